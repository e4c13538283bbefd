"""What a run says at its end: images encoded by each rank, a picture, the accuracy."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import CatMetric

from examples.digits import data


class ImagesEncoded(Callback):
    """Prints how many images each rank's vision tower encoded during ``fit``."""

    def __init__(self) -> None:
        self.count = 0
        self.counts: list[int] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hooks the tower before the strategy wraps it."""
        if stage == "fit":
            model: Any = pl_module.model
            self.hook = model.model.visual.register_forward_pre_hook(self._count, with_kwargs=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the counts."""
        self.hook.remove()
        metric = CatMetric().to(pl_module.device)
        metric.update(self.count)
        # torchmetrics gathers over all ranks, in their order
        self.counts = metric.compute().int().flatten().tolist()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prints the counts, after the progress bar has ended."""
        if stage == "fit" and self.counts and trainer.is_global_zero:
            print("images encoded: " + ", ".join(f"rank {rank}: {count:,}" for rank, count in enumerate(self.counts)))

    def _count(self, tower: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tower.training and torch.is_grad_enabled():
            grids: Tensor = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
            # a rank without images runs a dummy of one cell; no digit is that small
            self.count += int((grids.prod(dim=-1) > data.MERGE_SIZE**2).sum())


class Picture(Callback):
    """Draws unseen digits with what the model read and the loss curve; prints the accuracy as the last line.

    Args:
        filename: name of the picture in the Trainer's ``default_root_dir``.
        rows: rows of digits in the picture.
    """

    def __init__(self, filename: str = "digits.png", rows: int = 4) -> None:
        self.filename, self.rows = filename, rows
        self.path: Path | None = None
        self.losses: list[float] = []
        self.read: list[list[str]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: data.Sample, batch_idx: int
    ) -> None:
        """Keeps the loss."""
        self.losses.append(outputs["loss"].item())

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: data.Sample,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps what the model read in the first batch."""
        if batch_idx == 0:
            tokenizer = data.build_tokenizer()
            labelled = batch["labels"] != data.IGNORED_LABEL
            self.read = [
                [str(tokenizer.decode(token)).strip() for token in row[mask]] for row, mask in zip(outputs, labelled)
            ]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the picture, if there was a validation."""
        if trainer.is_global_zero and self.read:
            self.path = Path(trainer.default_root_dir) / self.filename
            self._draw(trainer).savefig(self.path, dpi=150)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prints the accuracy, after the progress bar has ended."""
        if stage == "fit" and self.path is not None:
            print(f"picture: {self.path}")
            print(f"token accuracy on unseen digits: {trainer.callback_metrics['accuracy']:.2f}")

    def _draw(self, trainer: Trainer) -> Figure:
        """Draws rows of digits above their names, and the loss below."""
        loader: Any = trainer.val_dataloaders
        unseen, shown = loader.dataset, next(iter(loader.batch_sampler))[: self.rows]
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        subfigures: Any = figure.subfigures(1, 2, width_ratios=[1.3, 1])
        left, right = subfigures
        left.suptitle("unseen digits and what the model read", fontsize=11)
        axes: Any = left.subplots(len(shown), data.MAX_IMAGES, squeeze=False)
        for ax in axes.flat:
            ax.set_axis_off()
        for row, index in enumerate(shown):
            digits, images = unseen.draw(index)
            for ax, digit, image, read in zip(axes[row], digits, images, self.read[row]):
                name = data.NAMES[unseen.digits.values[digit]].strip()
                ax.imshow(image)
                middle = image.width / 2
                ax.set(xlim=(middle - data.MAX_SIDE / 2, middle + data.MAX_SIDE / 2), ylim=(data.MAX_SIDE, -0.5))
                title, color = (read, "tab:green") if read == name else (f"{read} ({name})", "tab:red")
                ax.set_title(title, color=color, fontsize=9, pad=2)
        ax = right.subplots()
        ax.plot(range(1, len(self.losses) + 1), self.losses, linewidth=1)
        ax.set_title("training loss on the digits' names", fontsize=11)
        ax.set_xlabel("step")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        return figure
