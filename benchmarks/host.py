"""Time that this package's own code takes on the host in a step, whatever the devices do.

One rank of eight whose other ranks are pretended: collectives are left out. Tensors are tiny, so that nothing but calling
counts. Each figure is the processor time of a step with the model divided, less that of the same step undivided.

* Vision: 32 images over eight ranks: checks, the header, owners, routes, the selection of this rank's pixels and the exchange,
  forward and backward, less what the same tower takes for this rank's images.
* Decoder: hooks, bookkeeping and the audit of one layer, without the exchanges. These are told apart: packing and unpacking
  what an all-to-all moves, forward and backward, with autograd's own time for them, without the call of the collective.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.measure import pretend
from benchmarks.models import FAMILY, qwen
from benchmarks.report import Chart, Options, Report, at_most
from lightning_vdp.collectives import Layout
from lightning_vdp.families.find import find_models
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.sequence import heads
from lightning_vdp.settings import Settings
from lightning_vdp.testing import run_ranks, tiny_batch

__all__ = ["run"]

_RANKS, _SHARD = 8, 8
_LAYERS = (4, 28)


def _all_to_all(output: Tensor, *_: Any, **__: Any) -> None:
    output.zero_()


def _all_gather(output: Tensor, own: Tensor, **_: Any) -> Any:
    # all ranks say what this one says
    output.view(-1, own.numel()).copy_(own)
    return SimpleNamespace(wait=lambda: None)


def _microseconds(steps: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Medians of the processor time of several steps, which take turns."""
    taken: list[list[float]] = [[] for _ in steps]
    # calls of collectives are not our time
    with patch.multiple(dist, all_to_all_single=_all_to_all, all_gather_single=_all_gather):
        for turn in range(rounds + 3):
            for times, step in zip(taken, steps):
                start = time.thread_time()
                step()
                if turn >= 3:
                    times.append(1e6 * (time.thread_time() - start))
    return [statistics.median(times) for times in taken]


def _divided(model: PreTrainedModel) -> tuple[PreTrainedModel, SequenceMesh]:
    copied, mesh = deepcopy(model), SequenceMesh("cpu", 1, _RANKS)
    divide_models(find_models(copied), mesh, Settings(verify_first_batch=False))
    return copied, mesh


def _constant(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention that costs nothing and has no backward."""
    batch, count, positions, width = query.shape
    return query.new_zeros(batch, positions, count, width), None


def _sum(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention that costs next to nothing."""
    return (query + key + value).transpose(1, 2), None


class _NoExchange:
    """Stands in for an all-to-all: what it would have received was made the first time."""

    def __init__(self) -> None:
        self._received: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, tensors: Sequence[Tensor], layout: Layout, *_: Any) -> tuple[Tensor, ...]:
        if id(layout) not in self._received:
            self._received[id(layout)] = layout.unpack(torch.zeros(sum(layout.output_sizes)))
        return self._received[id(layout)]


def _decoder(rounds: int) -> dict[str, float]:
    """Microseconds of a layer: hooks, and exchanges without the calls of collectives."""
    pretend(_RANKS)
    for name, function in (("constant", _constant), ("sum", _sum)):
        ALL_ATTENTION_FUNCTIONS.register(name, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    ids = torch.randint(3, 100, (1, _RANKS * _SHARD))

    def run(model: PreTrainedModel, positions: int, backward: bool) -> None:
        hidden = model.model(input_ids=ids[:, :positions], use_cache=False).last_hidden_state
        if backward:
            hidden.sum().backward()

    def time_layers(model: PreTrainedModel) -> tuple[list[float], list[Any]]:
        """A list that fills with microseconds of the forward of a layer, with every hook of it; and what takes the time."""
        taken: list[float] = []
        started = 0.0

        def start(*_: Any) -> None:
            nonlocal started
            started = time.thread_time()

        def stop(*_: Any) -> None:
            taken.append(1e6 * (time.thread_time() - started))

        layers = model.model.language_model.layers
        clocks = [layer.register_forward_pre_hook(start, prepend=True) for layer in layers]
        return taken, clocks + [layer.register_forward_hook(stop) for layer in layers]

    both: dict[int, list[float]] = {}
    for layers in _LAYERS:
        plain = qwen(layers=layers, hidden=64, tower_layers=1, tower_hidden=32)
        divided, _ = _divided(plain)
        for model in (plain, divided):
            model.set_attn_implementation("constant")
        with patch.object(heads, "all_to_all", _NoExchange()):
            (ours, clocks), (theirs, others) = time_layers(divided), time_layers(plain)
            _microseconds([partial(run, divided, ids.shape[1], False), partial(run, plain, _SHARD, False)], rounds)
        hooks = statistics.median(ours) - statistics.median(theirs)
        for clock in clocks + others:
            clock.remove()
        for model in (plain, divided):
            model.set_attn_implementation("sum")
        both[layers] = _microseconds(
            [partial(run, divided, ids.shape[1], True), partial(run, plain, _SHARD, True)], rounds
        )

    def per_layer(side: int) -> float:
        few, many = _LAYERS
        return (both[many][side] - both[few][side]) / (many - few)

    exchanges = per_layer(0) - per_layer(1) - hooks
    return {"hooks": hooks, "exchanges": exchanges, "layer": per_layer(1)}


def _images(rounds: int) -> dict[str, float]:
    """Milliseconds of a step's vision side, and of the same undivided."""
    pretend(_RANKS)
    plain = qwen(layers=0, hidden=64, tower_layers=1, tower_hidden=32)
    divided, mesh = _divided(plain)
    batch = tiny_batch(FAMILY, ([(1, 4, 4 + 2 * (index % 3)) for index in range(32)],), dtype=torch.float32)
    del batch["attention_mask"], batch["labels"]

    def run(model: PreTrainedModel) -> None:
        model.model(**batch, use_cache=False).last_hidden_state.sum().backward()

    # in most steps ranks do not compare what they read
    mesh.watch.locate = lambda: ("training", 1)
    run(divided)
    plan = mesh.watch.plans["image"]
    owned = plan.owned(0)
    pixels = torch.cat([batch["pixel_values"].split(plan.sizes)[unit] for unit in owned])
    grids = batch["image_grid_thw"][owned]
    others = torch.zeros(sum(plan.rows) - plan.rows_per_rank[0], 64)

    def own_features(*_: Any, **kwargs: Any) -> Any:
        # what this rank encodes, undivided; the rest stands for rows of others
        outputs = type(plain.model).get_image_features(plain.model, pixels, grids, **kwargs)
        outputs.pooler_output = (*outputs.pooler_output, others)
        return outputs

    plain.model.get_image_features = own_features
    with_ours, without = _microseconds([lambda: run(divided), lambda: run(plain)], rounds)
    return {"vision": (with_ours - without) / 1000, "undivided": without / 1000}


def run(options: Options) -> Report:
    """Measures on the host; the device plays no part."""
    rounds = 5 if options.quick else 60
    (decoder,), (vision,) = run_ranks(_decoder, 1, rounds, timeout=600), run_ranks(_images, 1, rounds, timeout=600)
    figures = {
        "host_vision_ms": vision["vision"],
        "host_decoder_us_per_layer": decoder["hooks"],
        "host_exchange_us_per_layer": decoder["exchanges"],
    }
    rows = [
        {
            "what": "vision, 32 images, 8 ranks",
            "ours": 1000 * vision["vision"],
            "the same undivided": 1000 * vision["undivided"],
        },
        {
            "what": "a decoder layer, without exchanges",
            "ours": decoder["hooks"],
            "the same undivided": decoder["layer"],
        },
        {"what": "a decoder layer's exchanges", "ours": decoder["exchanges"], "the same undivided": decoder["layer"]},
    ]
    return Report(
        figures=figures,
        chart=Chart(
            "Processor time on the host in a step",
            "microseconds",
            [row["what"] for row in rows],
            {name: [row[name] for row in rows] for name in ("ours", "the same undivided")},
        ),
        table=rows,
        limits={"host_vision_ms": at_most(1), "host_decoder_us_per_layer": at_most(50)},
        notes=[
            "The other ranks are pretended, and nothing is computed that could be compared: both sides do the same calls."
        ],
    )
