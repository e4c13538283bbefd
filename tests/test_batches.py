"""Data loaders that give the ranks of a group other samples, and the documented ways that do not."""

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from lightning_vdp import UlyssesVisionDPStrategy
from lightning_vdp.batch.host_copies import host_tensors, keep_samples, known_sample, sample
from lightning_vdp.batch.same import digest_batch
from lightning_vdp.families.find import find_models
from lightning_vdp.testing import ParityModule, RankFailed, quiet_trainer, run_ranks, tiny_batch, tiny_model

FAMILY = "qwen2_5_vl"


class _Samples(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**tiny_batch(FAMILY, seed=index, dtype=torch.float32), "index": index}


class _Noisy(_Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.randn((), generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big")))
        batch = super().__getitem__(index)
        return {**batch, "pixel_values": batch["pixel_values"] + noise}


class _Stream(IterableDataset[dict[str, Any]]):
    """As the README has it: shares samples over replicas, and those of a replica over the loader's workers."""

    def __init__(self, replica: int, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        worker_id, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        samples = _Samples()
        for index in range(self.replica + self.replicas * worker_id, 8, self.replicas * workers):
            yield samples[index]


class _Module(ParityModule):
    def __init__(self, kind: str) -> None:
        super().__init__(tiny_model(FAMILY))
        self.kind = kind
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen.append(int(batch.pop("index")))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        strategy = self.trainer.strategy
        rank, world = strategy.global_rank, strategy.world_size
        replica, replicas = strategy.data_parallel_rank, strategy.data_parallel_size
        options: dict[str, dict[str, Any]] = {
            "stream that ignores the replica": {"dataset": _Stream(rank, world)},
            "sampler of ranks": {"dataset": _Samples(), "sampler": DistributedSampler(_Samples(), world, rank)},
            "shuffled without seed": {"dataset": _Samples(), "shuffle": True},
            "augmented without seed": {"dataset": _Noisy()},
            "stream": {"dataset": _Stream(replica, replicas), "num_workers": 2},
            "sampler": {"dataset": _Samples(), "sampler": DistributedSampler(_Samples(), replicas, replica)},
        }
        return DataLoader(batch_size=None, **options[self.kind])


def _fit(kind: str) -> list[int]:
    module = _Module(kind)
    torch.manual_seed(int(os.environ["RANK"]))
    strategy = UlyssesVisionDPStrategy(sequence_parallel_size=2, verify_first_batch=False)
    quiet_trainer(devices=4, strategy=strategy).fit(module)
    return module.seen


CAUSES = {
    "stream that ignores the replica": "the data loader's iterable dataset ignores the replica",
    "sampler of ranks": "the data loader's sampler was made for another number of replicas",
    "shuffled without seed": "the data loader shuffles without a seed that ranks share; call `seed_everything(seed",
    "augmented without seed": "random augmentation without a seed that ranks share; call `seed_everything(seed",
}


@pytest.mark.parametrize("kind", CAUSES)
def test_cause_is_named_in_the_first_step(kind: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_fit, 4, kind)
    failures = caught.value.failures
    assert len(set(failures.values())) == 1, failures
    assert "ranks 0 and 1 of one sequence group hold different samples at training step 0" in failures[0]
    assert f"likely cause: {CAUSES[kind]}" in failures[0]


@pytest.mark.parametrize("kind", ["stream", "sampler"])
def test_documented_ways_give_each_replica_its_share(kind: str) -> None:
    seen = run_ranks(_fit, 4, kind)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == list(range(8))


def test_each_part_of_a_batch_has_its_digest() -> None:
    family, batch = find_models(tiny_model(FAMILY))[0].family, tiny_batch(FAMILY, videos=[[(2, 4, 4)]])
    digests = digest_batch(batch, family)
    assert digests == digest_batch({name: value.clone() for name, value in batch.items()}, family)
    for name, value in batch.items():
        changed = {**batch, name: value + 1}
        assert sum(a != b for a, b in zip(digests, digest_batch(changed, family))) == 1


def test_what_is_on_a_device_is_left_out_unless_known_on_the_host() -> None:
    family, batch = find_models(tiny_model(FAMILY))[0].family, tiny_batch(FAMILY)
    pixels = frozenset({"pixel_values"})
    moved = {name: value.to("meta") for name, value in batch.items()}
    assert not any(digest_batch(moved, family))
    samples = host_tensors(batch, pixels, sample)
    keep_samples(samples, moved)
    digests = digest_batch(moved, family)
    assert [number for number in digests if number] == [number for number in digest_batch(batch, family) if number][-1:]
    moved["pixel_values"].mul_(2)
    assert known_sample(moved["pixel_values"]) is None


def test_seeds_are_not_what_is_suspicious(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_vdp.batch.same import suspect_loader

    loader = DataLoader(_Samples(), shuffle=True)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert suspect_loader(loader, 1) == 3
    pl.seed_everything(1)
    assert suspect_loader(loader, 1) == 0
    assert suspect_loader([], 1) == 0
