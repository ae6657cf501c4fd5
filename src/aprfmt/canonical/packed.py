"""Quantized weights of Hugging Face checkpoints (FP8, GPTQ, AWQ, ...): carried as stored, or dequantized on read.

A quantized weight is several stored tensors: codes, scales, zero points. They are found by name here, and the weight
becomes one lazy tensor that dequantizes what is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

from aprfmt.arch import names
from aprfmt.arch.converter import language_part
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.row import Architecture
from aprfmt.codecs import plain
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.codecs.packed import FLOATS_BY_TORCH, Decoded, PackedBlocks, Scheme, TensorScales, weight_arguments
from aprfmt.codecs.packed_schemes import METHODS, SCHEMES
from aprfmt.codecs.stream import STEP
from aprfmt.errors import CorruptError, RefusedError
from aprfmt.formats.hf_files import parse_object, read_text_file
from aprfmt.formats.hfdir import HfNative
from aprfmt.io.source import is_file
from aprfmt.model import Model, Tensor
from aprfmt.text import plural
from aprfmt.types import Shape

HF_QUANT = "hf_quant_config.json"

UNPACK_HINT = "dequantize it with the tool that quantized it, or keep it quantized with --dtype keep"
_ORIGINAL = "convert the model that it was quantized from (base_model in its README.md)"
_WAYS = {
    "auto-round": f"{_ORIGINAL}, or export it from auto-round with --format auto_gptq; --dtype keep keeps it quantized",
    "quark": f"{_ORIGINAL}; --dtype keep keeps it quantized",
    "torchao": f"{_ORIGINAL}, or load it with torchao and save weight.dequantize() of each module; "
    "--dtype keep keeps it quantized",
}
"""Method -> what to do if it is not supported."""
_CONFIG_HINT = "download config.json and the weights again, from the same revision"

_CT_FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
               "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")  # fmt: skip
_ACCEPTED: dict[str, dict[str, tuple[str, ...]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2"), "pack_dtype": ("int32",)},
    "modelopt": {"quant_algo": ("FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN")},
}
"""Supported settings by method."""
_KEYS = ("quantization_config", "compression_config", "quantization")

# Suffixes that only parts of quantized weights have; none may be left when all weights are found.
_MARKS = (
    ".qweight", ".qzeros", ".scales", ".biases", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv",
    ".weight_scale_2", ".weight_global_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx",
    ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4",
    ".SCB", ".weight_format", ".pre_quant_scale", "_proj_scale_inv", "_proj_blocks", "_proj_scales",
)  # fmt: skip

# Scales of activations and of the KV cache: a dequantized model computes these in floats and does not need them.
_ASIDE = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale",
    "_activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale",
)  # fmt: skip

_STORED_PACKED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I32", "U32")
_MLX_METHOD = "mlx"


@dataclass(frozen=True, slots=True)
class PackedForm:
    """What quantized weights have in common; most of those of a large model share one form.

    Attributes:
        scheme, settings: how to dequantize them.
        endings: suffixes of its stored tensors, as the scheme spells them.
        shape: row-major, of the dequantized weight.
        dtype: before quantization.
    """

    scheme: Scheme
    settings: Mapping[str, object]
    endings: tuple[str, ...]
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight of a quantized checkpoint as a lazy tensor: dequantized on read, in little memory.

    Attributes:
        name: its Hugging Face name, "model.layers.0.mlp.up_proj.weight".
        dtype: F32, F16 or BF16: the dtype before quantization, or the requested one; that of `blocks` if set.
        form: its scheme, shape and settings.
        sources: the stored tensors, in the order of the form's endings.
        values: returns the values; None for a form of which only shapes are needed: made on read.
        blocks: returns GGML blocks with the same codes and scales, which are then the tensor's bytes.
    """

    name: str
    dtype: str
    form: PackedForm
    sources: tuple[Tensor, ...]
    values: Decoded | None = None
    blocks: PackedBlocks | None = None

    @property
    def shape(self) -> Shape:
        """Row-major, of the decoded weight."""
        return self.form.shape

    @property
    def scheme(self) -> str:
        """Name for messages, "FP8"."""
        return self.form.scheme.label

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return tuple(source.name for source in self.sources)

    @property
    def is_stored(self) -> bool:
        """Whether the blocks are stored as they are in a source."""
        return self.blocks is not None and self.sources[0].dtype == self.dtype

    @property
    def scales(self) -> TensorScales:
        """The tensor scales that its blocks need."""
        return self.blocks.scales if self.blocks is not None else {}

    @property
    def decoded(self) -> Decoded:
        """Dequantizes the values."""
        form = self.form
        return self.values or form.scheme.decode(dict(zip(form.endings, self.sources, strict=True)), form.settings)

    @property
    def n_bytes(self) -> int:
        """Bytes once dequantized."""
        return DTYPES[self.dtype].n_bytes(self.shape)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value of the dequantized weight, scales included."""
        return 8 * sum(source.n_bytes for source in self.sources) / max(1, n_elements(self.shape))

    def decoded_source(self) -> PackedTensor:
        """The weight as values instead of blocks, in its dtype before quantization."""
        return replace(self, dtype=self.form.dtype, blocks=None) if self.blocks is not None else self

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the dequantized weight."""
        size, end = DTYPES[self.dtype].block_bytes, offset + len(buffer)
        done, decoded = 0, self.decoded
        step = decoded.step // DTYPES[self.dtype].block if self.blocks is not None else STEP
        for start in range(offset // size, -(-end // size), step):
            stop = min(start + step, -(-end // size))
            if self.blocks is not None:
                data = memoryview(self.blocks.between(start, stop))
            else:
                data = plain.encode(self.dtype, decoded.between(start, stop)).view("u1").data
            part = data[max(0, offset - start * size) : end - start * size]
            buffer[done : done + len(part)] = part
            done += len(part)


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to treat quantized weights.

    Attributes:
        decode: whether to dequantize them at all.
        dtype: to which dtype, before any conversion; None: the one before quantization.
        keep_blocks: whether to keep weights quantized that a GGUF of this architecture stores unchanged.
        keep_scales: whether blocks may have a separate tensor scale.
        keep_stored: whether to keep the blocks of a source that have one.
    """

    decode: bool = False
    dtype: str | None = None
    keep_blocks: bool = False
    keep_scales: bool = True
    keep_stored: bool = False


AS_STORED = Decoding()
AS_VALUES = Decoding(decode=True, dtype="F32")


BlockChange = TypedDict("BlockChange", {"tensor": str, "from": str, "to": str, "largest_relative_change": float})
"""A weight with kept codes and rounded scales: the change of a value relative to the largest of its block."""


@dataclass(frozen=True)
class Packing:
    """The quantized weights of a model.

    Attributes:
        weights: each of them, as a lazy tensor.
        parts: names of their stored tensors, and of those that only a quantized model needs.
        decoded: whether the output gets the dequantized weights.
        warning: for the user, None if nothing.
    """

    weights: Sequence[PackedTensor] = ()
    parts: frozenset[str] = frozenset()
    decoded: bool = False
    warning: str | None = None

    @cached_property
    def by_first_part(self) -> dict[str, PackedTensor]:
        """The quantized weights by the name of their first part, which they replace."""
        return {weight.sources[0].name: weight for weight in self.weights}

    def losses(self) -> list[str]:
        """A sentence per scheme for the report of an output with dequantized weights."""
        counts = Counter(w.scheme for w in self.weights if w.blocks is None) if self.decoded else {}
        sentences = [f"{n} tensors decoded from {scheme}" for scheme, n in sorted(counts.items())]
        return sentences + change_sentences(self.changes())

    def changes(self) -> list[BlockChange]:
        """The weights whose blocks have the codes of the checkpoint, but rounded scales."""
        found = [(w, w.blocks) for w in self.weights if self.decoded and w.blocks is not None and w.blocks.change]
        return [
            BlockChange({"tensor": w.name, "from": w.scheme, "to": b.dtype, "largest_relative_change": b.change})
            for w, b in found
        ]


def change_sentences(changes: Sequence[BlockChange]) -> list[str]:
    """One sentence for each pair of types."""
    sentences = []
    for source, target in sorted({(change["from"], change["to"]) for change in changes}):
        own = [c["largest_relative_change"] for c in changes if (c["from"], c["to"]) == (source, target)]
        sentences.append(
            f"{plural(len(own), 'tensor')} converted from {source} to {target}, codes unchanged: "
            f"rounding the scales changes values by up to {max(own):.1e} of the largest value in their block"
        )
    return sentences


def packing(
    model: Model,
    row: Architecture | None,
    h: Hyperparams,
    decoding: Decoding,
    extra_names: Collection[str] = (),
    *,
    allow_unmapped: bool,
) -> Packing:
    """Plans how the quantized weights of `model` are carried; extra tensors, those of `extra_names`, in their natural
    dtype.

    Sets `h`'s quantization_config to the folder's, and removes it if the weights are dequantized. Raises RefusedError
    for weights that look quantized but are not supported, unless they are kept unmapped.
    """
    if model.convention == "gguf":
        return Packing()
    config = _config(model, h)
    try:
        weights = packed_weights(model.tensors, config, decoding.dtype if decoding.decode else None, extra_names)
    except RefusedError as error:
        if decoding.decode or not (allow_unmapped or model.convention == "apr"):
            raise
        return Packing(warning=f"quantized weights are kept as stored; they cannot be decoded: {error}")
    if row is not None and decoding.keep_blocks and any(one.pack for one in row.tensors):
        weights = [weight for weight in weights if not _has_row(row, h, weight)]
    if decoding.decode and decoding.keep_blocks and decoding.dtype is None:
        weights = [w if w.sources[0].name in extra_names else _as_blocks(w, decoding) for w in weights]
    if not weights:
        return Packing()
    used = {source.name for weight in weights for source in weight.sources}
    parts = frozenset(used.union(activation_scales(model.tensors, config)))
    if not decoding.decode:
        schemes = ", ".join(sorted({weight.scheme for weight in weights}))
        warning = (
            f"{len(weights)} weights are kept quantized ({schemes}); --dtype bf16, f16 or f32 dequantizes them, as "
            "does an export to GGUF (except MXFP4)"
        )
        return Packing(weights, parts, warning=warning)
    h.extra.pop("quantization_config", None)
    return Packing(weights, parts, decoded=True)


def _as_blocks(weight: PackedTensor, decoding: Decoding) -> PackedTensor:
    """The weight as GGML blocks, if they can hold its codes and scales unchanged."""
    blocks = weight.decoded.blocks()
    if blocks is None or (blocks.scales and not decoding.keep_scales):
        return weight
    return replace(weight, dtype=blocks.dtype, blocks=blocks)


def _has_row(row: Architecture, h: Hyperparams, weight: PackedTensor) -> bool:
    """Whether the family's table moves the parts to a GGUF unchanged."""
    spelled = (names.draft_name(row, h, part) or part for part in weight.parts)
    return all(any(match.row.pack for match in names.matches(row, part)) for part in spelled)


def _config(model: Model, h: Hyperparams) -> dict[str, object]:
    stored = {"quantization_config": h.extra.get("quantization_config"), "dtype": h.extra.get("dtype")}
    config = {key: value for key, value in stored.items() if value is not None}
    native = model.native_as(HfNative)
    if native is not None:
        path = native.folder / HF_QUANT
        hf_quant = parse_object(read_text_file(path), str(native.folder), HF_QUANT) if is_file(path) else None
        config = with_hf_quant({**model.metadata, **config}, hf_quant)
        if config.get("quantization_config") is not None:
            h.extra["quantization_config"] = config["quantization_config"]
    return config


def packed_weights(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, object],
    dtype: str | None = None,
    extra_names: Collection[str] = (),
) -> list[PackedTensor]:
    """The quantized weights among `tensors`, in their order; anything that is not in `parts` is an ordinary tensor.

    They are dequantized to `dtype`, if given, except those whose first part is in `extra_names`. `config` is
    config.json, see `with_hf_quant` for hf_quant_config.json. Shapes, groups and orders are checked here, values are
    read later. Raises RefusedError with scheme, tensor and hint for an unsupported scheme, a missing part, or parts
    that contradict each other or the config.
    """
    settings = settings_of(config)
    if settings is None:
        _refuse_undescribed(tensors)
        return []
    schemes = [scheme for scheme in SCHEMES if settings["quant_method"] in scheme.methods]
    stored_as = {dtype for scheme in schemes for dtype in scheme.dtypes}
    natural = natural_dtype(config)
    found, used = [], set[str]()
    forms: dict[object, PackedForm] = {}
    for name, tensor in tensors.items():
        match = _match(name, tensor, tensors, schemes, settings) if tensor.dtype in stored_as else None
        if match is None:
            continue
        scheme, base = match
        endings = (scheme.main, *scheme.needs, *(e for e in scheme.may if base + e in tensors))
        sources = tuple([tensors[base + ending] for ending in endings])
        alike = (scheme.needs, endings, *[(source.dtype, source.shape, source.n_bytes) for source in sources])
        form, values = forms.get(alike) if scheme.by_form else None, None
        if form is None:
            values = decode_weight(scheme, dict(zip(endings, sources, strict=True)), settings)
            form = PackedForm(scheme, settings, endings, values.shape, _dtype_of(values, sources, natural))
            if scheme.by_form:
                forms[alike], values = form, None
        made = base + scheme.result
        weight = PackedTensor(
            made, form.dtype if dtype is None or name in extra_names else dtype, form, sources, values
        )
        if made in tensors and made not in weight.parts:
            raise _refused(scheme, name, f"{made} is stored together with its quantized form")
        found.append(weight)
        used.update(weight.parts)
    _refuse_strays(tensors, used, settings)
    _refuse_absent(tensors, settings)
    return found


def decode_weight(scheme: Scheme, sources: Mapping[str, Tensor], settings: Mapping[str, object]) -> Decoded:
    """The weight that `scheme` dequantizes. Raises CorruptError for stored tensors of a wrong length, as its decoder
    does.
    """
    for source in sources.values():
        _check_size(source)
    return scheme.decode(sources, settings)


def _dtype_of(decoded: Decoded, sources: Sequence[Tensor], natural: str | None) -> str:
    """The dtype of a weight before quantization.

    If neither tensors nor config (`natural`) state it, the dtype of the scales: quantizers keep the model's.
    """
    scales = next((source.dtype for source in sources if source.dtype in ("F16", "BF16")), "F32")
    return decoded.dtype or natural or scales


def activation_scales(tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> list[str]:
    """Tensors that only serve quantized activations or caches: a dequantized model does not need them."""
    if settings_of(config) is None:
        return []
    return [name for name, t in tensors.items() if name.endswith(_ASIDE) and t.n_bytes <= 1 << 20]


def _match(
    name: str, tensor: Tensor, tensors: Mapping[str, Tensor], schemes: Sequence[Scheme], settings: Mapping[str, object]
) -> tuple[Scheme, str] | None:
    """The scheme that tensor `name` is the main part of, and the base name."""
    bases = []
    for scheme in schemes:
        if tensor.dtype in scheme.dtypes and name.endswith(scheme.main) and (scheme.main or not name.endswith(_MARKS)):
            base = name[: len(name) - len(scheme.main)]
            if all(base + ending in tensors for ending in scheme.needs):
                return scheme, base
            bases.append((scheme, base))
    if not bases or (len(tensor.shape) < 2 and bases[0][0].main in ("", ".weight")):
        return None
    scheme, base = bases[0]
    module = base.removesuffix(".weight")
    if scheme.main in ("", ".weight") and is_ignored(settings, module):
        return None
    missing = next(base + ending for ending in scheme.needs if base + ending not in tensors)
    raise _refused(scheme, name, f"{missing} is missing")


def _check_size(tensor: Tensor) -> None:
    """Raises CorruptError unless the tensor's byte count matches its dtype and shape."""
    row = DTYPES[tensor.dtype]
    if row.kind == "plain" and row.n_bytes(tensor.shape) != tensor.n_bytes:
        what = f"{tensor.n_bytes} bytes do not match {row.name} of shape {list(tensor.shape)}"
        raise CorruptError(what, path=tensor.source.path, tensor=tensor.name)


def _refuse_strays(tensors: Mapping[str, Tensor], used: set[str], settings: Mapping[str, object]) -> None:
    """Refuses unrecognized parts of quantized weights: as plain tensors they would have wrong values."""
    method = settings["quant_method"]
    for name, tensor in tensors.items():
        if name in used or name.endswith(_ASIDE):
            continue
        module = name.removesuffix(".weight")
        codes = name.endswith(".weight") and len(tensor.shape) > 1 and tensor.dtype in _STORED_PACKED
        if name.endswith(_MARKS) or (codes and not is_ignored(settings, module)):
            what = f"{method}: the tensor belongs to a quantized weight that is incomplete or of an unknown layout"
            raise RefusedError(what, tensor=name, hint=UNPACK_HINT)


def _refuse_absent(tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> None:
    """Refuses MLX settings of a module that has no quantized weight: config and weights are of different models."""
    if settings["quant_method"] != _MLX_METHOD:
        return
    for module, entry in settings.items():
        if isinstance(entry, dict) and f"{module}.scales" not in tensors:
            what = f"MLX: config.json says that {module} is quantized, but {module}.scales is missing"
            raise RefusedError(what, tensor=f"{module}.weight", hint=_CONFIG_HINT)


def _refuse_undescribed(tensors: Mapping[str, Tensor]) -> None:
    """Refuses quantized weights without a config; a name alone is not enough, its companions must be present."""
    for name in tensors:
        for scheme in SCHEMES:
            base = name[: len(name) - len(scheme.main)]
            if (
                scheme.main not in ("", ".weight")
                and name.endswith(scheme.main)
                and tensors[name].dtype in scheme.dtypes
                and all(base + ending in tensors for ending in scheme.needs)
            ):
                raise _refused(scheme, name, "the weights are quantized, but config.json has no quantization_config")
        if name.endswith("_scale_inv") or (name.endswith(".SCB") and name[:-3] + "weight" in tensors):
            what = "the weights are quantized, but config.json has no quantization_config"
            raise RefusedError(what, tensor=name, hint="put the model's own config.json next to them")


def _refused(scheme: Scheme, tensor: str, what: str) -> RefusedError:
    return RefusedError(f"{scheme.label}: {what}", tensor=tensor, hint=UNPACK_HINT)


# --- what a config says of packed weights ---


def with_hf_quant(config: Mapping[str, object], hf_quant: Mapping[str, object] | None) -> dict[str, object]:
    """`config` completed with hf_quant_config.json, ModelOpt's own file."""
    merged = dict(config)
    quantization = (hf_quant or {}).get("quantization")
    if isinstance(quantization, dict) and _stored(config) is None:
        producer = (hf_quant or {}).get("producer")
        name = producer.get("name") if isinstance(producer, dict) else None
        merged["quantization_config"] = {"quant_method": str(name or "modelopt").lower()} | quantization
    return merged


def settings_of(config: Mapping[str, object]) -> dict[str, object] | None:
    """The quantization settings of a config, or None. Raises RefusedError for unsupported ones."""
    found = _stored(config)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise RefusedError("quantization_config of config.json is not a JSON object", hint=_CONFIG_HINT)
    method = _method(found)
    if method not in METHODS:
        way = _WAYS.get(method, f"supported: {', '.join(METHODS)}; {UNPACK_HINT}")
        raise RefusedError(f"weights quantized with {method} cannot be decoded", hint=way)
    problem = _problem(method, found)
    if problem is not None:
        raise RefusedError(f"{method}: {problem} is not supported", hint=UNPACK_HINT)
    return {**found, "quant_method": method}


def without_packing(config: Mapping[str, object]) -> dict[str, object]:
    """`config` of dequantized weights, without quantization settings."""
    return _without_settings(config, _KEYS)


def _without_settings(config: Mapping[str, object], keys: Collection[str]) -> dict[str, object]:
    kept = {key: value for key, value in config.items() if key not in keys}
    for key, value in kept.items():
        if isinstance(value, dict):
            kept[key] = _without_settings(value, _KEYS if "quantization_config" in value else ())
    return kept


def _stored(config: Mapping[str, object]) -> object:
    """The settings, also those of a language model inside a larger one."""
    for holder in (config, language_part(config)):
        for key in _KEYS:
            if holder.get(key):
                return holder[key]
    return None


_STORED_BY_AUTOROUND = {"gptq": "gptq", "awq": "awq"}
"""`packing_format` of AutoRound -> the method with that layout."""


def _method(settings: Mapping[str, object]) -> str:
    method = settings.get("quant_method")
    if isinstance(method, str) and method:
        if method.lower().replace("_", "-").removeprefix("intel/") == "auto-round":
            stored = str(settings.get("packing_format") or settings.get("backend"))
            return _STORED_BY_AUTOROUND.get(stored.rpartition(":")[2].removeprefix("auto_"), "auto-round")
        return method.lower().replace("_", "-") if method.lower() != "fbgemm_fp8" else "fbgemm_fp8"
    if "load_in_4bit" in settings or "load_in_8bit" in settings:
        return "bitsandbytes"
    if "config_groups" in settings:
        return "compressed-tensors"
    if "mode" in settings or {"group_size", "bits"} <= settings.keys():
        return _MLX_METHOD
    return "a method that config.json does not name"


def _problem(method: str, settings: Mapping[str, object]) -> str | None:
    """The first unsupported setting, described."""
    for key, accepted in _ACCEPTED.get(method, {}).items():
        value = settings.get(key)
        if value is not None and value not in accepted:
            return f"{key} {value!r}"
    if method == "gptq" and settings.get("is_marlin_format"):
        return "the layout of the Marlin kernels"
    if method == "awq":
        version = str(settings.get("version", settings.get("checkpoint_format", "gemm"))).lower()
        if version != "gemm":
            return f"version {version!r}"
        return "zero_point false" if settings.get("zero_point") is False else None
    return _compressed(settings) if method == "compressed-tensors" else None


def _compressed(settings: Mapping[str, object]) -> str | None:
    groups = settings.get("config_groups")
    entries = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    for stored in (settings.get("format"), *(group.get("format") for group in entries)):
        if stored is not None and stored not in _CT_FORMATS:
            return f"format {stored!r}"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        return f"sparsity format {sparsity['format']!r}"
    transform = settings.get("transform_config")
    if isinstance(transform, dict) and transform.get("config_groups"):
        return "a transform of the activations at run time"
    known = (None, "tensor", "channel", "group", "block", "tensor_group")
    odd = [strategy for w in weight_arguments(settings) if (strategy := w.get("strategy")) not in known]
    return f"strategy {odd[0]!r}" if odd else None


def natural_dtype(config: Mapping[str, object]) -> str | None:
    """The dtype that the config states for the model's weights."""
    for holder in (config, language_part(config)):
        word = holder.get("dtype") or holder.get("torch_dtype")
        if isinstance(word, str) and word.removeprefix("torch.") in FLOATS_BY_TORCH:
            return FLOATS_BY_TORCH[word.removeprefix("torch.")]
    return None


def is_ignored(settings: Mapping[str, object], module: str) -> bool:
    """Whether the settings exclude `module` or a parent from quantization; patterns are taken literally."""
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules", "exclude_modules"):
        names = settings.get(key)
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str) and name and f".{name}." in f".{module}.":
                return True
    return False
