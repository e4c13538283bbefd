"""Version 2 of FSDP: torch's `fully_shard`, told what to do by the arguments of Lightning's FSDPStrategy."""

from collections.abc import Callable, Iterable
from typing import Any

from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateKeyType,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy, _Policy
from torch.optim import Optimizer

from lightning_vdp.errors import UserError
from lightning_vdp.fsdp.policy import gathered_apart

__all__ = ["check_arguments", "make_shard_mesh", "reshard", "shard", "sharded_parts"]

_KNOWN = {
    "auto_wrap_policy",
    "cpu_offload",
    "device_id",
    "device_mesh",
    "ignored_modules",
    "ignored_states",
    "mixed_precision",
    "sharding_strategy",
    "sync_module_states",
    "use_orig_params",
}
_RESHARDS = {
    ShardingStrategy.FULL_SHARD: None,
    ShardingStrategy.HYBRID_SHARD: None,
    ShardingStrategy.SHARD_GRAD_OP: False,
    ShardingStrategy._HYBRID_SHARD_ZERO2: False,
}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Looks for arguments of FSDP1 that `fully_shard` has nothing for.

    Args:
        arguments: Of :class:`torch.distributed.fsdp.FullyShardedDataParallel`.

    Raises:
        UserError: If there is one; the message names it.
    """
    for name, value in arguments.items():
        if name not in _KNOWN and value is not None:
            raise UserError(
                f"`{name}` is an argument of FSDP1 for which `fsdp_version=2` has nothing; leave it out, or set "
                "`fsdp_version=1`."
            )
    if not arguments.get("use_orig_params", True):
        raise UserError(
            "`use_orig_params=False` makes flat parameters, which only FSDP1 has; leave it out, or set `fsdp_version=1`."
        )
    if arguments.get("sharding_strategy") == ShardingStrategy.NO_SHARD:
        raise UserError(
            "`sharding_strategy='NO_SHARD'` has no counterpart in `fsdp_version=2`; give `sharding_strategy='HYBRID_SHARD'` "
            "with `device_mesh=(processes, 1)`, or set `fsdp_version=1`."
        )
    policy = arguments.get("auto_wrap_policy")
    if policy is not None and not isinstance(policy, _Policy):
        raise UserError(
            f"`auto_wrap_policy` is {policy!r}, but `fsdp_version=2` takes a set of module classes or a policy object of "
            "torch.distributed.fsdp.wrap, such as CustomPolicy; give one, or set `fsdp_version=1`."
        )


def make_shard_mesh(device_type: str, world_size: int) -> DeviceMesh:
    """The mesh over all ranks, which needs no further process group."""
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))


def sharded_parts(root: nn.Module) -> list[nn.Module]:
    """Modules of a tree whose weights `fully_shard` gathers on their own, the root among them."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _policy(module: nn.Module, arguments: dict[str, Any]) -> _Policy:
    policy = arguments.get("auto_wrap_policy")
    return CustomPolicy(gathered_apart(module)) if policy is None else policy


def _ignored(arguments: dict[str, Any]) -> tuple[set[nn.Module], set[nn.Parameter]]:
    given = [*(arguments.get("ignored_modules") or ()), *(arguments.get("ignored_states") or ())]
    modules = {child for module in given if isinstance(module, nn.Module) for child in module.modules()}
    parameters = {value for value in given if isinstance(value, nn.Parameter)}
    return modules, parameters | {value for module in modules for value in module.parameters(recurse=False)}


def _targets(module: nn.Module, arguments: dict[str, Any], ignored: set[nn.Module]) -> list[nn.Module]:
    """Modules to shard on their own, inner ones first; activation checkpointing's wrappers instead of what they hold."""
    if any(isinstance(child, FSDPModule) for child in module.modules()):
        # the user sharded submodules in `configure_model`; the root takes the rest
        return []
    chosen = dict.fromkeys(_policy(module, arguments)._run_policy(module, ignored, {}))
    wrappers = [child for child in module.modules() if hasattr(child, "_checkpoint_wrapped_module")]
    for wrapper in wrappers:
        inner: Any = wrapper._checkpoint_wrapped_module
        if inner in chosen:
            chosen[wrapper] = None
            del chosen[inner]
    chosen.pop(module, None)
    return [child for child in reversed(list(module.modules())) if child in chosen]


def _mixed_precision(config: Any) -> MixedPrecisionPolicy:
    if config is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=config.param_dtype,
        reduce_dtype=config.reduce_dtype,
        cast_forward_inputs=config.cast_forward_inputs,
    )


def _check_dtypes(parts: list[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Refuses what torch would refuse in the first forward: its sentence does not say where."""
    seen = {id(parameter) for parameter in ignored}
    for part in parts:
        own = {name: value for name, value in part.named_parameters() if id(value) not in seen}
        seen |= {id(value) for value in own.values()}
        trained = {value.dtype: name for name, value in own.items() if value.requires_grad}
        if len(trained) > 1:
            examples = " and ".join(f"`{name}` in {dtype}" for dtype, name in trained.items())
            raise UserError(
                f"{type(part).__name__} trains {examples}, but weights that are gathered together and trained need one "
                "dtype; give them one (frozen weights may have another)."
            )


def shard(
    module: nn.Module,
    arguments: dict[str, Any],
    mesh: DeviceMesh,
    checkpointing: dict[str, Any],
    fill: Callable[[nn.Module, set[int]], None] | None = None,
) -> None:
    """Shards a module in place, by default blocks and heads on their own, and then the root.

    Args:
        module: The LightningModule; submodules may be sharded already.
        arguments: Of :class:`torch.distributed.fsdp.FullyShardedDataParallel`, as `check_arguments` takes them.
        mesh: What to shard over; of two axes, the first replicates.
        checkpointing: For `apply_activation_checkpointing`; empty for none.
        fill: Gives a part its weights before it is sharded; the set, filled on the way, names modules that have them.
    """
    # inside of what is sharded, so that recomputation meets gathered weights
    _setup_activation_checkpointing(module, checkpointing)
    modules, parameters = _ignored(arguments)
    offload = arguments.get("cpu_offload")
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _mixed_precision(arguments.get("mixed_precision")),
        "reshard_after_forward": _RESHARDS[arguments["sharding_strategy"]],
        "offload_policy": CPUOffloadPolicy() if offload is not None and offload.offload_params else OffloadPolicy(),
        "ignored_params": parameters,
    }
    parts = [*_targets(module, arguments, modules), module]
    _check_dtypes(parts, parameters)
    filled: set[int] = set()
    for part in parts:
        if fill is not None:
            fill(part, filled)
        fully_shard(part, **options)
    root: Any = module
    # what a batch leaves unused on one rank may be used on another
    root.set_reduce_scatter_unused_params(True)


def reshard(parts: Iterable[nn.Module]) -> None:
    """Frees gathered weights that evaluation leaves behind, so that the parameters are the sharded ones."""
    for part in parts:
        if isinstance(part, FSDPModule):
            part.reshard()


def state_dict_2(root: nn.Module, full: bool) -> dict[str, Any]:
    """The weights of a root of FSDP2 on the CPU: whole on rank 0 alone, or this rank's parts."""
    return get_model_state_dict(root, options=StateDictOptions(full_state_dict=full, cpu_offload=True))


def optimizer_state_2(root: nn.Module, optimizer: Optimizer, full: bool, is_global_zero: bool) -> dict[str, Any]:
    """The state of an optimizer of parameters under FSDP2; a whole one as a plain optimizer would save it."""
    options = StateDictOptions(full_state_dict=full, cpu_offload=True)
    state: dict[str, Any] = get_optimizer_state_dict(root, optimizer, options=options)
    if full and is_global_zero:
        state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, root)
    return state
