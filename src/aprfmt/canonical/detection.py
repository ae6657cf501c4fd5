"""Detects the architecture row of an opened model, or which part of a network it contains."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from aprfmt.arch import hparams as hp
from aprfmt.arch.extra_tensors import part_of
from aprfmt.arch.heads import MODULE_KEYS
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.arch.similar import AUTO_SIMILAR
from aprfmt.arch.table import ARCHITECTURES, find, lookup, nearest, row_of
from aprfmt.canonical.model_kinds import ADAPTER, looks_like_adapter
from aprfmt.errors import UsageError
from aprfmt.formats import hfdir, safetensors
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.model import Model


def find_row(model: Model, arch: str | None = None) -> Architecture | None:
    """The architecture row named by `arch`, else the one detected from the model."""
    if arch is not None and arch not in ("auto", AUTO_SIMILAR):
        row = lookup(arch)
        if row is None:
            raise UsageError(f"unknown architecture {arch!r}", hint=name_hint(arch))
        return row
    if model.convention == "apr" and model.metadata.get(UNMAPPED_KEY) is True:
        return None
    stated = model.metadata.get(ROW_KEY) if model.convention == "apr" else None
    if isinstance(stated, str) and stated in ARCHITECTURES:
        return ARCHITECTURES[stated]
    kv = model.metadata if model.convention == "gguf" else None
    return row_of(model.hparams, kv=kv, tensor_names=model.tensors)


def row_of_unknown(h: Hyperparams, row: Architecture | None) -> Architecture | None:
    """`row`, if neither the class nor the model type of the network names one; None otherwise."""
    named = h.hf_architecture or h.hf_model_type
    known = named is None or find(hf_class=h.hf_architecture, model_type=h.hf_model_type) is not None
    return None if known else row


def config_of(model: Model) -> Mapping[str, object] | None:
    """config.json of a checkpoint, or None. Raises CorruptError, UnsupportedError."""
    folder, single = model.native_as(HfNative), model.native_as(SafetensorsNative)
    return hfdir.config_of(folder) if folder else safetensors.config_of(single) if single else None


def hparams_as(model: Model, row: Architecture | None) -> Hyperparams:
    """A copy of the model's hyper-parameters; those of a checkpoint are read as `row`, whatever its config names."""
    stated = deepcopy(model.hparams)
    if row is None or model.convention != "hf" or stated.architecture == row.id:
        return stated
    config = config_of(model)
    if config is None:
        return stated
    found = hp.from_hf_config(config, row)
    found.extra |= {key: value for key, value in stated.extra.items() if MODULE_KEYS.fullmatch(key)}
    return found


def find_part(model: Model, row: Architecture | None) -> str:
    """What the source contains if it is not a network: its tensors keep their names."""
    if looks_like_adapter(model):
        return ADAPTER
    if model.convention == "gguf":
        return part_of(row, model.metadata, model.hparams, model.tensors)
    stated = model.metadata.get(PART_KEY) if model.convention == "apr" else None
    return stated if isinstance(stated, str) else ""


def name_hint(word: str) -> str:
    """The closest known name, and where to list all names."""
    near = nearest(word)
    return (f"the closest is {near!r}; " if near else "") + "apr architectures lists all of them"


PART_KEY = "aprfmt.part"
"""APR metadata key: what a file contains that is not a network."""


ROW_KEY = "aprfmt.row"
"""APR metadata key: the row as which the network of an unknown class was read (`--arch`)."""

UNMAPPED_KEY = "aprfmt.unmapped"
"""APR metadata key of a network without a row whose architecture has a known name: a GGUF may say "mixtral", which
llama.cpp calls "llama".
"""
