"""What a run tells its user about the sizes of its groups, once."""

from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

__all__ = ["announce_global_batch", "warn_that_nothing_is_divided"]


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


def warn_that_nothing_is_divided(strategy_name: str, devices: int, query_heads: Sequence[int]) -> None:
    """Warns that an automatic size came out as 1.

    Args:
        strategy_name: What the strategy calls itself.
        devices: Devices of a node.
        query_heads: Attention head counts that the size had to divide.
    """
    rank_zero_warn(
        f"{strategy_name} chose groups of one rank, in which nothing is divided: no larger size divides both the "
        f"{devices} devices of a node and the attention heads ({', '.join(map(str, query_heads))})."
    )
