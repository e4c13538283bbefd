"""Version 2 of FSDP: torch's `fully_shard`, told what to do by the arguments of Lightning's FSDPStrategy."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.fsdp import _setup_activation_checkpointing
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
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
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import CustomPolicy, _Policy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vdp.checkpoint.load import LoadRequest, load_into_root
from lightning_vdp.errors import UserError
from lightning_vdp.fsdp.backend import FSDPBackend, ShardRanks, Wrapping
from lightning_vdp.fsdp.materialize import fill_from_rank_zero
from lightning_vdp.fsdp.policy import gathered_apart
from lightning_vdp.fsdp.shard_mesh import make_hybrid_mesh

__all__ = ["FSDP2Backend"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")

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


class FSDP2Backend(FSDPBackend):
    """Shards with `fully_shard`; the root is the LightningModule itself."""

    version = 2

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    @override
    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
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
                "`sharding_strategy='NO_SHARD'` has no counterpart in `fsdp_version=2`; give "
                "`sharding_strategy='HYBRID_SHARD'` with `device_mesh=(processes, 1)`, or set `fsdp_version=1`."
            )
        policy = arguments.get("auto_wrap_policy")
        if policy is not None and not isinstance(policy, _Policy):
            raise UserError(
                f"`auto_wrap_policy` is {policy!r}, but `fsdp_version=2` takes a set of module classes or a policy object of "
                "torch.distributed.fsdp.wrap, such as CustomPolicy; give one, or set `fsdp_version=1`."
            )

    @override
    def check_hybrid_shards(self, shards: int) -> None:
        # any number will do
        pass

    @override
    def make_default_mesh(self, ranks: ShardRanks, hybrid: bool) -> DeviceMesh | None:
        if hybrid:
            return make_hybrid_mesh(ranks.device_type, (ranks.world_size // ranks.node_size, ranks.node_size))
        # over all ranks, which needs no further process group
        return init_device_mesh(ranks.device_type, (ranks.world_size,), mesh_dim_names=("shard",))

    @override
    def model_sharded_context(self, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
        # `fully_shard` needs none
        return nullcontext()

    @override
    def find_absent_weights_problem(self) -> str | None:
        return None

    @override
    def wrap(self, module: "pl.LightningModule", wrapping: Wrapping, fill: bool) -> nn.Module:
        arguments = wrapping.arguments
        # inside of what is sharded, so that recomputation meets gathered weights
        _setup_activation_checkpointing(module, dict(wrapping.activation_checkpointing))
        ignored_modules, ignored_parameters = _ignored(arguments)
        offload = arguments.get("cpu_offload")
        offloads = offload is not None and offload.offload_params
        options: dict[str, Any] = {
            "mesh": arguments["device_mesh"],
            "mp_policy": _mixed_precision(arguments.get("mixed_precision")),
            "reshard_after_forward": _RESHARDS[arguments["sharding_strategy"]],
            "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
            "ignored_params": ignored_parameters,
        }
        parts = [*_targets(module, arguments, ignored_modules), module]
        _check_dtypes(parts, ignored_parameters)
        filled: set[int] = set()
        for part in parts:
            if fill or arguments.get("sync_module_states"):
                fill_from_rank_zero(wrapping.device, dist.get_rank(), part, filled)
            fully_shard(part, **options)
        root: Any = module
        # what a batch leaves unused on one rank may be used on another
        root.set_reduce_scatter_unused_params(True)
        if not offloads:
            # what is not sharded: buffers and metrics
            module.to(wrapping.device)
        return module

    @override
    def is_idle(self, part: nn.Module) -> bool:
        assert isinstance(part, FSDPModule)
        return part._get_fsdp_state()._training_state.name == "IDLE"

    @override
    def check_manual_optimization(self, root: nn.Module) -> None:
        # `enter` makes it work
        pass

    @override
    def enter(self, root: nn.Module) -> None:
        module: Any = root
        for name in _STEPS:
            if is_overridden(name, module):
                register_fsdp_forward_method(module, name)
                self._undo.append(partial(vars(module).pop, name, None))
        if not module.automatic_optimization:
            # a backward within `training_step` frees the root's weights, which a second forward there needs
            for child in module.children():
                self._undo.append(child.register_forward_pre_hook(lambda *_: module.unshard()).remove)

    @override
    def reshard(self, root: nn.Module) -> None:
        for part in root.modules():
            if isinstance(part, FSDPModule):
                # its weights are still whole, and would not be seen to change
                part.reshard()

    @override
    def leave(self, root: nn.Module) -> None:
        while self._undo:
            self._undo.pop()()
        self.reshard(root)

    @override
    def model_state(self, root: nn.Module, full: bool) -> dict[str, Any]:
        return get_model_state_dict(root, options=StateDictOptions(full_state_dict=full, cpu_offload=True))

    @override
    def optimizer_state(self, root: nn.Module, optimizer: Optimizer, full: bool) -> dict[str, Tensor]:
        options = StateDictOptions(full_state_dict=full, cpu_offload=True)
        state: dict[str, Any] = get_optimizer_state_dict(root, optimizer, options=options)
        if full and dist.get_rank() == 0:
            state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, root)
        return state

    @override
    def load(
        self, root: nn.Module, request: LoadRequest, load_by_lightning: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        return load_into_root(root, request)


def _policy(module: nn.Module, arguments: Mapping[str, Any]) -> _Policy:
    policy = arguments.get("auto_wrap_policy")
    return CustomPolicy(gathered_apart(module)) if policy is None else policy


def _ignored(arguments: Mapping[str, Any]) -> tuple[set[nn.Module], set[nn.Parameter]]:
    given = [*(arguments.get("ignored_modules") or ()), *(arguments.get("ignored_states") or ())]
    modules = {child for module in given if isinstance(module, nn.Module) for child in module.modules()}
    parameters = {value for value in given if isinstance(value, nn.Parameter)}
    return modules, parameters | {value for module in modules for value in module.parameters(recurse=False)}


def _targets(module: nn.Module, arguments: Mapping[str, Any], ignored: set[nn.Module]) -> list[nn.Module]:
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
        new = {name: value for name, value in part.named_parameters() if id(value) not in seen}
        seen |= {id(value) for value in new.values()}
        trained = {value.dtype: name for name, value in new.items() if value.requires_grad}
        if len(trained) > 1:
            examples = " and ".join(f"`{name}` in {dtype}" for dtype, name in trained.items())
            raise UserError(
                f"{type(part).__name__} trains {examples}, but weights that are gathered together and trained need one "
                "dtype; give them one (frozen weights may have another)."
            )
