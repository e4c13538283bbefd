"""What becomes of the global batch where ranks share batches."""

from lightning.pytorch.utilities import rank_zero_info

__all__ = ["announce_global_batch"]


def announce_global_batch(strategy_name: str, replicas: int, group_size: int, accumulate: int) -> None:
    """Says how many batches an optimizer step takes, and how it stays as it was under plain FSDP.

    Args:
        strategy_name: What the strategy calls itself.
        replicas: Number of sequence groups.
        group_size: Ranks of a sequence group.
        accumulate: Batches that each replica takes before an optimizer step.
    """
    rank_zero_info(
        f"{strategy_name}: {group_size} ranks share each batch; batches per optimizer step: {replicas * accumulate}, was "
        f"{replicas * group_size * accumulate} under fsdp; accumulate_grad_batches={group_size * accumulate} keeps it."
    )
