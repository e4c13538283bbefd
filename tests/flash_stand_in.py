"""A stand-in for flash attention on the CPU: the signatures that transformers calls, in plain PyTorch."""

from typing import Any

import torch
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor, nn

CALLS = {"varlen": 0, "dense": 0}


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, window: tuple[int, int]) -> Tensor:
    """Attention of one sequence: ``[S, H, D]`` each."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = (
        x.transpose(0, 1) for x in (query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))
    )
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1])[None]
    seen = columns <= rows if causal else torch.ones_like(columns <= rows)
    if window[0] >= 0:
        seen = seen & (columns >= rows - window[0])
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    CALLS["varlen"] += 1
    lengths = cu_seqlens_q.diff().tolist()
    assert sum(lengths) == q.shape[0]
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths))
    return torch.cat([_attend(*part, softmax_scale, causal, window_size) for part in parts])


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    CALLS["dense"] += 1
    return torch.stack([_attend(*part, softmax_scale, causal, window_size) for part in zip(q, k, v)])


def use_flash(model: Any) -> Any:
    """Makes a model's decoder call the stand-in as "flash_attention_2"."""
    name = "flash_attention_2"
    flash._loaded_implementation = name
    flash._flash_fn, flash._flash_varlen_fn = flash_attn_func, flash_attn_varlen_func
    flash._pad_fn, flash._unpad_fn = flash._pad_input, flash._unpad_input
    flash._process_flash_kwargs_fn = flash._lazy_define_process_function(flash_attn_varlen_func)
    for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        config._attn_implementation_internal = name
    return model
