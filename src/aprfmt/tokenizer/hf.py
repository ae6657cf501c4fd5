"""Tokenizers out of a Hugging Face folder: tokenizer.json, or vocab.json with merges.txt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aprfmt.errors import CorruptError, LimitError, UnsupportedError
from aprfmt.limits import MAX_TEXT_FILE_BYTES, MAX_TOKEN_ID, MAX_VOCAB_HOLES
from aprfmt.tokenizer import pre
from aprfmt.tokenizer.hf_special import chat_templates, special_ids
from aprfmt.tokenizer.model import Tokenizer, TokenType

__all__ = ["TOKENIZER_FILES", "is_tokenizer_file", "looks_special", "read_files"]

TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)
"""Files of a folder that belong to its tokenizer, beside `additional_chat_templates/*.jinja`."""

_MERGE_SPACE = "\u0120"
"""Stands for a space inside a half of a merge, which is itself written as two halves around a space."""
_UNDERLINE = "\u2581"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRE_BY_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_REACHED_BY_NO_MERGE = -1e6


@dataclass(slots=True)
class _Added:
    """One added token, from whichever file."""

    id: int
    content: str
    special: bool


def is_tokenizer_file(name: str) -> bool:
    """Whether the relative path `name` is a tokenizer file."""
    return name in TOKENIZER_FILES or (
        name.startswith("additional_chat_templates/") and name.endswith(".jinja")
    )


def looks_special(text: str) -> bool:
    """llama.cpp's rule for added tokens that are control tokens although their file does not say so."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def read_files(files: Mapping[str, bytes], config: Mapping[str, Any] | None = None) -> Tokenizer | None:
    """The tokenizer of a folder's files, None where there is none.

    Args:
        files: contents by relative path; files that are no tokenizer files are ignored.
        config: the parsed config.json, for special ids that the tokenizer files leave open.

    Raises:
        CorruptError: a file is no JSON, or holds values of the wrong type, ids out of range, unknown merges.
        UnsupportedError: an algorithm other than BPE, or only files of other tokenizer libraries.
    """
    kept = {name: bytes(data) for name, data in files.items() if is_tokenizer_file(name)}
    settings = {**_special_map(kept), **_object(kept, "tokenizer_config.json")}
    if "tokenizer.json" in kept:
        parsed, source = _object(kept, "tokenizer.json"), "tokenizer.json"
    elif "vocab.json" in kept and "merges.txt" in kept:
        parsed, source = _old_files(kept, settings), "vocab.json"
    else:
        other = sorted(kept.keys() & {"tokenizer.model", "spiece.model", "vocab.txt", "tekken.json"})
        if not other:
            return None
        raise UnsupportedError(
            f"a tokenizer that exists only as {other[0]} is not supported",
            path=other[0],
            hint="save it with transformers' fast tokenizer, which writes tokenizer.json",
        )
    return _build(parsed, source, settings, config or {}, kept)


def _build(
    parsed: Mapping[str, Any],
    source: str,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    files: dict[str, bytes],
) -> Tokenizer:
    model = parsed.get("model")
    if not isinstance(model, Mapping):
        raise CorruptError("there is no `model` object", path=source)
    _check_model(model, source)
    vocab = _vocab(model.get("vocab"), source)
    added = _added_tokens(parsed, settings, vocab, source)
    pieces = model.get("byte_fallback") is True and not _byte_level(parsed.get("pre_tokenizer"))
    tokens, types = _tokens(vocab, added, _named_specials(settings), source)
    if pieces:
        _piece_types(tokens, types, model.get("unk_token"))
    texts = vocab.keys() | {token.content for token in added}
    merges = _merges(model.get("merges", []), texts, source)
    special, flags = special_ids(parsed, settings, config, {t.content: t.id for t in reversed(added)}, tokens)
    if pieces:
        flags["add_space_prefix"] = _adds_space_prefix(parsed)
    template, templates = chat_templates(files, settings)
    return Tokenizer(
        model="llama" if pieces else "gpt2",
        tokens=tokens,
        merges=merges,
        types=types,
        scores=_scores(tokens, types, merges) if pieces else [],
        pre="default" if pieces else _pre(files, parsed, settings),
        special=special,
        flags=flags,
        chat_template=template,
        chat_templates=templates,
        n_added=len({token.id for token in added}),
        files=files,
    )


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in a file, {} where the file is not there."""
    if name not in files:
        return {}
    data = files[name]
    if len(data) > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"{len(data)} bytes are too many for a tokenizer file", path=name)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"no valid JSON: {error}", path=name) from error
    if not isinstance(value, dict):
        raise CorruptError("the top level is no JSON object", path=name)
    return value


def _special_map(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The roles of special_tokens_map.json, which count where tokenizer_config.json does not name one."""
    entries = _object(files, "special_tokens_map.json").items()
    return {key: value for key, value in entries if key.endswith(("_token", "_special_tokens"))}


def _old_files(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, Any]:
    """vocab.json, merges.txt and added_tokens.json in the shape of a tokenizer.json.

    Added tokens are special unless tokenizer_config.json says otherwise.
    """
    try:
        # Not splitlines: a token may hold any of the characters that Unicode counts as line ends.
        lines = [line.removesuffix("\r") for line in files["merges.txt"].decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise CorruptError(f"no UTF-8 text: {error}", path="merges.txt") from error
    merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    decoder = settings.get("added_tokens_decoder")
    entries = [e for e in decoder.values() if isinstance(e, Mapping)] if isinstance(decoder, Mapping) else []
    ordinary = [entry.get("content") for entry in entries if entry.get("special") is False]
    added = [
        {"content": text, "id": i, "special": text not in ordinary}
        for text, i in _object(files, "added_tokens.json").items()
    ]
    model = {"type": "BPE", "vocab": _object(files, "vocab.json"), "merges": merges}
    return {"model": model, "added_tokens": added, "post_processor": {"type": "ByteLevel"}}


def _check_model(model: Mapping[str, Any], source: str) -> None:
    kind = model.get("type", "BPE")
    affixes = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if kind != "BPE" or affixes:
        what = f"a {kind} model" if kind != "BPE" else f"a BPE model with {affixes[0]}"
        raise UnsupportedError(f"{what} is not supported, only BPE", path=source)


def _vocab(vocab: object, source: str) -> dict[str, int]:
    """Checks model.vocab: text -> id."""
    if not isinstance(vocab, dict):
        raise CorruptError("model.vocab is no JSON object", path=source)
    for text, i in vocab.items():
        if type(i) is not int or not 0 <= i <= MAX_TOKEN_ID:
            raise CorruptError(f"model.vocab[{text!r}] is no token id: {i!r}", path=source)
    try:
        "".join(vocab).encode()
    except UnicodeEncodeError as error:
        raise CorruptError("model.vocab holds a text with a lone surrogate", path=source) from error
    return vocab


def _added_tokens(
    parsed: Mapping[str, Any], settings: Mapping[str, Any], vocab: Mapping[str, int], source: str
) -> list[_Added]:
    """Added tokens of tokenizer.json, then those that only tokenizer_config.json lists."""
    listed = parsed.get("added_tokens") or []
    if not isinstance(listed, list):
        raise CorruptError("added_tokens is no array", path=source)
    added = [_added(entry, f"added_tokens[{n}]", source) for n, entry in enumerate(listed)]
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        raise CorruptError("added_tokens_decoder is no JSON object", path="tokenizer_config.json")
    ids, texts = {token.id for token in added} | set(vocab.values()), {token.content for token in added}
    for key, entry in decoder.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key
        where = f"added_tokens_decoder[{key!r}]"
        if not isinstance(entry, Mapping):
            raise CorruptError(f"{where} is no JSON object", path="tokenizer_config.json")
        token = _added({**entry, "id": token_id}, where, "tokenizer_config.json")
        if token.content not in texts and (token.id not in ids or vocab.get(token.content) == token.id):
            added.append(token)
    return added


def _added(entry: object, where: str, source: str) -> _Added:
    if not isinstance(entry, Mapping):
        raise CorruptError(f"{where} is no JSON object", path=source)
    token_id, content = entry.get("id"), entry.get("content")
    if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
        raise CorruptError(f"{where} has no usable id: {token_id!r}", path=source)
    if not isinstance(content, str) or any("\ud800" <= c <= "\udfff" for c in content):
        raise CorruptError(f"{where} has no usable content: {content!r}", path=source)
    return _Added(token_id, content, entry.get("special") is True)


def _named_specials(settings: Mapping[str, Any]) -> set[str]:
    """Texts with a role in tokenizer_config.json: special to transformers, whatever their flag says."""
    more = settings.get("additional_special_tokens") or []
    values = [value for key, value in settings.items() if key.endswith("_token")]
    values += more if isinstance(more, list) else []
    texts = [value.get("content") if isinstance(value, Mapping) else value for value in values]
    return {text for text in texts if isinstance(text, str)}


def _tokens(
    vocab: Mapping[str, int], added: list[_Added], named: set[str], source: str
) -> tuple[list[str], list[int]]:
    """Text and GGML type of each id, by llama.cpp's rule; ids that nothing names become unused pads."""
    ids = {*vocab.values(), *(token.id for token in added)}
    if not ids:
        raise CorruptError("the vocabulary is empty", path=source)
    size = max(ids) + 1
    if size - len(ids) > len(ids) + MAX_VOCAB_HOLES:
        raise LimitError(f"ids reach {size - 1}, but there are only {len(ids)} tokens", path=source)
    tokens = [f"[PAD{i}]" for i in range(size)] if len(ids) < size else [""] * size
    types = [int(TokenType.UNUSED)] * size
    for text, i in vocab.items():
        tokens[i], types[i] = text, int(TokenType.NORMAL)
    for token in added:
        control = token.special or token.content in named or looks_special(token.content)
        types[token.id] = int(TokenType.CONTROL if control else TokenType.USER_DEFINED)
        # llama.cpp looks for user-defined texts in the input as it is, where a space is a space.
        tokens[token.id] = token.content if control else token.content.replace(_UNDERLINE, " ")
    return tokens, types


def _piece_types(tokens: list[str], types: list[int], unk: object) -> None:
    """SentencePiece types beyond the common rule: single bytes and the unknown token."""
    for i, text in enumerate(tokens):
        if text == unk:
            types[i] = int(TokenType.UNKNOWN)
        elif _BYTE.fullmatch(text):
            types[i] = int(TokenType.BYTE)


def _merges(merges: object, texts: set[str], source: str) -> list[str]:
    """Merges as "left right" whichever way the file spells them; each half and the whole must be a token."""
    if not isinstance(merges, list):
        raise CorruptError("model.merges is no array", path=source)
    result = []
    for n, merge in enumerate(merges):
        halves = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(halves, list)
            or len(halves) != 2
            or not all(isinstance(half, str) for half in halves)
        ):
            raise CorruptError(f"model.merges[{n}] is no pair of tokens: {merge!r}", path=source)
        left, right = halves
        if left not in texts or right not in texts or left + right not in texts:
            raise CorruptError(
                f"model.merges[{n}] names a token that is not in the vocabulary: {halves}", path=source
            )
        spaced = " " in left or " " in right
        result.append(
            f"{left.replace(' ', _MERGE_SPACE)} {right.replace(' ', _MERGE_SPACE)}"
            if spaced
            else f"{left} {right}"
        )
    return result


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Scores that make a best-score-first merger do what the ranked merges do: minus the rank.

    llama.cpp's SentencePiece merges the adjacent pair whose joined text has the best score; a text that
    several merges give takes the rank of the first. Single characters and bytes need no merge and score 0.
    """
    rank: dict[str, int] = {}
    for n, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), n)
    fixed = {
        int(TokenType.CONTROL): -1000.0,
        int(TokenType.USER_DEFINED): -1000.0,
        int(TokenType.UNUSED): -10000.0,
        int(TokenType.BYTE): 0.0,
        int(TokenType.UNKNOWN): 0.0,
    }

    def score(text: str, kind: int) -> float:
        if kind in fixed:
            return fixed[kind]
        return -float(rank[text]) if text in rank else 0.0 if len(text) == 1 else _REACHED_BY_NO_MERGE

    return [score(text, kind) for text, kind in zip(tokens, types, strict=True)]


def _steps(step: object) -> Iterator[Mapping[str, Any]]:
    """A normaliser or pre-tokenizer and all the steps inside it; a crafted file nests them thousands deep."""
    left = [step]
    while left:
        step = left.pop()
        if isinstance(step, Mapping):
            yield step
            inner = step.get("normalizers") or step.get("pretokenizers")
            left += inner if isinstance(inner, list) else []


def _byte_level(pre_tokenizer: object) -> bool:
    """Whether a pre-tokenizer turns text into GPT-2's byte alphabet."""
    return any(step.get("type") == "ByteLevel" for step in _steps(pre_tokenizer))


def _adds_space_prefix(parsed: Mapping[str, Any]) -> bool:
    """Whether a SentencePiece-style tokenizer puts a space before the text."""

    def prepends(step: Mapping[str, Any]) -> bool:
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        return step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and scheme != "never")

    return any(prepends(step) for key in ("normalizer", "pre_tokenizer") for step in _steps(parsed.get(key)))


def _pre(files: Mapping[str, bytes], parsed: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    if "tokenizer.json" in files:
        return pre.detect(files["tokenizer.json"], parsed).name
    return _PRE_BY_CLASS.get(str(settings.get("tokenizer_class", "")).removesuffix("Fast"))
