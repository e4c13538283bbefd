"""The first batch, run divided and whole: what no counter of layers sees shows in the logits."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_vdp.batch.contents import read_modality
from lightning_vdp.batch.host_copies import host_copy
from lightning_vdp.batch.validate import unreadable_problem
from lightning_vdp.call.call import CALL, ForwardCall, Purpose
from lightning_vdp.call.header import exchange_headers
from lightning_vdp.families.family import Family, Modality
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.shards import shard_sequence

__all__ = ["FirstBatch", "evaluating", "find_difference", "shorten"]

LIMIT = 2048
_NOT_NEEDED = ("labels", "shift_labels", "num_items_in_batch")
# errors of positions relative to the size of a typical one: in float32 rounding stays far below the first; in lower
# precision it may come near, but then at most positions alike, whereas mixed tokens show at a few
_TOLERANCE, _LOW_TOLERANCE, _LOW_OUTLIER, _OUTLIER_RATIO = 1e-3, 0.3, 0.05, 10


class FirstBatch:
    """Whether a model's first batch is still to come; copies of a divided model share it."""

    def __init__(self, expected: bool) -> None:
        self.expected = expected

    def __deepcopy__(self, memo: dict[int, Any]) -> "FirstBatch":
        return self


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within it, a module is in evaluation mode and computes no gradients; modes are put back as they were."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child in training:
            child.training = True


def shorten(
    arguments: Mapping[str, Any], family: Family, config: Any, ranks: int, limit: int = LIMIT
) -> dict[str, Any] | None:
    """Cuts a forward's checked arguments to one row of at most `limit` positions with whole images, or without any where
    rows of features are measured.

    Args:
        arguments: The arguments by name. Those that are short enough are returned as they are, without what only the loss
            needs.
        family: Facts about the model.
        config: The model's config.
        ranks: Size of the sequence group.
        limit: Positions.

    Returns:
        The arguments, or None if they cannot be cut.
    """
    arguments = {name: value for name, value in arguments.items() if name not in _NOT_NEEDED and value is not None}
    ids = arguments.get("input_ids")
    sequence = arguments["inputs_embeds"] if ids is None else ids
    if sequence.shape[0] * sequence.shape[1] <= limit:
        return arguments
    if ids is None or "mm_encoder_outputs" in arguments:
        return None
    if any(name.startswith("cu_seq_lens") for name in arguments):
        return None
    if not family.facts.merged_rows:
        arguments = _without_vision(arguments, family, config)
        ids = arguments["input_ids"]
    host = host_copy(ids)
    mask = arguments.get("attention_mask")
    if mask is None:
        columns = torch.arange(host.shape[1])
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        columns = host_copy(mask)[0].nonzero().flatten()
    else:
        return None
    length, kept = min(limit, len(columns)), {}
    for modality in family.modalities:
        length, kept[modality.name] = _whole_units(arguments, modality, config, host[0, columns[:length]])
    for modality in family.modalities:
        # a cut for one modality may have cut units of another
        length, kept[modality.name] = _whole_units(arguments, modality, config, host[0, columns[:length]])
    if length < ranks:
        return None
    return _cut(arguments, family, columns[:length].to(ids.device), ids.shape, kept)


def _without_vision(arguments: Mapping[str, Any], family: Family, config: Any) -> dict[str, Any]:
    """Words alone, where which features a cut would keep shows only when the tower has run."""
    vision = {"mm_token_type_ids", *(name for modality in family.modalities for name in modality.arguments)}
    words = {name: value for name, value in arguments.items() if name not in vision}
    for modality in family.modalities:
        token = modality.token
        if token is not None:
            words["input_ids"] = words["input_ids"].masked_fill(words["input_ids"] == token, 0)
    return words


def _whole_units(arguments: Mapping[str, Any], modality: Modality, config: Any, row: Tensor) -> tuple[int, int]:
    """Positions of a row up to the first unit that does not fit in whole, and the units before it."""
    if arguments.get(modality.pixels) is None:
        return len(row), 0
    token = modality.token
    assert token is not None
    places = row.eq(token).nonzero().flatten()
    merged = int(config.vision_config.spatial_merge_size) ** 2
    rows = [patches // merged for patches in read_modality(arguments, modality).patches]
    used = units = 0
    while units < len(rows) and used + rows[units] <= len(places):
        used += rows[units]
        units += 1
    return (int(places[used]) if used < len(places) else len(row)), units


def _cut(
    arguments: Mapping[str, Any], family: Family, columns: Tensor, shape: torch.Size, kept: Mapping[str, int]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[-1] == shape[1]:
            # [B, S] and position ids [3, B, S]
            result[name] = value[..., :1, :].index_select(-1, columns)
        else:
            result[name] = value
    for modality in family.modalities:
        if modality.pixels not in arguments:
            continue
        units = kept[modality.name]
        if units == 0:
            result.pop(modality.pixels)
            result.pop(modality.grid or "", None)
        else:
            assert modality.grid is not None
            patches = read_modality(arguments, modality).patches
            result[modality.grid] = arguments[modality.grid][:units]
            result[modality.pixels] = arguments[modality.pixels][: sum(patches[:units])]
    return result


def find_difference(divided: Tensor, whole: Tensor, config: Any) -> str | None:
    """Compares what a model yields divided and whole at this rank's positions.

    Args:
        divided: Logits or hidden states, shape ``[B, T, N]``.
        whole: The same positions of the undivided run.
        config: The model's config.

    Returns:
        A sentence if they differ by more than rounding, or None.
    """
    if divided.numel() == 0 or not whole.isfinite().all():
        # an overflow of the model's own says nothing about division
        return None
    wide = torch.float64 if divided.dtype == torch.float64 else torch.float32
    errors = (divided.to(wide) - whole.to(wide)).norm(dim=-1).flatten()
    error = errors / whole.to(wide).norm(dim=-1).square().mean().sqrt().clamp(min=1e-30)
    text = config.get_text_config()
    routed = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    low = divided.dtype in (torch.bfloat16, torch.float16)
    worst = float(error.max())
    if not low:
        equal = worst <= _TOLERANCE
    elif routed:
        # rounding may send single tokens to other experts
        equal = float(error.quantile(0.9)) <= _LOW_TOLERANCE
    else:
        equal = worst <= max(_LOW_OUTLIER, min(_LOW_TOLERANCE, _OUTLIER_RATIO * float(error.median())))
    if equal and worst == worst:
        return None
    return (
        f"the model does not yield the same when its sequence is divided (relative difference {worst:.1e} on the first "
        "batch): some layer mixes tokens outside attention, or the tower mixes images; set `sequence_parallel_size=1` for "
        "this model, or "
        "`verify_first_batch=False` if the difference is known to be harmless"
    )


def verify_first_batch(
    module: PreTrainedModel,
    arguments: dict[str, Any],
    mesh: SequenceMesh,
    family: Family,
    start: Callable[[dict[str, Any], Purpose], ForwardCall],
) -> None:
    """Runs the first batch whole and divided and compares.

    Raises:
        StepError: If they differ by more than rounding on any rank; the same on every rank.
    """
    short, problem = None, None
    try:
        short = shorten(arguments, family, module.config, mesh.sequence_parallel_size)
    except Exception as failure:
        # no rank may raise alone
        problem = unreadable_problem(failure)
    # every rank of the world runs the same forwards, whatever batch it holds
    uncut = {"length": [1] if short is None else []}
    if any(header["length"] for header in exchange_headers(mesh, uncut, problem).wait()):
        return
    assert short is not None
    results: list[Tensor] = []
    with evaluating(module):
        for purpose in (Purpose.COMPARE_WHOLE, Purpose.COMPARE_DIVIDED):
            call = start(short, purpose)
            outputs = module(**short, **{CALL: call})
            results.append(outputs.logits if "logits" in outputs else outputs.last_hidden_state)
    whole_result, divided = results
    if divided.shape[1] != whole_result.shape[1]:
        whole_result = shard_sequence(whole_result, call.shard)
    exchange_headers(mesh, {}, find_difference(divided, whole_result, module.config)).wait()
