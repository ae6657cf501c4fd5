"""Tokenizers inside APR metadata: the reference's `tokenizer.*` keys, the rest under `aprfmt.tokenizer`.

    tokenizer.model, .vocabulary, .vocab_size, .merges, .pre_type, .token_type, .scores,
    tokenizer.bos_token_id, .eos_token_id, .padding_token_id, .add_bos_token     reference readers know these
    chat_template                                                                the typed field
    aprfmt.tokenizer {special, flags, chat_templates, n_added, extra, gguf_keys, pre_note, patches}    the rest

Texts that are not Unicode (a GGUF may contain any bytes) are listed with U+FFFD; `patches` has their bytes.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from aprfmt.errors import CorruptError, RefusedError
from aprfmt.tokenizer.data import KvType, TokenType, is_unicode, read_list, read_value
from aprfmt.tokenizer.ggml import template_key, to_gguf
from aprfmt.tokenizer.model import Tokenizer

_T = TypeVar("_T")
OWN_KEY = "aprfmt.tokenizer"
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}
_MODELS = {"bpe": "gpt2", "unigram": "llama", "spm": "llama", "sentencepiece": "llama", "wordpiece": "bert"}
_PYTHON: dict[str, set[type]] = {
    **{f"{sign}INT{bits}": {int} for sign in ("U", "") for bits in (8, 16, 32, 64)},
    **{f"FLOAT{bits}": {int, float} for bits in (32, 64)},
    "BOOL": {bool},
    "STRING": {str},
}
_LOOKS_SPECIAL = re.compile(r"<\|.+\|>|</?[a-z_]{1,17}>", re.DOTALL)
_LOOKS_UNUSED = re.compile(r"\[PAD\d+\]|<\|pad_\d+\|>|")


def to_metadata(tok: Tokenizer) -> dict[str, object]:
    """APR metadata entries for a tokenizer, without `files`.

    Raises:
        RefusedError: a model, pre-tokenizer or template name that is not Unicode text.
    """
    for name in (tok.model, tok.pre or "", *tok.chat_templates):
        if not is_unicode(name):
            raise RefusedError(f"the tokenizer's name {name!r} is not Unicode text")
    texts = {"vocabulary": tok.tokens, "merges": tok.merges}
    patches: dict[str, dict[str, str]] = {name: _patches(range(len(items)), items) for name, items in texts.items()}
    patches["chat_template"] = _patches([""], [tok.chat_template or ""])
    patches["chat_templates"] = _patches(list(tok.chat_templates), list(tok.chat_templates.values()))
    patches["scores"] = {
        str(i): struct.pack("<d", score).hex() for i, score in enumerate(tok.scores) if not math.isfinite(score)
    }
    values: dict[str, object] = {
        "tokenizer.model": tok.model,
        "tokenizer.vocabulary": _to_printable(tok.tokens, patches["vocabulary"]),
        "tokenizer.vocab_size": len(tok.tokens),
        "tokenizer.merges": _to_printable(tok.merges, patches["merges"]) or None,
        "tokenizer.pre_type": tok.pre,
        "tokenizer.token_type": list(tok.types) or None,
        "tokenizer.scores": [score if math.isfinite(score) else 0.0 for score in tok.scores] or None,
        "tokenizer.add_bos_token": tok.flags.get("add_bos"),
        "chat_template": None if tok.chat_template is None else _text(tok.chat_template),
        **{f"tokenizer.{key}": tok.special.get(role) for role, key in _SPECIAL.items()},
    }
    own: dict[str, object] = {
        "special": {role: i for role, i in tok.special.items() if role not in _SPECIAL},
        "flags": {flag: value for flag, value in tok.flags.items() if flag != "add_bos"},
        "chat_templates": {name: _text(text) for name, text in tok.chat_templates.items()},
        "n_added": tok.n_added,
        "extra": {key: [kind, _to_json(value)] for key, (kind, value) in tok.extra.items()},
        "gguf_keys": [key for key, _, _ in to_gguf(tok, vocab_size=None)],
        "pre_note": tok.pre_note if tok.pre is None else "",
        "patches": {name: patch for name, patch in patches.items() if patch},
    }
    if not tok.model or tok.model.lower() in _MODELS:  # it would be read as another algorithm
        own["model"] = tok.model
    values[OWN_KEY] = {key: value for key, value in own.items() if value or key == "model"}
    return {key: value for key, value in values.items() if value is not None}


def from_metadata(metadata: Mapping[str, object]) -> Tokenizer | None:
    """The tokenizer in APR metadata, None without a vocabulary; `files` stays empty.

    Files of other writers may call the algorithm `tokenizer.model_type` and lack types: those are then inferred from
    the texts, as in the reference runtime.

    Raises:
        CorruptError: an entry of the wrong type.
    """
    if metadata.get("tokenizer.vocabulary") is None:
        return None
    own = _mapping(metadata.get(OWN_KEY), OWN_KEY)
    patches = _mapping(own.get("patches"), f"{OWN_KEY}.patches")
    tokens = _apply_patches(_list(metadata, "vocabulary", str), patches, "vocabulary")
    merges = _apply_patches(_list(metadata, "merges", str), patches, "merges")
    scores = [float(score) for score in _list(metadata, "scores", float)]
    for i, hexed in _mapping(patches.get("scores"), "patches.scores").items():
        scores[_index(i, len(scores))] = struct.unpack("<d", _unhex(hexed, 8))[0]
    types = _list(metadata, "token_type", int)
    if not types and OWN_KEY not in metadata:
        types = _infer_types(tokens)
    for name, items in (("token_type", types), ("scores", scores)):
        if items and len(items) != len(tokens):
            raise CorruptError(f"tokenizer.{name} has {len(items)} entries for {len(tokens)} tokens")
    special = {role: metadata.get(f"tokenizer.{key}") for role, key in _SPECIAL.items()}
    special |= _mapping(own.get("special"), "special")
    flags = {"add_bos": metadata.get("tokenizer.add_bos_token"), **_mapping(own.get("flags"), "flags")}
    template = _string(metadata, "chat_template")
    if template is None:
        template = _string(metadata, "tokenizer.chat_template")
    templates = _read_values(_mapping(own.get("chat_templates"), "chat_templates"), str, "chat template")
    return Tokenizer(
        model=_model(metadata, own.get("model"), bool(merges), bool(scores)),
        tokens=tokens,
        merges=merges,
        types=types,
        scores=scores,
        pre=_string(metadata, "tokenizer.pre_type"),
        special={
            role: i
            for role, i in _read_values(special, int, "special id").items()
            if 0 <= i < 1 << 32  # -1 means none
        },
        flags=_read_values(flags, bool, "flag"),
        chat_template=template if template is None else _patch_text(template, patches, "chat_template", ""),
        chat_templates={
            name: _patch_text(text, patches, "chat_templates", name)
            for name, text in _sort_templates(templates, own.get("gguf_keys")).items()
        },
        n_added=read_value(own.get("n_added"), int, f"{OWN_KEY}.n_added") or 0,
        extra=_extra(_mapping(own.get("extra"), "extra")),
        gguf_keys=_keys(own.get("gguf_keys")),
        pre_note=read_value(own.get("pre_note"), str, f"{OWN_KEY}.pre_note") or "",
    )


def _sort_templates(templates: dict[str, str], keys: object) -> dict[str, str]:
    """Templates in the order of their GGUF keys: JSON objects of an APR are sorted by name."""
    rank = {key: i for i, key in enumerate(_keys(keys))}
    return dict(sorted(templates.items(), key=lambda item: rank.get(template_key(item[0]), len(rank))))


def _keys(value: object) -> list[str]:
    return [key for key in value if isinstance(key, str)] if isinstance(value, list) else []


def _to_json(value: object) -> object:
    """Bytes, and texts that are not Unicode, as an object; everything else is already JSON."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return {"hex": _bytes(value).hex()} if isinstance(value, str) and not is_unicode(value) else value


def _extra(stored: Mapping[str, object]) -> dict[str, tuple[KvType, object]]:
    found: dict[str, tuple[KvType, object]] = {}
    for key, pair in stored.items():
        where = f"{OWN_KEY} entry extra[{key!r}]"
        kind, value = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if not isinstance(kind, str | list):
            raise CorruptError(f"{where} is not a pair of type and value")
        if isinstance(value, Mapping) and "base64" in value:
            try:
                value = base64.b64decode(value["base64"], validate=True)
            except (binascii.Error, TypeError, ValueError) as error:
                raise CorruptError(f"{where} is not base64: {error}") from error
        elif isinstance(value, Mapping):
            value = _unhex(value.get("hex")).decode("utf-8", "surrogateescape")
        is_array = isinstance(kind, list)
        inner = kind[1] if is_array and kind[:1] == ["ARRAY"] and len(kind) == 2 else kind
        items = value if isinstance(value, list | bytes) and is_array else [value]
        allowed = _PYTHON.get(inner) if isinstance(inner, str) else None
        if not isinstance(inner, str) or allowed is None or not set(map(type, items)) <= allowed:
            raise CorruptError(f"{where} does not match its type {kind}")
        found[key] = (("ARRAY", inner) if is_array else inner, value)
    return found


def _model(metadata: Mapping[str, object], literal: object, merges: bool, scores: bool) -> str:
    """The algorithm's GGUF name; if neither key states it, inferred from the lists present.

    A `literal` name is a GGUF's own, however odd.
    """
    if isinstance(literal, str) and metadata.get("tokenizer.model") == literal:
        return literal
    name = _string(metadata, "tokenizer.model") or _string(metadata, "tokenizer.model_type")
    if name is None:
        return "gpt2" if merges else "llama" if scores else "none"
    return _MODELS.get(name.lower(), name)


def _infer_types(tokens: Sequence[str]) -> list[int]:
    """Types inferred from the texts: `<|...|>` and `<word>` are special, pads and repeated texts unused."""
    first = {text: i for i, text in reversed(list(enumerate(tokens)))}
    repeated = {text for text, n in Counter(tokens).items() if n > 1}

    def kind(i: int, text: str) -> TokenType:
        if (text in repeated and first[text] != i) or _LOOKS_UNUSED.fullmatch(text):
            return TokenType.UNUSED
        long_enough = len(text) > 4 if text.startswith("<|") else len(text) <= 20
        return TokenType.CONTROL if long_enough and _LOOKS_SPECIAL.fullmatch(text) else TokenType.NORMAL

    return [int(kind(i, text)) for i, text in enumerate(tokens)]


def _bytes(text: str) -> bytes:
    """UTF-8, with lone surrogates that represent a byte as that byte; files have no others."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise RefusedError(f"the tokenizer text {text!r} is neither valid Unicode nor encoded bytes") from error


def _patches(keys: Sequence[int | str], texts: Sequence[str]) -> dict[str, str]:
    """Hex of the bytes of each text that is not Unicode."""
    # One encoding of everything is far cheaper than one per text, and nearly always sufficient.
    if is_unicode("".join(texts)):
        return {}
    pairs = zip(keys, texts, strict=True)
    return {str(key): _bytes(text).hex() for key, text in pairs if not is_unicode(text)}


def _text(text: str) -> str:
    return _bytes(text).decode("utf-8", "replace")


def _to_printable(items: list[str], patches: Mapping[str, str]) -> list[str]:
    result = list(items)
    for i in patches:
        result[int(i)] = _text(result[int(i)])
    return result


def _apply_patches(items: list[str], patches: Mapping[str, object], name: str) -> list[str]:
    for i, hexed in _mapping(patches.get(name), f"patches.{name}").items():
        items[_index(i, len(items))] = _unhex(hexed).decode("utf-8", "surrogateescape")
    return items


def _patch_text(text: str, patches: Mapping[str, object], name: str, key: str) -> str:
    hexed = _mapping(patches.get(name), f"patches.{name}").get(key)
    return text if hexed is None else _unhex(hexed).decode("utf-8", "surrogateescape")


def _index(text: str, n: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) < n):
        raise CorruptError(f"{OWN_KEY} patches entry {text!r} of {n}")
    return int(text)


def _unhex(value: object, size: int | None = None) -> bytes:
    try:
        data = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        data = b""
    if not data or size not in (None, len(data)):
        raise CorruptError(f"{OWN_KEY} has a patch that is not hexadecimal")
    return data


def _mapping(value: object, name: str) -> Mapping[str, object]:
    if value is not None and not isinstance(value, Mapping):
        raise CorruptError(f"metadata entry {name} is not an object")
    return value or {}


def _list(metadata: Mapping[str, object], name: str, kind: type[_T]) -> list[_T]:
    return read_list(metadata.get(f"tokenizer.{name}"), kind, f"metadata entry tokenizer.{name}")


def _string(metadata: Mapping[str, object], key: str) -> str | None:
    return read_value(metadata.get(key), str, f"metadata entry {key}")


def _read_values(values: Mapping[str, object], kind: type[_T], what: str) -> dict[str, _T]:
    """The entries that are not null. Raises CorruptError for one of another type."""
    found = {name: read_value(value, kind, f"the tokenizer's {what} {name}") for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}
