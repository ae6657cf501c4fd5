"""llama.cpp's quantization presets (file types) as data, and the dtype that each tensor of a GGUF gets.

The decisions are those of llama.cpp's llama_model_quantize.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import RefusedError, UsageError
from aprfmt.types import Shape


@dataclass(frozen=True, slots=True)
class QuantizationPreset:
    """One preset.

    Attributes:
        name: the user-facing name.
        file_type: llama.cpp's enum value (`enum llama_ftype`) for `general.file_type`.
        dtype: default dtype of matrices.
        advice: when to use it, one line.
        rules: exceptions by kind of tensor (see KINDS; "*" is every kind without a rule of its own): clauses
            `condition&condition:DTYPE`, the first that holds counts. A clause without conditions always holds, one
            without a dtype keeps the preset's. CONDITIONS lists the conditions.
    """

    name: str
    file_type: int
    dtype: str
    advice: str
    rules: Mapping[str, str] = field(default_factory=dict)


def _preset(name: str, file_type: int, dtype: str, advice: str, **rules: str) -> QuantizationPreset:
    """The usual kind of preset: with eight experts, keys and values are a small part and get eight bits."""
    eight = {kind: f"experts8:Q8_0 {rules.get(kind, '')}".strip() for kind in ("attn_v", "attn_k")}
    return QuantizationPreset(name, file_type, dtype, advice, rules | eight)


def _two_bits(name: str, file_type: int, dtype: str, advice: str, better: str, attn_output: str) -> QuantizationPreset:
    """A preset of one to two bits; `better` is the type of the few most sensitive tensors."""
    rules = {
        "output": "Q5_K", "token_embd": better, "attn_v": f"gqa4:Q4_K experts4:Q4_K {better}",
        "attn_k": "experts8:Q4_K", "attn_output": f"experts8:Q5_K {attn_output}", "ffn_down": f"counted/8:{better}",
    }  # fmt: skip
    return QuantizationPreset(name, file_type, dtype, advice, rules)


# Attention output projections in models with eight experts other than Falcon.
_EIGHT = "falcon: experts8:Q5_K"

_NEEDS = "needs an importance matrix"

_ROWS = (
    _preset("q8_0", 7, "Q8_0", "as good as 16-bit floats at half the size"),
    _preset("q6_k", 18, "Q6_K", "hardly any measurable loss"),
    _preset("q5_k_m", 17, "Q5_K", "small loss; if you have the memory for more than q4_k_m",
         attn_v="more:Q6_K", ffn_down="more:Q6_K"),
    _preset("q5_k_s", 16, "Q5_K", "q5_k_m without its higher-precision layers"),
    _preset("q5_1", 9, "Q5_1", "legacy; q5_k_m is better and smaller"),
    _preset("q5_0", 8, "Q5_0", "legacy; q5_k_s is better at the same size", ffn_down="first/8&imatrix:Q5_1"),
    _preset("q4_k_m", 15, "Q4_K", "recommended: a third of the size, small loss",
         attn_v="more:Q6_K 70b:Q5_K", attn_output=_EIGHT,
         ffn_down="falcon&first/16:Q6_K falcon&more:Q5_K falcon: more:Q6_K"),
    _preset("q4_k_s", 14, "Q4_K", "a little smaller than q4_k_m",
         attn_v="70b:Q5_K first4:Q5_K", attn_output=_EIGHT, ffn_down="falcon: first/8:Q5_K"),
    _preset("iq4_nl", 25, "IQ4_NL", "like iq4_xs with blocks of 32, for row sizes that are not multiples of 256",
         attn_v="gqa4:Q5_K", attn_output=_EIGHT, ffn_down="imatrix: first/8:Q5_K"),
    _preset("iq4_xs", 30, "IQ4_XS", "the smallest 4-bit type; best with an importance matrix",
         attn_v="gqa4:Q5_K", attn_output=_EIGHT, ffn_down="imatrix: first/8:Q5_K"),
    _preset("q4_1", 3, "Q4_1", "legacy; q4_k_m is better and smaller"),
    _preset("q4_0", 2, "Q4_0", "legacy; fast on some CPUs", ffn_down="first/8&imatrix:Q4_1"),
    QuantizationPreset(
        "mxfp4_moe", 38, "MXFP4", "experts as MXFP4, the rest as Q8_0; for models trained that way",
        {"*": "stacked:MXFP4 Q8_0", "output": "Q8_0"}),
    _preset("q3_k_l", 13, "Q3_K", "the largest 3-bit type",
         attn_v="Q5_K", attn_output="falcon:Q4_K experts8: Q5_K", ffn_down="falcon:Q4_K Q5_K"),
    _preset("q3_k_m", 12, "Q3_K", "3 bits; noticeable loss",
         attn_v="70b:Q5_K first2:Q5_K Q4_K", attn_output=f"{_EIGHT} Q4_K",
         ffn_down="first/16:Q5_K falcon&!more: Q4_K"),
    _preset("q3_k_s", 11, "Q3_K", "the smallest 3-bit K-quant",
         attn_v="70b:Q5_K", attn_output=_EIGHT),
    _preset("iq3_m", 27, "IQ3_S", "better and smaller than q3_k_m; use an importance matrix",
         attn_v="70b:Q5_K Q4_K", attn_output=f"{_EIGHT} Q4_K", ffn_down="first/8:Q4_K experts8&more:Q4_K"),
    _preset("iq3_s", 26, "IQ3_S", "iq3_m without its higher-precision layers; use an importance matrix",
         attn_v="70b&gqa4:Q5_K gqa4:Q4_K", attn_output=_EIGHT),
    _preset("iq3_xs", 22, "IQ3_S", f"between iq3_s and iq3_xxs; {_NEEDS}",
         attn_v="70b&gqa4:Q5_K gqa4:Q4_K", attn_k="IQ3_XXS", attn_q="IQ3_XXS", attn_output=_EIGHT,
         ffn_gate="middle:IQ3_XXS", ffn_up="middle:IQ3_XXS"),
    _preset("iq3_xxs", 23, "IQ3_XXS", f"the smallest 3-bit type; {_NEEDS}",
         output="Q5_K", token_embd="IQ3_S", attn_v="70b&gqa4:Q5_K gqa4:Q4_K imatrix: IQ3_S",
         attn_k="IQ2_S", attn_q="IQ2_S", attn_output=f"{_EIGHT} IQ3_S",
         ffn_down="imatrix: first/8:Q4_K Q3_K"),
    _preset("q2_k", 10, "Q2_K", "2 to 3 bits; for models that do not fit otherwise",
         attn_v="70b:Q5_K gqa4:Q4_K Q3_K", attn_output=f"{_EIGHT} Q3_K", ffn_down="Q3_K"),
    _preset("q2_k_s", 21, "Q2_K", f"nearly all weights in 2 bits; {_NEEDS}",
         attn_v="70b&gqa4:Q5_K gqa4:Q4_K", ffn_down="first/8:Q4_K"),
    _two_bits("iq2_m", 29, "IQ2_S", f"the best 2-bit type; {_NEEDS}", "IQ3_S", "IQ3_S"),
    _two_bits("iq2_s", 28, "IQ2_XS", f"two bits; {_NEEDS}", "IQ3_S", "IQ3_S"),
    _two_bits("iq2_xs", 20, "IQ2_XS", f"two bits; {_NEEDS}", "Q2_K", ""),
    _two_bits("iq2_xxs", 19, "IQ2_XXS", f"the smallest 2-bit type; {_NEEDS}", "Q2_K", ""),
    _two_bits("iq1_m", 31, "IQ1_M", f"experimental, for very large models; {_NEEDS}", "Q2_K", "IQ2_XXS"),
    _two_bits("iq1_s", 24, "IQ1_S", f"the smallest type; {_NEEDS}", "Q2_K", "IQ2_XXS"),
    _preset("tq2_0", 37, "TQ2_0", "only for models trained with ternary weights", token_embd="Q4_K"),
    _preset("tq1_0", 36, "TQ1_0", "like tq2_0, smaller but slower", token_embd="Q4_K"),
    _preset("q2_0", 41, "Q2_0", "only for models trained with 2-bit weights", token_embd="Q4_K"),
    _preset("q1_0", 40, "Q1_0", "only for models trained with 1-bit weights"),
)  # fmt: skip

PRESETS: dict[str, QuantizationPreset] = {preset.name: preset for preset in _ROWS}

OTHER_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "MXFP4": 38, "NVFP4": 39}
"""Dtypes without a preset of the same name: the file type (`enum llama_ftype`) of a file that mostly has that dtype."""

ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}

_ELSEWHERE = {
    "int4 4bit q4 nf4 awq gptq w4a16": "q4_k_m", "int8 8bit q8 w8a8": "q8_0", "6bit q6 int6": "q6_k",
    "5bit q5 int5": "q5_k_m", "3bit q3 int3": "q3_k_m", "2bit q2 int2": "q2_k", "fp8 float8 f8 e4m3": "f8_e4m3",
}  # fmt: skip
"""Presets closest to other programs' names, in the spelling of _key."""


def _key(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_BY_KEY = {_key(name): preset for name, preset in PRESETS.items()}
_BY_KEY |= {_key(alias): PRESETS[name] for alias, name in ALIASES.items()}


def find_preset(name: str) -> QuantizationPreset | None:
    """The preset `name` or its alias, ignoring case and underscores; None if unknown."""
    return _BY_KEY.get(_key(name))


def file_type_of(dtype: str) -> int:
    """llama.cpp's file type for matrices that are mostly `dtype`, else that of floats."""
    preset = find_preset(dtype)
    return preset.file_type if preset is not None else OTHER_FILE_TYPES.get(dtype, 0)


def uniform_preset(dtype: str) -> QuantizationPreset | None:
    """A preset of one block type without a preset of its name; None if llama.cpp has no file type for it."""
    file_type = OTHER_FILE_TYPES.get(dtype)
    return None if file_type is None else QuantizationPreset(dtype.lower(), file_type, dtype, "")


def require_quantized(name: str) -> None:
    """Raises UsageError for a float dtype or "keep"."""
    if _key(name) in ("keep", "f32", "f16", "bf16", "f64"):
        raise UsageError(f"{name} is not a quantized type", hint=f"apr convert FILE -o OUT --dtype {name}")


# Suffixes of names that state the dtype ("-Q8_0", ".f16"), or which part of a model a file is.
_TYPE_OF_NAME = re.compile(r"[-._](f32|f16|bf16|(i?q\d|tq\d|mxfp4|nvfp4)[a-z0-9_]*)$", re.IGNORECASE)
_PART_OF_NAME = re.compile(r"-\d{5}-of-\d{5}$")
_NO_NAMES = ("model", "pytorch_model", "consolidated", "ggml-model")


def quantized_name(source: str, preset: str, *, imatrix: bool = False, pure: bool = False) -> str:
    """The usual file name on the hub: "Qwen3-0.6B-Q4_K_M.gguf" from ./Qwen3-0.6B or Qwen3-0.6B-F16.gguf.

    With an importance matrix or a single type it differs: "Qwen3-0.6B-Q4_K_M-imatrix.gguf".

    Raises UsageError for an unknown preset, and for a source without a name.
    """
    require_quantized(preset)
    found = find_preset(preset)
    if found is None and _key(preset) not in {_key(name) for name in DTYPES}:
        raise unknown(preset)
    word = found.name if found is not None else preset
    path = Path(source.removeprefix("hf://").split("@")[0]) if source.startswith("hf://") else Path(source)
    path = path if path.name not in ("", "..") else path.resolve()
    suffix = path.suffix.lower()
    name = path.stem if suffix in (".gguf", ".apr", ".safetensors", ".json", ".bin") else path.name
    name = _PART_OF_NAME.sub("", name.removesuffix(".safetensors.index"))
    name = _TYPE_OF_NAME.sub("", name)
    name = path.resolve().parent.name if name in _NO_NAMES else name
    if not name:
        raise UsageError("cannot derive an output name from the source", hint="set one with -o")
    return f"{name}-{word.upper()}{'-pure' * pure}{'-imatrix' * imatrix}.gguf"


def unknown_scheme(name: str, schemes: Collection[str]) -> UsageError:
    """The error for a name that is none of the `schemes` of a folder, with the closest match."""
    near = get_close_matches(name.lower(), schemes, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(schemes)}"
    return UsageError(f"unknown dtype or quantization scheme {name!r}", hint=hint)


def counterpart(name: str) -> str | None:
    """The preset or dtype that is closest to another program's name; None if it is not one."""
    return next((preset for words, preset in _ELSEWHERE.items() if _key(name) in words.split()), None)


def unknown(name: str, *others: str) -> UsageError:
    """The error for a name that is neither a preset nor one of `others`, with the closest match."""
    known = [*others, *PRESETS, *ALIASES]
    near = [preset for preset in [counterpart(name)] if preset in known] or get_close_matches(
        name.lower(), known, n=1, cutoff=0.5
    )
    if name.isdecimal():
        hint = f"for MLX: --format mlx --bits {name}; else a preset such as q4_k_m (apr quantize --list)"
    elif near:
        hint = f"did you mean {near[0]}? apr quantize --list shows all presets"
    else:
        hint = f"known: {', '.join([*others, *PRESETS])}"
    return UsageError(f"unknown dtype or quantization preset {name!r}", hint=hint)


# --- decisions ---


@dataclass(frozen=True, slots=True)
class PresetContext:
    """The properties of a network that the rules depend on.

    Attributes:
        architecture: `general.architecture`.
        n_layers: `block_count`, MTP layers included.
        n_heads, n_kv_heads: of the first layer.
        n_experts: 0 without experts.
    """

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_experts: int

    @property
    def heads_per_kv(self) -> int:
        """Query heads per key-value head in the first layer; 0 without key-value heads."""
        return self.n_heads // self.n_kv_heads if self.n_kv_heads else 0

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp treats the network as a 70B model."""
        if self.n_layers != _LAYERS_OF_70B.get(self.architecture):
            return False
        return self.architecture != "llama" or (self.n_heads != self.n_kv_heads and self.n_experts != 8)


_LAYERS_OF_70B = {"llama": 80, "llama-embed": 80, "qwen2": 80, "olmo": 80, "deci": 80, "jais2": 68}


@dataclass(frozen=True, slots=True)
class QuantizeOverrides:
    """Options of a preset.

    Attributes:
        pure: every quantizable tensor in the preset's own dtype, without its rules.
        output: dtype of the output head.
        embedding: dtype of the token embedding.
        patterns: the first pattern that matches a tensor's name sets its dtype.
        leave_output: whether the output head is not quantized.
        imatrix: whether an importance matrix was given.
        padded: block types whose rows may end in padding (those of an `.apr`).
    """

    pure: bool = False
    output: str | None = None
    embedding: str | None = None
    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()
    leave_output: bool = False
    imatrix: bool = False
    padded: tuple[str, ...] = ()

    def override(self, name: str) -> str | None:
        """The dtype of the tensor by an override, if any."""
        return next((dtype for pattern, dtype in self.patterns if pattern.search(name)), None)

    def is_fixed(self, name: str) -> bool:
        """Whether an option sets the dtype of the tensor."""
        of_kind = {"output": self.output, "token_embd": self.embedding}.get(kind_of(name))
        return of_kind is not None or self.override(name) is not None


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """A tensor among those of its kind: its index `i` of `n`, which is the layer if layers are known.

    `counted` is the plain running index, `stacked` whether it consists of several matrices.
    """

    i: int
    n: int
    counted: int
    stacked: bool


CONDITIONS: Mapping[str, Callable[[TensorPosition, PresetContext], bool]] = {
    "more": lambda p, net: more_bits(p.i, p.n),
    "middle": lambda p, net: p.n // 8 <= p.i < 7 * p.n // 8, "first/8": lambda p, net: p.i < p.n // 8,
    "first/16": lambda p, net: p.i < p.n // 16, "first2": lambda p, net: p.i < 2,
    "first4": lambda p, net: p.i < 4, "counted/8": lambda p, net: p.counted < p.n // 8,
    "stacked": lambda p, net: p.stacked, "gqa4": lambda p, net: net.heads_per_kv >= 4,
    "experts4": lambda p, net: net.n_experts >= 4, "experts8": lambda p, net: net.n_experts == 8,
    "70b": lambda p, net: net.is_70b, "falcon": lambda p, net: net.architecture == "falcon",
}  # fmt: skip
"""Words of the rules; "imatrix" is one more, and "!" negates."""


def more_bits(i: int, n: int) -> bool:
    """Whether layer `i` of `n` is in the first or last eighth, or every third one in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


KINDS = (
    ("attn_qkv.weight", "attn_v"), ("attn_kv_b.weight", "attn_v"), ("attn_v.weight", "attn_v"),
    ("attn_k.weight", "attn_k"), ("attn_q.weight", "attn_q"), ("attn_output.weight", "attn_output"),
    ("ffn_up", "ffn_up"), ("ffn_gate", "ffn_gate"), ("ffn_down", "ffn_down"),
)  # fmt: skip
"""Part of a tensor's name -> its kind; the first match. Three kinds match the whole name."""

OUTPUT = "output.weight"
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")


def kind_of(name: str) -> str:
    """The kind of a tensor; "other" if no rule names it."""
    if name == OUTPUT:
        return "output"
    if name in EMBEDDINGS:
        return "token_embd"
    return next((kind for part, kind in KINDS if part in name), "other")


# Parts of names of small or sensitive matrices, which every preset leaves unchanged.
_LEFT = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight",
    "time_mix_first.weight", "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight",
    "time_mix_v0.weight", "time_mix_v1.weight", "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight",
    "time_mix_a2.weight", "time_mix_g1.weight", "time_mix_g2.weight", "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight", "attn_rel_b.weight", ".position_embd",
    "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd", ".patch_merger", "a.rvq.codebook",
    "mm.a.code_embd",
)  # fmt: skip
_LEFT_WHOLE = ("position_embd.weight", "token_types.weight")


def is_quantizable(name: str, shape: Shape) -> bool:
    """Whether a preset may quantize the GGUF tensor: a matrix or a stack of matrices, except those excluded."""
    n_dims = len(shape) - next((i for i, dim in enumerate(shape) if dim != 1), len(shape))
    if n_dims < 2 or not name.endswith("weight") or name in _LEFT_WHOLE:
        return False
    return not any(part in name for part in _LEFT)


# Blocks of 256 values that do not divide a row fall back to blocks of 32, and then to F16.
_FALLBACK = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0", "Q2_0": "Q4_0", "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL", "IQ2_XXS": "IQ4_NL",
    "IQ2_XS": "IQ4_NL", "IQ2_S": "IQ4_NL", "IQ3_XXS": "IQ4_NL", "IQ3_S": "IQ4_NL", "IQ4_XS": "IQ4_NL",
}  # fmt: skip


def fitting(target: str, shape: Shape) -> str:
    """`target`, or the closest dtype whose blocks divide the rows of `shape`."""
    row = DTYPES[target]
    if row.kind != "ggml" or shape[-1] % row.block == 0:
        return target
    return fitting(_FALLBACK[target], shape) if target in _FALLBACK else "F16"


# Types with too few bits to be used without column importances, and those that llama.cpp's encoder cannot write
# without.
_POOR_WITHOUT = ("IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_M", "IQ1_S")
_IMPOSSIBLE_WITHOUT = ("IQ2_XXS", "IQ2_XS", "IQ1_S")


def needs_weights(name: str, dtype: str, preset: QuantizationPreset) -> bool:
    """Whether quantizing the tensor to `dtype` needs importance weights."""
    if dtype in _IMPOSSIBLE_WITHOUT:
        return True
    poor = dtype in _POOR_WITHOUT or (dtype == "Q2_K" and preset.name == "q2_k_s")
    return poor and name not in (*EMBEDDINGS, OUTPUT)


def choose(
    tensors: Mapping[str, Shape],
    preset: QuantizationPreset,
    network: PresetContext,
    overrides: QuantizeOverrides | None = None,
) -> dict[str, str]:
    """The dtype of every tensor that `preset` quantizes; unchanged tensors are absent.

    `tensors` are all tensors of the GGUF with their row-major shapes, in any order.
    Raises RefusedError for a name without the layer that a rule asks for.
    """
    chooser = _Chooser(tensors, preset, network, overrides or QuantizeOverrides())
    ordered = sorted(tensors, key=lambda name: (_layer(name), name.encode(errors="surrogateescape")))
    found = ((name, chooser.dtype(name)) for name in ordered)
    return {name: dtype for name, dtype in found if dtype is not None}


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d{1,6})\.", name)
    return int(match[1]) if match else -1


@dataclass(slots=True)
class _Chooser:
    """Called once per tensor, layer by layer: some rules count the tensors of a kind."""

    tensors: Mapping[str, Shape]
    preset: QuantizationPreset
    network: PresetContext
    overrides: QuantizeOverrides
    n_attn_v: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n_attn_v = sum(kind_of(name) == "attn_v" for name in self.tensors)

    def dtype(self, name: str) -> str | None:
        """The dtype of the tensor; None to leave it unchanged."""
        shape, overrides = self.tensors[name], self.overrides
        if not is_quantizable(name, shape) or (overrides.leave_output and name == OUTPUT):
            return None
        kind, named = kind_of(name), overrides.override(name)
        target = self.preset.dtype
        if kind == "token_embd" and overrides.embedding and (name == EMBEDDINGS[0] or named is None):
            target = overrides.embedding
        elif kind == "output" and overrides.output:
            target = overrides.output
        elif named is not None:
            target = named
        elif not overrides.pure:
            target = self._by_rule(name, kind, shape)
        return target if target in overrides.padded else fitting(target, shape)

    def _by_rule(self, name: str, kind: str, shape: Shape) -> str:
        if kind == "token_embd" and OUTPUT not in self.tensors:  # a tied head
            kind = "output"
        if kind == "output":
            return self._output(shape)
        place = self._place(name, kind, shape)
        rule = self.preset.rules.get(kind, self.preset.rules.get("*", ""))
        for clause in rule.split():
            conditions, _, dtype = clause.rpartition(":")
            if all(self._holds(word, place) for word in conditions.split("&") if word):
                return dtype or self.preset.dtype
        return self.preset.dtype

    def _output(self, shape: Shape) -> str:
        if self.overrides.output:
            return self.overrides.output
        if self.network.architecture == "falcon" or shape[-1] % DTYPES[self.preset.dtype].block:
            return "Q8_0"
        return self.preset.rules.get("output", "Q8_0" if self.preset.dtype == "Q8_0" else "Q6_K")

    def _place(self, name: str, kind: str, shape: Shape) -> TensorPosition:
        counted = self.counts.get(kind, 0)
        self.counts[kind] = counted + 1
        stacked = len(shape) > 2 and shape[-3] > 1
        if kind == "attn_v":
            return TensorPosition(counted, self.n_attn_v, counted, stacked)
        i, n = counted, self.network.n_layers
        if kind.startswith("ffn_") and self.network.n_experts > 1 and self.preset.rules.get(kind):
            i = _layer(name)  # the number of expert tensors per layer varies
            if not 0 <= i < n:
                raise RefusedError(
                    f"the preset {self.preset.name} depends on the layer, but the tensor is outside the {n} layers",
                    tensor=name,
                )
        return TensorPosition(i, n, counted, stacked)

    def _holds(self, word: str, place: TensorPosition) -> bool:
        if word.startswith("!"):
            return not self._holds(word[1:], place)
        return self.overrides.imatrix if word == "imatrix" else CONDITIONS[word](place, self.network)


def usual_bits(preset: QuantizationPreset) -> float:
    """Bits per weight of a typical model (Llama-3.1-8B), with an importance matrix."""
    shapes: dict[str, Shape] = {"token_embd.weight": (128256, 4096), "output.weight": (128256, 4096)}
    matrices: dict[str, Shape] = {
        "attn_q": (4096, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096), "attn_output": (4096, 4096),
        "ffn_gate": (14336, 4096), "ffn_up": (14336, 4096), "ffn_down": (4096, 14336),
    }  # fmt: skip
    for layer in range(32):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    chosen = choose(shapes, preset, PresetContext("llama", 32, 32, 8, 0), QuantizeOverrides(imatrix=True))
    n_bytes = sum(DTYPES[chosen[name]].n_bytes(shape) for name, shape in shapes.items())
    return 8 * n_bytes / sum(rows * cols for rows, cols in shapes.values())
