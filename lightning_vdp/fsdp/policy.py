"""What FSDP gathers on its own where the user does not say."""

from collections.abc import Callable

from torch import nn

from lightning_vdp.families.find import untied_heads
from lightning_vdp.families.wrappers import is_block, unwrap

__all__ = ["gathered_apart"]


def gathered_apart(module: nn.Module) -> Callable[[nn.Module], bool]:
    """Makes the default policy: blocks, and heads, whose weights are large and needed at the end of a forward alone.

    Token embeddings stay with the root: some models look them up in front of the tower and some behind it, so that
    replicas with and without images would gather them in another order.

    Args:
        module: What is wrapped.

    Returns:
        Whether FSDP gathers the weights of a module inside it on their own.
    """
    heads = {id(head) for head in untied_heads(module)}
    return lambda part: is_block(part) or id(unwrap(part)) in heads
