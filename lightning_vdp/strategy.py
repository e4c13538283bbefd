"""`UlyssesVisionDPStrategy`: what the Trainer calls. It orchestrates and computes nothing itself."""

import logging
import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import enable_wrap
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vdp.agreement import gather_numbers, raise_together
from lightning_vdp.batch.host_copies import host_tensors, keep_host_copies, keep_samples, sample
from lightning_vdp.batch.loader import AgreedLoader
from lightning_vdp.batch.same import suspect_loader
from lightning_vdp.checkpoint.export import MODELS_KEY, describe_models
from lightning_vdp.checkpoint.load import load_sharded_module, loosened, newest
from lightning_vdp.checkpoint.resume import continue_samplers, rescale_progress, unmark
from lightning_vdp.checkpoint.safety import check_holds_data
from lightning_vdp.checkpoint.save import frozen_names, replaced_in_one_step, write_file, write_shards
from lightning_vdp.errors import StepError, UserError
from lightning_vdp.families.find import DividedModel, find_models, query_heads, untied_heads
from lightning_vdp.families.wrappers import plain_name, unwrap
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.forward.patches import Patches
from lightning_vdp.fsdp.fsdp1 import full_state_on_cpu, shard_in_place, wrap
from lightning_vdp.fsdp.fsdp2 import check_arguments, make_shard_mesh, optimizer_state_2, reshard, state_dict_2
from lightning_vdp.fsdp.materialize import fill_from_rank_zero, hash_of
from lightning_vdp.fsdp.precision import UlyssesVisionDPPrecision
from lightning_vdp.fsdp.remembered import fsdp_parts, known_root, wraps_more_than_default
from lightning_vdp.mesh import SequenceMesh, Size, resolve_sizes
from lightning_vdp.run.compatibility import check_overrides
from lightning_vdp.run.notebook import NotebookLauncher
from lightning_vdp.run.signals import Sigterm
from lightning_vdp.settings import Settings

__all__ = ["UlyssesVisionDPStrategy"]

log = logging.getLogger(__name__)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# names under which checkpoints say for how many replicas they count batches, and whether they hold frozen weights
_REPLICAS, _FROZEN = "data_parallel_size", "frozen_weights"
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# what planning reads on the host, beside what says something of images
_HOST_COPIES = frozenset(("input_ids", "labels", "shift_labels", "position_ids"))
# what ranks of a group compare by a few values
_HOST_SAMPLES = frozenset(("pixel_values", "pixel_values_videos"))


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise UserError(f"`{name}` is {value!r}, but must be one of {', '.join(map(repr, choices))}.")


def _check_number(name: str, value: Any, kind: Any, what: str, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
        raise UserError(f"`{name}` is {value!r}, but must be {what}.")


def _locate(trainer: "pl.Trainer") -> tuple[str, int]:
    """The stage, and which of its batches is at hand: in training since the start, elsewhere in this loop's run."""
    stage = trainer.state.stage
    if trainer.training:
        return "training", max(trainer.fit_loop.epoch_loop.total_batch_idx, 0)
    progress = getattr(trainer._active_loop, "batch_progress", None)
    return ("forward" if stage is None else stage.value), max(progress.current.ready - 1, 0) if progress else 0


class UlyssesVisionDPStrategy(FSDPStrategy):
    """Trains Hugging Face vision-language models with images and sequence divided over groups of ranks.

    Consecutive ranks form sequence groups that work on one batch together: each rank runs the vision tower on its share
    of the images (Vision DP), and holds its share of the language model's sequence (Ulysses attention). Weights,
    gradients and optimizer states are divided over all ranks by FSDP. The gradient equals that of one process per
    group, to rounding.

    Args:
        sequence_parallel_size: Ranks of a sequence group, S. "auto" takes the devices of one node, or the largest size
            below that which divides the attention heads; a model that only `configure_model` builds is not known by then,
            and needs a number where its heads do not fit. 1 makes this plain FSDP.
        data_parallel_size: Number of replicas, D; a replica is a sequence group seen as one data-parallel worker.
            "auto": the number of processes divided by S.
        vision_data_parallel: Whether each rank runs the tower on its share of the images. False: every rank runs it on
            every image of its group.
        vision_assignment: How images are given to ranks: "balanced" may permute them, "contiguous" keeps their order.
        vision_balance: What is balanced: "time" predicts the tower's work, "memory" counts patches.
        vision_exchange: How features get from owners to the ranks that need them: "routed" sends each row to the rank
            whose shard it belongs to, "gather" gives all ranks all of them.
        logits: What `outputs.logits` is: "shard" of this rank, or "whole" sequence.
        loss_tokens: How replicas with different label counts weigh within one micro-step: "replica" takes the mean over
            replicas of their token means, as DDP does; "global" weighs every token alike.
        verify_first_batch: Whether each model's first batch, cut to 2,048 tokens, is also run divided and whole without
            gradients, and refused if the two differ by more than rounding.
        check_batches_every_n_steps: How often the ranks of a group compare what they read (ids, grids and a sample of the
            pixels): in the first of so many batches; 0 never does. Lengths, image sizes and label counts are compared in
            every batch.
        hang_warning_s: Seconds without progress inside a step after which every rank logs where it is, in which step, and
            which peers are behind. None switches that off, and with it that ranks which lost another one say why.
        shard_frozen_tower: Whether FSDP divides the weights of a vision tower without trainable parameters. False keeps
            a whole one on every rank, which then needs no collectives and no dummy images.
        fsdp_version: Version of torch's FSDP: 1, or 2 (`fully_shard`), which takes mixed dtypes in a block, as adapters have.
        save_frozen_weights: Whether checkpoints hold weights that are not trained. False saves adapters alone, and a run
            that resumes must begin with the same frozen weights.
        **kwargs: Every argument of :class:`lightning.pytorch.strategies.FSDPStrategy`. Without an `auto_wrap_policy`,
            each block that gradient checkpointing knows is wrapped, those of the vision tower too, and each head that shares
            its weights with nobody.

    Raises:
        UserError: If an argument has a value that is not named here.
    """

    strategy_name = "ulysses_vdp"
    # Lightning's list is shared by subclasses, and a name in it becomes CUDA-only
    _registered_strategies: list[str] = []  # noqa: RUF012

    def __init__(
        self,
        sequence_parallel_size: Size = "auto",
        data_parallel_size: Size = "auto",
        vision_data_parallel: bool = True,
        vision_assignment: Literal["balanced", "contiguous"] = "balanced",
        vision_balance: Literal["time", "memory"] = "time",
        vision_exchange: Literal["routed", "gather"] = "routed",
        logits: Literal["shard", "whole"] = "shard",
        loss_tokens: Literal["replica", "global"] = "replica",
        verify_first_batch: bool = True,
        check_batches_every_n_steps: int = 50,
        hang_warning_s: float | None = 120.0,
        shard_frozen_tower: bool = True,
        fsdp_version: Literal[1, 2] = 1,
        save_frozen_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        _check_choice("vision_assignment", vision_assignment, ("balanced", "contiguous"))
        _check_choice("vision_balance", vision_balance, ("time", "memory"))
        _check_choice("vision_exchange", vision_exchange, ("routed", "gather"))
        _check_choice("logits", logits, ("shard", "whole"))
        _check_choice("loss_tokens", loss_tokens, ("replica", "global"))
        _check_choice("fsdp_version", fsdp_version, (1, 2))
        _check_number(
            "check_batches_every_n_steps", check_batches_every_n_steps, int, "a whole number, or 0 for never", 0
        )
        if hang_warning_s is not None:
            _check_number("hang_warning_s", hang_warning_s, (int, float), "a number of seconds above 0, or None", 1e-3)
        super().__init__(**kwargs)
        self._hang_warning_s = hang_warning_s
        self._fsdp_version = fsdp_version
        self._save_frozen_weights = save_frozen_weights
        if fsdp_version == 2:
            check_arguments({**self.kwargs, "sharding_strategy": self.sharding_strategy})
        self._requested_sizes = (sequence_parallel_size, data_parallel_size)
        self._settings = Settings(
            vision_data_parallel=vision_data_parallel,
            vision_assignment=vision_assignment,
            vision_balance=vision_balance,
            vision_exchange=vision_exchange,
            logits=logits,
            loss_tokens=loss_tokens,
            verify_first_batch=verify_first_batch,
            check_batches_every_n_steps=check_batches_every_n_steps,
        )
        self._shard_frozen_tower = shard_frozen_tower
        self._whole_towers: list[nn.Module] = []
        self._host_copies = _HOST_COPIES
        self._fsdp_mesh_sizes: tuple[int, ...] | None = None
        self._mesh: SequenceMesh | None = None
        self._division = Patches()
        self._sigterm: Sigterm | None = None
        self._entered: list[str] = []
        self._root_hooks: list[Callable[[], None]] = []
        self._continued: list[Any] = []

    # ---- sizes, ranks and groups

    @property
    def mesh(self) -> SequenceMesh:
        """The ranks and their groups; exists from `setup_environment` on."""
        if self._mesh is None:
            raise RuntimeError("The process groups do not exist yet: they are made when the Trainer starts to run.")
        return self._mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh with axes "data_parallel" and "sequence_parallel"."""
        return self.mesh.device_mesh

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """What FSDP replicates and shards over, if it is a mesh; None: FSDP1 shards over the world."""
        mesh = self.kwargs.get("device_mesh")
        return mesh if isinstance(mesh, DeviceMesh) else None

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """One rank of each replica, this one among them: for `sync_dist_group` and torchmetrics' `process_group`."""
        return self.mesh.data_parallel_group

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks of a sequence group, S."""
        return self.mesh.sequence_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas, D."""
        return self.mesh.data_parallel_size

    @property
    def sequence_parallel_rank(self) -> int:
        """This rank's place in its sequence group."""
        return self.mesh.sequence_parallel_rank

    @property
    def data_parallel_rank(self) -> int:
        """The replica that this rank belongs to: what samplers and iterable datasets share samples out by."""
        return self.mesh.data_parallel_rank

    @property
    def _on_cpu(self) -> bool:
        return self.root_device.type == "cpu"

    # ---- the Trainer's hooks, in the order in which it calls them

    @property
    @override
    def precision_plugin(self) -> FSDPPrecision:
        return cast(FSDPPrecision, self._precision_plugin or UlyssesVisionDPPrecision("32-true"))

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if type(precision_plugin) is FSDPPrecision:
            precision_plugin = UlyssesVisionDPPrecision(cast(Any, precision_plugin.precision), precision_plugin.scaler)
        FSDPStrategy.precision_plugin.fset(self, precision_plugin)  # type: ignore[attr-defined]

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if _IS_INTERACTIVE and not self.cluster_environment.creates_processes_externally:
            check_overrides(NotebookLauncher)
            self._launcher = NotebookLauncher(self)
        else:
            super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        replication = self.kwargs.get("device_mesh")
        if isinstance(replication, tuple):
            # Lightning would make this mesh on "cuda", whatever the accelerator
            del self.kwargs["device_mesh"]
            self._fsdp_mesh_sizes = replication
        super().setup_environment()
        if isinstance(self.cluster_environment, LightningEnvironment):
            # Lightning's launcher does so in the process that starts the others only
            _set_num_threads_if_needed(self.num_processes)
        # who refuses something next must not leave while others still connect
        self.barrier()
        self._setup_mesh()
        self._setup_fsdp_mesh()
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self.device_mesh

    def _setup_mesh(self) -> None:
        if self._mesh is not None and self._mesh.world is dist.group.WORLD:
            self._mesh.reopen()
            return
        sequence, data = self._requested_sizes
        heads = query_heads(self.lightning_module) if self.lightning_module is not None else []
        sizes = resolve_sizes(dist.get_world_size(), sequence, data, self.num_processes, heads)
        if sizes[1] == 1 and self._requested_sizes == ("auto", "auto") and self.num_processes > 1:
            rank_zero_warn(
                f"{self.strategy_name} chose groups of one rank, in which nothing is divided: no larger size divides both the "
                f"{self.num_processes} devices of a node and the attention heads ({', '.join(map(str, heads))})."
            )
        self._mesh = SequenceMesh(self.root_device.type, *sizes, timeout=self._timeout)

    def _setup_fsdp_mesh(self) -> None:
        sizes = self._fsdp_mesh_sizes
        if sizes is not None:
            self._fsdp_mesh_sizes = None
            if len(sizes) != 2 or sizes[0] * sizes[1] != self.world_size:
                raise UserError(
                    f"`device_mesh` is {sizes}, but must be (replicas, shards) whose product is the {self.world_size} "
                    "processes."
                )
            self._refuse_one_shard(sizes[1])
            self.kwargs["device_mesh"] = self._hybrid_mesh(sizes)
        elif self.fsdp_mesh is not None:
            self._refuse_one_shard(self.fsdp_mesh.size(-1))
        elif self.sharding_strategy in _HYBRID and self._on_cpu:
            raise UserError("Hybrid sharding on the CPU needs `device_mesh=(replicas, shards)`.")
        elif self._fsdp_version == 2:
            sizes = (self.world_size // self.num_processes, self.num_processes)
            hybrid = self.sharding_strategy in _HYBRID
            self.kwargs["device_mesh"] = (
                self._hybrid_mesh(sizes) if hybrid else make_shard_mesh(self.root_device.type, self.world_size)
            )
        else:
            # FSDP then shards over the devices of a node
            self._refuse_one_shard(self.num_processes)
        if self.fsdp_mesh is not None and (self.fsdp_mesh.ndim == 2) != (self.sharding_strategy in _HYBRID):
            raise UserError(
                f"`device_mesh` has {self.fsdp_mesh.ndim} axes and `sharding_strategy` is {self.sharding_strategy.name}, but "
                "two axes (replicas, shards) belong to hybrid sharding and one to the others; change one of the two arguments."
            )

    def _hybrid_mesh(self, sizes: tuple[int, ...]) -> DeviceMesh:
        return init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("replicate", "shard"))

    def _refuse_one_shard(self, shards: int) -> None:
        if self.sharding_strategy in _HYBRID and shards == 1 and self._fsdp_version == 1:
            raise UserError(
                "Hybrid sharding over a shard size of 1 does not reduce gradients in FSDP1; give `device_mesh` a second size "
                "of 2 or more, or set `fsdp_version=2`."
            )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # Lightning seeds workers by rank, with which ranks of a group would draw different augmentations
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(dataloader, "worker_init_fn", self) is None:
            vars(dataloader)["worker_init_fn"] = partial(pl_worker_init_function, rank=self.data_parallel_rank)
        self.mesh.suspicion = max(self.mesh.suspicion, suspect_loader(dataloader, self.data_parallel_size))
        assert self.lightning_module is not None
        return AgreedLoader(
            super().process_dataloader(dataloader),
            self.mesh,
            until_last=bool(self.lightning_module.trainer.predicting),
            is_stopped=lambda: self._sigterm is not None and self._sigterm.noted,
        )

    def _is_repeated(self, *indices: Any) -> bool:
        """Whether a batch to predict is one that this rank repeats because other ranks have more."""
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.predict_loop
        loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
        loader = loaders[indices[1] if len(indices) > 1 else 0] if loaders else None
        if not isinstance(loader, AgreedLoader) or loader.batches_before_end is None:
            return False
        # a step that does not take the index: where lengths are known, nothing is fetched in advance
        return indices[0] >= loader.batches_before_end if indices else sized_len(loader) is not None

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.model is not None
        check_overrides(type(self))
        check_overrides(type(self.precision_plugin))
        self.mesh.suspicion = 0
        divided = self.sequence_parallel_size > 1
        if self._settings.loss_tokens == "global" and not divided:
            raise UserError(
                "`loss_tokens='global'` acts in sequence groups of two ranks or more, but `sequence_parallel_size` is 1; weigh "
                "the loss in `training_step`, or leave it out."
            )
        models = find_models(self.model) if divided or not self._shard_frozen_tower else []
        self._host_copies = _HOST_COPIES.union(*(model.family.describing for model in models))
        self._whole_towers = (
            [] if self._shard_frozen_tower else [self._whole_tower(model) for model in models if model.tower]
        )
        # refuses before anything is changed
        known_root(self.model, self._remembered_arguments)
        self._division = divide_models(models, self.mesh, self._settings, self._whole_towers)
        self._check_trainer(trainer)
        self._sigterm = Sigterm(trainer)
        super().setup(trainer)
        self._check_wrapped(models)
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_manual_optimization()
        if self._fsdp_version == 2:
            self._enter_root()
        if isinstance(self.precision_plugin, UlyssesVisionDPPrecision):
            self.precision_plugin.fsdp_root = self.model
            self.precision_plugin.compute_device = self.root_device
        if divided:
            self.mesh.watch.locate = partial(_locate, trainer)
            if self._hang_warning_s is not None:
                self.mesh.start_watch(self._hang_warning_s)
        if trainer.state.fn == TrainerFn.FITTING and self.sequence_parallel_size > 1:
            world, replicas, size = self.world_size, self.data_parallel_size, self.sequence_parallel_size
            accumulate = trainer.accumulate_grad_batches
            rank_zero_info(
                f"{self.strategy_name}: {size} ranks share each batch; batches per optimizer step: "
                f"{replicas * accumulate}, was {world * accumulate} under fsdp; "
                f"accumulate_grad_batches={size * accumulate} keeps it."
            )

    def _check_trainer(self, trainer: "pl.Trainer") -> None:
        """Refuses what does not work with weights that FSDP has divided, before anything is wrapped."""
        if self.cpu_offload is not None and self.cpu_offload.offload_params and self._on_cpu:
            raise UserError(
                "`cpu_offload` moves weights between a CUDA device and the host, but the ranks run on the CPU; leave it out."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):
                raise UserError(
                    f"{type(callback).__name__} averages whole weights, of which each rank holds a part only; average "
                    "`self.parameters()` in the LightningModule, which are this rank's parts, or leave the callback out."
                )
        assert self.model is not None
        dtypes = {value.dtype for value in self.model.parameters() if value.requires_grad and value.is_floating_point()}
        low = dtypes & {torch.bfloat16, torch.float16}
        if "mixed" in str(self.precision_plugin.precision) and low and trainer.state.fn == TrainerFn.FITTING:
            rank_zero_warn(
                f"Weights to be trained are in {', '.join(map(str, low))}, so that {self.precision_plugin.precision!r} has no "
                "float32 master weights, and small updates are lost; load the model with `dtype=torch.float32`."
            )

    def _check_manual_optimization(self) -> None:
        assert self.lightning_module is not None
        root: Any = self.model
        if self._fsdp_version == 1 and not self.lightning_module.automatic_optimization and root._has_params:
            raise UserError(
                "Manual optimization runs backward inside `training_step`, where FSDP1 still holds the root's weights "
                "gathered; set `fsdp_version=2`, or automatic optimization."
            )

    def _whole_tower(self, model: DividedModel) -> nn.Module:
        assert model.tower is not None
        trainable = next((name for name, value in model.tower.named_parameters() if value.requires_grad), None)
        if trainable is not None:
            raise UserError(
                f"`shard_frozen_tower=False` needs a frozen vision tower, but `{trainable}` of {type(model.tower).__name__} at "
                f"'{model.name}' is trainable; freeze it or leave the argument out."
            )
        if self.kwargs.get("sync_module_states"):
            raise UserError(
                "`sync_module_states` does not reach a tower that `shard_frozen_tower=False` keeps whole; load its weights on "
                "every rank, or leave one of the two out."
            )
        return model.tower.to(self.root_device)

    @property
    def _fsdp_arguments(self) -> dict[str, Any]:
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            # on the CPU Lightning's index is None, with which FSDP looks for an accelerator
            "device_id": self.root_device if self._on_cpu else self.root_device.index,
            **({"ignored_modules": self._whole_towers} if self._whole_towers else {}),
            **self.kwargs,
        }

    @property
    def _remembered_arguments(self) -> dict[str, Any]:
        """What later runs of the same module must not change."""
        return {
            **self._fsdp_arguments,
            "activation_checkpointing_policy": bool(self._activation_checkpointing_kwargs),
            "fsdp_version": self._fsdp_version,
        }

    def _check_wrapped(self, models: list[DividedModel]) -> None:
        assert self.model is not None
        parts = fsdp_parts(self.model)
        heads = [id(head) for head in untied_heads(self.model)]
        for model in models if len(self._division) else []:
            if any(unwrap(part) is model.entries[0] for part in parts if part is not self.model):
                raise UserError(
                    f"`auto_wrap_policy` wraps {type(model.entries[0]).__name__} as a whole, which would lose "
                    "`outputs.sequence_shard`; wrap its blocks, as without a policy."
                )
            if model.decoder is model.base and model.family.modalities and wraps_more_than_default(self.model):
                raise UserError(
                    f"{type(model.base).__name__} merges features inside its decoder, where replicas without images would "
                    "gather the weights of other modules than blocks and heads in another order; use no `auto_wrap_policy`."
                )
            inside = {
                id(child) for part in (model.tower, model.decoder) if part is not None for child in part.modules()
            }.union(heads)
            apart = [unwrap(part) for part in parts if part is not self.model and id(unwrap(part)) not in inside]
            within = {id(child) for child in model.base.modules()}
            lost = next((part for part in apart if id(part) in within and part is not model.base), None)
            if lost is not None and model.tower in self._whole_towers:
                raise UserError(
                    f"`auto_wrap_policy` wraps {type(lost).__name__} beside a tower that `shard_frozen_tower=False` keeps "
                    "whole, so that replicas without images would not gather its weights; leave it out of the policy."
                )
        self.mesh.headers_first = wraps_more_than_default(self.model)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        root = known_root(model, self._remembered_arguments)
        if root is not None:
            return root
        absent = self._check_meta(model)
        if self._fsdp_version == 2:
            return self._shard_model(model, absent)
        try:
            root = wrap(model, self._fsdp_arguments, self._remembered_arguments)
        except ValueError as error:
            if "uniform dtype" not in str(error):
                raise
            raise UserError(
                f"FSDP1 cannot hold weights of several dtypes in one block ({error}), as adapters in float32 on a bfloat16 "
                "model are; set `fsdp_version=2`, or give all weights one dtype."
            ) from error
        # what else Lightning does to a model it finds wrapped; it would drop the policy, which other modules need
        policy = self.kwargs.pop("auto_wrap_policy", None)
        try:
            return super()._setup_model(root)
        finally:
            if policy is not None:
                self.kwargs["auto_wrap_policy"] = policy

    def _check_meta(self, model: nn.Module) -> bool:
        """Whether some ranks have weights on the meta device, to be filled with rank 0's."""
        absent = any(value.is_meta for value in model.parameters())
        if self.kwargs.get("param_init_fn") is not None:
            return False
        signature = [(plain_name(name), value.shape, value.dtype) for name, value in model.named_parameters()]
        seen = gather_numbers(self.mesh, int(absent))
        if not any(seen):
            return False
        problem = None
        if seen[0]:
            problem = "rank 0 has weights on the meta device; load them there with `from_pretrained`"
        elif len(set(gather_numbers(self.mesh, hash_of(signature)))) > 1:
            problem = (
                "ranks have other names, shapes or dtypes of weights than rank 0; give `from_pretrained` and `from_config` the "
                "same config and `dtype`"
            )
        elif self._fsdp_version == 1:
            problem = (
                "FSDP1 fills weights on the meta device only with `param_init_fn` and `sync_module_states`; set "
                "`fsdp_version=2`, which needs neither"
            )
        if problem is not None:
            raise UserError(f"{type(model).__name__} cannot be set up: {problem}.")
        return True

    def _shard_model(self, model: nn.Module, absent: bool) -> nn.Module:
        mesh = self.fsdp_mesh
        assert mesh is not None
        shard_in_place(
            model,
            self._fsdp_arguments,
            self._remembered_arguments,
            mesh,
            self._activation_checkpointing_kwargs,
            fill=partial(fill_from_rank_zero, self.root_device, self.global_rank)
            if absent or self.kwargs.get("sync_module_states")
            else None,
        )
        if not (self.cpu_offload and self.cpu_offload.offload_params):
            # what is not sharded: buffers and metrics
            model.to(self.root_device)
        return model

    def _enter_root(self) -> None:
        """Lets the root of FSDP2, which is the LightningModule itself, gather its weights for the steps of the Trainer."""
        assert self.lightning_module is not None
        for name in _STEPS:
            if is_overridden(name, self.lightning_module):
                register_fsdp_forward_method(self.lightning_module, name)
                self._entered.append(name)
        if not self.lightning_module.automatic_optimization:
            root: Any = self.lightning_module
            # a backward within `training_step` frees the root's weights, which a second forward there needs
            hooks = [child.register_forward_pre_hook(lambda *_: root.unshard()) for child in root.children()]
            self._root_hooks = [hook.remove for hook in hooks]

    def _leave_root(self) -> None:
        while self._entered:
            vars(self.lightning_module).pop(self._entered.pop(), None)
        while self._root_hooks:
            self._root_hooks.pop()()
        self._reshard()

    def _reshard(self) -> None:
        # after evaluation the root's weights are still whole, and would not be seen to change
        if self._fsdp_version == 2 and self.model is not None:
            reshard(fsdp_parts(self.model))

    @override
    def on_validation_end(self) -> None:
        self._reshard()

    @override
    def on_test_end(self) -> None:
        self._reshard()

    @override
    def on_predict_end(self) -> None:
        self._reshard()

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        if self._fsdp_version == 2:
            # `fully_shard` needs no context
            yield
            return
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._fsdp_arguments):
            yield

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # collected before: processors' outputs move in place
        collected = None if self._on_cpu else host_tensors(batch, self._host_copies)
        samples = None if self._on_cpu else host_tensors(batch, _HOST_SAMPLES, sample)
        moved = super().batch_to_device(batch, device, dataloader_idx)
        keep_host_copies(collected, moved)
        keep_samples(samples, moved)
        return moved

    # ---- steps: what this rank does, and what to say if another one's failure ends it

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.mesh.watch.step("training_step"):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.mesh.watch.step("validation_step"):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.mesh.watch.step("test_step"):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.mesh.watch.step("predict_step"):
            predictions = super().predict_step(*args, **kwargs)
        return None if self._is_repeated(*args[1:], *kwargs.values()) else predictions

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.mesh.watch.step("backward"):
            return super().backward(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.mesh.watch.step("optimizer_step"):
            return super().optimizer_step(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._mesh is not None and isinstance(exception, Exception) and not isinstance(exception, StepError):
            cause = self._mesh.watch.tell(exception)
            if cause is not None:
                log.error(cause)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._division.undo()
        self._leave_root()
        if self._sigterm is not None:
            self._sigterm.restore()
        if self._mesh is not None:
            self._mesh.close()
        super().teardown()

    # ---- checkpoints

    @property
    def _full(self) -> bool:
        return self._state_dict_type == "full"

    def _full_state(self) -> AbstractContextManager[None] | None:
        """What whole state dicts of FSDP1 on the CPU need instead of Lightning's way; None if Lightning's serves."""
        if not self._full or not self._on_cpu:
            return None
        assert self.model is not None
        return full_state_on_cpu(self.model)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        weights = self._state_dict()
        if self._save_frozen_weights:
            return weights
        assert self.lightning_module is not None
        frozen = frozen_names(self.lightning_module)
        return {name: value for name, value in weights.items() if name not in frozen}

    def _state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        if self._fsdp_version == 2:
            return state_dict_2(self.model, self._full)
        context = self._full_state()
        if context is None:
            return super().lightning_module_state_dict()
        with context:
            return self.model.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        assert self.model is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        if self._fsdp_version == 2:
            return optimizer_state_2(self.model, optimizer, self._full, self.is_global_zero)
        context = self._full_state()
        if context is None:
            return super().optimizer_state(optimizer)
        with context:
            state = FullyShardedDataParallel.optim_state_dict(self.model, optimizer)
            if self.is_global_zero:
                state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)
            return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        checkpoint[_REPLICAS] = self.data_parallel_size
        checkpoint[_FROZEN] = self._save_frozen_weights
        checkpoint[MODELS_KEY] = describe_models(self.lightning_module)
        filepath = self.broadcast(filepath)
        own_io = type(self.checkpoint_io) is not TorchCheckpointIO
        if storage_options is not None or "://" in str(filepath) or (self._full and own_io):
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(filepath)
        if path.is_dir() and not _is_sharded_checkpoint(path):
            raise IsADirectoryError(
                f"There is a folder at {path} that is no checkpoint; give the checkpoint another name."
            )
        with replaced_in_one_step(path, self.is_global_zero, self.barrier) as part:
            problem = None
            try:
                if not self._full:
                    write_shards(checkpoint, part, self.is_global_zero)
                elif self.is_global_zero:
                    write_file(checkpoint, part)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            raise_together(
                self.mesh, problem, f"The checkpoint {path} could not be written, and what was there is left"
            )

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = newest(Path(self.broadcast(checkpoint_path)))
        if weights_only is not False:
            check_holds_data(path)
        with loosened(self.lightning_module, enabled=not self._save_frozen_weights):
            return self._load_checkpoint(path, weights_only)

    def _load_checkpoint(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        assert self.model is not None
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        # Lightning's way of loading shards needs all of them
        partial_shards = not self._save_frozen_weights and _is_sharded_checkpoint(path)
        if self._fsdp_version == 2 or partial_shards:
            optimizers = self.optimizers if fitting else []
            checkpoint = load_sharded_module(
                path, self.model, optimizers, self.lightning_module.strict_loading, weights_only
            )
        else:
            checkpoint = super().load_checkpoint(path, weights_only)
        replicas = checkpoint.get(_REPLICAS, self.data_parallel_size)
        if fitting and replicas != self.data_parallel_size:
            rescale_progress(checkpoint["loops"], replicas, self.data_parallel_size)
        return checkpoint

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        self._continued = continue_samplers(self.lightning_module.trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        unmark(self._continued)

    # ---- registration

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers "ulysses_vdp" and, with fixed sizes of a sequence group, "ulysses_vdp_sp2", "_sp4" and "_sp8"."""
        description = "Vision DP and Ulysses sequence parallelism on FSDP"
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=description)
        for size in (2, 4, 8):
            name = f"{cls.strategy_name}_sp{size}"
            if name not in strategy_registry:
                strategy_registry.register(
                    name, cls, description=f"{description}, {size} ranks to a batch", sequence_parallel_size=size
                )
