import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from examples.digits import compare, data
from examples.digits.model import DigitReader

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def training() -> data.DigitRows:
    return data.DigitRows(data.split_digits()[0], length=64, seed=7)


@pytest.fixture(scope="module")
def unseen() -> data.DigitRows:
    return data.DigitRows(data.split_digits()[1], seed=7)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_rows_same_seed_are_equal(training: data.DigitRows) -> None:
    again = data.DigitRows(data.split_digits()[0], length=64, seed=7)
    for index in (5, 3, 5):
        assert_equal(again[index], training[index])


def test_rows_other_seed_or_index_differ(training: data.DigitRows) -> None:
    other = data.DigitRows(training.digits, length=64, seed=8)
    images = [rows.draw(index)[1][0] for rows, index in ((training, 0), (training, 1), (other, 0))]
    assert len({image.tobytes() for image in images}) == 3


def test_batches_do_not_depend_on_workers(training: data.DigitRows) -> None:
    here, elsewhere = (
        list(DataLoader(training, batch_size=16, num_workers=workers, collate_fn=data.collate)) for workers in (0, 2)
    )
    for a, b in zip(here, elsewhere, strict=True):
        assert_equal(a, b)


def test_rows_hold_2_to_6_images_of_varying_grids(training: data.DigitRows, unseen: data.DigitRows) -> None:
    for rows in (training, unseen):
        grids = [rows[index]["image_grid_thw"] for index in range(len(rows))]
        assert {len(grid) for grid in grids} == {2, 3, 4, 5, 6}
        sizes = {tuple(size) for size in torch.cat(grids).tolist()}
        assert len(sizes) > 6
        assert all(t == 1 and h >= 4 and w >= 4 for t, h, w in sizes)


def test_labels_are_the_names_after_each_image_only(training: data.DigitRows) -> None:
    row = training[0]
    digits, _ = training.draw(0)
    labelled = row["labels"] != data.IGNORED_LABEL
    names = [data.NAMES[training.digits.values[digit]] for digit in digits]
    assert training.tokenizer.decode(row["labels"][labelled]) == "".join(names)
    assert torch.equal(row["labels"][labelled], row["input_ids"][labelled])
    assert int(labelled.sum()) == len(digits)
    end = training.tokenizer.convert_tokens_to_ids(data.VISION_END)
    before = row["input_ids"][labelled.nonzero().flatten() - 1]
    assert set(before.tolist()) == {end}


def test_placeholders_match_the_grids(training: data.DigitRows) -> None:
    for index in range(8):
        row = training[index]
        patches = int(row["image_grid_thw"].prod(-1).sum())
        assert len(row["pixel_values"]) == patches
        assert int(row["mm_token_type_ids"].sum()) == patches // data.MERGE_SIZE**2


def test_collate_pads_rows_and_joins_images(training: data.DigitRows) -> None:
    rows = [training[index] for index in range(4)]
    batch = data.collate(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    for key in ("input_ids", "labels", "attention_mask", "mm_token_type_ids"):
        assert batch[key].shape == (4, longest)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        assert batch["attention_mask"][index].tolist() == [1] * length + [0] * (longest - length)
        assert (batch["labels"][index, length:] == data.IGNORED_LABEL).all()
    assert len(batch["pixel_values"]) == sum(len(row["pixel_values"]) for row in rows)
    assert len(batch["image_grid_thw"]) == sum(len(row["image_grid_thw"]) for row in rows)


def test_unseen_digits_never_appear_in_training() -> None:
    training, unseen = data.split_digits()
    assert len(training) + len(unseen) == 1797
    assert not set(training.sources) & set(unseen.sources)
    assert not {scan.tobytes() for scan in training.scans} & {scan.tobytes() for scan in unseen.scans}
    assert set(np.bincount(unseen.values).tolist()) <= {34, 35, 36, 37}


def test_unseen_rows_hold_each_digit_once(unseen: data.DigitRows) -> None:
    drawn = np.concatenate([unseen.draw(index)[0] for index in range(len(unseen))])
    assert sorted(drawn.tolist()) == list(range(360))


def test_images_are_the_scans(unseen: data.DigitRows) -> None:
    digits, images = unseen.draw(0)
    for digit, image in zip(digits, images):
        small = np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX), dtype=float)
        assert np.corrcoef(small.ravel(), unseen.digits.scans[digit].ravel())[0, 1] > 0.9


def test_tokenizer_round_trip() -> None:
    tokenizer = data.build_tokenizer()
    for text in (data.PROMPT, "".join(data.NAMES), "anything else, ü 7!"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {len(tokenizer.encode(name)) for name in data.NAMES} == {1}
    assert tokenizer.get_vocab() == data.build_tokenizer().get_vocab()


def test_model_has_the_size_that_the_readme_says() -> None:
    model = DigitReader()
    assert 0.65e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.8e6


def test_model_reads_the_token_before_its_label(training: data.DigitRows) -> None:
    class Outputs:
        logits = torch.nn.functional.one_hot(torch.tensor([[4, 2, 7]]))

    assert DigitReader._read(Outputs()).tolist() == [[7, 4, 2]]


def test_compare_draws_the_differences() -> None:
    ways = list(compare.WAYS)
    figure = compare.draw({way: [2.0 + 1e-6 * index, 1.0] for index, way in enumerate(ways)})
    assert [len(ax.lines) for ax in figure.axes] == [3, 2]


def run_fit(folder: Path, *options: str) -> list[str]:
    """Runs the example as its documentation says, in ``folder``; returns the lines that it prints."""
    (folder / "examples").symlink_to(ROOT / "examples")
    script = Path(sys.executable).with_name("lightning-vdp")
    run = subprocess.run(
        [script, "fit", "--config", "examples/digits/cpu.yaml", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    return run.stdout.splitlines()


def test_fit_writes_pictures_and_says_what_it_did(tmp_path: Path) -> None:
    options = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    *_, images, picture, accuracy = run_fit(tmp_path, *options)
    counts = [int(count) for count in re.findall(r"rank \d: (\d+)", images)]
    assert len(counts) == 2
    assert all(counts)
    assert 2 * 16 * data.MIN_IMAGES <= sum(counts) <= 2 * 16 * data.MAX_IMAGES
    assert picture == "picture: runs/digits/digits.png"
    assert (tmp_path / "runs/digits/digits.png").stat().st_size > 10_000
    assert re.fullmatch(r"token accuracy on unseen digits: [01]\.\d\d", accuracy)
    written = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert {parts for parts in written if parts[0] != "examples"} == {("runs", "digits")}


@pytest.mark.slow
def test_whole_run_reads_unseen_digits(tmp_path: Path) -> None:
    assert float(run_fit(tmp_path)[-1].removeprefix("token accuracy on unseen digits: ")) >= 0.9
