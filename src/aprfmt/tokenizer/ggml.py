"""Tokenizers as GGUF key-value pairs: `tokenizer.ggml.*`, `tokenizer.chat_template*` and further keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TypeAlias, TypeVar

from aprfmt.errors import CorruptError, RefusedError, UsageError
from aprfmt.tokenizer.data import (
    CHARSMAP,
    NO_VOCABULARY,
    TOKEN_TYPE_COUNT,
    KvType,
    TokenType,
    is_unicode,
    read_list,
    read_value,
)
from aprfmt.tokenizer.model import Tokenizer

KV: TypeAlias = tuple[str, KvType, object]
"""(key, type name or ("ARRAY", element type name), value): what formats.gguf_write takes, types by name."""

_T = TypeVar("_T")
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
SPECIAL_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "sep": "seperator_token_id",
    "pad": "padding_token_id", "cls": "cls_token_id", "mask": "mask_token_id", "eot": "eot_token_id",
    "eom": "eom_token_id",
    **{f"fim_{part}": f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")},
    "prefix": "prefix_token_id", "suffix": "suffix_token_id", "middle": "middle_token_id",
}  # fmt: skip
"""Role -> key; "seperator" is the format's own spelling, the last three are older names of fim_*."""

_FLAG_KEYS = {
    "add_bos": "add_bos_token", "add_eos": "add_eos_token", "add_sep": "add_sep_token",
    "add_space_prefix": "add_space_prefix", "remove_extra_whitespaces": "remove_extra_whitespaces",
    "lowercase": "normalizer.lowercase", "strip_accents": "normalizer.strip_accents",
}  # fmt: skip
_LIST_KINDS = {"tokens": "str[]", "merges": "str[]", "token_type": "i32[]", "scores": "f32[]"}
_LIST_KEYS = ("model", "pre", *_LIST_KINDS)
VOCABULARY_KEYS = frozenset(_PREFIX + key for key in _LIST_KEYS)
"""What `key_problems` looks at."""
_HOLE_SCORE = -10000.0
_BYTES = (("ARRAY", "UINT8"), ("ARRAY", "INT8"))

_WANTED_BY_NAME = {
    "phi-3": ("</s>", "<unk>", "<s>", "<|endoftext|>"),
    "phi3": ("</s>", "<unk>", "<s>", "<|endoftext|>"),
}
"""Part of a model's name, in lower case -> tokens that llama.cpp then requires; it refuses files without them."""
_NAME_IS_NOT_READ = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
"""Pre-tokenizers for which it ignores the name."""


def missing_by_name(tok: Tokenizer, name: str) -> tuple[str, list[str]]:
    """(part of the model's `name`, missing tokens that llama.cpp requires because of it)."""
    part = next((part for part in _WANTED_BY_NAME if part in name.lower()), "")
    if not part or tok.model == NO_VOCABULARY or tok.pre in _NAME_IS_NOT_READ:
        return "", []
    known = set(tok.tokens)
    return part, [token for token in _WANTED_BY_NAME[part] if token not in known]


_MODELS = ("llama", "bert", "gpt2", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace")
_BY_MERGES = ("gpt2", "gemma4")


def key_problems(kv: Mapping[str, object], architecture: str, rows: int | None) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) for the vocabulary keys that llama.cpp requires.

    `rows` is the number of rows of the token embedding, or None.
    """
    model = kv.get(_PREFIX + "model")
    if model is None:
        yield _PREFIX + "model", "is missing: the file has no tokenizer"
        return
    if model in (NO_VOCABULARY, "no_vocab"):
        key = f"{architecture}.vocab_size"
        if rows is not None and kv.get(key) != rows:
            yield key, f"is {kv.get(key, 'missing')} in a file without vocabulary, the embedding has {rows} rows"
        return
    if model not in _MODELS:
        yield _PREFIX + "model", f"is {str(model)[:40]!r}, a tokenizer unknown to llama.cpp"
    tokens = read_list(kv.get(_PREFIX + "tokens"), str, _PREFIX + "tokens")
    if not tokens:
        yield _PREFIX + "tokens", "is missing"
        return
    if rows is not None and len(tokens) != rows:
        yield _PREFIX + "tokens", f"has {len(tokens)} tokens, the embedding {rows} rows"
    if len(set(tokens)) < len(tokens):
        yield _PREFIX + "tokens", "has duplicate tokens"
    if model in _BY_MERGES and _PREFIX + "merges" not in kv and kv.get(_PREFIX + "pre") != "kimi-k2":
        yield _PREFIX + "merges", "is missing"
    for name in ("scores", "token_type"):
        value = kv.get(_PREFIX + name)
        if isinstance(value, Sized) and len(value) < len(tokens):
            yield _PREFIX + name, f"has {len(value)} entries for {len(tokens)} tokens"


def known_keys() -> Iterator[tuple[str, str]]:
    """(key, its type: u32, str, f32[], ...) for the keys of a vocabulary that llama.cpp reads."""
    yield from ((_PREFIX + key, "str") for key in ("model", "pre"))
    yield from ((_PREFIX + key, kind) for key, kind in _LIST_KINDS.items())
    yield from ((_PREFIX + key, "u32") for key in SPECIAL_KEYS.values())
    yield from ((_PREFIX + key, "bool") for key in _FLAG_KEYS.values())
    yield from ((TOKEN_TYPE_COUNT, "u32"), (_TEMPLATE, "str"), (_TEMPLATE + "s", "str[]"))


def from_gguf(kv: Mapping[str, object]) -> Tokenizer | None:
    """The tokenizer of a GGUF's key-value pairs, None without one.

    Raises:
        CorruptError: a key has a value of the wrong type, or there are more types or scores than tokens.
    """
    model = read_value(kv.get(_PREFIX + "model"), str, _PREFIX + "model")
    if model is None:
        return None
    tokens = read_list(kv.get(_PREFIX + "tokens"), str, _PREFIX + "tokens")
    n = len(tokens)
    ids = {role: i for role, key in _find_keys(kv, SPECIAL_KEYS) if (i := _token_id(kv[key], key)) is not None}
    flags = {flag: read_value(kv.get(key), bool, key) for flag, key in _find_keys(kv, _FLAG_KEYS)}
    # Some writers pad the tokens but not the types: the missing ones are pads.
    return Tokenizer(
        model=model,
        tokens=tokens,
        merges=read_list(kv.get(_PREFIX + "merges"), str, _PREFIX + "merges"),
        types=_read_parallel(kv, "token_type", int, n, int(TokenType.UNUSED)),
        scores=[float(score) for score in _read_parallel(kv, "scores", float, n, _HOLE_SCORE)],
        pre=read_value(kv.get(_PREFIX + "pre"), str, _PREFIX + "pre"),
        special=ids,
        flags={flag: value for flag, value in flags.items() if value is not None},
        chat_template=read_value(kv.get(_TEMPLATE), str, _TEMPLATE),
        chat_templates=_read_templates(kv),
        extra=_extra(kv),
        gguf_keys=[key for key in kv if key.startswith("tokenizer.")],
        notes=[  # llama.cpp ignores such ids
            f"{_PREFIX}{SPECIAL_KEYS[role]} is {i}, but the tokenizer has only {n} tokens"
            for role, i in ids.items()
            if n and i >= n
        ],
    )


def _extra(kv: Mapping[str, object]) -> dict[str, tuple[KvType, object]]:
    """Keys without an attribute, with their types; nested arrays and text that is not Unicode stay in the file."""
    known = {_PREFIX + key for key in (*_LIST_KEYS, *SPECIAL_KEYS.values(), *_FLAG_KEYS.values())}
    kind_of = getattr(kv, "kind", None)  # of a file: its stated types
    found: dict[str, tuple[KvType, object]] = {}
    for key in kv:
        if not key.startswith("tokenizer.") or key in known or key.startswith(_TEMPLATE):
            continue
        value = kv[key]
        kind: KvType | None = _BYTES[0] if key == CHARSMAP else _kind(value)
        if kind_of is not None:
            kind = kind_of(key)
        items = value if isinstance(value, Iterable) else ()
        if kind is None or (kind == ("ARRAY", "STRING") and not is_unicode("".join(items))):
            continue
        found[key] = (kind, bytes(n & 0xFF for n in items) if kind in _BYTES else value)
    return found


def _kind(value: object) -> KvType | None:
    """The type of a value without a stated one."""
    if isinstance(value, list) and value:
        inner = _kind(value[0])
        return ("ARRAY", "INT32" if inner == "UINT32" else inner) if isinstance(inner, str) else None
    kinds: dict[type, str] = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    return ("ARRAY", "UINT8") if isinstance(value, bytes) else kinds.get(type(value))


def to_gguf(tok: Tokenizer, *, vocab_size: int | None, pad_style: str = "llama.cpp") -> list[KV]:
    """Key-value pairs for a GGUF, in the order and with the types of llama.cpp's converter.

    A tokenizer from a GGUF keeps that file's order. llama.cpp refuses a vocabulary with duplicate texts, so later
    copies are written as unused ids.

    Args:
        tok: the tokenizer.
        vocab_size: rows of the embedding; missing ids are added as unused tokens. None: no padding.
        pad_style: "llama.cpp" names them `[PAD{id}]`, "apr" `<|pad_{id}|>`.

    Raises:
        RefusedError: more tokens than `vocab_size`, or lists of different lengths.
        UsageError: an unknown pad style.
    """
    if pad_style not in ("llama.cpp", "apr"):
        raise UsageError(f"unknown pad style {pad_style!r}", hint="use llama.cpp or apr")
    tokens, types, scores = _pad(tok, vocab_size, pad_style)
    strings = ("ARRAY", "STRING")
    keys: list[KV] = [(_PREFIX + "model", "STRING", tok.model)]
    if tok.pre is not None:
        keys.append((_PREFIX + "pre", "STRING", tok.pre))
    if tokens:
        keys.append((_PREFIX + "tokens", strings, tokens))
    if scores:
        keys.append((_PREFIX + "scores", ("ARRAY", "FLOAT32"), scores))
    if types:
        keys.append((_PREFIX + "token_type", ("ARRAY", "INT32"), types))
    # A SentencePiece vocabulary works by scores: merges are for Hugging Face files only.
    if tok.merges and (tok.model != "llama" or _PREFIX + "merges" in tok.gguf_keys):
        keys.append((_PREFIX + "merges", strings, list(tok.merges)))
    keys += [(_PREFIX + SPECIAL_KEYS[role], "UINT32", i) for role, i in tok.special.items() if role in SPECIAL_KEYS]
    for flag, value in tok.flags.items():
        if flag in _FLAG_KEYS:
            position = 0 if flag == "add_space_prefix" and tok.model == "gpt2" else len(keys)
            keys.insert(position, (_PREFIX + _FLAG_KEYS[flag], "BOOL", value))
    for key, (kind, content) in tok.extra.items():
        if kind in _BYTES and isinstance(content, bytes):
            content = [n - 256 if n > 127 and kind == ("ARRAY", "INT8") else n for n in content]
        keys.append((key, kind, content))
    # The named templates with the list of their names, then the default one.
    named: list[KV] = [(template_key(name), "STRING", text) for name, text in tok.chat_templates.items()]
    keys += named
    if named:
        keys.append((_TEMPLATE + "s", strings, [key.removeprefix(_TEMPLATE + ".") for key, _, _ in named]))
    if tok.chat_template is not None:
        keys.append((_TEMPLATE, "STRING", tok.chat_template))
    rank = {key: i for i, key in enumerate(tok.gguf_keys)}
    return sorted(keys, key=lambda entry: rank.get(entry[0], len(rank)))


def _pad(tok: Tokenizer, vocab_size: int | None, style: str) -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores for the file: padded, and without duplicate texts."""
    n = len(tok.tokens)
    for name, parallel in (("types", tok.types), ("scores", tok.scores)):
        if parallel and len(parallel) != n:
            raise RefusedError(f"the tokenizer has {n} tokens but {len(parallel)} {name}")
    if vocab_size is not None and n > vocab_size:
        raise RefusedError(
            f"the tokenizer has {n} tokens, the model's vocabulary only {vocab_size}",
            hint="use the tokenizer that belongs to the model, see --tokenizer",
        )
    extra = max((vocab_size or 0) - n, 0) if n else 0
    tokens = tok.tokens + [""] * extra
    types = tok.types + [int(TokenType.UNUSED)] * extra if tok.types else []
    scores = tok.scores + [_HOLE_SCORE] * extra if tok.scores else []
    if extra or len(set(tokens)) < n:
        _name_unused(tokens, types, n, "[PAD{}]" if style == "llama.cpp" else "<|pad_{}|>")
    return tokens, types, scores


def _name_unused(tokens: list[str], types: list[int], n_real: int, template: str) -> None:
    """Gives pads (ids from `n_real`) and duplicate texts unique names, in place."""
    seen: set[str] = set()
    taken = set(tokens)
    for i, text in enumerate(tokens):
        if i < n_real and text not in seen:
            seen.add(text)
            continue
        name = template.format(i)
        while name in taken:
            name += "_"
        tokens[i] = name
        taken.add(name)
        if types:
            types[i] = int(TokenType.UNUSED)


def template_key(name: str) -> str:
    """The GGUF key of a chat template other than the default one."""
    return f"{_TEMPLATE}." + "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def _read_templates(kv: Mapping[str, object]) -> dict[str, str]:
    prefix, listed = _TEMPLATE + ".", kv.get(_TEMPLATE + "s")
    order = [prefix + name for name in read_list(listed, str, _TEMPLATE + "s")]
    keys = dict.fromkeys([*(key for key in order if key in kv), *(key for key in kv if key.startswith(prefix))])
    texts = {key.removeprefix(prefix): read_value(kv.get(key), str, key) for key in keys}
    return {name: text for name, text in texts.items() if text is not None}


def _find_keys(kv: Mapping[str, object], table: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """(our name, full key) of the table's keys that the file has, in the file's order."""
    by_key = {_PREFIX + key: name for name, key in table.items()}
    return [(by_key[key], key) for key in kv if key in by_key]


def _token_id(value: object, key: str) -> int | None:
    """The token id; None for -1, which means none. Raises CorruptError for anything but an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise CorruptError(f"{key} is not an integer")
    return value if 0 <= value < 1 << 32 else None


def _read_parallel(kv: Mapping[str, object], name: str, kind: type[_T], n: int, missing: _T) -> list[_T]:
    """An array with one entry per token, extended with `missing`; empty if the file has none."""
    items = read_list(kv.get(_PREFIX + name), kind, _PREFIX + name)
    if len(items) > n:
        raise CorruptError(f"{_PREFIX}{name} has {len(items)} entries for {n} tokens")
    return items + [missing] * (n - len(items)) if items else items
