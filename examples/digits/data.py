"""Rows of handwritten digits, each image followed by its name: ``<image> seven <image> two``."""

from collections.abc import Sequence

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

PROMPT = "Read the digits:"
NAMES = (" zero", " one", " two", " three", " four", " five", " six", " seven", " eight", " nine")
PAD, END, VISION_START, VISION_END = "<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
IGNORED_LABEL = -100
PATCH_SIZE, MERGE_SIZE, TEMPORAL_PATCH_SIZE = 4, 2, 2
CELL = PATCH_SIZE * MERGE_SIZE
MIN_IMAGES, MAX_IMAGES = 2, 6
MIN_SIDE, MAX_SIDE = 14, 36


# what a Hugging Face processor returns, with labels; a batch joins the patches of all its images
Sample = dict[str, Tensor]


class Digits:
    """Scans of 8 x 8 pixels and their values, in the order of ``sources``.

    Args:
        scans: brightness from 0 to 255, shape [N, 8, 8].
        values: the digits from 0 to 9, shape [N].
        sources: each scan's index in scikit-learn's data set, shape [N].
    """

    def __init__(self, scans: np.ndarray, values: np.ndarray, sources: np.ndarray) -> None:
        self.scans, self.values, self.sources = scans, values, sources

    def __len__(self) -> int:
        return len(self.values)


def split_digits(unseen: int = 360) -> tuple[Digits, Digits]:
    """Splits scikit-learn's 1,797 scanned digits into those for training and ``unseen`` others.

    The split is always the same, whatever the seed of a run, so that a checkpoint never meets an unseen digit.
    """
    data = load_digits()
    scans = np.round(data.images * (255 / 16)).astype(np.uint8)
    parts = train_test_split(np.arange(len(scans)), test_size=unseen, stratify=data.target, random_state=0)
    training, held_out = (Digits(scans[part], data.target[part], part) for part in parts)
    return training, held_out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer, in which each digit's name is one token, on the text of the rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[PAD, END, VISION_START, VISION_END, IMAGE, VIDEO],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROMPT + "".join(NAMES)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[VISION_START, VISION_END, IMAGE, VIDEO],
    )


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """Returns Qwen2-VL's own image processor, with patches small enough for digits."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=TEMPORAL_PATCH_SIZE,
        size={"shortest_edge": (2 * CELL) ** 2, "longest_edge": (5 * CELL) ** 2},
    )


class DigitRows(Dataset[Sample]):
    """Rows of 2 to 6 digits, each drawn at its own height and width.

    A row depends on ``seed`` and its index alone, so neither the number of workers nor that of ranks changes it.

    Args:
        digits: what to draw from.
        length: number of rows; each draws its digits at random. ``None``: every digit is drawn exactly once.
        seed: chooses digits, sizes and slants.
    """

    def __init__(self, digits: Digits, length: int | None = None, seed: int = 0) -> None:
        self.digits, self.seed = digits, seed
        self.dealt = self._deal() if length is None else []
        self.length = length or len(self.dealt)
        self.tokenizer, self.image_processor = build_tokenizer(), build_image_processor()
        self.prompt_ids = self.tokenizer.encode(PROMPT)
        self.name_ids = [self.tokenizer.encode(name) for name in NAMES]
        self.image_ids = [self.tokenizer.encode(token)[0] for token in (VISION_START, VISION_END, IMAGE)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        chosen, images = self.draw(index)
        pixels = self.image_processor(images=images, return_tensors="pt")
        grids = pixels["image_grid_thw"]
        start, end, image = self.image_ids
        ids = list(self.prompt_ids)
        labels = [IGNORED_LABEL] * len(ids)
        for digit, cells in zip(chosen, (grids.prod(dim=-1) // MERGE_SIZE**2).tolist()):
            name = self.name_ids[self.digits.values[digit]]
            ids += [start, *[image] * cells, end, *name]
            labels += [*[IGNORED_LABEL] * (cells + 2), *name]
        ids.append(self.tokenizer.eos_token_id)
        labels.append(IGNORED_LABEL)
        input_ids = torch.tensor(ids)
        return {
            "input_ids": input_ids,
            "labels": torch.tensor(labels),
            "mm_token_type_ids": (input_ids == image).long(),
            "pixel_values": pixels["pixel_values"],
            "image_grid_thw": grids,
        }

    def draw(self, index: int) -> tuple[np.ndarray, list[Image.Image]]:
        """Returns which digits row ``index`` holds (indices into ``digits``) and their images."""
        random = np.random.default_rng([self.seed, index])
        if self.dealt:
            chosen, slants = self.dealt[index], np.zeros(MAX_IMAGES)
        else:
            chosen = random.integers(len(self.digits), size=random.integers(MIN_IMAGES, MAX_IMAGES + 1))
            slants = random.uniform(-12, 12, size=MAX_IMAGES)
        images = []
        for digit, slant in zip(chosen, slants):
            width, height = random.integers(MIN_SIDE, MAX_SIDE + 1, size=2).tolist()
            image = Image.fromarray(self.digits.scans[digit]).resize((width, height), Image.Resampling.BICUBIC)
            images.append(image.rotate(slant, Image.Resampling.BICUBIC).convert("RGB"))
        return chosen, images

    def _deal(self) -> list[np.ndarray]:
        """Deals every digit into exactly one row."""
        random = np.random.default_rng(self.seed)
        left, rows = random.permutation(len(self.digits)), []
        while len(left):
            remainders = len(left) - np.arange(MIN_IMAGES, MAX_IMAGES + 1)
            # what remains must fill a row, or be nothing
            remainder = random.choice(remainders[(remainders >= MIN_IMAGES) | (remainders == 0)])
            row, left = np.split(left, [len(left) - remainder])
            rows.append(row)
        return rows


def collate(rows: Sequence[Sample]) -> Sample:
    """Pads rows on the right and joins their images."""

    def pad(key: str, value: int) -> Tensor:
        return pad_sequence([row[key] for row in rows], batch_first=True, padding_value=value)

    return {
        "input_ids": pad("input_ids", 0),
        "labels": pad("labels", IGNORED_LABEL),
        "mm_token_type_ids": pad("mm_token_type_ids", 0),
        "attention_mask": pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True),
        "pixel_values": torch.cat([row["pixel_values"] for row in rows]),
        "image_grid_thw": torch.cat([row["image_grid_thw"] for row in rows]),
    }


class DigitsDataModule(LightningDataModule):
    """Rows of digits for training, and rows of digits that training never sees.

    Args:
        train_rows: rows of one epoch; each is drawn anew, so one long epoch takes the place of many.
        batch_size: rows that one replica (one group of ranks) takes at a time.
        num_workers: worker processes per rank.
        seed: chooses digits, sizes and slants.
    """

    def __init__(self, train_rows: int = 5600, batch_size: int = 16, num_workers: int = 2, seed: int = 7) -> None:
        super().__init__()
        self.train_rows, self.batch_size, self.num_workers, self.seed = train_rows, batch_size, num_workers, seed

    def setup(self, stage: str) -> None:
        """Splits the digits."""
        training, unseen = split_digits()
        self.training = DigitRows(training, self.train_rows, self.seed)
        self.unseen = DigitRows(unseen, seed=self.seed)

    def train_dataloader(self) -> DataLoader:
        """Rows of training digits."""
        return self._loader(self.training, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Rows of unseen digits, each digit once."""
        return self._loader(self.unseen)

    def predict_dataloader(self) -> DataLoader:
        """The rows of ``val_dataloader``."""
        return self.val_dataloader()

    def _loader(self, rows: DigitRows, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=collate,
        )
