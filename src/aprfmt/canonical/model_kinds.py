"""Detects models that are not networks (adapters, towers, importance matrices) by container and names."""

from __future__ import annotations

from collections.abc import Mapping

from aprfmt.arch.extra_tensors import holds_adapter
from aprfmt.io.source import is_file
from aprfmt.model import Model

CLIP = "clip"
"""`general.architecture` of every tower GGUF."""


def is_clip(model: Model) -> bool:
    """Whether `model` is a tower GGUF."""
    return model.convention == "gguf" and model.metadata.get("general.architecture") == CLIP


def is_adapter(model: Model) -> bool:
    """Whether the model is an adapter by its metadata: a folder's config, keys of a GGUF or `.apr`."""
    if model.convention == "gguf" and model.metadata.get("general.type") != "adapter":
        return False
    if model.convention == "apr" and "lora_rank" not in model.metadata:
        return False
    from aprfmt.formats import lora

    if model.convention == "gguf":
        return "adapter.type" in model.metadata or any(name.endswith(lora.A) for name in model.tensors)
    if model.convention == "apr":
        return any(name.endswith(lora.A) for name in model.tensors)
    return adapter_config(model) is not None and not _is_network(model)


def looks_like_adapter(model: Model) -> bool:
    """Whether the model is an adapter by its metadata or by the names of all its tensors."""
    return is_adapter(model) or holds_adapter(model.tensors)


def _is_network(model: Model) -> bool:
    """Whether a folder with an adapter config also contains a model."""
    from aprfmt.formats import lora
    from aprfmt.formats.hfdir import HfNative

    folder = model.native_as(HfNative)
    return folder is not None and lora.weights_of([*folder.shards, lora.CONFIG]) is None


def adapter_config(model: Model) -> Mapping[str, object] | None:
    """adapter_config.json of a folder, or of a file's folder; None if missing. Raises CorruptError."""
    from aprfmt.formats import lora
    from aprfmt.formats.hf_files import parse_object, read_text_file
    from aprfmt.formats.hfdir import HfNative
    from aprfmt.formats.safetensors import SafetensorsNative

    if (folder := model.native_as(HfNative)) is not None:
        raw, at = folder.text_file(lora.CONFIG), folder.folder
    elif model.native_as(SafetensorsNative) is not None and model.path.name in (lora.PEFT_WEIGHTS, lora.MLX_WEIGHTS):
        at = model.path.parent
        path = lora.config_path(at)
        raw = read_text_file(path) if is_file(path) else None
    else:
        return None
    return None if raw is None else parse_object(raw, str(lora.config_path(at)), lora.CONFIG)


ADAPTER = "an adapter"
