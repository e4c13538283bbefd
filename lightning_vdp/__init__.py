"""Vision data parallelism and Ulysses sequence parallelism for Hugging Face vision-language models.

Importing this package registers the strategy, so that ``Trainer(strategy="ulysses_vdp")`` finds it.
"""

from lightning_vdp.errors import StepError, UserError
from lightning_vdp.fsdp.precision import UlyssesVisionDPPrecision
from lightning_vdp.registration import register
from lightning_vdp.sequence.tokens import token_entropy, token_log_probs
from lightning_vdp.shards import SequenceShard, gather_sequence, sequence_mean, shard_sequence
from lightning_vdp.strategy import UlyssesVisionDPStrategy

__all__ = [
    "SequenceShard",
    "StepError",
    "UlyssesVisionDPPrecision",
    "UlyssesVisionDPStrategy",
    "UserError",
    "gather_sequence",
    "sequence_mean",
    "shard_sequence",
    "token_entropy",
    "token_log_probs",
]

__version__ = "0.1.0.dev0"

register()
