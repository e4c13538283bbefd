"""Whether the ranks of a sequence group hold one batch: digests to compare, and what to say if they differ."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

from lightning_vdp.batch.host_copies import known_host_copy, known_sample
from lightning_vdp.families.family import Family

__all__ = ["digest_batch", "find_other_batches", "suspect_loader"]

# digested from a host copy, or from a sample of the values where they are many
_WHOLE = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "mm_token_type_ids")
_SAMPLED = ("inputs_embeds",)
_MOST = 2**22

_CAUSES = (
    "a sampler that shuffles without a seed that ranks share, a sampler made for another number of replicas, or an iterable "
    "dataset that ignores the replica",
    "the data loader's iterable dataset ignores the replica",
    "the data loader's sampler was made for another number of replicas",
    "the data loader shuffles without a seed that ranks share; call `seed_everything(seed, workers=True)`",
)
_AUGMENTED = "random augmentation without a seed that ranks share; call `seed_everything(seed, workers=True)`"
_READ = "give samplers and datasets `trainer.strategy.data_parallel_rank` of `data_parallel_size`"


def _names(family: Family) -> list[str]:
    units = [name for modality in family.modalities for name in (modality.grid, modality.pixels) if name is not None]
    return [*_WHOLE, *_SAMPLED, *units]


def digest_batch(arguments: Mapping[str, Any], family: Family) -> list[int]:
    """Digests a forward's arguments: ids, grids and masks whole, pixels and embeddings by a sample of their values.

    What is on a device and not known on the host is left out, since reading it would wait for the device.

    Args:
        arguments: The forward's arguments by name.
        family: Facts about the model.

    Returns:
        One number for each name of the family; 0 where nothing is known.
    """
    sampled = {*_SAMPLED, *(modality.pixels for modality in family.modalities)}
    digests = []
    for name in _names(family):
        value = arguments.get(name)
        if not isinstance(value, Tensor):
            digests.append(0)
            continue
        few = name not in sampled and value.numel() <= _MOST
        values = known_host_copy(value) if few else known_sample(value)
        digests.append(0 if values is None else _digest(values, value.shape))
    return digests


def _digest(values: Tensor, shape: Sequence[int]) -> int:
    values = values.detach().to(torch.float64) if values.is_floating_point() else values
    text = hashlib.blake2b(str(list(shape)).encode() + values.contiguous().numpy().tobytes(), digest_size=8)
    return (int.from_bytes(text.digest(), "big") >> 1) or 1


def suspect_loader(loader: Any, replicas: int) -> int:
    """Looks for what makes ranks of a group read different samples.

    Args:
        loader: A data loader as Lightning hands it to the strategy.
        replicas: Number of replicas.

    Returns:
        A number for `find_other_batches`; 0 if nothing stands out.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return 1
    sampler = getattr(loader, "sampler", None)
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas != replicas:
        return 2
    if isinstance(sampler, RandomSampler) and "PL_GLOBAL_SEED" not in os.environ:
        return 3
    return 0


def find_other_batches(
    headers: Sequence[Mapping[str, Sequence[int]]], ranks: int, family: Family, place: str
) -> str | None:
    """Compares the headers within each sequence group; the same on every rank of the world.

    Args:
        headers: The headers of all ranks of the world.
        ranks: Size of a sequence group.
        family: Facts about the model.
        place: Stage and step, for the message.

    Returns:
        Which ranks hold other samples than their group, and the likely cause; or None.
    """
    problems = []
    for start in range(0, len(headers), ranks):
        for rank in range(start + 1, start + ranks):
            if headers[rank] is headers[start]:
                continue
            other = _different(headers[start], headers[rank], family)
            if other is None:
                continue
            pixels = {modality.pixels for modality in family.modalities}
            suspect = max([*headers[start]["loader"], *headers[rank]["loader"], 0])
            cause = _AUGMENTED if other in pixels else _CAUSES[suspect]
            problems.append(
                f"ranks {start} and {rank} of one sequence group hold different samples at {place} (`{other}` differs), but "
                f"must read the same batch; likely cause: {cause}; {_READ}"
            )
            break
    return "; ".join(problems) or None


def _different(first: Mapping[str, Sequence[int]], second: Mapping[str, Sequence[int]], family: Family) -> str | None:
    """The first argument that two ranks hold differently."""
    for name, one, other in zip(_names(family), first["digest"], second["digest"]):
        if one and other and one != other:
            return name
    if first["length"] != second["length"]:
        return "input_ids"
    for index, modality in enumerate(family.modalities):
        held = [index in header["modalities"] for header in (first, second)]
        if held[0] != held[1]:
            return modality.pixels
        if first[f"{modality.name}_units"] != second[f"{modality.name}_units"]:
            return modality.grid or modality.pixels
    if first["tokens"] and second["tokens"] and first["tokens"] != second["tokens"]:
        return "labels"
    return None
