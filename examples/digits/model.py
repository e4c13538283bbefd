"""A small Qwen2.5-VL that reads digits; nothing in it knows about ranks but the gathering of logits."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from examples.digits import data
from lightning_vdp import gather_sequence


def build_model(
    hidden_size: int, layers: int, tower_hidden_size: int, tower_layers: int
) -> Qwen2_5_VLForConditionalGeneration:
    """Returns a randomly initialised Qwen2.5-VL for the tokens and patches of ``examples.digits.data``."""
    tokenizer = data.build_tokenizer()
    special = ("image", data.IMAGE), ("video", data.VIDEO), ("vision_start", data.VISION_START)
    common: dict[str, Any] = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in special}
    heads = 4
    frequencies = hidden_size // heads // 2
    # the usual 0.02 is meant for wide models; narrow ones take long to leave it
    common["initializer_range"] = initializer_range = 0.05
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [frequencies - 2 * (3 * frequencies // 8), *[3 * frequencies // 8] * 2],
            },
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "initializer_range": initializer_range,
        },
        vision_config={
            "depth": tower_layers,
            "hidden_size": tower_hidden_size,
            "intermediate_size": 2 * tower_hidden_size,
            "num_heads": 4,
            "out_hidden_size": hidden_size,
            "patch_size": data.PATCH_SIZE,
            "spatial_merge_size": data.MERGE_SIZE,
            "temporal_patch_size": data.TEMPORAL_PATCH_SIZE,
            "window_size": 4 * data.CELL,
            "fullatt_block_indexes": [tower_layers - 1],
            "initializer_range": initializer_range,
        },
        tie_word_embeddings=False,
        **common,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


class DigitReader(LightningModule):
    """Learns to name each digit right after its image.

    Args:
        hidden_size: width of the decoder.
        layers: number of decoder layers.
        tower_hidden_size: width of the vision tower.
        tower_layers: number of the vision tower's layers.
        learning_rate: peak of the one-cycle schedule.
    """

    def __init__(
        self,
        hidden_size: int = 128,
        layers: int = 3,
        tower_hidden_size: int = 64,
        tower_layers: int = 3,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.model = build_model(hidden_size, layers, tower_hidden_size, tower_layers)
        self.accuracy = MulticlassAccuracy(
            num_classes=self.model.lm_head.out_features, average="micro", ignore_index=data.IGNORED_LABEL
        )

    def setup(self, stage: str) -> None:
        """Lets the metric count each replica once."""
        self.accuracy.process_group = getattr(self.trainer.strategy, "data_parallel_group", None)

    def training_step(self, batch: data.Sample, batch_idx: int) -> Tensor:
        """Returns the loss on the digits' names."""
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: data.Sample, batch_idx: int) -> Tensor:
        """Returns the token that the model reads at each label, shape [B, S]."""
        outputs = self.model(**batch)
        read = self._read(outputs)
        self.accuracy(read, batch["labels"])
        self.log("accuracy", self.accuracy, prog_bar=True, batch_size=len(read))
        return read

    def predict_step(self, batch: data.Sample, batch_idx: int) -> Tensor:
        """Returns the token that the model reads at each position, shape [B, S]."""
        return self._read(self.model(**batch))

    def configure_optimizers(self) -> Any:
        """AdamW under a one-cycle schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.learning_rate,
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=0.1,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @staticmethod
    def _read(outputs: Any) -> Tensor:
        logits, shard = outputs.logits, getattr(outputs, "sequence_shard", None)
        if shard is not None:
            logits = gather_sequence(logits, shard)
        # a token is predicted at the position before it; the first has none
        return logits.argmax(dim=-1).roll(1, dims=1)
