"""Looking into a checkpoint before it is loaded: what it holds must be data, not code.

A pickled file may name any function and have it called by whoever opens it. torch opens the index of a sharded checkpoint,
and every entry in it that is not a tensor, without any limit; Lightning does so with whole checkpoints. So rank 0 reads all
of it with torch's limits first, tensors aside, and no other rank opens a checkpoint that did not pass.
"""

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _METADATA_FILENAME
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.serialization import get_unsafe_globals_in_checkpoint
from typing_extensions import override

from lightning_vdp.agreement import gather_texts
from lightning_vdp.errors import UserError
from lightning_vdp.mesh import SequenceMesh

__all__ = ["check_holds_data", "check_holds_data_together"]

_INDEX = ".metadata"

_IN_INDEX = {
    "torch": r"Size|device|(float|int|uint|bfloat|complex|bool|qint|quint|float8_|bits)\w*",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata|ChunkStorageMetadata|Metadata|MetadataIndex|StorageMeta|TensorProperties"
        "|TensorStorageMetadata|_MEM_FORMAT_ENCODING"
    ),
    "collections": "OrderedDict",
    "pathlib": r"(Pure)?(Posix|Windows)?Path",
}
"""What torch writes into the index of a sharded checkpoint, as patterns, by module: classes without code of their own."""


class _IndexReader(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if not re.fullmatch(_IN_INDEX.get(module, "(?!)"), name):
            raise UserError(_message("holds code", f"{module}.{name}"))
        found = super().find_class(module, name)
        if module == "torch" and not isinstance(found, (type, torch.dtype)):
            raise UserError(_message("holds code", f"{module}.{name}"))
        return found


def check_holds_data(path: Path) -> None:
    """Checks that a checkpoint holds tensors and plain values alone, and that it is complete; reads no tensor's data.

    Args:
        path: A file, or a folder with shards. A path where nothing is passes.

    Raises:
        UserError: If loading would run code, or the checkpoint is cut short; the message names what is to blame.
    """
    if path.is_dir():
        _check_shards(path)
    elif path.exists():
        with _readable(path):
            _check_file(path)


def check_holds_data_together(path: Path, mesh: SequenceMesh) -> None:
    """Checks a checkpoint on rank 0, before any rank opens it; all ranks of the world call it.

    Args:
        path: See `check_holds_data`.
        mesh: Whose side group tells the others.

    Raises:
        UserError: See `check_holds_data`; the same on every rank.
    """
    problem = None
    if mesh.rank == 0:
        try:
            check_holds_data(path)
        except UserError as error:
            problem = str(error)
    problem = gather_texts(mesh, problem)[0]
    if problem is not None:
        raise UserError(problem)


def _message(what: str, names: str) -> str:
    return (
        f"{what}: {names}, and loading it may run code. If you trust who wrote the checkpoint, give the strategy "
        "`trust_checkpoints=True` (`--trust-checkpoint` of `export`), or name harmless classes to "
        "`torch.serialization.add_safe_globals`."
    )


@contextmanager
def _readable(path: Path, part: str = "") -> Iterator[None]:
    """Within it, whatever goes wrong in reading a file becomes one sentence that names the file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"The checkpoint {path} {part}{error}") from None
    # whatever a broken file makes an unpickler raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"The checkpoint {path} {part}cannot be read, and may be cut short ({reason}); resume from another one."
        ) from error


def _check_file(file: Any) -> None:
    """Reads what torch saved in a file or buffer with torch's limits, onto no device."""
    try:
        torch.load(file, map_location="meta", mmap=isinstance(file, Path) or None, weights_only=True)
    except pickle.UnpicklingError as error:
        if not isinstance(file, Path):
            file.seek(0)
        try:
            names = sorted(get_unsafe_globals_in_checkpoint(file))
        # a file that is no archive of torch's
        except (ValueError, RuntimeError):
            raise error from None
        if not names and "code" not in str(error):
            names = [(str(error).strip().splitlines() or [""])[0]]
        raise UserError(_message("holds more than tensors and plain values", ", ".join(names))) from None


def _check_shards(folder: Path) -> None:
    with _readable(folder / _METADATA_FILENAME):
        _check_file(folder / _METADATA_FILENAME)
    with _readable(folder / _INDEX):
        index = _IndexReader(io.BytesIO((folder / _INDEX).read_bytes())).load()
        tensors = {name for name, entry in index.state_dict_metadata.items() if type(entry) is TensorStorageMetadata}
        places = list(index.storage_data.items())
    sizes: dict[str, int] = {}
    for entry, place in places:
        with _readable(folder, f"(entry {entry.fqn}) "):
            name = str(place.relative_path)
            if Path(name).name != name:
                raise UserError(f"leads to another folder ({name}); resume from one that this strategy wrote.")
            if getattr(place, "transform_descriptors", None):
                raise UserError("is compressed, which torch's default does not do; save it without.")
            if name not in sizes:
                sizes[name] = (folder / name).stat().st_size
            if place.offset < 0 or place.offset + place.length > sizes[name]:
                expected = place.offset + place.length
                raise UserError(
                    f"is cut short: {name} has {sizes[name]} bytes of at least {expected}; resume from another one."
                )
            if entry.fqn not in tensors:
                with (folder / name).open("rb") as file:
                    file.seek(place.offset)
                    _check_file(io.BytesIO(file.read(place.length)))
