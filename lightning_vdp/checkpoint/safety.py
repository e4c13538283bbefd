"""Looking into a checkpoint before it is loaded: what it holds must be data, not code."""

from pathlib import Path
from pickle import UnpicklingError

import torch

from lightning_vdp.errors import UserError

__all__ = ["check_holds_data"]


def check_holds_data(path: Path) -> None:
    """Checks that a checkpoint in one file holds tensors and plain values alone; reads no tensor's data.

    Lightning loads whole checkpoints of FSDP with an unpickler of its own, which runs what a file asks it to.

    Args:
        path: The file. Folders of shards are left alone: Lightning loads what is pickled there with torch's limits.

    Raises:
        UserError: If loading would run code.
    """
    if not path.is_file():
        return
    try:
        torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except UnpicklingError as error:
        reason = str(error).strip().splitlines()
        raise UserError(
            f"The checkpoint {path} holds more than tensors and plain values, so that loading it would run code: "
            f"{' '.join(reason[:1])} If you trust who wrote it, pass `weights_only=False` to the Trainer."
        ) from error
