"""Write safetensors: one file, or a folder with config, tokenizer and the source's other files."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

from aprfmt.arch import hparams as hp
from aprfmt.arch import names
from aprfmt.arch.configless import VARIANT, config_of_tensors
from aprfmt.arch.fields import as_text
from aprfmt.arch.heads import MODULE
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.canonical import sidecar
from aprfmt.canonical.depth_pruning import with_layers
from aprfmt.canonical.detection import row_of_unknown
from aprfmt.canonical.drafts import named_drafts, with_mtp_layers_counted
from aprfmt.canonical.model import Canonical, from_gguf
from aprfmt.canonical.packed import HF_QUANT, without_packing
from aprfmt.canonical.sides import hf_side
from aprfmt.canonical.single_experts import with_single_experts
from aprfmt.canonical.tensor import CanonicalTensor, Losses, extra_dtype, plain_dtype
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.plain import EIGHT_BITS
from aprfmt.convert.files import dropped_files_loss, record_differences
from aprfmt.convert.serving import PackedModules, packed_modules
from aprfmt.convert.source_manifest import SourceManifest, overlay
from aprfmt.convert.source_manifest_writer import restorable, source_names
from aprfmt.convert.targets.base import DEFAULT_SHARD_BYTES, Output, Work
from aprfmt.convert.towers import PREPROCESSOR_FILE, further_files, whole_config
from aprfmt.errors import RefusedError
from aprfmt.formats import INDEX_SUFFIXES, apr_metadata, mistral, safetensors
from aprfmt.formats.hf_files import parse_config, parse_object, read_text_file
from aprfmt.formats.hf_modules import MODULES_NAME, module_files
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out_tensor import OutTensor, group_by_size
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.pipe import FileLayout, Literal
from aprfmt.io.source import is_folder
from aprfmt.provenance import provenance
from aprfmt.provenance.model_card import CARD, to_card
from aprfmt.tokenizer import hf_write
from aprfmt.tokenizer.data import NAMED_TEMPLATES, NO_VOCABULARY
from aprfmt.tokenizer.hf import has_vocabulary, is_tokenizer_file, read_files
from aprfmt.tokenizer.hf_specials import chat_templates
from aprfmt.trust.signature import FOLDER_SIGNATURE
from aprfmt.types import JsonObject

CONFIG = "config.json"
GENERATION = "generation_config.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"

# Stored dtype -> its name in config.json.
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def layouts(c: Canonical, work: Work) -> Output:
    """The files of a Hugging Face folder for `c`: the imported files themselves if nothing changed."""
    return folder(c, work, restorable(c, "hf"), "pt")


def folder(c: Canonical, work: Work, manifest: SourceManifest | None, framework: str) -> Output:
    """The folder; `framework` goes into the shards' `__metadata__` ("pt" for transformers, "mlx" for MLX)."""
    if from_gguf(c):
        record_differences(c, work.losses)
    losses, shard_bytes = work.losses, work.options.shard_bytes
    source = source_texts(c, manifest)
    # The classes in the source's config.json expect its tensor names.
    params = source.get(mistral.PARAMS_NAME) if _is_mistral(c, source, manifest) else None
    own_names = dict(names_of_source(c, manifest)) if CONFIG in source and params is None else {}
    packed = packed_modules(c, work.options)
    if packed.scheme is not None and not packed.again:
        c, stacks = with_single_experts(c)
        own_names = own_names | {
            name: _like_stack(name, stack, own_names[stack]) for name, stack in stacks.items() if stack in own_names
        }
        packed.c = c
    tensors = _hf_tensors(c, "keep" if packed.scheme else work.options.dtype, losses, own_names, packed)
    packed.check(losses)
    texts = sidecar.with_folder_fields(c.model, c.info, with_card(c, with_edits(c, source), losses))
    texts = texts if MODULES_NAME in texts else texts | module_files(c.hparams.extra, c.hparams.hidden_size or 0)
    if c.packs.decoded:
        texts.pop(HF_QUANT, None)
    kept = _keeps_all(c, tensors, own_names) and not (manifest is not None and manifest.is_partial)
    config: bytes | None
    floats = [t for t in tensors if t.dtype in _TORCH_NAMES and not t.name.endswith("_scale")]
    floats = floats if packed.packed else tensors
    config, config_kept = config_json(c, texts, params, floats, kept) if not _is_adapter(c) else (None, True)
    if (
        manifest is not None
        and kept
        and config_kept
        and shard_bytes is None
        and framework == "pt"
        and (weights := manifest.weight_layouts())
    ):
        if texts == source:
            return Output(manifest.layouts(), tensors, lossless=not c.left_out)
        made = texts | tokenizer_files(c, texts)
        kept_names = {layout.name for layout in weights}  # the index is a text, too
        written = [FileLayout(n, [Literal(data)]) for n, data in made.items() if n not in kept_names]
        return Output([*written, *_unsigned(manifest, losses), *weights], tensors)
    if packed.packed and config is not None:
        config = _json(parse_config(config, c.model.path) | {"quantization_config": packed.settings()})
        texts = texts | {name: _json(value) for name, value in packed.files().items()}
    if params is not None:  # what is written from here on has Hugging Face's layout
        texts.pop(mistral.PARAMS_NAME, None)
    files = {**({CONFIG: config} if config is not None else {}), **tokenizer_files(c, texts)}
    if c.tower is not None and c.arch is not None and config is not None and CONFIG not in texts:
        whole, preprocessor = whole_config(c.tower, parse_config(config, c.model.path), c.arch)
        files[CONFIG] = _json(whole)
        files.update({PREPROCESSOR_FILE: _json(preprocessor)} if preprocessor else {})
        files.update({name: _json(told) for name, told in further_files(c.tower).items()})
    files |= {n: data for n, data in texts.items() if n not in files and not n.endswith(INDEX_SUFFIXES)}
    if shard_bytes is None:
        shard_bytes = DEFAULT_SHARD_BYTES
    own, modules = _modules(c, tensors, files, framework)
    shards = _shards(own, shard_bytes or sum(t.n_bytes for t in own), framework)
    if _is_adapter(c):
        shards = [replace(shard, name=shard.name.replace("model", "adapter_model", 1)) for shard in shards]
    others = _unsigned(manifest, losses) if manifest is not None else []
    if manifest is None:
        losses.others += dropped_files_loss(c, "the source manifest does not match the model")
    layouts = [*(FileLayout(n, [Literal(data)]) for n, data in files.items()), *others, *modules, *shards]
    return Output(layouts, tensors, n_params=c.n_params if packed.packed else None)


def _unsigned(manifest: SourceManifest, losses: Losses) -> list[FileLayout]:
    """The other files of the source, without its signature, which does not cover what is written now."""
    layouts = manifest.other_layouts()
    kept = [layout for layout in layouts if layout.name != FOLDER_SIGNATURE]
    if len(kept) < len(layouts):
        losses.others.append(f"the signature ({FOLDER_SIGNATURE}) dropped: it covers the source, not the output")
    return kept


def with_card(c: Canonical, texts: dict[str, bytes], losses: Losses) -> dict[str, bytes]:
    """`texts` with a model card if the source has none and provenance is known."""
    if CARD in texts:
        losses.warnings += provenance.contradictions(texts[CARD], c.info)
        return texts
    card = to_card(c.info, c.general, named_by_folder=bool(texts) or _is_adapter(c))
    return texts if card is None else texts | {CARD: card}


def source_texts(c: Canonical, manifest: SourceManifest | None) -> dict[str, bytes]:
    """The text files of the source's folder, by name."""
    if manifest is not None:
        texts = manifest.text_files()
        own = {name: data for name, data in texts.items() if is_tokenizer_file(name)}
        # They have no digest that would reveal damage, and the tokenizer was not read from them.
        if c.tokenizer is not None and not own.keys() <= manifest.digests.keys() and c.tokenizer.files != own:
            read_files(own, {})
        return texts
    if (folder := c.model.native_as(HfNative)) is not None:
        return {path.as_posix(): read_text_file(folder.folder / path) for path in folder.other_files}
    return {}


def config_json(
    c: Canonical, texts: Mapping[str, bytes], params: bytes | None, tensors: list[OutTensor], kept: bool
) -> tuple[bytes | None, bool]:
    """config.json, and whether it equals the source's; in Mistral's layout `params` is the source.

    None for an architecture published without one, as it follows from the tensors.
    """
    source = texts.get(CONFIG) if params is None else None
    if c.arch is None and source is None:
        what = c.part or f"architecture {c.hparams.architecture or 'unknown'!r}"
        raise RefusedError(
            f"{what} has no config.json mapping",
            path=c.model.path,
            hint="export to one safetensors file instead: -o model.safetensors",
        )
    if c.arch is None:
        return source or b"{}", True
    # What the source's own config.json lacks, the new one may lack too.
    unwritten = None if source is not None else _of_tensors(c, tensors)
    has_own = source is not None or params is not None or unwritten is not None
    now = hp.to_hf_config((c if has_own else with_mtp_layers_counted(c)).hparams, complete=not has_own)
    if not has_own:
        return _json(now | {"dtype": _torch_dtype(tensors)}), False
    at = c.model.path / CONFIG if is_folder(c.model.path) else c.model.path
    base = mistral.to_config(parse_config(params, at)) if params is not None else parse_config(source or b"{}", at)
    base = base if unwritten is None else unwritten
    row = row_of_unknown(c.hparams, c.arch)
    then = hp.to_hf_config(_as_import(c, hp.from_hf_config(base, row)), row, complete=False)
    config = overlay(base if c.layers is None else with_layers(base, c.layers), then, now)
    if unwritten is not None and config == base:
        return None, True
    if not kept:
        config = _with_dtype(without_packing(config), _torch_dtype(tensors))
    return (source or _json(config), True) if config == base else (_json(config), False)


def _is_mistral(c: Canonical, texts: Mapping[str, bytes], manifest: SourceManifest | None) -> bool:
    """Whether the source has Mistral's own layout, by the names of its weights as in formats.hfdir."""
    if (folder := c.model.native_as(HfNative)) is not None:
        return folder.params is not None
    if manifest is None or mistral.PARAMS_NAME not in texts:
        return False
    weights = [layout.name for layout in manifest.weight_layouts()]
    return any(map(mistral.is_weights, weights)) or (not weights and CONFIG not in texts)


def _with_dtype(config: Mapping[str, object], word: str) -> dict[str, object]:
    """`config` with another dtype, also in its sub-configs."""
    out = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": word}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config") and value.keys() & {"dtype", "torch_dtype"}:
            out[key] = _with_dtype(value, word)
    return out


def _is_adapter(c: Canonical) -> bool:
    """Whether the model has extra tensors only, as an adapter does."""
    return not c.tensors and bool(c.extras) and not from_gguf(c)


def _of_tensors(c: Canonical, tensors: list[OutTensor]) -> JsonObject | None:
    """The config.json of an architecture that is published without one, inferred from the tensors."""
    told = config_of_tensors({tensor.name: tensor.shape for tensor in tensors})
    variant = as_text(c.hparams.extra.get(VARIANT))
    return {**told, VARIANT: variant} if told is not None and variant is not None else None


def names_of_source(c: Canonical, manifest: SourceManifest | None) -> Mapping[str, str]:
    """The source names of the tensors that are renamed in canonical form."""
    if c.model.convention == "hf":
        return source_names(c)
    return manifest.names if manifest is not None else {}


def _as_import(c: Canonical, source: Hyperparams) -> Hyperparams:
    """The hyper-parameters of an `.apr` imported from `source`: missing token ids come from the tokenizer."""
    # As in canonical: a separate head unties it; without the key the tensors decide.
    if source.tied and c.head in c.tensors and c.is_whole:
        source.tied = False
    elif source.tied is None and c.head not in c.tensors and c.embedding in c.tensors:
        source.tied = True
    if c.model.convention != "apr":
        return source
    ids = {key: c.model.metadata.get(key) for key in ("tokenizer.bos_token_id", "tokenizer.eos_token_id")}
    metadata = hp.to_apr(source) | {key: value for key, value in ids.items() if value is not None}
    # Through JSON text, in which NaN is null and some numbers are float32.
    return hp.from_apr(apr_metadata.parse(apr_metadata.dump(metadata)))


def with_edits(c: Canonical, texts: dict[str, bytes]) -> dict[str, bytes]:
    """The source's text files with the tokenizer or chat template that the user gave, if any."""
    tokenizer = c.tokenizer
    if tokenizer is not c.model.tokenizer:
        own = {name for name in texts if is_tokenizer_file(name) and name != GENERATION}
        return {name: data for name, data in texts.items() if name not in own}
    if tokenizer is None or not any(is_tokenizer_file(name) for name in texts):
        return texts
    settings = parse_object(texts.get(SETTINGS, b"{}"), str(c.model.path), SETTINGS, unique=False)
    template = tokenizer.chat_template
    stored = chat_templates(texts, settings)[0]
    if stored == template or (stored is None and template in NAMED_TEMPLATES):
        return texts
    is_set = isinstance(settings.get("chat_template"), str) and TEMPLATE not in texts
    edited = {name: data for name, data in texts.items() if name not in (TEMPLATE, "chat_template.json")}
    if settings.pop("chat_template", None) is not None or is_set:
        edited[SETTINGS] = _json(settings | ({"chat_template": template} if is_set and template else {}))
    if template and not is_set:
        edited[TEMPLATE] = template.encode("utf-8", "surrogateescape")
    return edited


def _json(value: Mapping[str, object]) -> bytes:
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (
            json.dumps(value, indent=2) + "\n"
        ).encode()  # half of a surrogate pair, which only an escape can express


def _torch_dtype(tensors: list[OutTensor]) -> str:
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.n_bytes
    most = max(totals, key=lambda d: totals[d], default="F32")
    # Networks do not compute in 8-bit floats: loaders widen them to this dtype.
    return _TORCH_NAMES.get(most, "bfloat16" if most in EIGHT_BITS else "float32")


def tokenizer_files(c: Canonical, texts: Mapping[str, bytes]) -> dict[str, bytes]:
    """The tokenizer files, generated if `texts` hold none."""
    if c.tokenizer is None or c.tokenizer.model == NO_VOCABULARY:
        return {}
    if has_vocabulary(texts):
        return {}  # the source's own files are carried unchanged
    return hf_write.to_hf_files(c.tokenizer, max_length=c.hparams.max_position_embeddings, name=c.info.get("name"))


def _modules(
    c: Canonical, tensors: list[OutTensor], files: Collection[str], framework: str
) -> tuple[list[OutTensor], list[FileLayout]]:
    """The tensors of the model itself, and the files of its modules in subfolders, whose tensors have their prefix.

    `files` are those of the folder, including each module's config.json.
    """
    groups: dict[str, list[OutTensor]] = {"": []}
    for tensor in tensors:
        folder, _, name = tensor.name.partition(".")
        if (tensor.name in c.extras or MODULE.match(tensor.name)) and f"{folder}/{CONFIG}" in files:
            groups.setdefault(folder, []).append(replace(tensor, name=name))
        else:
            groups[""].append(tensor)
    own = groups.pop("")
    metadata = {"format": framework}
    return own, [
        FileLayout(f"{folder}/model.safetensors", safetensors.layout(group, metadata))
        for folder, group in groups.items()
    ]


def _shards(tensors: list[OutTensor], shard_bytes: int, framework: str) -> list[FileLayout]:
    groups = group_by_size(tensors, shard_bytes, lambda tensor: tensor.n_bytes)
    metadata = {"format": framework}
    if len(groups) == 1:
        return [FileLayout("model.safetensors", safetensors.layout(groups[0], metadata))]
    file_names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    weight_map = {t.name: name for name, group in zip(file_names, groups, strict=True) for t in group}
    index = {
        "metadata": {"total_size": sum(t.n_bytes for t in tensors)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    layouts = [
        FileLayout(name, safetensors.layout(group, metadata)) for name, group in zip(file_names, groups, strict=True)
    ]
    return [*layouts, FileLayout("model.safetensors.index.json", [Literal(_json(index))])]


# --- one file, tensors ---


def safetensors_layouts(c: Canonical, work: Work) -> Output:
    """One safetensors file for `c`: the imported file itself if nothing changed."""
    manifest = restorable(c, "safetensors")
    own_names = names_of_source(c, manifest)
    tensors = _hf_tensors(c, work.options.dtype, work.losses, own_names)
    work.losses.others += dropped_files_loss(c, "a safetensors file cannot hold other files")
    if manifest is not None and _keeps_all(c, tensors, own_names) and len(manifest.files) == 1:
        return Output([replace(manifest.layouts()[0], name=work.name)], tensors, lossless=True)
    own = c.model.native_as(SafetensorsNative)
    metadata = own.metadata if own is not None else {"format": "pt"}
    return Output([FileLayout(work.name, safetensors.layout(tensors, metadata))], tensors)


def _hf_tensors(
    c: Canonical, dtype: str, losses: Losses, own_names: Mapping[str, str], packed: PackedModules | None = None
) -> list[OutTensor]:
    """The tensors of a safetensors export: Hugging Face names (if a source had others, `own_names`), floats as `dtype`;
    quantized blocks become F16, except those that go into `packed` unchanged.

    Only tensors of two or more dimensions become 8-bit floats; biases and norms keep their dtype. Raises RefusedError
    for dtypes that safetensors lacks.
    """
    wanted = plain_dtype(dtype, EIGHT_BITS)
    if wanted is not None and DTYPES[wanted].safetensors is None:
        raise RefusedError(
            f"safetensors has no dtype {wanted}",
            path=c.model.path,
            hint="use --dtype f32, f16 or bf16, or export to GGUF",
        )
    drafts, others = (named_drafts(c), {}) if from_gguf(c) and c.arch is not None else ({}, c.extras)
    towers = {name: t for name, t in c.extras.items() if c.tower.has(name)} if c.tower is not None else {}
    of_towers = {t.name: t for t in hf_side(c.tower.row if c.tower is not None else None, towers)}
    others = others | of_towers
    stay = {name: t for name, t in c.extras.items() if name not in (*drafts, *others, *towers)}
    for part in replace(c, extras=stay).extra_parts():
        losses.add(f"{part} dropped: they have no Hugging Face names")
    out = []
    for tensor in (*hf_side(c.arch, c.tensors | drafts), *others.values()):
        is_kept = tensor.name in others and tensor.name not in of_towers
        target = extra_dtype(tensor, dtype) if is_kept else _dtype(tensor, wanted)
        name = own_name(c, tensor.name, own_names)
        if wanted is None and packed is not None and not is_kept and (parts := packed.outs(tensor, name, losses)):
            out += parts
            continue
        losses.note(tensor.original_dtype, target)
        out.append(tensor.out(name, target, overflow=losses.overflow))
    return out


def _like_stack(name: str, stack: str, spelled: str) -> str:
    """The canonical name of an expert with the prefix that the source has, which spells the name of its stack so."""
    kept = next(n for n in range(len(stack), -1, -1) if spelled.endswith(stack[len(stack) - n :]))
    return spelled[: len(spelled) - kept] + name.removeprefix(stack[: len(stack) - kept])


def own_name(c: Canonical, name: str, own_names: Mapping[str, str]) -> str:
    """The checkpoint name of the tensor `name`: that of the source, else that of the family."""
    if name in own_names or c.arch is None:
        return own_names.get(name, name)
    if c.tower is not None and not own_names:
        return name if name in c.extras else c.tower.text_name(name)
    return names.draft_spelling(c.arch, c.hparams, name)


def _dtype(tensor: CanonicalTensor, wanted: str | None) -> str:
    row = DTYPES[tensor.dtype]
    is_float = row.name in _TORCH_NAMES or row.kind != "plain"
    if wanted is not None and is_float and (wanted not in EIGHT_BITS or len(tensor.shape) > 1):
        return wanted
    return tensor.dtype if row.safetensors is not None and not tensor.is_decoded else "F16"


def _keeps_all(c: Canonical, tensors: list[OutTensor], own_names: Mapping[str, str]) -> bool:
    """Whether every tensor keeps its name and dtype."""
    own = {own_name(c, name, own_names): tensor.dtype for name, tensor in c.all_tensors.items()}
    return all(own.get(t.name) == t.dtype for t in tensors) and not c.packs.decoded
