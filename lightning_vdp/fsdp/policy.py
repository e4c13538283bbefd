"""What FSDP gathers on its own: where the user does not say, and whether what the user says can be divided."""

from collections.abc import Callable, Collection, Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_vdp.errors import UserError
from lightning_vdp.families.find import DividedModel, untied_heads
from lightning_vdp.families.wrappers import class_name, is_block, unwrap

__all__ = ["check_wrapped", "fsdp_parts", "gathered_apart", "wraps_more_than_default"]


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


def fsdp_parts(root: nn.Module) -> list[nn.Module]:
    """Modules of a tree whose weights FSDP of either version gathers on their own, the root among them."""
    return [part for part in root.modules() if isinstance(part, (FSDPModule, FullyShardedDataParallel))]


def wraps_more_than_default(root: nn.Module) -> bool:
    """Whether FSDP gathers weights of other modules than blocks and heads on their own, such as an embedding's."""
    is_apart = gathered_apart(root)
    return any(not is_apart(part) for part in fsdp_parts(root) if unwrap(part) is not unwrap(root))


def check_wrapped(root: nn.Module, models: Iterable[DividedModel], whole_towers: Collection[nn.Module]) -> None:
    """Checks that ranks gather weights in one order, whatever their batches hold.

    Args:
        root: The FSDP root.
        models: The models inside whose forwards are divided.
        whole_towers: Towers that every rank holds whole.

    Raises:
        UserError: If the user's `auto_wrap_policy` takes a module that must be gathered with others.
    """
    parts = [part for part in fsdp_parts(root) if part is not root]
    for model in models:
        if any(unwrap(part) is model.entries[0] for part in parts):
            raise UserError(
                f"`auto_wrap_policy` wraps {class_name(model.entries[0])} as a whole, which would lose "
                "`outputs.sequence_shard`; wrap its blocks, as without a policy."
            )
        if model.decoder is model.base and model.family.modalities and wraps_more_than_default(root):
            raise UserError(
                f"{class_name(model.base)} merges features inside its decoder, where replicas without images would "
                "gather the weights of other modules than blocks and heads in another order; use no `auto_wrap_policy`."
            )
        lost = _first_wrapped_between(root, parts, model)
        if lost is not None and model.tower in whole_towers:
            raise UserError(
                f"`auto_wrap_policy` wraps {class_name(lost)} beside a tower that `shard_frozen_tower=False` keeps "
                "whole, so that replicas without images would not gather its weights; leave it out of the policy."
            )


def _first_wrapped_between(root: nn.Module, parts: Iterable[nn.Module], model: DividedModel) -> nn.Module | None:
    """The first part inside a model that belongs to neither its tower, nor its decoder, nor a head; None if all do."""
    inside = {id(child) for child in model.base.modules() if child is not model.base}
    towers_or_decoders = [module for module in (model.tower, model.decoder) if module is not None]
    known = {id(child) for module in towers_or_decoders for child in module.modules()}
    known |= {id(head) for head in untied_heads(root)}
    return next((part for part in map(unwrap, parts) if id(part) in inside - known), None)
