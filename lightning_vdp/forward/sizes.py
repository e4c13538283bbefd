"""Sizes of the groups in which forwards are divided."""

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_vdp.families.find import query_heads
from lightning_vdp.mesh import Size, resolve_sizes

__all__ = ["choose_sizes"]


def choose_sizes(
    requested: tuple[Size, Size], module: nn.Module | None, world_size: int, node_size: int, strategy_name: str
) -> tuple[int, int]:
    """Chooses or checks the sizes of the two mesh axes; warns if nothing will be divided although nobody asked for that.

    Args:
        requested: Ranks of a sequence group and number of replicas, or "auto".
        module: The LightningModule, whose models' attention heads limit an automatic size; None if there is none yet.
        world_size: Number of ranks.
        node_size: Ranks of one node.
        strategy_name: What the strategy calls itself.

    Returns:
        The number of replicas and the ranks of a sequence group.

    Raises:
        UserError: If the requested sizes do not fit the world.
    """
    heads = [] if module is None else query_heads(module)
    sizes = resolve_sizes(world_size, *requested, node_size, heads)
    if sizes[1] == 1 and requested == ("auto", "auto") and node_size > 1:
        rank_zero_warn(
            f"{strategy_name} chose groups of one rank, in which nothing is divided: no larger size divides both the "
            f"{node_size} devices of a node and the attention heads ({', '.join(map(str, heads))})."
        )
    return sizes
