"""How llama.cpp's pre-tokenizers split text, in terms of tokenizer.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

UNNAMED = "default"
"""llama.cpp's default rule for a byte-level BPE."""


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """One of llama.cpp's pre-tokenizers, in terms of tokenizer.json.

    Attributes:
        splits: regexes applied one after the other, each isolating its matches; "digits" for single digits.
        gpt2_regex: whether the final byte-level step also splits by GPT-2's regex.
        ignore_merges: whether a piece that is a whole token is taken before any merge is tried.
        add_bos: llama.cpp's default.
        always_bos: whether llama.cpp prepends BOS to every text, whatever the file says.
        nfc: whether the original tokenizers normalize to NFC (llama.cpp never does).
        letters: "bytes" for GPT-2's alphabet of bytes; "pieces" for the text itself with U+2581 for spaces and
            `<0xNN>` tokens for what is in no token; "words" for the text itself.
        llama: llama.cpp's own regexes for `splits` if they split some texts differently.
    """

    splits: tuple[str, ...] = ()
    gpt2_regex: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    always_bos: bool = False
    letters: str = "bytes"
    llama: tuple[str, ...] = ()


SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SUFFIX_BY_CLASSES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
_LLAMA3 = rf"{SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}"
_QWEN2 = rf"{SUFFIX}|{_WORD}|\p{{N}}|{_SYMBOLS}"
_QWEN35 = (
    rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)


def _by_case(upper: str, lower: str, suffix: str, digits: str, symbols: str = _SLASH) -> str:
    """Words split by capitals, as in GPT-4o."""
    return rf"{_CASED}{upper}*{lower}+{suffix}|{_CASED}{upper}+{lower}*{suffix}|{digits}|{symbols}"


_GPT4O = _by_case(_UPPER, _LOWER, SUFFIX + "?", r"\p{N}{1,3}")
_TEKKEN = _by_case(_UPPER, _LOWER, "", r"\p{N}")
# llama.cpp has no classes of capitals: it removes a-z and A-Z from the letters.
_NOT_LOWER, _NOT_UPPER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_GPT4O_IN_LLAMA = _by_case(_NOT_LOWER, _NOT_UPPER, SUFFIX_BY_CLASSES + "?", r"\p{N}{1,3}")
_TEKKEN_IN_LLAMA = _by_case(_NOT_LOWER, _NOT_UPPER, "", r"\p{N}")
_MARKED_IN_LLAMA = _by_case(
    r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]", SUFFIX_BY_CLASSES + "?", r"\p{N}{1,3}"
)
_ANY = r"[\p{L}\p{M}]"
_SEED = rf"{SUFFIX}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES
_MINICPM = rf"{SUFFIX}|{_WORD}|\p{{N}}+|{_SYMBOLS}"
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3_WORDS = _ASCII_SYMBOL + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = _DEEPSEEK3_WORDS + r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# llama.cpp maps non-ASCII white space to a vertical tab if a regex has no class of letters.
_CJK_IN_LLAMA = _CJK.replace("]", r"&&[^\s]]", 1)
_CASED_LETTERS: str = json.loads(Path(__file__).with_name("pre.json").read_bytes())["cased"]
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_THREE = "[0-9][0-9][0-9]"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_WIDE_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = (
    rf"{SUFFIX}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_WIDE_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _KANA
)
# Digits in threes from the right. llama.cpp keeps what precedes a number in one piece with its first group.
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
_THREES_IN_LLAMA = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = r"[\p{Han}]+|" + _by_case(_UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN, SUFFIX + "?", r"\p{N}{1,3}", _SYMBOLS)
_HAN_IN_LLAMA = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f\U0002b820-\U0002cead\U0002ceae-\U0002ebef"
    "\U0002f800-\U0002fa1f"
)
_KIMI_IN_LLAMA = (
    rf"[{_HAN_IN_LLAMA}]+|{_CASED}[\p{{L}}&&[^{_HAN_IN_LLAMA}]]+{SUFFIX_BY_CLASSES}?|\p{{N}}{{1,3}}|{_SYMBOLS}"
)
_EXAONE_MOE = (
    rf"{SUFFIX}|{_CASED}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}"
)
_CHAMELEON = (
    "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", "digits", r"[\p{P}!-/:-@\[-`{-~]",
)  # fmt: skip


def _deepseek_llm(wide_symbols: str, cjk: str) -> tuple[str, ...]:
    return (
        r"[\r\n]", rf"\s?[A-Za-z{_CASED_LETTERS}]+",
        f"\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f{wide_symbols}]+", r"\s+$", cjk, r"\p{N}+",
    )  # fmt: skip


LINES = r"[^\n]+|[\n]+"
"""Runs of line ends, and the text between them."""

RULES: dict[str, PreTokenizerRule] = {
    "llama-bpe": PreTokenizerRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizerRule((_LLAMA3,)),
    "smaug-bpe": PreTokenizerRule((_LLAMA3,)),
    "glm4": PreTokenizerRule((_LLAMA3,), ignore_merges=True),
    "qwen2": PreTokenizerRule((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizerRule((_QWEN2,), nfc=True),
    "qwen35": PreTokenizerRule((_QWEN35,), nfc=True),
    "gpt-2": PreTokenizerRule(gpt2_regex=True),
    "phi-2": PreTokenizerRule(gpt2_regex=True),
    "olmo": PreTokenizerRule(gpt2_regex=True),
    "mpt": PreTokenizerRule(gpt2_regex=True),
    "smollm": PreTokenizerRule(("digits",), gpt2_regex=True),
    "starcoder": PreTokenizerRule(("digits",), gpt2_regex=True),
    "refact": PreTokenizerRule(("digits",), gpt2_regex=True),
    "command-r": PreTokenizerRule(("digits",), gpt2_regex=True),
    "gpt-4o": PreTokenizerRule((_GPT4O,), llama=(_GPT4O_IN_LLAMA,)),
    "llama4": PreTokenizerRule((_GPT4O,), llama=(_GPT4O_IN_LLAMA,)),
    "granite-embed-multi-97m": PreTokenizerRule((_GPT4O,), ignore_merges=True, llama=(_MARKED_IN_LLAMA,)),
    "tekken": PreTokenizerRule((_TEKKEN,), ignore_merges=True, add_bos=True, llama=(_TEKKEN_IN_LLAMA,)),
    "deepseek-v3": PreTokenizerRule((r"\p{N}{1,3}", _KANA, _DEEPSEEK3)),
    "deepseek-coder": PreTokenizerRule(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, "digits"),
        llama=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_IN_LLAMA, "digits"),
    ),
    "seed-coder": PreTokenizerRule((_SEED,)),
    "bailingmoe": PreTokenizerRule((_BAILING,)),
    "minicpm5": PreTokenizerRule((r"\p{N}{1,3}", _MINICPM), ignore_merges=True),
    "ufakzeka": PreTokenizerRule((rf"{_WORD}|\p{{N}}|{_SYMBOLS}",)),
    "default": PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE)),
    "falcon": PreTokenizerRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE)),
    "deepseek-llm": PreTokenizerRule(
        _deepseek_llm("\u3000-\u3002", _CJK), llama=_deepseek_llm("\u3001-\u3002", _CJK_IN_LLAMA)
    ),
    "spark2_5": PreTokenizerRule(
        (r"\p{N}{1,3}", _KANA, rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}", "digits")
    ),
    "jais-2": PreTokenizerRule((_JAIS2,)),
    "youtu": PreTokenizerRule(
        (_YOUTU, _by_case(_UPPER, _LOWER, SUFFIX + "?", r"\p{N}")),
        ignore_merges=True,
        llama=(_YOUTU, _by_case(_ANY, _ANY, SUFFIX_BY_CLASSES + "?", r"\p{N}")),
    ),
    "tiny_aya": PreTokenizerRule(
        (_THREES, _GPT4O), llama=(_THREES_IN_LLAMA, _by_case(_ANY, _ANY, SUFFIX_BY_CLASSES + "?", r"\p{N}{1,3}"))
    ),
    "afmoe": PreTokenizerRule((_THREES_IN_LLAMA, _ASIAN, _DEEPSEEK3)),
    "bloom": PreTokenizerRule((_BLOOM,)),
    "viking": PreTokenizerRule((_BLOOM, "digits")),
    "chameleon": PreTokenizerRule(_CHAMELEON, gpt2_regex=True, add_bos=True),
    "superbpe": PreTokenizerRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))"), llama=(r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))")),
    "exaone-moe": PreTokenizerRule((_EXAONE_MOE,)),
    "laguna": PreTokenizerRule((LINES, _QWEN2)),
    "kimi-k2": PreTokenizerRule((_KIMI,), llama=(_KIMI_IN_LLAMA,)),
    "gemma4": PreTokenizerRule((LINES,), letters="pieces", always_bos=True),
    "sarvam-moe": PreTokenizerRule((LINES,), letters="pieces"),
    "whitespace": PreTokenizerRule((r"\S+",), letters="words"),
}
"""By name; detection by structure returns the first of several names with the same rules."""

_SAME_AS = {
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "qwen2": "stablelm2 hunyuan solar-open megrez kormo f2llmv2 grok-2",
    "smollm": "codeshell exaone minerva-7b mellum2",
    "gpt-2": "jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 jais "
    "trillion granite-docling jina-v1-en jina-v2-code roberta-bpe",
    "gpt-4o": "kanana2 talkie minimax-m2",
    "dbrx": "chatglm-bpe",
    "glm4": "glm5",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bailingmoe": "bailingmoe2 llada-moe",
    "bloom": "poro-chat gpt3-finnish",
    "tiny_aya": "cohere2moe",
    "gemma4": "granite-embed-multi-311m",
}
_RULE_OF = {other: name for name, others in _SAME_AS.items() for other in others.split()}


def rule(name: str | None) -> PreTokenizerRule | None:
    """The rule behind llama.cpp's name `name`, None for one that it does not know."""
    return RULES.get(_RULE_OF.get(name, name)) if name is not None else None


NAMES = frozenset((*RULES, *_RULE_OF))
"""The names that have a rule: all that llama.cpp knows."""

IGNORE_MERGES = frozenset(name for name in NAMES if RULES[_RULE_OF.get(name, name)].ignore_merges)
"""The names whose rule takes whole tokens before merges."""
