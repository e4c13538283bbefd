"""`UlyssesVisionDPStrategy`: what the Trainer calls. It orchestrates and computes nothing itself."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vdp.batch.host_copies import move_with_host_copies
from lightning_vdp.batch.loader import AgreedLoader
from lightning_vdp.batch.predictions import is_repeated
from lightning_vdp.batch.same import suspect_loader
from lightning_vdp.batch.workers import seed_workers_by_replica
from lightning_vdp.checkpoint.load import LoadRequest, allow_missing_weights, newest
from lightning_vdp.checkpoint.resume import continue_samplers, rescale_progress, restore_loaders
from lightning_vdp.checkpoint.safety import check_holds_data_together
from lightning_vdp.checkpoint.save import add_facts, is_left_to_lightning, without_frozen, write_checkpoint
from lightning_vdp.errors import StepError
from lightning_vdp.families.find import find_models
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.forward.patches import Patches
from lightning_vdp.forward.sizes import choose_sizes
from lightning_vdp.fsdp.backend import ShardRanks, Wrapping
from lightning_vdp.fsdp.checks import check_run
from lightning_vdp.fsdp.materialize import some_weights_are_absent
from lightning_vdp.fsdp.policy import check_wrapped, wraps_more_than_default
from lightning_vdp.fsdp.precision import UlyssesVisionDPPrecision
from lightning_vdp.fsdp.remembered import known_root, remember
from lightning_vdp.fsdp.shard_mesh import resolve_shard_mesh
from lightning_vdp.fsdp.versions import BACKENDS
from lightning_vdp.fsdp.whole_tower import keep_towers_whole
from lightning_vdp.mesh import SequenceMesh, Size
from lightning_vdp.run.compatibility import check_overrides
from lightning_vdp.run.global_batch import announce_global_batch
from lightning_vdp.run.locate import locate
from lightning_vdp.run.notebook import NotebookLauncher
from lightning_vdp.run.signals import Sigterm
from lightning_vdp.run.watched import log_cause, watched
from lightning_vdp.settings import Settings, check_choice

__all__ = ["UlyssesVisionDPStrategy"]


class UlyssesVisionDPStrategy(FSDPStrategy):
    """Trains Hugging Face vision-language models with images and sequence divided over groups of ranks.

    Consecutive ranks form sequence groups that work on one batch together: each rank runs the vision tower on its share
    of the images (Vision DP), and holds its share of the language model's sequence (Ulysses attention). Weights,
    gradients and optimizer states are divided over all ranks by FSDP. The gradient equals that of one process per
    group, to rounding.

    Args:
        sequence_parallel_size: Ranks of a sequence group, S. "auto" takes the devices of one node, or the largest size
            below that which divides the attention heads; a model that only `configure_model` builds is not known by then,
            and needs a number where its heads do not fit. 1 divides weights alone, as FSDP does.
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
        trust_checkpoints: Whether checkpoints may hold any Python object, such as hyperparameters of your own classes. Such
            a file can run code on every rank that opens it; False refuses it, with the names of the classes.
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
        fsdp_version: Literal[1, 2] = 2,
        save_frozen_weights: bool = True,
        trust_checkpoints: bool = False,
        **kwargs: Any,
    ) -> None:
        settings = Settings(
            vision_data_parallel=vision_data_parallel,
            vision_assignment=vision_assignment,
            vision_balance=vision_balance,
            vision_exchange=vision_exchange,
            logits=logits,
            loss_tokens=loss_tokens,
            verify_first_batch=verify_first_batch,
            check_batches_every_n_steps=check_batches_every_n_steps,
            hang_warning_s=hang_warning_s,
            shard_frozen_tower=shard_frozen_tower,
            fsdp_version=fsdp_version,
            save_frozen_weights=save_frozen_weights,
            trust_checkpoints=trust_checkpoints,
        )
        super().__init__(**kwargs)
        check_choice("state_dict_type", self._state_dict_type, ("full", "sharded"))
        self._settings = settings
        self._requested_sizes = (sequence_parallel_size, data_parallel_size)
        self._backend = BACKENDS[fsdp_version]()
        self._backend.check_arguments({**self.kwargs, "sharding_strategy": self.sharding_strategy})
        self._mesh: SequenceMesh | None = None
        self._patches = Patches()
        self._whole_towers: list[nn.Module] = []
        self._host_copies: frozenset[str] = frozenset()
        self._sigterm: Sigterm | None = None
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
        shard_mesh = self.kwargs.get("device_mesh")
        if isinstance(shard_mesh, tuple):
            # Lightning would make this mesh on "cuda", whatever the accelerator
            del self.kwargs["device_mesh"]
        super().setup_environment()
        if isinstance(self.cluster_environment, LightningEnvironment):
            # Lightning's launcher does so in the process that starts the others only
            _set_num_threads_if_needed(self.num_processes)
        # who refuses something next must not leave while others still connect
        self.barrier()
        self._setup_mesh()
        ranks = ShardRanks(self.root_device.type, self.world_size, self.num_processes)
        shard_mesh = resolve_shard_mesh(self._backend, shard_mesh, self.sharding_strategy, ranks)
        if shard_mesh is not None:
            self.kwargs["device_mesh"] = shard_mesh
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self.device_mesh

    def _setup_mesh(self) -> None:
        if self._mesh is not None and self._mesh.world is dist.group.WORLD:
            self._mesh.reopen()
            return
        module, world, node = self.lightning_module, dist.get_world_size(), self.num_processes
        sizes = choose_sizes(self._requested_sizes, module, world, node, self.strategy_name)
        self._mesh = SequenceMesh(self.root_device.type, *sizes, timeout=self._timeout)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        seed_workers_by_replica(dataloader, self.data_parallel_rank)
        self.mesh.suspicion = max(self.mesh.suspicion, suspect_loader(dataloader, self.data_parallel_size))
        return AgreedLoader(
            super().process_dataloader(dataloader),
            self.mesh,
            until_last=bool(self._module.trainer.predicting),
            is_stopped=lambda: self._sigterm is not None and self._sigterm.noted,
        )

    @override
    def model_sharded_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._backend.model_sharded_context(self._wrapping.arguments)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        check_overrides(type(self))
        check_overrides(type(self.precision_plugin))
        settings, module, divided = self._settings, self._module, self.sequence_parallel_size > 1
        settings.check_group_size(self.sequence_parallel_size)
        self.mesh.suspicion = 0
        models = find_models(module) if divided or not settings.shard_frozen_tower else []
        self._host_copies = frozenset[str]().union(*(model.family.describing for model in models))
        self._whole_towers = []
        if not settings.shard_frozen_tower:
            self._whole_towers = keep_towers_whole(models, self.kwargs, self.root_device)
        # refuses before anything is changed
        known_root(module, self._backend, self._wrapping)
        self._patches = divide_models(models, self.mesh, settings, self._whole_towers)
        check_run(trainer, module, self.cpu_offload, str(self.precision_plugin.precision), self.root_device)
        self._sigterm = Sigterm(trainer)
        super().setup(trainer)
        root, fitting = self._root, trainer.state.fn == TrainerFn.FITTING
        check_wrapped(root, models if divided else [], self._whole_towers)
        self.mesh.headers_first = wraps_more_than_default(root)
        if fitting and not module.automatic_optimization:
            self._backend.check_manual_optimization(root)
        self._backend.enter(root)
        if isinstance(self.precision_plugin, UlyssesVisionDPPrecision):
            self.precision_plugin.fsdp_root, self.precision_plugin.compute_device = root, self.root_device
        if divided:
            self.mesh.watch.locate = partial(locate, trainer)
            if settings.hang_warning_s is not None:
                self.mesh.start_watch(settings.hang_warning_s)
            if fitting:
                sizes = (self.data_parallel_size, self.sequence_parallel_size)
                announce_global_batch(self.strategy_name, *sizes, trainer.accumulate_grad_batches)

    @property
    def _module(self) -> "pl.LightningModule":
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _root(self) -> nn.Module:
        assert self.model is not None
        return self.model

    @property
    def _wrapping(self) -> Wrapping:
        arguments = {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            # not its index, as Lightning gives: on the CPU there is none, with which FSDP looks for an accelerator
            "device_id": self.root_device,
            **({"ignored_modules": self._whole_towers} if self._whole_towers else {}),
            **self.kwargs,
        }
        return Wrapping(arguments, self._activation_checkpointing_kwargs, self.root_device)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        module, wrapping = cast("pl.LightningModule", model), self._wrapping
        root = known_root(module, self._backend, wrapping)
        if root is None:
            absent = some_weights_are_absent(module, self._backend, wrapping, self.mesh)
            root = self._backend.wrap(module, wrapping, fill=absent)
            remember(module, root, self._backend, wrapping)
        return root

    @override
    def on_validation_end(self) -> None:
        self._backend.reshard(self._root)

    on_test_end = on_predict_end = on_validation_end

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        move = partial(super().batch_to_device, batch, device, dataloader_idx)
        return move() if self.root_device.type == "cpu" else move_with_host_copies(batch, move, self._host_copies)

    # ---- steps

    training_step = watched(FSDPStrategy.training_step)
    validation_step = watched(FSDPStrategy.validation_step)
    test_step = watched(FSDPStrategy.test_step)
    backward = watched(FSDPStrategy.backward)
    optimizer_step = watched(FSDPStrategy.optimizer_step)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.mesh.watch.step("predict_step"):
            predictions = super().predict_step(*args, **kwargs)
        repeated = is_repeated(self._module.trainer, *args[1:], *kwargs.values())
        return None if repeated else predictions

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._mesh is not None and isinstance(exception, Exception) and not isinstance(exception, StepError):
            log_cause(self._mesh.watch, exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._patches.undo()
        if self.model is not None:
            self._backend.leave(self.model)
        if self._sigterm is not None:
            self._sigterm.restore()
        if self._mesh is not None:
            self._mesh.close()
        super().teardown()

    # ---- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        weights = self._backend.model_state(self._root, full=self._state_dict_type == "full")
        return weights if self._settings.save_frozen_weights else without_frozen(weights, self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return self._backend.optimizer_state(self._root, optimizer, full=self._state_dict_type == "full")

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        add_facts(checkpoint, self._module, self.data_parallel_size, self._settings.save_frozen_weights)
        filepath, sharded = self.broadcast(filepath), self._state_dict_type == "sharded"
        if is_left_to_lightning(filepath, storage_options, self.checkpoint_io, sharded):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            write_checkpoint(checkpoint, Path(filepath), sharded, self.mesh, self.barrier)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = newest(Path(self.broadcast(checkpoint_path)))
        weights_only = weights_only is not False and not self._settings.trust_checkpoints
        if weights_only:
            check_holds_data_together(path, self.mesh)
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        may_lack_weights = not self._settings.save_frozen_weights
        load_by_lightning = partial(super().load_checkpoint, path, weights_only)
        with allow_missing_weights(self._module, enabled=may_lack_weights):
            optimizers, strict = self.optimizers if fitting else [], self._module.strict_loading
            request = LoadRequest(path, optimizers, strict, may_lack_weights, weights_only)
            checkpoint = self._backend.load(self._root, request, load_by_lightning)
        if fitting:
            rescale_progress(checkpoint, self.data_parallel_size)
        return checkpoint

    @override
    def on_train_start(self) -> None:
        self._continued = continue_samplers(self._module.trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        restore_loaders(self._continued)

    # ---- registration

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers "ulysses_vdp" and, with fixed sizes of a sequence group, "ulysses_vdp_sp2", "_sp4" and "_sp8"."""
        what = "Vision DP and Ulysses sequence parallelism on FSDP"
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, what)
        for size in (2, 4, 8):
            name, sized = f"{cls.strategy_name}_sp{size}", f"{what}, {size} ranks to a batch"
            if name not in strategy_registry:
                strategy_registry.register(name, cls, sized, sequence_parallel_size=size)
