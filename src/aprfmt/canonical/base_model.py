"""The base model of an adapter: given by the user, named by the adapter, or described by the file itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aprfmt import formats
from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.canonical.adapter import stored_config
from aprfmt.canonical.lora_pairs import Base
from aprfmt.canonical.model_kinds import adapter_config, is_adapter
from aprfmt.canonical.read import canonical
from aprfmt.errors import AprError, RefusedError
from aprfmt.formats import hf_files, hub
from aprfmt.io.source import is_file, is_folder
from aprfmt.limits import MAX_PATH_CHARS
from aprfmt.model import Model
from aprfmt.types import PathLike

CONFIG = "config.json"


def read_base(path: PathLike) -> Base:
    """Reads the base model at `path`: a folder (config.json suffices) or a model in any format.

    Raises RefusedError for an architecture without a row, and what opening it raises.
    """
    place = formats.resolve(path)
    if is_folder(place) and is_file(place / CONFIG):
        hparams = from_hf_config(hf_files.read_config(place / CONFIG))
        row = ARCHITECTURES.get(hparams.architecture or "")
    else:
        with formats.open(place) as model:
            if is_adapter(model):
                raise RefusedError("this is an adapter, not a base model", path=place)
            c = canonical(model)
        row, hparams = c.arch, c.hparams
    if row is None:
        raise RefusedError(
            f"unknown architecture of the base model: {hparams.hf_architecture or hparams.architecture!r}",
            path=place,
            hint="list the supported names with apr architectures",
        )
    return Base(row, hparams)


def find_base(model: Model, given: PathLike | None) -> Base | None:
    """Finds the base model of the adapter `model`: `given`, else the one the adapter names if it is on this machine.

    Downloads nothing. Raises what read_base raises for `given`.
    """
    if given is not None:
        return read_base(given)
    if model.convention == "apr":
        return None  # the file describes its base itself
    place = _named(model)
    if place is None:
        return None
    try:
        return read_base(place)
    except AprError:
        return None


def _named(model: Model) -> Path | None:
    """The folder of the base that an adapter's config names."""
    if model.convention == "gguf":
        body: Mapping[str, object] | None = stored_config(model.metadata)
    else:
        body = adapter_config(model)
    own = model.path if is_folder(model.path) else model.path.parent
    if body is None:
        return None
    if is_file(own / CONFIG) and model.convention == "hf":
        return own
    name = body.get("base_model_name_or_path", body.get("model"))
    if not isinstance(name, str) or not 0 < len(name) <= MAX_PATH_CHARS:
        return None
    with suppress(AprError, ValueError):  # not a valid path on this system
        return next((place for place in (Path(name), own / name) if is_file(place / CONFIG)), hub.cached_config(name))
    return None
