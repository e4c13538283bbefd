"""What FSDP shards and replicates over."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from lightning_vdp.errors import UserError
from lightning_vdp.fsdp.backend import FSDPBackend, ShardRanks

__all__ = ["make_hybrid_mesh", "resolve_shard_mesh"]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def make_hybrid_mesh(device_type: str, sizes: tuple[int, ...]) -> DeviceMesh:
    """Makes the mesh of hybrid sharding.

    Args:
        device_type: Type of the ranks' devices.
        sizes: Number of replicas of the weights, and of ranks that hold one replica together.
    """
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard"))


def resolve_shard_mesh(
    backend: FSDPBackend, given: Any, sharding_strategy: ShardingStrategy, ranks: ShardRanks
) -> DeviceMesh | None:
    """Makes the mesh that FSDP shards over, or checks the one that the user gave; every rank calls it.

    Args:
        backend: The version of FSDP.
        given: The strategy's argument `device_mesh`: a mesh, a tuple (replicas, shards), or None.
        sharding_strategy: How weights are divided.
        ranks: The ranks.

    Returns:
        The mesh; None where FSDP makes do without one.

    Raises:
        UserError: If the mesh fits neither the ranks nor the sharding strategy.
    """
    hybrid = sharding_strategy in _HYBRID
    mesh = None
    if isinstance(given, tuple):
        if len(given) != 2 or given[0] * given[1] != ranks.world_size:
            raise UserError(
                f"`device_mesh` is {given}, but must be (replicas, shards) whose product is the {ranks.world_size} processes."
            )
        if hybrid:
            backend.check_hybrid_shards(given[1])
        mesh = make_hybrid_mesh(ranks.device_type, given)
    elif isinstance(given, DeviceMesh):
        if hybrid:
            backend.check_hybrid_shards(given.size(-1))
        mesh = given
    elif hybrid and ranks.device_type == "cpu":
        raise UserError("Hybrid sharding on the CPU needs `device_mesh=(replicas, shards)`.")
    else:
        mesh = backend.make_default_mesh(ranks, hybrid)
    if mesh is not None and (mesh.ndim == 2) != hybrid:
        raise UserError(
            f"`device_mesh` has {mesh.ndim} axes and `sharding_strategy` is {sharding_strategy.name}, but two axes (replicas, "
            "shards) belong to hybrid sharding and one to the others; change one of the two arguments."
        )
    return mesh
