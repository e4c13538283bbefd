"""Version 1 of FSDP: `FullyShardedDataParallel`, which wraps modules, as Lightning's FSDPStrategy does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.strategies.fsdp import (
    _get_sharded_state_dict_context,
    _has_meta_device_parameters_or_buffers,
    _is_sharded_checkpoint,
    _move_torchmetrics_to_device,
    _setup_activation_checkpointing,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vdp.checkpoint.load import LoadRequest, load_into_root
from lightning_vdp.errors import UserError
from lightning_vdp.fsdp.backend import FSDPBackend, ShardRanks, Wrapping
from lightning_vdp.fsdp.policy import gathered_apart

__all__ = ["FSDP1Backend"]


class FSDP1Backend(FSDPBackend):
    """Wraps with `FullyShardedDataParallel`; the root is a module around the LightningModule."""

    version = 1

    @override
    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        # they are this version's own
        pass

    @override
    def check_hybrid_shards(self, shards: int) -> None:
        if shards == 1:
            raise UserError(
                "Hybrid sharding over a shard size of 1 does not reduce gradients in FSDP1; give `device_mesh` a second size "
                "of 2 or more, or set `fsdp_version=2`."
            )

    @override
    def make_default_mesh(self, ranks: ShardRanks, hybrid: bool) -> DeviceMesh | None:
        if hybrid:
            # FSDP then shards over the devices of a node
            self.check_hybrid_shards(ranks.node_size)
        return None

    @override
    def model_sharded_context(self, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
        return enable_wrap(wrapper_cls=FullyShardedDataParallel, **arguments)

    @override
    def find_absent_weights_problem(self) -> str | None:
        return (
            "FSDP1 fills weights on the meta device only with `param_init_fn` and `sync_module_states`; set "
            "`fsdp_version=2`, which needs neither"
        )

    @override
    def wrap(self, module: "pl.LightningModule", wrapping: Wrapping, fill: bool) -> nn.Module:
        arguments = wrapping.arguments
        policy = arguments.get("auto_wrap_policy") or CustomPolicy(gathered_apart(module))
        if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
            # the user wrapped submodules in `configure_model`; the root takes the rest
            policy = None
        try:
            root = FullyShardedDataParallel(module, **{**arguments, "auto_wrap_policy": policy})
        except ValueError as error:
            if "uniform dtype" not in str(error):
                raise
            raise UserError(
                f"FSDP1 cannot hold weights of several dtypes in one block ({error}), as adapters in float32 on a bfloat16 "
                "model are; set `fsdp_version=2`, or give all weights one dtype."
            ) from error
        if _has_meta_device_parameters_or_buffers(root):
            rank_zero_warn("FSDP1 has wrapped the model, but it still has parameters or buffers on the meta device.")
        _move_torchmetrics_to_device(root, wrapping.device)
        _setup_activation_checkpointing(root, dict(wrapping.activation_checkpointing))
        return root

    @override
    def is_idle(self, part: nn.Module) -> bool:
        assert isinstance(part, FullyShardedDataParallel)
        return part.training_state.name == "IDLE"

    @override
    def check_manual_optimization(self, root: nn.Module) -> None:
        assert isinstance(root, FullyShardedDataParallel)
        if root._has_params:
            raise UserError(
                "Manual optimization runs backward inside `training_step`, where FSDP1 still holds the root's weights "
                "gathered; set `fsdp_version=2`, or automatic optimization."
            )

    @override
    def enter(self, root: nn.Module) -> None:
        # the Trainer calls the root, which calls the step
        pass

    @override
    def reshard(self, root: nn.Module) -> None:
        # the root frees its weights after each forward
        pass

    @override
    def leave(self, root: nn.Module) -> None:
        pass

    @override
    def model_state(self, root: nn.Module, full: bool) -> dict[str, Any]:
        with _state_dict_kind(root, full):
            return root.state_dict()

    @override
    def optimizer_state(self, root: nn.Module, optimizer: Optimizer, full: bool) -> dict[str, Tensor]:
        with _state_dict_kind(root, full):
            state = FullyShardedDataParallel.optim_state_dict(root, optimizer)
            if full and dist.get_rank() == 0:
                state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, root)
            return state

    @override
    def load(
        self, root: nn.Module, request: LoadRequest, load_by_lightning: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        # Lightning's way of loading shards needs all of them
        if request.may_lack_weights and _is_sharded_checkpoint(request.path):
            return load_into_root(root, request)
        return load_by_lightning()


@contextmanager
def _state_dict_kind(root: nn.Module, full: bool) -> Iterator[None]:
    """Within it, state dicts of a root are whole on rank 0 alone, or this rank's parts; on the host in either case."""
    if not full:
        with _get_sharded_state_dict_context(root):  # type: ignore[attr-defined]
            yield
        return
    # no offload of what is there already: CPU to CPU it writes to freed memory (Lightning issue 21804)
    devices = [part.compute_device for part in FullyShardedDataParallel.fsdp_modules(root)]
    offload = torch.device("cpu") not in devices
    with FullyShardedDataParallel.state_dict_type(
        root,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=offload, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True),
    ):
        yield
