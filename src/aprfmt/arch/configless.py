"""Checkpoints published without a config.json: infers the config from tensor shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aprfmt.types import Json, JsonObject, Shape

VARIANT = "model_variant"
"""Key of the model's variant in llama.cpp: the name of its folder."""

_EMBEDDING = "flow_lm.conditioner.embed.weight"
_HEAD = 64
"""Head size of each published Pocket TTS; tensors do not tell it."""

_SIZES = {
    "latent_dim": ("flow_lm.bos_emb", 0),
    "flow_dim": ("flow_lm.flow_net.input_proj.weight", 0),
    "flow_frequencies": ("flow_lm.flow_net.time_embed.0.freqs", 0),
    "inner_dim": ("mimi.downsample.conv.conv.weight", 0),
    "outer_dim": ("mimi.upsample.convtr.convtr.weight", 0),
    "n_filters": ("mimi.encoder.model.0.conv.weight", 0),
    "hidden_size": ("mimi.encoder_transformer.transformer.layers.0.norm1.weight", 0),
    "intermediate_size": ("mimi.encoder_transformer.transformer.layers.0.linear1.weight", 0),
}


def config_of_tensors(shapes: Mapping[str, Shape]) -> JsonObject | None:
    """The config.json of a Pocket TTS, as far as tensors tell; None for other checkpoints."""
    embedding = shapes.get(_EMBEDDING, ())
    if "flow_lm.bos_emb" not in shapes or len(embedding) != 2:
        return None
    vocab, width = embedding
    sizes = {key: shape[at] for key, (name, at) in _SIZES.items() if len(shape := shapes.get(name, ())) > at}
    audio: JsonObject = {
        **sizes,
        "num_hidden_layers": _depth(shapes, "mimi.encoder_transformer.transformer.layers"),
        "num_attention_heads": sizes.get("hidden_size", 0) // _HEAD,
        "flow_depth": _depth(shapes, "flow_lm.flow_net.res_blocks"),
    }
    ffn: Json = next(iter(shapes.get("flow_lm.transformer.layers.0.linear1.weight", ())), None)
    return {
        "architectures": ["FlowLMModel"], "model_type": "pockettts", "vocab_size": vocab, "hidden_size": width,
        "intermediate_size": ffn, "num_hidden_layers": _depth(shapes, "flow_lm.transformer.layers"),
        "num_attention_heads": width // _HEAD, "audio_config": audio,
    }  # fmt: skip


def _depth(shapes: Mapping[str, Shape], beginning: str) -> int:
    found = (re.match(rf"{re.escape(beginning)}\.(\d{{1,5}})\.", name) for name in shapes)
    return len({match[1] for match in found if match})
