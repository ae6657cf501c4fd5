"""Tokenizers out of a Hugging Face folder, whatever form its files have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aprfmt.errors import CorruptError, LimitError, UnsupportedError
from aprfmt.limits import MAX_TEXT_FILE_BYTES, MAX_TOKEN_ID
from aprfmt.tokenizer import pre
from aprfmt.tokenizer.hf_added import Added, added_tokens, named_specials
from aprfmt.tokenizer.hf_bpe import bpe
from aprfmt.tokenizer.hf_kinds import Draft, unigram, wordpiece
from aprfmt.tokenizer.hf_old import bpe_files, sentencepiece_draft, wordpiece_file
from aprfmt.tokenizer.hf_special import chat_templates, special_ids
from aprfmt.tokenizer.model import Tokenizer

__all__ = ["TOKENIZER_FILES", "is_tokenizer_file", "read_files"]

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
        "sentencepiece.bpe.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)
"""Files of a folder that belong to its tokenizer, beside `additional_chat_templates/*.jinja`."""

_FOREIGN = {"sentencepiece.bpe.model", "tekken.json"}


def is_tokenizer_file(name: str) -> bool:
    """Whether the relative path `name` is a tokenizer file."""
    return name in TOKENIZER_FILES or (
        name.startswith("additional_chat_templates/") and name.endswith(".jinja")
    )


def read_files(files: Mapping[str, bytes], config: Mapping[str, Any] | None = None) -> Tokenizer | None:
    """The tokenizer of a folder's files, None where there is none.

    Of several forms tokenizer.json counts, then vocab.json with merges.txt, tokenizer.model, vocab.txt.

    Args:
        files: contents by relative path; files that are no tokenizer files are ignored.
        config: the parsed config.json, for special ids that the tokenizer files leave open.

    Raises:
        CorruptError: a file is no JSON, or holds values of the wrong type, ids out of range, unknown merges.
        RefusedError: the settings ask for a token that the vocabulary has not.
        UnsupportedError: an algorithm that llama.cpp has not, or only files of other tokenizer libraries.
    """
    kept = {name: bytes(data) for name, data in files.items() if is_tokenizer_file(name)}
    settings = {**_special_map(kept), **_object(kept, "tokenizer_config.json")}
    spm = next((name for name in ("tokenizer.model", "spiece.model") if name in kept), None)
    if "tokenizer.json" in kept:
        parsed, source = _object(kept, "tokenizer.json"), "tokenizer.json"
    elif "vocab.json" in kept and "merges.txt" in kept:
        extra = _object(kept, "added_tokens.json")
        parsed = bpe_files(_object(kept, "vocab.json"), kept["merges.txt"], extra, settings)
        source = "vocab.json"
    elif spm is not None:
        extra = _object(kept, "added_tokens.json")
        draft, added = sentencepiece_draft(kept[spm], spm, extra, settings)
        return _finish(draft, {}, added, settings, config or {}, kept)
    elif "vocab.txt" in kept:
        parsed, source = wordpiece_file(kept["vocab.txt"], settings), "vocab.txt"
    else:
        _check_foreign(kept)
        return None
    return _build(parsed, source, settings, config or {}, kept)


def _check_foreign(kept: Mapping[str, bytes]) -> None:
    """Raises UnsupportedError for files that hold a tokenizer in a form that is not read."""
    for name in sorted(kept.keys() & _FOREIGN):
        raise UnsupportedError(
            f"a tokenizer that exists only as {name} is not supported",
            path=name,
            hint="save it with transformers' fast tokenizer, which writes tokenizer.json",
        )


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
    kind = model.get("type", "Unigram" if isinstance(model.get("vocab"), list) else "BPE")
    if kind not in ("BPE", "Unigram", "WordPiece"):
        raise UnsupportedError(
            f"a {kind} model is not supported, only BPE, Unigram and WordPiece",
            path=source,
            hint="llama.cpp has no such tokenizer either",
        )
    named = named_specials(settings)
    if kind == "Unigram":
        added = added_tokens(parsed, settings, _positions(model.get("vocab")), source)
        draft = unigram(parsed, added, named, config, source)
    else:
        vocab = _vocab(model.get("vocab"), source)
        added = added_tokens(parsed, settings, vocab, source)
        if kind == "BPE":
            draft = bpe(parsed, files.get("tokenizer.json"), vocab, added, named, settings, source)
        else:
            draft = wordpiece(parsed, vocab, added, named, config, source)
            draft.pre = pre.hash_name(files.get("tokenizer.json", b"")) or "default"
    return _finish(draft, parsed, added, settings, config, files)


def _positions(vocab: object) -> dict[str, int]:
    """Id by text of a Unigram vocabulary; entries of another form are for unigram to refuse."""
    entries = vocab if isinstance(vocab, list) else []
    return {e[0]: i for i, e in enumerate(entries) if isinstance(e, list) and e and isinstance(e[0], str)}


def _finish(
    draft: Draft,
    parsed: Mapping[str, Any],
    added: list[Added],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    files: dict[str, bytes],
) -> Tokenizer:
    """The algorithm's lists together with special ids, flags and chat templates, which all have in common."""
    texts = {token.content: token.id for token in reversed(added)}
    special, flags = special_ids(parsed, settings, config, texts, draft.tokens, draft.notes)
    if draft.model == "t5":  # llama.cpp ends such texts with EOS unless told otherwise
        flags = {"add_bos": False, "add_eos": False, **flags}
    template, templates = chat_templates(files, settings)
    return Tokenizer(
        model=draft.model,
        tokens=draft.tokens,
        merges=draft.merges,
        types=draft.types,
        scores=draft.scores,
        pre=draft.pre,
        special={**draft.special, **special},
        flags={**flags, **draft.flags},
        chat_template=template,
        chat_templates=templates,
        n_added=len({token.id for token in added}),
        files=files,
        extra=draft.extra,
        pre_note=draft.pre_note,
        notes=draft.notes,
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
