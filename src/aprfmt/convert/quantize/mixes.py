"""The quantization mixes: what llama.cpp calls file types. Which block type each kind of tensor gets, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from aprfmt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Mix:
    """One mix.

    Attributes:
        name: what users type.
        file_type: llama.cpp's number (`enum llama_ftype`), which `general.file_type` gets.
        dtype: what every matrix gets for which no rule says otherwise.
        advice: when to take it, one line.
        rules: by kind of tensor (see mix_rules.KINDS; "*" is every kind without a rule of its own) the exceptions:
            clauses `condition&condition:DTYPE`, of which the first that holds counts. A clause without conditions
            always holds, one without a dtype leaves the mix's. The conditions stand in mix_rules.CONDITIONS.
    """

    name: str
    file_type: int
    dtype: str
    advice: str
    rules: Mapping[str, str] = field(default_factory=dict)


def _mix(name: str, file_type: int, dtype: str, advice: str, **rules: str) -> Mix:
    """A mix of the usual kind: with eight experts, keys and values are a small part and get eight bits."""
    eight = {kind: f"experts8:Q8_0 {rules.get(kind, '')}".strip() for kind in ("attn_v", "attn_k")}
    return Mix(name, file_type, dtype, advice, rules | eight)


def _two_bits(name: str, file_type: int, dtype: str, advice: str, better: str, attn_output: str) -> Mix:
    """A mix of one to two bits, where `better` is the type of the few tensors that such a loss would hurt most."""
    rules = {
        "output": "Q5_K",
        "token_embd": better,
        "attn_v": f"gqa4:Q4_K experts4:Q4_K {better}",
        "attn_k": "experts8:Q4_K",
        "attn_output": f"experts8:Q5_K {attn_output}",
        "ffn_down": f"counted/8:{better}",
    }
    return Mix(name, file_type, dtype, advice, rules)


# Output projections of attention in models of eight experts, which are not Falcons.
_EIGHT = "falcon: experts8:Q5_K"

_NEEDS = "needs an importance matrix"

_ROWS = (
    _mix("q8_0", 7, "Q8_0", "as good as 16-bit floats at half the size"),
    _mix("q6_k", 18, "Q6_K", "hardly any measurable loss"),
    _mix("q5_k_m", 17, "Q5_K", "small loss; if memory allows more than q4_k_m",
         attn_v="more:Q6_K", ffn_down="more:Q6_K"),
    _mix("q5_k_s", 16, "Q5_K", "q5_k_m without its better layers"),
    _mix("q5_1", 9, "Q5_1", "older form; q5_k_m is better at the same size"),
    _mix("q5_0", 8, "Q5_0", "older form; q5_k_s is better at the same size", ffn_down="first/8&imatrix:Q5_1"),
    _mix("q4_k_m", 15, "Q4_K", "the usual choice: a third of the size, small loss",
         attn_v="more:Q6_K 70b:Q5_K", attn_output=_EIGHT,
         ffn_down="falcon&first/16:Q6_K falcon&more:Q5_K falcon: more:Q6_K"),
    _mix("q4_k_s", 14, "Q4_K", "a little smaller than q4_k_m",
         attn_v="70b:Q5_K first4:Q5_K", attn_output=_EIGHT, ffn_down="falcon: first/8:Q5_K"),
    _mix("iq4_nl", 25, "IQ4_NL", "like iq4_xs in blocks of 32, for rows that 256 does not divide",
         attn_v="gqa4:Q5_K", attn_output=_EIGHT, ffn_down="imatrix: first/8:Q5_K"),
    _mix("iq4_xs", 30, "IQ4_XS", "the smallest with four bits; best with an importance matrix",
         attn_v="gqa4:Q5_K", attn_output=_EIGHT, ffn_down="imatrix: first/8:Q5_K"),
    _mix("q4_1", 3, "Q4_1", "older form; q4_k_m is better and smaller"),
    _mix("q4_0", 2, "Q4_0", "older form; fast on some processors", ffn_down="first/8&imatrix:Q4_1"),
    Mix("mxfp4_moe", 38, "MXFP4", "stacked experts as MXFP4, the rest as Q8_0; for models trained that way",
        {"*": "stacked:MXFP4 Q8_0", "output": "Q8_0"}),
    _mix("q3_k_l", 13, "Q3_K", "the largest with three bits",
         attn_v="Q5_K", attn_output="falcon:Q4_K experts8: Q5_K", ffn_down="falcon:Q4_K Q5_K"),
    _mix("q3_k_m", 12, "Q3_K", "three bits; the loss is noticeable",
         attn_v="70b:Q5_K first2:Q5_K Q4_K", attn_output=f"{_EIGHT} Q4_K",
         ffn_down="first/16:Q5_K falcon&!more: Q4_K"),
    _mix("q3_k_s", 11, "Q3_K", "the smallest of its family with three bits",
         attn_v="70b:Q5_K", attn_output=_EIGHT),
    _mix("iq3_m", 27, "IQ3_S", "better and smaller than q3_k_m; use an importance matrix",
         attn_v="70b:Q5_K Q4_K", attn_output=f"{_EIGHT} Q4_K", ffn_down="first/8:Q4_K experts8&more:Q4_K"),
    _mix("iq3_s", 26, "IQ3_S", "iq3_m without its better layers; use an importance matrix",
         attn_v="70b&gqa4:Q5_K gqa4:Q4_K", attn_output=_EIGHT),
    _mix("iq3_xs", 22, "IQ3_S", f"between iq3_s and iq3_xxs; {_NEEDS}",
         attn_v="70b&gqa4:Q5_K gqa4:Q4_K", attn_k="IQ3_XXS", attn_q="IQ3_XXS", attn_output=_EIGHT,
         ffn_gate="middle:IQ3_XXS", ffn_up="middle:IQ3_XXS"),
    _mix("iq3_xxs", 23, "IQ3_XXS", f"three bits at their smallest; {_NEEDS}",
         output="Q5_K", token_embd="IQ3_S", attn_v="70b&gqa4:Q5_K gqa4:Q4_K imatrix: IQ3_S",
         attn_k="IQ2_S", attn_q="IQ2_S", attn_output=f"{_EIGHT} IQ3_S",
         ffn_down="imatrix: first/8:Q4_K Q3_K"),
    _mix("q2_k", 10, "Q2_K", "two to three bits; for models that do not fit otherwise",
         attn_v="70b:Q5_K gqa4:Q4_K Q3_K", attn_output=f"{_EIGHT} Q3_K", ffn_down="Q3_K"),
    _mix("q2_k_s", 21, "Q2_K", f"two bits nearly everywhere; {_NEEDS}",
         attn_v="70b&gqa4:Q5_K gqa4:Q4_K", ffn_down="first/8:Q4_K"),
    _two_bits("iq2_m", 29, "IQ2_S", f"the best with two bits; {_NEEDS}", "IQ3_S", "IQ3_S"),
    _two_bits("iq2_s", 28, "IQ2_XS", f"two bits; {_NEEDS}", "IQ3_S", "IQ3_S"),
    _two_bits("iq2_xs", 20, "IQ2_XS", f"two bits; {_NEEDS}", "Q2_K", ""),
    _two_bits("iq2_xxs", 19, "IQ2_XXS", f"two bits at their smallest; {_NEEDS}", "Q2_K", ""),
    _two_bits("iq1_m", 31, "IQ1_M", f"for trials with very large models; {_NEEDS}", "Q2_K", "IQ2_XXS"),
    _two_bits("iq1_s", 24, "IQ1_S", f"the smallest of all; {_NEEDS}", "Q2_K", "IQ2_XXS"),
    _mix("tq2_0", 37, "TQ2_0", "for models trained with weights -1, 0, 1 only", token_embd="Q4_K"),
    _mix("tq1_0", 36, "TQ1_0", "as tq2_0, smaller but slower", token_embd="Q4_K"),
    _mix("q2_0", 41, "Q2_0", "for models trained with two-bit weights only", token_embd="Q4_K"),
    _mix("q1_0", 40, "Q1_0", "for models trained with one-bit weights only"),
)  # fmt: skip

MIXES: dict[str, Mix] = {mix.name: mix for mix in _ROWS}

# Dtypes that no mix is named after: the file type (`enum llama_ftype`) of a file that holds little else.
_OTHER_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "MXFP4": 38, "NVFP4": 39}

ALIASES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}


def _key(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_BY_KEY = {_key(name): mix for name, mix in MIXES.items()}
_BY_KEY |= {_key(alias): MIXES[name] for alias, name in ALIASES.items()}


def find_mix(name: str) -> Mix | None:
    """The mix called `name`, aliases included; case and underscores do not matter. None if there is none."""
    return _BY_KEY.get(_key(name))


def file_type_of(dtype: str) -> int:
    """llama.cpp's number for a file whose matrices are mostly `dtype`; where it has none, that of floats."""
    mix = find_mix(dtype)
    return mix.file_type if mix is not None else _OTHER_FILE_TYPES.get(dtype, 0)


def uniform_mix(dtype: str) -> Mix | None:
    """A mix of one block type that no mix is named after; None where llama.cpp has no file type for it."""
    file_type = _OTHER_FILE_TYPES.get(dtype)
    return None if file_type is None else Mix(dtype.lower(), file_type, dtype, "")


def require_quantized(name: str) -> None:
    """Raises UsageError for a name that means floats, or nothing at all."""
    if _key(name) in ("keep", "f32", "f16", "bf16", "f64"):
        raise UsageError(f"{name} is not a quantized type", hint=f"apr convert FILE -o OUT --dtype {name}")


def unknown(name: str, *others: str) -> UsageError:
    """The error for a name that is not a mix and none of `others`, with the nearest that is one."""
    known = [*others, *MIXES, *ALIASES]
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = (f"did you mean {near[0]}? " if near else "") + "known: " + ", ".join([*others, *MIXES])
    return UsageError(f"unknown dtype or mix {name!r}", hint=hint)
