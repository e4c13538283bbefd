"""The one seam behind which torch's versions of FSDP differ.

A backend does with one version what the strategy asks for; `versions.py` is the only place that knows which there are.
The strategy holds one backend, and calls it in the order in which the methods stand here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_vdp.checkpoint.load import LoadRequest

__all__ = ["FSDPBackend", "ShardRanks", "Wrapping"]


@dataclass(frozen=True)
class ShardRanks:
    """The ranks over which weights are divided.

    Args:
        device_type: Type of the devices that they compute on.
        world_size: Number of all ranks.
        node_size: Number of ranks of one node.
    """

    device_type: str
    world_size: int
    node_size: int


@dataclass(frozen=True)
class Wrapping:
    """How a LightningModule is wrapped.

    Args:
        arguments: Arguments of :class:`torch.distributed.fsdp.FullyShardedDataParallel`.
        activation_checkpointing: Arguments of torch's `apply_activation_checkpointing`; empty for none.
        device: Where this rank computes.
    """

    arguments: Mapping[str, Any]
    activation_checkpointing: Mapping[str, Any]
    device: torch.device


class FSDPBackend(ABC):
    """What one version of FSDP does."""

    version: ClassVar[int]
    """What users give as `fsdp_version`."""

    # ---- before the model is there

    @abstractmethod
    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuses arguments that this version has nothing for, as soon as the strategy is made.

        Args:
            arguments: See `Wrapping`; those of the world, such as meshes, may still be missing.

        Raises:
            UserError: If there is one; the message names it.
        """

    @abstractmethod
    def check_hybrid_shards(self, shards: int) -> None:
        """Refuses a number of shards that hybrid sharding cannot have, as soon as the world is known.

        Args:
            shards: Number of ranks that hold one copy of the weights together.

        Raises:
            UserError: If this version cannot divide over so few.
        """

    @abstractmethod
    def make_default_mesh(self, ranks: ShardRanks, hybrid: bool) -> DeviceMesh | None:
        """Makes the mesh to shard over where the user gives none.

        Args:
            ranks: The ranks.
            hybrid: Whether weights are divided within a node and replicated over nodes.

        Returns:
            The mesh, whose first axis replicates if it has two; None if this version makes do without one.
        """

    @abstractmethod
    def model_sharded_context(self, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Returns the context in which a LightningModule's `configure_model` runs.

        Args:
            arguments: See `Wrapping`.
        """

    # ---- setup

    @abstractmethod
    def find_absent_weights_problem(self) -> str | None:
        """Says why ranks without weights of their own cannot get those of rank 0; None if they can."""

    @abstractmethod
    def wrap(self, module: "pl.LightningModule", wrapping: Wrapping, fill: bool) -> nn.Module:
        """Divides a module's weights: by default blocks and heads on their own, and then what is left, with the root.

        Args:
            module: The LightningModule; submodules may be wrapped already.
            wrapping: How.
            fill: Whether some ranks have weights on the meta device, which get the values of rank 0.

        Returns:
            The root; it may be the module itself.

        Raises:
            UserError: If weights that are gathered together cannot be, because of their dtypes.
        """

    @abstractmethod
    def is_idle(self, part: nn.Module) -> bool:
        """Whether a part's weights are not gathered, as they are in the middle of a forward or backward.

        Args:
            part: A module whose weights this version gathers on their own.
        """

    @abstractmethod
    def check_manual_optimization(self, root: nn.Module) -> None:
        """Refuses a root with which a backward within `training_step` is not possible.

        Args:
            root: The root.

        Raises:
            UserError: If it is not.
        """

    # ---- the run

    @abstractmethod
    def enter(self, root: nn.Module) -> None:
        """Lets the root gather its weights in the steps that the Trainer calls, until `leave`.

        Args:
            root: The root.
        """

    @abstractmethod
    def reshard(self, root: nn.Module) -> None:
        """Frees gathered weights that evaluation leaves behind, so that the parameters are the sharded ones.

        Args:
            root: The root, or a module that was never wrapped.
        """

    @abstractmethod
    def leave(self, root: nn.Module) -> None:
        """Undoes `enter`, and reshards.

        Args:
            root: The root, or a module that was never wrapped.
        """

    # ---- checkpoints

    @abstractmethod
    def model_state(self, root: nn.Module, full: bool) -> dict[str, Any]:
        """Returns the weights on the host by plain names; every rank calls it.

        Args:
            root: The root.
            full: Whether rank 0 gets whole weights and the others none; otherwise each rank gets its parts.
        """

    @abstractmethod
    def optimizer_state(self, root: nn.Module, optimizer: Optimizer, full: bool) -> dict[str, Tensor]:
        """Returns an optimizer's state on the host; every rank calls it.

        Args:
            root: The root.
            optimizer: Holds parameters of the root.
            full: Whether rank 0 gets a whole state, as a plain optimizer would save it; otherwise each rank gets its parts.
        """

    @abstractmethod
    def load(
        self, root: nn.Module, request: LoadRequest, load_by_lightning: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Loads weights and the states of optimizers; every rank calls it.

        Args:
            root: The root.
            request: What to load.
            load_by_lightning: Does the same in the way of Lightning's FSDPStrategy, which serves FSDP1.

        Returns:
            What else the checkpoint holds.
        """
