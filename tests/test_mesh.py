import pickle

import pytest

from lightning_vdp.mesh import SequenceMesh, resolve_sizes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"world_size": 8}, (1, 8)),
        ({"world_size": 16, "devices_per_node": 8}, (2, 8)),
        ({"world_size": 8, "query_heads": [28]}, (2, 4)),
        ({"world_size": 8, "query_heads": [28, 6]}, (4, 2)),
        ({"world_size": 12, "devices_per_node": 6, "query_heads": [16]}, (6, 2)),
        # a group never spans nodes: 4 does not divide the 6 devices of a node
        ({"world_size": 12, "devices_per_node": 6, "query_heads": [4]}, (6, 2)),
        ({"world_size": 8, "sequence_parallel_size": 2}, (4, 2)),
        ({"world_size": 8, "data_parallel_size": 2}, (2, 4)),
        ({"world_size": 8, "sequence_parallel_size": 4, "data_parallel_size": 2}, (2, 4)),
        ({"world_size": 1}, (1, 1)),
    ],
)
def test_sizes(arguments: dict[str, int], expected: tuple[int, int]) -> None:
    assert resolve_sizes(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_parallel_size": 3}, r"does not divide the 8 processes; choose one of \[1, 2, 4, 8\]"),
        ({"sequence_parallel_size": -2}, "is -2, but must be 1 or more"),
        ({"data_parallel_size": 0}, "`data_parallel_size` is 0"),
        ({"sequence_parallel_size": True}, "is True, but must be a positive whole number"),
        ({"sequence_parallel_size": 2.0}, "is 2.0, but must be a positive whole number"),
        ({"sequence_parallel_size": 2, "data_parallel_size": 2}, "is 4, but there are 8 processes"),
    ],
)
def test_bad_sizes(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_sizes(8, **arguments)


def test_pickling_leaves_a_closed_mesh() -> None:
    mesh = object.__new__(SequenceMesh)
    mesh.is_open = True
    assert pickle.loads(pickle.dumps(mesh)).is_open is False
