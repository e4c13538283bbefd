"""The (data_parallel, sequence_parallel) mesh of ranks and its process groups."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh

from lightning_vdp.errors import UserError
from lightning_vdp.run.observers import Observers
from lightning_vdp.run.watch import Watch, run_store

__all__ = ["SequenceMesh", "resolve_sizes"]

Size = int | Literal["auto"]


def _size(name: str, value: Size) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"`{name}` is {value!r}, but must be a positive whole number or 'auto'.")
    if value < 1:
        raise UserError(f"`{name}` is {value}, but must be 1 or more; 1 switches the division off.")
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
        world_size: The number of ranks.
        sequence_parallel_size: The number of ranks that hold one batch together, or "auto".
        data_parallel_size: The number of replicas, or "auto".
        devices_per_node: The number of ranks of one node, beyond which "auto" does not go. Default: the world's.
        query_heads: The numbers of attention heads that an automatic size must divide.

    Returns:
        `(data_parallel_size, sequence_parallel_size)`, whose product is the world size.

    Raises:
        UserError: If a size is below 1, or the sizes do not multiply to the world size.
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
            raise UserError(
                f"`data_parallel_size` is {data}, which does not divide the {world_size} processes; "
                f"choose one of {_divisors(world_size)}."
            )
        sequence = world_size // data
    assert sequence is not None
    if world_size % sequence:
        raise UserError(
            f"`sequence_parallel_size` is {sequence}, which does not divide the {world_size} processes; "
            f"choose one of {_divisors(world_size)} or another number of devices."
        )
    if data is not None and data * sequence != world_size:
        raise UserError(
            f"`data_parallel_size` {data} times `sequence_parallel_size` {sequence} is {data * sequence}, "
            f"but there are {world_size} processes; leave one of the two at 'auto'."
        )
    return world_size // sequence, sequence


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


class _Groups(NamedTuple):
    """What one world makes once for each pair of sizes: groups are never freed, and each may hold a communicator."""

    device_mesh: DeviceMesh
    sequence: dist.ProcessGroup
    data: dist.ProcessGroup
    header: dist.ProcessGroup
    header_device: torch.device


_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], _Groups]] = WeakKeyDictionary()
# watched runs of each world, which share its store
_runs: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def _groups(device_type: str, data: int, sequence: int, timeout: timedelta | None) -> _Groups:
    world = dist.group.WORLD
    assert world is not None
    known = _made.setdefault(world, {})
    key = (device_type, data, sequence, timeout)
    if key not in known:
        known[key] = _make_groups(device_type, data, sequence, timeout)
    return known[key]


def _make_groups(device_type: str, data: int, sequence: int, timeout: timedelta | None) -> _Groups:
    ranks = torch.arange(data * sequence).view(data, sequence)
    # each rank makes all groups, in one order; `init_device_mesh` gives them no timeout, and takes the world's own group for
    # an axis of all ranks, in whose communicator exchanges would wait for what FSDP gathers ahead
    data_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    sequence_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    assert data_group is not None
    assert sequence_group is not None
    names = ("data_parallel", "sequence_parallel")
    mesh = DeviceMesh.from_group([data_group, sequence_group], device_type, mesh=ranks, mesh_dim_names=names)
    return _Groups(mesh, sequence_group, data_group, *_make_header_group(device_type, timeout))


def _make_header_group(device_type: str, timeout: timedelta | None) -> tuple[dist.ProcessGroup, torch.device]:
    """Makes a group over the world on the host: numbers agreed on there cost no device sync."""
    group = None
    reason = "it failed on another rank"
    try:
        # where devices are CPUs, their own backend is one of the host
        group = dist.new_group(backend=None if device_type == "cpu" else "gloo", timeout=timeout)
    except RuntimeError as error:
        reason = str(error)
    made = torch.tensor([group is not None], dtype=torch.int32, device=device_type)
    dist.all_reduce(made, op=dist.ReduceOp.MIN)
    if group is not None and made.item():
        return group, torch.device("cpu")
    rank_zero_warn(
        f"The gloo group for step headers cannot be made ({reason}); the default group serves instead, at the price of one "
        "device sync per forward. Setting GLOO_SOCKET_IFNAME to the network interface usually helps."
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD, torch.device(device_type)


class SequenceMesh:
    """The ranks as a grid of replicas (rows) and members of a sequence group (columns), with their groups.

    Groups are made in one order on all ranks. Copying a module that refers to a mesh shares the mesh; pickling one
    leaves a closed mesh behind, on which hooks do nothing.

    Args:
        device_type: The type of the ranks' devices, "cpu" or "cuda".
        data_parallel_size: The number of replicas, D.
        sequence_parallel_size: The number of ranks of one sequence group, S, which are consecutive global ranks.
        timeout: The time that a collective in the groups may take. Default: that of the backend.
    """

    def __init__(
        self,
        device_type: str,
        data_parallel_size: int,
        sequence_parallel_size: int,
        timeout: timedelta | None = None,
    ) -> None:
        self.is_open = True
        self.device_type = device_type
        # set where FSDP wraps what runs between the start of a forward and the tower
        self.headers_first = False
        # what stands out about the data loaders of this run; see `suspect_loader`
        self.suspicion = 0
        self.data_parallel_size = data_parallel_size
        self.sequence_parallel_size = sequence_parallel_size
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.data_parallel_rank, self.sequence_parallel_rank = divmod(self.rank, sequence_parallel_size)
        self.world = dist.group.WORLD
        groups = _groups(device_type, data_parallel_size, sequence_parallel_size, timeout)
        self.device_mesh = groups.device_mesh
        self.sequence_group = groups.sequence
        self.data_parallel_group = groups.data
        self.header_group, self.header_device = groups.header, groups.header_device
        self.vision_observers = Observers()
        self.watch = Watch(self.rank, dist.get_process_group_ranks(self.sequence_group), self.world_size)

    def start_watch(self, warn_after_s: float) -> None:
        """Starts the watch over this rank, until `close`; every rank calls it.

        Args:
            warn_after_s: Seconds without progress inside a step after which every rank says where it is.
        """
        assert self.world is not None
        store = run_store(next(_runs.setdefault(self.world, count())))
        self.watch.start(store, warn_after_s, torch.device(self.device_type))

    def close(self) -> None:
        """Makes every hook that refers to this mesh inert, and ends the watch."""
        self.is_open = False
        self.watch.stop()

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
