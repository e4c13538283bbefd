"""What a rank plans, says and receives in a step as the world grows to 8 x 128 ranks: counted, not timed, but for planning.

One rank is real and the others are pretended; each replica holds a sample of documents with the sides of its images divided by
eight. Counted where collectives are called, forward and backward, are the exchanges within a sequence group and the header
that all ranks of the world exchange; FSDP's own collectives are those of plain FSDP and left out. Messages are what one rank
sends: an exchange over a group of S ranks takes S - 1.
"""

import statistics
import time
from typing import Any

import torch

from benchmarks.measure import pretend
from benchmarks.models import mix_batch, qwen
from benchmarks.report import Chart, Options, Report
from lightning_vdp.call.header import encode, exchange_headers
from lightning_vdp.families.find import find_models
from lightning_vdp.forward.divide import divide_models
from lightning_vdp.mesh import SequenceMesh
from lightning_vdp.settings import Settings
from lightning_vdp.testing import run_ranks
from lightning_vdp.testing.measure import ByteCounter
from lightning_vdp.vision import plan as planning

__all__ = ["run"]

_SHAPES = ((2, 1), (2, 8), (4, 8), (8, 1), (8, 4), (8, 16), (8, 64), (8, 128))
_LAYERS = 4


def _count(sequence: int, data: int) -> dict[str, float]:
    pretend(sequence * data)
    model = qwen(layers=_LAYERS, hidden=64, tower_layers=1, tower_hidden=32)
    mesh = SequenceMesh("cpu", data, sequence)
    mesh.watch.locate = lambda: ("training", 1)
    divide_models(find_models(model), mesh, Settings(verify_first_batch=False))
    batch = mix_batch("documents", shrink=8)
    in_group, in_world = ByteCounter(mesh.sequence_group), ByteCounter(mesh.header_group)
    with in_group, in_world:
        model.model(**batch, use_cache=False).last_hidden_state.sum().backward()
    (plan,) = mesh.watch.plans.values()
    header = {"modalities": [0], "image_units": list(plan.sizes)}
    # replicas hold other batches, and so say other things
    others = [encode({**header, "length": [batch["input_ids"].shape[1] + replica]}) for replica in range(data)]
    headers, plans = [], []
    for _ in range(20):
        start = time.thread_time()
        pending = exchange_headers(mesh, header)
        sent = time.thread_time() - start
        said = pending._buffer.view(data, sequence, -1)
        said[:, :, : len(others[0])] = torch.tensor(others)[:, None]
        start = time.thread_time()
        pending.wait()
        headers.append(sent + time.thread_time() - start)
        start = time.thread_time()
        planning.assign(plan.costs, sequence)
        plans.append(time.thread_time() - start)
    return {
        "exchanges": len(in_group.received),
        "messages": (sequence - 1) * len(in_group.received) + (sequence * data - 1) * len(in_world.received),
        "exchanged": sum(in_group.received),
        "header": sum(in_world.received),
        "header_ms": 1000 * statistics.median(headers),
        "plan_ms": 1000 * statistics.median(plans),
    }


def run(options: Options) -> Report:
    """Counts at all sizes; the device plays no part."""
    shapes = _SHAPES[:4] if options.quick else _SHAPES
    rows: list[dict[str, Any]] = []
    for sequence, data in shapes:
        (found,) = run_ranks(_count, 1, sequence, data, timeout=300)
        rows.append({"S": sequence, "D": data, "ranks": sequence * data, **found})
    largest = rows[-1]
    curve = [row for row in rows if row["S"] == largest["S"]]
    name = f"s{largest['S']}_d{largest['D']}"
    return Report(
        figures={
            f"scale_exchanges_{name}": largest["exchanges"],
            f"scale_messages_{name}": largest["messages"],
            f"scale_exchanged_bytes_{name}": largest["exchanged"],
            f"scale_header_bytes_{name}": largest["header"],
            f"scale_header_ms_{name}": largest["header_ms"],
            f"scale_plan_ms_{name}": largest["plan_ms"],
        },
        chart=Chart(
            f"Received by one rank in a step, S = {largest['S']}",
            "bytes",
            [row["ranks"] for row in curve],
            {
                "exchanges within the group": [row["exchanged"] for row in curve],
                "header of the world": [row["header"] for row in curve],
            },
            curves=True,
        ),
        table=rows,
        notes=["Nothing is computed that could be compared: the other ranks' data do not exist."],
    )
