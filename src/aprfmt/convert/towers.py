"""Converts vision and audio towers to and from a separate model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import names
from aprfmt.arch.configless import VARIANT, config_of_tensors
from aprfmt.arch.converter import look_up
from aprfmt.arch.fields import as_mapping
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.projectors import DEEPSTACK, with_layers
from aprfmt.arch.row import Architecture, Tower
from aprfmt.arch.table import ARCHITECTURES, classes_of, wrapper_of
from aprfmt.arch.tower_table import PREPROCESSOR, find_tower, from_config, missing_keys, to_config
from aprfmt.canonical.clip import check_towers, read_towers
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.canonical.tower import TowerPart, checkpoint_spelling, row_spelling
from aprfmt.codecs.dtypes import n_elements
from aprfmt.convert.source_manifest import SourceManifest
from aprfmt.convert.source_manifest_writer import restorable
from aprfmt.errors import RefusedError
from aprfmt.formats.hf_files import parse_object
from aprfmt.formats.hfdir import HfNative
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.text import first_few

_CONFIG = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
_FILES = ((PREPROCESSOR_FILE, "media_proc_cfg"), ("processor_config.json", "image_processor"))
"""Files with preprocessing settings, and the nested object that is merged into the top level; of two files with the
same key the later wins.
"""

OF_BOTH = ("feature_extractor",)
"""Further objects of processor_config.json whose keys count if the others have none."""


def tower_model(c: Canonical) -> Canonical:
    """The towers of `c` as a model whose row is a Tower.

    Raises RefusedError for a model without towers, for one that the table does not have, for missing parts of its
    config and for tensors that contradict it.
    """
    part = c.tower or _of_config(c)
    row, h = part.row, part.hparams
    tensors: dict[str, CanonicalTensor] = {}
    for tensor in c.all_tensors.values():
        name = row_spelling(row, h, tensor.name)
        if name is None and c.tower is not None and tensor.name in c.extras and c.tower.has_in_gguf(tensor.name):
            name = tensor.name
        if name is None or names.ignorable(row, tensor.name):
            continue
        if name in tensors:
            raise RefusedError("two tensors have this name in the tower", path=c.model.path, tensor=tensor.name)
        tensors[name] = replace(tensor, name=name, link=None) if tensor.link is None else tensor
    if not tensors:
        raise RefusedError(
            "the model has no tower tensors",
            path=c.model.path,
            hint="import the whole folder, or add the towers with --mmproj",
        )
    if missing := missing_keys(h, row):
        raise RefusedError(
            f"tower tensors required by the config are missing: {first_few(missing)}",
            path=c.model.path,
            hint="put the model's config.json and preprocessor_config.json next to its weights",
        )
    check_towers(row, h, tensors)
    general = c.general
    if general is not None:
        # Tensors that only one of checkpoint and GGUF has, or in another size, do not matter.
        found = {name: names.matches(row, name)[:1] for name in tensors}
        both = (
            n
            for n, match in found.items()
            if match and not names.is_hf_only(row, n, h) and row.made.keys().isdisjoint(match[0].row.gguf)
        )
        sizes = (n_elements(tensors[name].shape) for name in both)
        general = {**general, "size_label": provenance.size_label(sum(sizes))}
    return replace(
        c, arch=row, hparams=h, tokenizer=None, tensors=tensors,
        extras={name: t for name, t in c.extras.items() if not part.has(name)}, general=general, sidecar=None, files={},
        tower=part,
    )  # fmt: skip


def has_tower(c: Canonical) -> bool:
    """Whether `c` has tensors of a known tower."""
    if c.tower is not None:
        return True
    row = find_tower(_config(c)) if c.extras else None
    return row is not None and any(names.canonical_name(row, name) for name in c.extras)


def assumed(c: Canonical) -> list[str]:
    """Preprocessing defaults that the towers of `c` take from the table, because no file of the model has them."""
    if c.tower is not None or _config(c)[PREPROCESSOR]:
        return []
    row = _of_config(c).row
    begin = f"{PREPROCESSOR}."
    wanted = [
        name.removeprefix(begin) for key in row.keys for name in key.hf[:1] if key.gguf and name.startswith(begin)
    ]
    if not wanted:
        return []
    return [f"no {PREPROCESSOR_FILE} found: {', '.join(wanted)} are set to the defaults of {row.hf_class}"]


def _of_config(c: Canonical) -> TowerPart:
    config = _config(c)
    row = find_tower(config)
    if row is None:
        what = c.hparams.hf_architecture or c.hparams.architecture or "the model"
        if not c.extras:
            raise RefusedError(
                f"{what} has no towers", path=c.model.path, hint="leave out --mmproj to write the language model"
            )
        wrapper = wrapper_of(c.hparams.hf_architecture)
        why = f": llama.cpp's mtmd lacks {wrapper.lacks}" if wrapper is not None and wrapper.lacks else ""
        raise RefusedError(
            f"the towers of {what} are not supported{why}",
            path=c.model.path,
            hint="keep them in an .apr or a folder, or add them as docs/towers.md describes",
        )
    config |= _further_objects(c, row)
    if missing := _missing_parts(row, config):
        raise RefusedError(
            f"config.json lacks {first_few(missing)}, so the towers' sizes are unknown",
            path=c.model.path,
            hint="use the config.json of the whole model, not that of its language model",
        )
    return TowerPart(row, from_config(config, row, c.hparams.hidden_size))


def _further_objects(c: Canonical, row: Tower) -> dict[str, object]:
    """Reads the further config files that the row lists, by key. Raises RefusedError."""
    manifest = restorable(c, "hf") if row.files and c.model.convention == "apr" else None
    found: dict[str, object] = {}
    for key, name in row.files.items():
        if (raw := _text_file(c, manifest, name)) is None:
            raise RefusedError(
                f"{name} is missing, and the towers' sizes are unknown without it",
                path=c.model.path,
                hint="use the complete repository, including subfolders",
            )
        found[key] = parse_object(raw, str(c.model.path), name)
    return found


def _missing_parts(row: Tower, config: Mapping[str, object]) -> list[str]:
    """Missing objects of config.json that hold the tower's sizes."""
    found: dict[str, bool] = {}
    for key in row.keys:
        parents = [parent for name in key.hf if (parent := name.rpartition(".")[0])]
        if key.gguf and parents and parents[0].partition(".")[0] not in (PREPROCESSOR, "text_config"):
            there = any(look_up(config, (parent,))[1] for parent in parents)
            found[parents[0]] = found.get(parents[0], False) or there
    return [parent for parent, there in found.items() if not there]


def _config(c: Canonical) -> dict[str, object]:
    """config.json of the whole model, with the values of its preprocessor files."""
    manifest = restorable(c, "hf") if c.model.convention == "apr" else None
    raw = _text_file(c, manifest, _CONFIG)
    config: dict[str, object] = dict(parse_object(raw, str(c.model.path), _CONFIG)) if raw is not None else {}
    if raw is None and (known := config_of_tensors({t.name: t.shape for t in c.all_tensors.values()})) is not None:
        config = {**known, VARIANT: c.hparams.extra.get(VARIANT)}
    stated: dict[str, object] = {}
    for name, inside in _FILES:
        if (raw := _text_file(c, manifest, name)) is None:
            continue
        found = parse_object(raw, str(c.model.path), name)
        for key in OF_BOTH:
            stated = {**as_mapping(found.get(key)), **stated}
        stated |= {**found, **as_mapping(found.get(inside))}
    return config | {PREPROCESSOR: stated}


def _text_file(c: Canonical, manifest: SourceManifest | None, name: str) -> bytes | None:
    """The file `name` of the source folder, or of the one that the source manifest of an `.apr` holds; None without."""
    if (folder := c.model.native_as(HfNative)) is not None:
        return folder.config if name == _CONFIG else folder.text_file(name)
    if manifest is not None and name in manifest.files:
        return manifest.head(name)
    return None


# --- GGUF ---


def with_tower(c: Canonical, model: Model) -> Canonical:
    """`c`, a language model, with the towers of the GGUF `model` among its tensors.

    Raises RefusedError for a GGUF of something else, of towers that the table does not have, or of another model.
    """
    if c.part or c.tower is not None or has_tower(c):
        raise RefusedError(
            "the model already has towers" if not c.part else f"the file contains {c.part}, not a language model",
            path=c.model.path,
            hint="use --mmproj with the GGUF of a language model only",
        )
    found = read_towers(model, classes_of(c.arch) if c.arch is not None else ())
    part, row, h = found.part, found.part.row, found.part.hparams
    if h.hidden_size != c.hparams.hidden_size:
        raise RefusedError(
            f"the projector outputs {h.hidden_size} values, but the language model's embedding has "
            f"{c.hparams.hidden_size}",
            path=model.path,
            hint="the mmproj belongs to another model: use the one published with this model",
        )
    found.check()
    spelled = {checkpoint_spelling(row, h, name): tensor for name, tensor in found.tensors.items()}
    renamed = {name: replace(tensor, name=name) for name, tensor in spelled.items()}
    extras = {**c.extras, **renamed, **found.others}
    warnings = (*c.warnings, *_strangers(c, row, model))
    return replace(c, hparams=_inside(c, part), extras=extras, tower=part, warnings=warnings)


def _strangers(c: Canonical, row: Tower, model: Model) -> list[str]:
    """A warning if no known model combines such towers with such a language model."""
    known = {arch.gguf for arch in ARCHITECTURES.values() if not {*classes_of(arch)}.isdisjoint(row.hf_classes)}
    if c.arch is None or not known or c.arch.gguf in known:
        return []
    name = model.metadata.get("general.name")
    called = f" ({name})" if isinstance(name, str) else ""
    return [
        f"the towers{called} are from {first_few(row.hf_classes)}, trained with a {' or '.join(sorted(known))} "
        f"language model, but this one is {c.arch.gguf}: use the mmproj published with it, unless it was trained with "
        "these"
    ]


def _inside(c: Canonical, part: TowerPart) -> Hyperparams:
    """The values of the language model `c`, as in a config.json of the whole model."""
    if c.arch is None or c.model.convention != "gguf":
        return c.hparams
    hf_class, model_type = _identity(part, c.arch)
    own = c.arch.model_types[0] if c.arch.model_types else c.hparams.hf_model_type
    return replace(
        c.hparams, hf_architecture=hf_class, hf_model_type=own, extra={**c.hparams.extra, "text_of": model_type}
    )


# --- folders ---


def whole_config(
    part: TowerPart, text: Mapping[str, object], inner: Architecture
) -> tuple[dict[str, object], dict[str, object]]:
    """config.json of the whole model, around the `text` one of its language model `inner`, and
    preprocessor_config.json.
    """
    config = to_config(part.hparams, part.row)
    config = {key: value for key, value in config.items() if key not in part.row.files}
    stated = config.pop(PREPROCESSOR, {})
    config.pop("text_config", None)  # the language model's own keys take precedence
    mapping = text.get(DEEPSTACK)
    config = with_layers(config, mapping)
    text = {key: value for key, value in text.items() if key != DEEPSTACK}
    if "text_config" in text:
        return dict(sorted({**config, **text}.items())), dict(as_mapping(stated))
    hf_class, model_type = _identity(part, inner)
    own = {key: value for key, value in text.items() if key != "architectures"}
    if inner.model_types and own.get("model_type") not in inner.model_types:
        own["model_type"] = inner.model_types[0]  # that of the language model alone belongs to another row
    shared = ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    whole: dict[str, object] = {"architectures": [hf_class], "model_type": model_type, **config}
    if place := part.row.inside[0]:
        whole[place] = {**as_mapping(config.get(place)), "model_type": part.row.inside[1], "text_config": own}
    else:
        whole["text_config"] = own
    whole |= {key: text[key] for key in shared if key in text}
    return dict(sorted(whole.items())), dict(as_mapping(stated))


def further_files(part: TowerPart) -> dict[str, dict[str, object]]:
    """Contents of the further config files that the row lists, by name."""
    config = to_config(part.hparams, part.row)
    return {name: dict(as_mapping(config.get(key))) for key, name in part.row.files.items()}


def _identity(part: TowerPart, inner: Architecture) -> tuple[str, str]:
    """Class and model type of the whole: of those that a row is for, the ones around such a language model."""
    row, around = part.row, classes_of(inner)
    types = dict(zip(row.hf_classes, row.model_types, strict=False))
    hf_class = next((name for name in row.hf_classes if name in around and name in types), row.hf_class)
    return hf_class, types.get(hf_class, row.model_type)
