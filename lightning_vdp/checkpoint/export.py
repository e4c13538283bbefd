"""From a checkpoint to a folder that `from_pretrained` reads."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.fabric.strategies.fsdp import _METADATA_FILENAME, _is_sharded_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import AutoConfig, AutoProcessor, PreTrainedModel

from lightning_vdp.checkpoint.load import newest
from lightning_vdp.checkpoint.safety import check_holds_data
from lightning_vdp.errors import UserError
from lightning_vdp.families.wrappers import class_name, plain_name

__all__ = ["MODELS_KEY", "describe_models", "export"]

MODELS_KEY = "hugging_face_models"
"""Where a checkpoint describes the models inside the LightningModule."""


def describe_models(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Describes every outermost Hugging Face model in a module with plain values, as `export` needs it.

    Returns:
        By the model's name in the module: its class, its config as json, and the configs of its adapters.
    """
    described: dict[str, dict[str, Any]] = {}
    adapters = {plain_name(name): child for name, child in module.named_modules() if hasattr(child, "get_base_model")}
    for name, model in module.named_modules():
        name = plain_name(name)
        if not isinstance(model, PreTrainedModel) or any(name.startswith(f"{outer}.") for outer in described):
            continue
        described[name] = {
            "class": class_name(model),
            "config": model.config.to_json_string(use_diff=False),
            "source": model.config.name_or_path,
        }
        for outer, wrapper in adapters.items():
            if name.startswith(f"{outer}.") or outer == "":
                configs: Any = wrapper.peft_config
                described[name]["adapters"] = {key: _json(config.to_dict()) for key, config in configs.items()}
                described[name]["wrapper"] = outer
    return described


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, default=lambda value: sorted(value) if isinstance(value, set) else str(value))


def export(
    checkpoint: str | Path,
    folder: str | Path,
    name: str | None = None,
    config: str | None = None,
    processor: str | None = None,
    dtype: str | None = None,
    merge: bool = False,
    trust_checkpoint: bool = False,
) -> Path | None:
    """Writes a Hugging Face folder: config, weights as safetensors, and the processor where one is found.

    Args:
        checkpoint: A file, or the folder of a sharded checkpoint.
        folder: Where to write.
        name: Which model, where the LightningModule holds several; as in the checkpoint's names of weights.
        config: A folder or hub name whose config says what the model is; for checkpoints of other strategies.
        processor: A folder or hub name. Default: what the model was loaded from.
        dtype: Of the written weights, such as "bfloat16". Default: as in the checkpoint.
        merge: Whether adapters are merged into the weights; otherwise they alone are written.
        trust_checkpoint: Whether the checkpoint may hold any Python object; opening such a file can run code.

    Returns:
        Where the processor came from; None if none was written.

    Raises:
        UserError: If the checkpoint does not say what to write, or would run code, or lacks weights.
    """
    content = _read(newest(Path(checkpoint)), weights_only=not trust_checkpoint)
    weights: dict[str, Tensor] = content["state_dict"]
    described = content.get(MODELS_KEY) or {}
    if config is not None:
        described = {_root_of(weights, config): _described_by(config)}
    name, description = _choose(described, name, checkpoint)
    model = _rebuild(description, name, weights, merge)
    if dtype is not None:
        model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    source = processor or description["source"]
    if not source:
        return None
    if processor is None:
        # the model may have been made from a config, or its source be gone
        with suppress(OSError, ValueError):
            AutoProcessor.from_pretrained(source).save_pretrained(folder)
            return Path(source)
        return None
    AutoProcessor.from_pretrained(source).save_pretrained(folder)
    return Path(source)


def _read(path: Path, weights_only: bool) -> dict[str, Any]:
    if not path.exists():
        raise UserError(
            f"There is no checkpoint at {path}; give the path of a file or of a sharded checkpoint's folder."
        )
    if weights_only:
        check_holds_data(path)
    if not _is_sharded_checkpoint(path):
        content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return content
    content = torch.load(path / _METADATA_FILENAME, map_location="cpu", weights_only=weights_only)
    shards: dict[str, Any] = {}
    _load_state_dict(shards, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(keys={"model"}), no_dist=True)
    return {**content, "state_dict": shards["model"]}


def _root_of(weights: Mapping[str, Tensor], config: str) -> str:
    """The name under which a model's weights stand, found by the longest beginning that all weights share."""
    first = next(iter(weights)).split(".")
    while first and not all(weight.startswith(".".join(first) + ".") for weight in weights):
        first.pop()
    # the names of a model share no beginning, but for the base model of one without a head
    return ".".join(first)


def _described_by(source: str) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(source)
    if not config.architectures:
        raise UserError(f"The config at {source} names no `architectures`; add the model's class there.")
    return {"class": config.architectures[0], "config": config.to_json_string(use_diff=False), "source": source}


def _choose(described: Mapping[str, Any], name: str | None, checkpoint: str | Path) -> tuple[str, dict[str, Any]]:
    if not described:
        raise UserError(
            f"{checkpoint} does not say which Hugging Face model it holds, as checkpoints of this strategy do; give "
            "`--config` the folder or hub name that the model was loaded from."
        )
    if name is None and len(described) == 1:
        name = next(iter(described))
    if name is None or name not in described:
        names = ", ".join(map(repr, described))
        raise UserError(f"The checkpoint holds the models {names}, and `--name` is {name!r}; give one of these names.")
    return name, described[name]


def _rebuild(description: dict[str, Any], name: str, weights: Mapping[str, Tensor], merge: bool) -> Any:
    model_class = getattr(transformers, description["class"], None)
    if model_class is None:
        raise UserError(
            f"transformers {transformers.__version__} has no {description['class']}, which the checkpoint holds; install the "
            "version that trained it."
        )
    config = model_class.config_class.from_dict(json.loads(description["config"]))
    outer = description.get("wrapper", name)
    with torch.device("meta"):
        model = model_class(config)
        for key, adapter in description.get("adapters", {}).items():
            model = _add_adapter(model, key, json.loads(adapter))
    prefix = f"{outer}." if outer else ""
    found = {weight.removeprefix(prefix): value for weight, value in weights.items() if weight.startswith(prefix)}
    missing, unexpected = model.load_state_dict(found, strict=False, assign=True)
    only_adapters = "adapters" in description and not merge
    lost = [weight for weight in missing if not only_adapters or "lora_" in weight]
    if lost or unexpected:
        raise UserError(
            f"The weights at {name!r} do not fit {description['class']}: {len(lost)} are missing and {len(unexpected)} are "
            f"not expected, such as {(lost or unexpected)[0]!r}; check `--name` and `--config`."
        )
    if only_adapters:
        return model
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    model.tie_weights()
    return model


def _add_adapter(model: nn.Module, key: str, values: dict[str, Any]) -> Any:
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_peft_type(**values)
    if isinstance(model, PeftModel):
        model.add_adapter(key, config)
        return model
    return PeftModel(model, config, key)  # type: ignore[arg-type]
