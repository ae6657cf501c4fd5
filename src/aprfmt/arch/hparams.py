"""Hyper-parameters: one engine reads and writes them as config.json, GGUF keys and APR metadata.

A row's `keys` say which spellings mean the same number, its converters convert values that differ. Every reader fills
one Hyperparams, every writer reads it:

    config.json   each key by its spellings, else the row's default; `normalize` (what needs all keys), then `fill`
    GGUF          sizes first, since per-head and per-layer values need them; then the rest; then `fill`
    APR           typed fields and their aliases, `aprfmt.hparams`; then defaults, then `fill`
"""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Collection, Mapping, Sized
from dataclasses import replace

from aprfmt.arch import rope
from aprfmt.arch.converter import GgufKeys, Scope, check_layers, converter_of, flattened, language_part, look_up
from aprfmt.arch.converters import common
from aprfmt.arch.fields import (
    OTHER_FORMAT,
    GgufKey,
    Misfit,
    as_float,
    as_id,
    as_int,
    as_mapping,
    as_text,
    config_value,
    converter_value,
    plain_value,
    typed_key,
)
from aprfmt.arch.heads import EVEN_HEADS, MODULE_KEYS, head_of
from aprfmt.arch.hyperparams import FIELDS, Hyperparams
from aprfmt.arch.projectors import MAP, TARGETS
from aprfmt.arch.row import (
    HAS_TENSORS,
    HEAD,
    HEAD_DIM,
    MOST,
    OF_TENSOR,
    OPTIONAL,
    OUTPUT,
    OWN,
    REQUIRED,
    ROPE,
    ROTARY_DIM,
    SHARED_ROTARY_DIM,
    WINDOW,
    Architecture,
    Key,
)
from aprfmt.arch.scopes import (
    TOKEN_IDS,
    defaults_of,
    derive_heads,
    drafts_key,
    fill,
    full_key,
    keys_of,
    read_config,
    scopes_of,
    take,
)
from aprfmt.arch.table import ARCHITECTURES, find, find_gguf
from aprfmt.arch.zero_biases import stated_switches
from aprfmt.errors import CorruptError, RefusedError, UnmappedError

EXTRA_KEY = "aprfmt.hparams"
"""APR metadata key for values without a typed field."""

_UNKNOWN_KEYS: tuple[Key, ...] = (
    *(
        Key(f.gguf, (*f.hf, *f.rare), f.kind, f.name, converter=common.head_dim if f.name == "head_dim" else None)
        for f in FIELDS
        if f.name != "rope_theta"
    ),
    Key("rope", converter=common.rope_keys),
    Key("attention.sliding_window", ("sliding_window",), converter=common.window),
)
_UNKNOWN = Architecture("", "", "", "", (), (), (), _UNKNOWN_KEYS)
"""Placeholder for an architecture that the table does not have."""

_REQUIRED = (
    "num_layers", "max_position_embeddings", "hidden_size", "intermediate_size", "num_heads", "rms_norm_eps",
)  # fmt: skip
# Model types that no transformers class registers.
_MODEL_TYPE_OF = {"smollm": "llama", "smollm2": "llama"}
_OF_ASSISTANTS = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
_OF_THE_WHOLE = (
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
    "quantization_config", "model_type", "vision_config", "image_token_id", MAP, TARGETS, *_OF_ASSISTANTS,
)  # fmt: skip
_STRUCTURAL = frozenset((ROPE, ROTARY_DIM, SHARED_ROTARY_DIM, HEAD_DIM))
_LAYER = re.compile(r"\.\d+\.")


def _row_of(h: Hyperparams) -> Architecture | None:
    row = find(hf_class=h.hf_architecture, model_type=h.hf_model_type, config=h.extra)
    return row or ARCHITECTURES.get(h.architecture or "") or find(gguf=h.architecture)


# --- config.json ---


def from_hf_config(config: Mapping[str, object], row: Architecture | None = None) -> Hyperparams:
    """Hyper-parameters of a config.json; absent keys get their model type's defaults. Raises CorruptError.

    The language model's part of a multimodal config is used (`extra["text_of"]` is then its model type). A per-layer
    list for a typed field is kept in `extra` under its config name, and the field is the common value, None if layers
    differ. With `row` it is read as that family's.
    """
    config, hf_class = flattened(config), first_class(config)
    whole, whole_type = config, as_text(config.get("model_type"))
    part = language_part(config)
    if part:  # the language model of a multimodal one, with values that only the whole states
        config = {**{key: config[key] for key in _OF_THE_WHOLE if key in config}, **part}
    text_type = as_text(config.get("model_type"))
    row = row or find(
        hf_class=hf_class,
        model_type=whole_type,
        config=config,
        part_class=first_class(part),
        part_type=as_text(part.get("model_type")),
    )
    h = Hyperparams(hf_architecture=hf_class, hf_model_type=text_type or whole_type)
    h.architecture = row.id if row else h.hf_model_type
    defaults = defaults_of(row, text_type, whole_type)
    scopes = scopes_of(h, row or _UNKNOWN, defaults)
    read_config(scopes, config, defaults)
    fill(h, scopes)
    rope.read(h, config, defaults, row)
    h.rope_type = row.rope_type if row else None
    full = {**defaults, **config}
    dtype = full.get("dtype", full.get("torch_dtype"))
    if isinstance(dtype, str):
        h.extra["dtype"] = dtype
    if text_type != whole_type and whole_type:
        h.extra["text_of"] = whole_type
    tied = full.get("tie_word_embeddings")
    # If the whole and its part differ, it depends on the class and its version; the tensors tell.
    agreed = whole.get("tie_word_embeddings", tied) == tied
    h.tied = tied if agreed and isinstance(tied, bool) else None
    if head_of(hf_class) is not None:
        h.extra |= {key: config[key] for key in ("id2label", "num_labels") if key in config and key not in h.extra}
    # null is not an absent key here: some classes have a default that a small vocabulary lacks.
    if "pad_token_id" in config:
        h.extra["pad_token_id"] = config["pad_token_id"]
    _set_token_ids(h, full)
    if (limits := _step_limits(config)) is not None:
        h.extra[STEP_LIMITS] = limits
    return h


STEP_LIMITS = "time_step_limit"


def _step_limits(config: Mapping[str, object]) -> list[float] | None:
    """The time step limits of a state space model; None if unlimited."""
    limits = config.get(STEP_LIMITS)
    if isinstance(limits, list):  # transformers writes what JSON lacks as {"__float__": "Infinity"}
        limits = [math.inf if n == {"__float__": "Infinity"} else n for n in limits]
    if not isinstance(limits, list) or len(limits) != 2 or not all(isinstance(n, int | float) for n in limits):
        return None
    low, high = limits
    return None if low <= 0 and high == math.inf else [min(float(n), _LARGEST_STEP) for n in (low, high)]


_LARGEST_STEP = 1e30
"""Represents infinity, which JSON does not have."""


def first_class(config: Mapping[str, object]) -> str | None:
    """The first class in a config.json."""
    classes = config.get("architectures")
    return as_text(classes[0]) if isinstance(classes, list) and classes else None


def with_target(h: Hyperparams, row: Architecture | None, target: Mapping[str, object]) -> Hyperparams | None:
    """`h` of a draft model, completed from its target model's config.json; None if `row` is not a draft model's."""
    if row is None or not any(converter_of(key).from_target for key in row.keys):
        return None
    h = replace(h, extra=dict(h.extra))
    target = {**target, **language_part(target)}
    for scope in scopes_of(h, row, defaults_of(row, h.hf_model_type)):
        convert = converter_of(scope.key).from_target
        if convert is not None and scope.value is None:
            scope.put(convert(target, scope))
    return h


def set_by_tensors(h: Hyperparams, row: Architecture, names: Collection[str]) -> None:
    """Sets the switches that neither a config.json nor a GGUF need to state, from the checkpoint's tensors."""
    for name in _told_by_tensors(row):
        h.extra[name] = any(hf in names for tensor in row.tensors if tensor.need == name for hf in tensor.hf)


def _told_by_tensors(row: Architecture) -> set[str]:
    return {key.hf[0] for key in row.keys if key.role == HAS_TENSORS}


def to_hf_config(h: Hyperparams, row: Architecture | None = None, *, complete: bool = True) -> dict[str, object]:
    """A config.json that transformers 4 and 5 load, sorted.

    Raises UnmappedError, and RefusedError for missing sizes; with `complete` False these are left out.
    """
    row = row or _row_of(h)
    if row is None:
        raise UnmappedError(f"architecture {h.architecture!r} has no Hugging Face class in the architecture table")
    missing = [*missing_sizes(h, row)] + (["vocab_size"] if h.vocab_size is None else [])
    if missing and complete:
        raise RefusedError(f"a config.json needs {', '.join(missing)}, which the source lacks")
    hf_class, model_type = hf_identity(h, row)
    if complete and hf_class in row.other_names:
        hf_class, model_type = row.hf_class, row.model_type
    if complete and model_type in EVEN_HEADS and h.hidden_size and h.num_heads and h.hidden_size % h.num_heads:
        raise RefusedError(
            f"transformers' {hf_class} needs a hidden_size that is a multiple of num_attention_heads: "
            f"{h.hidden_size} is not a multiple of {h.num_heads}",
            hint="keep the GGUF, or convert it with -o NAME.apr",
        )
    # The row's keys, then everything else in `extra`; null if absence would mean something else.
    defaults = defaults_of(row, model_type)
    config: dict[str, object] = {}
    done = {"rope_scaling", "rope_layers", "partial_rotary_factor", "text_of", "head_dim", *_told_by_tensors(row)}
    for scope in scopes_of(h, row, defaults):
        key = scope.key
        if key.role == OF_TENSOR:
            done.add(key.hf[0])
        if not key.hf or key.role in (ROPE, ROTARY_DIM, SHARED_ROTARY_DIM, HAS_TENSORS, OF_TENSOR):
            continue
        name = key.hf[0]
        value = h.extra.get(name)
        value = value if isinstance(value, list) or not key.field else getattr(h, key.field)
        if key.role == HEAD_DIM and not common.head_dim_is_named(scope):
            continue
        done.add(name)
        default, _ = look_up(defaults, key.hf)
        if value is not None or ((name in h.extra or default is not None) and not key.field):
            set_path(config, name, False if value is None and isinstance(default, bool) else value)
    for name, value in h.extra.items():
        if name not in done:
            set_path(config, name, value)
    if any(key.role == ROPE for key in row.keys):
        config |= rope.to_hf(h, row, defaults)
    config |= {
        "architectures": [hf_class],
        "model_type": model_type,
        "tie_word_embeddings": bool(h.tied),
        "bos_token_id": h.bos_token_id,
        "eos_token_id": h.extra.get("eos_token_id", h.eos_token_id),
    }
    config = {name: value for name, value in config.items() if not MODULE_KEYS.fullmatch(name)}
    return dict(sorted(_inside({**config, **row.config}, h, row).items()))


def _inside(config: dict[str, object], h: Hyperparams, row: Architecture) -> dict[str, object]:
    """`config` nested as the row's classes have it."""
    key, own_type = row.inside
    if not key:
        return config
    whole = {name: config.pop(name) for name in ("architectures", "model_type", *_OF_ASSISTANTS) if name in config}
    own_type = h.hf_model_type if h.hf_model_type and h.hf_model_type in row.defaults else own_type
    return {**whole, "tie_word_embeddings": config["tie_word_embeddings"], key: {**config, "model_type": own_type}}


def set_path(config: dict[str, object], name: str, value: object) -> None:
    """Sets "a.b" as b of the object a."""
    parent, dot, rest = name.partition(".")
    if not dot:
        config[name] = value
        return
    inner = config.setdefault(parent, {})
    if not isinstance(inner, dict):
        raise CorruptError(f"{parent} is not an object")
    set_path(inner, rest, value)


def missing_sizes(h: Hyperparams, row: Architecture) -> dict[str, str]:
    """Sizes that the row requires and the source lacks, with their config.json keys."""
    named = {
        key.field: key.hf[0]
        for key in row.keys
        if key.field in _REQUIRED and key.constant is None and key.hf and key.converter is None
    }
    sizes = (name for name in _REQUIRED if name in named and getattr(h, name) is None)
    return {name: named[name] for name in sizes if named[name] not in h.extra}


def hf_identity(h: Hyperparams, row: Architecture) -> tuple[str, str]:
    """(class, model type) of the network's config.json: the source's own, else those of its `row`."""
    model_type = h.hf_model_type or row.model_type
    if row.inside[0]:
        whole_type = h.extra.get("text_of", row.model_type)
        return h.hf_architecture or row.hf_class, str(whole_type)
    if "text_of" in h.extra:
        named = _class_named(row, model_type)
        return (named, model_type) if named else (row.hf_class, row.model_type)
    hf_class = h.hf_architecture or (h.hf_model_type and _class_named(row, h.hf_model_type)) or row.hf_class
    return hf_class, _MODEL_TYPE_OF.get(model_type, model_type)


def _class_named(row: Architecture, model_type: str) -> str | None:
    """The class of the row whose name matches the model type."""

    def plain(name: str) -> str:
        return name.replace("_", "").lower()

    wanted = plain(f"{model_type.replace('_text', '')}ForCausalLM")
    return next((name for name in row.hf_classes if plain(name) == wanted), None)


def _set_token_ids(h: Hyperparams, source: Mapping[str, object]) -> None:
    for key in TOKEN_IDS:
        value = source.get(key)
        setattr(h, key, as_id(value, key))
        if isinstance(value, list) and value:
            h.extra[key] = value


# --- GGUF ---


def from_gguf(
    kv: Mapping[str, object], tensor_names: Collection[str] = (), row: Architecture | None = None
) -> Hyperparams:
    """Hyper-parameters of GGUF key-value pairs; `tensor_names` tell ties and biases. Raises CorruptError.

    With `row` they are read as that family's.
    """
    word = as_text(kv.get("general.architecture"))
    row = row or find_gguf(kv, tensor_names)
    h = Hyperparams(architecture=row.id if row else word, rope_type=row.rope_type if row else None)
    known = row or replace(_UNKNOWN, gguf=word or "")
    kv = _without_drafts(kv, known)
    flags = _flags_of(known, tensor_names) | dict.fromkeys(stated_switches(kv, known), False)
    defaults = defaults_of(row)
    scopes = [Scope(h, known, key, defaults, kv, tensor_names) for key in keys_of(known, defaults)]
    for scope in scopes:
        if scope.key.field:
            take(scope, _gguf_value(scope, flags))
    derive_heads(h)
    for scope in scopes:
        if not scope.key.field:
            take(scope, _gguf_value(scope, flags))
    fill(h, scopes)
    if h.vocab_size is None and isinstance(tokens := kv.get("tokenizer.ggml.tokens"), Sized):
        h.vocab_size = len(tokens)
    bos, eos, pad = (
        as_id(kv.get(key), key) for key in (f"tokenizer.ggml.{x}_token_id" for x in ("bos", "eos", "padding"))
    )
    h.bos_token_id, h.eos_token_id = bos, eos if eos is not None else h.eos_token_id
    if row is not None:
        h.extra["pad_token_id"] = pad
    if tensor_names and not {"output.weight", "token_embd.weight"}.isdisjoint(tensor_names):
        h.tied = "output.weight" not in tensor_names
    return h


def _without_drafts(kv: Mapping[str, object], row: Architecture) -> Mapping[str, object]:
    """`kv` with the network's own layers only: a GGUF's layer count includes MTP layers, which come last."""
    if not drafts_key(row).hf:  # a network of MTP layers only
        return kv
    count_key, drafts_name = full_key(row, "block_count"), full_key(row, "nextn_predict_layers")
    layers, drafts = (as_int(kv.get(key), key) for key in (count_key, drafts_name))
    if not layers or not drafts:
        return kv
    if drafts > layers:
        raise CorruptError(f"{drafts_name} is {drafts}, but the network has {layers} layers")
    prefix, n = f"{row.gguf}.", layers - drafts
    values = {key: kv[key] for key in kv if key.startswith(prefix)}
    whole = {full_key(row, "rope.dimension_sections"), *(full_key(row, k.gguf) for k in row.keys if k.draft == OWN)}
    lists = {key: value for key, value in values.items() if isinstance(value, list) and key not in whole}
    own = {key: value[:n] for key, value in lists.items() if len(value) == layers}
    return ChainMap({**own, count_key: n}, kv)  # type: ignore[arg-type]  # it is only read


def _gguf_value(scope: Scope, flags: Mapping[str, bool]) -> object:
    """The GGUF's value of a key in terms of config.json, converted by the key's converter."""
    key = scope.key
    if key.constant is not None:
        return key.constant
    if key.hf and key.hf[0] in flags:
        return flags[key.hf[0]]
    name = full_key(scope.row, key.gguf)
    value = scope.kv.get(name) if key.gguf else None
    if key.converter is not None:
        value = converter_value(name, key.kind, value)
    else:
        value = plain_value(name, value)
        if isinstance(value, list) and value and not key.kind.endswith("[]"):
            value = value[0] if value.count(value[0]) == len(value) else value  # the same of every layer: a number
        value = config_value(name, key.kind, value)
    return converter_of(key).from_gguf(value, scope)


def _flags_of(row: Architecture, names: Collection[str]) -> dict[str, bool]:
    """Config switch -> whether the tensors that need it are present; {} if the tensors are unknown."""
    if not names:
        return {}
    present = {_LAYER.sub(".{n}.", name, count=1) for name in names}
    flags: dict[str, bool] = {}
    for tensor in row.tensors:
        need = tensor.need.removesuffix(f"&{OUTPUT}")
        if need not in (REQUIRED, OPTIONAL, HEAD, OUTPUT):
            flags[need] = flags.get(need, False) or any(name in present for name in tensor.gguf)
    return {
        key.hf[0]: flags[key.hf[0]]
        for key in row.keys
        if key.hf and key.hf[0] in flags and key.kind == "bool" and not key.gguf
    }


def to_gguf(
    h: Hyperparams,
    arch: Architecture,
    *,
    vocab_size: int | None = None,
    file_type: int | None = None,
    complete: bool = True,
    misfits: bool = False,
) -> list[GgufKey]:
    """The architecture's GGUF keys, in the order of its row.

    `vocab_size` replaces the field. `file_type` (llama.cpp's enum value) adds `general.file_type` after the head sizes,
    else last, like llama.cpp's converter. Raises RefusedError for values that are missing or that a GGUF cannot
    express; with `complete` False they are left out. A value that its key cannot store is refused too; with `misfits`
    it is a Misfit.
    """
    missing = [*missing_sizes(h, arch)]
    if missing and complete:
        raise RefusedError(
            f"a GGUF needs {', '.join(missing)}, which the source lacks",
            hint=f"set it first: apr stamp FILE --set {missing[0]}=VALUE -o OUT.apr",
        )
    if vocab_size is not None:
        h = replace(h, vocab_size=vocab_size)
    defaults = defaults_of(arch, h.hf_model_type)
    out: dict[str, GgufKey] = {}
    lists: dict[str, object] = {}
    late: list[GgufKey] = [("general.file_type", "UINT32", file_type)] if file_type is not None else []
    for key in arch.keys:
        try:
            value = _gguf_side(Scope(h, arch, key, defaults))
        except RefusedError:
            if complete:
                raise
            continue
        if not isinstance(value, GgufKeys):
            value = GgufKeys({key.gguf: (key.kind, value)} if value is not None and key.gguf else {})
        for suffix, (kind, item) in value.items():
            name = full_key(arch, suffix)
            try:
                pair = typed_key(name, kind, item)
                if key.converter is not None:
                    converter_value(name, kind, item)  # refused here rather than by a reader
            except (CorruptError, RefusedError) as error:
                if not misfits:
                    raise
                pair = (name, "STRING", Misfit(item, error))
            out.setdefault(name, pair)
            lists.setdefault(name, key.draft)
        if key.role == HEAD_DIM:
            out |= {pair[0]: pair for pair in late}
            late = []
    count, drafts = (full_key(arch, suffix) for suffix in ("block_count", "nextn_predict_layers"))
    own_layers = as_int(out[count][2], count) if count in out and not isinstance(out[count][2], Misfit) else None
    if own_layers is not None:
        counts = drafts in out and bool(drafts_key(arch).hf) and not isinstance(out[drafts][2], Misfit)
        n_drafts = (as_int(out[drafts][2], drafts) or 0) if counts else 0
        out[count] = (count, out[count][1], own_layers + n_drafts)
        listed = {name: draft for name, draft in lists.items() if draft is not None}
        listed = {name: h.extra.get(str(draft), draft) for name, draft in listed.items()}
        out |= {name: _with_drafts(out[name], own_layers, n_drafts, draft) for name, draft in listed.items()}
    return [*out.values(), *late]


def _with_drafts(pair: GgufKey, layers: int, drafts: int, value: object) -> GgufKey:
    """A per-layer list, completed by the values of the MTP layers (see Key.draft)."""
    name, kind, items = pair
    if not isinstance(items, list) or len(items) < layers:
        return pair
    if value == OWN:
        padding = [type(items[0])()] * (layers + drafts - len(items)) if items else []
        return name, kind, [*items[: layers + drafts], *padding]
    value = max(items, default=0) if value == MOST else value
    return name, kind, [*items[:layers], *[value] * drafts]


def _gguf_side(scope: Scope) -> object:
    """The value of a GGUF's key, or several keys.

    Raises RefusedError if a config contradicts the value that the family's GGUFs imply.
    """
    key, value = scope.key, scope.value
    allowed = key.allowed if key.constant is None else (key.constant,)
    if allowed and value is not None and ("silu" if value == "swish" else value) not in allowed:
        known = " or ".join(map(repr, allowed[:2]))
        raise RefusedError(
            f"{scope.name} is {value!r:.40}; a GGUF of architecture {scope.row.gguf!r} implies {known}",
            hint=OTHER_FORMAT,
        )
    unused = key.role == WINDOW and scope.config("use_sliding_window") is False
    if value == 0 and value is not False and key.gguf in _ZERO_IS_NONE and not unused:
        raise RefusedError(f"{scope.name} is 0; llama.cpp treats a {key.gguf} of 0 as absent", hint=OTHER_FORMAT)
    return converter_of(key).to_gguf(value, scope) if key.constant is None else key.constant


_ZERO_IS_NONE = frozenset((
    "attention.scale", "attention.sliding_window", "attention.value_scale", "embedding_scale", "expert_weights_scale",
    "final_logit_softcapping", "logit_scale", "residual_scale",
))  # fmt: skip
"""Factors and windows that llama.cpp's graphs apply unless they are 0."""


# --- APR metadata ---


def from_apr(metadata: Mapping[str, object]) -> Hyperparams:
    """Hyper-parameters of APR metadata: typed fields, aliases, `to_apr`'s own, the reference's `hf_config`.

    Aliases of a wrong type are ignored, as in the reference. Raises CorruptError for bad typed fields.
    """
    stored = metadata.get("hf_config")
    base = from_hf_config(stored) if isinstance(stored, Mapping) else Hyperparams()
    h = Hyperparams(extra=base.extra, tied=base.tied)
    for name in ("architecture", "hf_architecture", "hf_model_type"):
        setattr(h, name, as_text(metadata.get(name)) or getattr(base, name))
    ours = dict(as_mapping(metadata.get(EXTRA_KEY)))
    row = find(
        hf_class=h.hf_architecture,
        model_type=h.hf_model_type or h.architecture,
        gguf=h.architecture,
        config=ours or base.extra,
    )
    row = row or ARCHITECTURES.get(h.architecture or "")
    h.architecture = row.id if row else h.architecture
    for f in FIELDS:
        value = metadata.get(f.name)
        if value is None:
            aliases = (metadata.get(key) for key in f.aliases)
            numbers = (v for v in aliases if isinstance(v, int | float) and not isinstance(v, bool))
            value = next(numbers, getattr(base, f.name))
        setattr(h, f.name, (as_float if f.kind == "f32" else as_int)(value, f.name))
    h.rope_type = as_int(metadata.get("rope_type"), "rope_type")
    tied = metadata.get("tied_embeddings")
    h.tied = tied if isinstance(tied, bool) else base.tied
    if not isinstance(ours.get("rope_scaling", {}), Mapping):
        raise CorruptError(f"{EXTRA_KEY}: rope_scaling is not an object")
    _set_token_ids(h, {key: ours.pop(key, metadata.get(f"tokenizer.{key}")) for key in TOKEN_IDS})
    h.extra |= ours
    derive_heads(h)
    if row is None:
        return h
    # A key missing in an .apr has transformers' default; but without a window there is none.
    check_layers(h)
    defaults = defaults_of(row, h.hf_model_type)
    scopes = scopes_of(h, row, defaults)
    for scope in scopes:
        key = scope.key
        if not key.field and key.hf and key.role not in _STRUCTURAL and key.hf[0] not in h.extra:
            value = None if key.role == WINDOW else look_up(defaults, key.hf)[0]
            scope.put(key.constant if value is None else value)
    fill(h, scopes)
    return h


def to_apr(h: Hyperparams) -> dict[str, object]:
    """APR metadata: typed fields, `tied_embeddings`, the rest under `aprfmt.hparams`; no nulls."""
    extra = {key: getattr(h, key) for key in TOKEN_IDS if getattr(h, key) is not None} | h.extra
    out = {
        "architecture": h.hf_model_type or h.architecture, "hf_architecture": h.hf_architecture,
        "hf_model_type": h.hf_model_type, "rope_type": h.rope_type, **{f.name: getattr(h, f.name) for f in FIELDS},
        "tied_embeddings": h.tied, EXTRA_KEY: extra or None,
    }  # fmt: skip
    return {key: value for key, value in out.items() if value is not None}


def active_window(h: Hyperparams) -> int | None:
    """The sliding attention window in positions; None if the network has none or does not use it."""
    defaults = defaults_of(_row_of(h), h.hf_model_type)
    used = h.extra.get("use_sliding_window", defaults.get("use_sliding_window"))
    sizes = (as_int(h.extra.get(name), name) for name in ("sliding_window", "attention_window_size"))
    return None if used is False else next(filter(None, sizes), None)
