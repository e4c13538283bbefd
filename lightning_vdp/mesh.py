"""The (data_parallel, sequence_parallel) mesh of ranks and its process groups."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["SequenceMesh", "resolve_sizes"]

Size = int | Literal["auto"]


def _size(name: str, value: Size) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` is {value!r}, but must be a positive whole number or 'auto'.")
    if value < 1:
        raise ValueError(f"`{name}` is {value}, but must be 1 or more; 1 switches the division off.")
    return value


def resolve_sizes(
    world_size: int,
    sequence_parallel_size: Size = "auto",
    data_parallel_size: Size = "auto",
    devices_per_node: int | None = None,
    query_heads: Sequence[int] = (),
) -> tuple[int, int]:
    """Chooses or checks the sizes of the two mesh axes.

    Args:
        world_size: Number of ranks.
        sequence_parallel_size: Ranks that hold one batch together, or "auto".
        data_parallel_size: Number of replicas, or "auto".
        devices_per_node: Ranks of one node: the largest size that "auto" takes. Default: the world.
        query_heads: Attention head counts that an automatic size must divide.

    Returns:
        `(data_parallel_size, sequence_parallel_size)`, whose product is the world size.

    Raises:
        ValueError: If a size is below 1, or the sizes do not multiply to the world size.
    """
    sequence = _size("sequence_parallel_size", sequence_parallel_size)
    data = _size("data_parallel_size", data_parallel_size)
    if sequence is None and data is None:
        limit = min(devices_per_node or world_size, world_size)
        sequence = next(
            size
            for size in range(limit, 0, -1)
            if world_size % size == 0 and limit % size == 0 and all(heads % size == 0 for heads in query_heads)
        )
    if sequence is None and data is not None:
        if world_size % data:
            raise ValueError(
                f"`data_parallel_size` is {data}, which does not divide the {world_size} processes; "
                f"choose one of {_divisors(world_size)}."
            )
        sequence = world_size // data
    assert sequence is not None
    if world_size % sequence:
        raise ValueError(
            f"`sequence_parallel_size` is {sequence}, which does not divide the {world_size} processes; "
            f"choose one of {_divisors(world_size)} or another number of devices."
        )
    if data is not None and data * sequence != world_size:
        raise ValueError(
            f"`data_parallel_size` {data} times `sequence_parallel_size` {sequence} is {data * sequence}, "
            f"but there are {world_size} processes; leave one of the two at 'auto'."
        )
    return world_size // sequence, sequence


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


class SequenceMesh:
    """The ranks as a grid of replicas (rows) and members of a sequence group (columns), with their groups.

    Groups are made in one order on all ranks. Copying a module that refers to a mesh shares the mesh; pickling one
    leaves a closed mesh behind, on which hooks do nothing.

    Args:
        device_type: "cpu" or "cuda".
        data_parallel_size: Number of replicas, D.
        sequence_parallel_size: Ranks of one sequence group, S; consecutive global ranks.
        timeout: For the group that agrees on step headers. Default: that of the backend.
    """

    def __init__(
        self,
        device_type: str,
        data_parallel_size: int,
        sequence_parallel_size: int,
        timeout: timedelta | None = None,
    ) -> None:
        self.is_open = True
        self.data_parallel_size = data_parallel_size
        self.sequence_parallel_size = sequence_parallel_size
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.data_parallel_rank, self.sequence_parallel_rank = divmod(self.rank, sequence_parallel_size)
        self.world = dist.group.WORLD
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type,
            (data_parallel_size, sequence_parallel_size),
            mesh_dim_names=("data_parallel", "sequence_parallel"),
        )
        self.sequence_group: dist.ProcessGroup = self.device_mesh.get_group("sequence_parallel")
        self.data_parallel_group: dist.ProcessGroup = self.device_mesh.get_group("data_parallel")
        self.header_group, self.header_device = self._make_header_group(device_type, timeout)

    def _make_header_group(self, device_type: str, timeout: timedelta | None) -> tuple[dist.ProcessGroup, torch.device]:
        """Makes a gloo group over the world: numbers agreed on there cost no device sync."""
        group = None
        try:
            group = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            reason = str(error)
        made = torch.tensor([group is not None], dtype=torch.int32, device=device_type)
        dist.all_reduce(made, op=dist.ReduceOp.MIN)
        if group is not None and made.item():
            return group, torch.device("cpu")
        if group is not None:
            reason = "it failed on another rank"
        rank_zero_warn(
            f"The gloo group for step headers cannot be made ({reason}); the default group serves instead, at the price "
            "of one device sync per forward. Setting GLOO_SOCKET_IFNAME to the network interface usually helps."
        )
        assert self.world is not None
        return self.world, torch.device(device_type)

    def close(self) -> None:
        """Makes every hook that refers to this mesh inert."""
        self.is_open = False

    def reopen(self) -> None:
        """Undoes `close`, for the same strategy in the same world."""
        self.is_open = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceMesh":
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _closed_mesh, ()


def _closed_mesh() -> SequenceMesh:
    mesh = object.__new__(SequenceMesh)
    mesh.is_open = False
    return mesh
