"""Tokenizers without a tokenizer.json: vocab.json + merges.txt, vocab.txt, tokenizer.model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aprfmt.errors import CorruptError, LimitError, UnsupportedError
from aprfmt.limits import MAX_TEXT_FILE_BYTES
from aprfmt.tokenizer import sentencepiece
from aprfmt.tokenizer.ggml import CHARSMAP
from aprfmt.tokenizer.hf_added import UNDERLINE, Added, added_tokens, named_specials, place
from aprfmt.tokenizer.hf_kinds import ADDED_SCORE, GREEDY_NOTE, HOLE_SCORE, Draft, check_charsmap
from aprfmt.tokenizer.model import TokenType

__all__ = ["bpe_files", "sentencepiece_draft", "wordpiece_file"]

_BERT_ROLES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_BERT_LIKE = ("Bert", "Electra", "MPNet", "LayoutLM", "Funnel", "Lxmert", "DPR", "Splinter")
_NOT_BERT = ("BertJapanese", "Bertweet", "CamemBert", "PhoBert", "Roberta", "BertGeneration")


def _lines(data: bytes, path: str) -> list[str]:
    if len(data) > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"{len(data)} bytes are too many for a tokenizer file", path=path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"no UTF-8 text: {error}", path=path) from error
    # Not splitlines: a token may hold any of the characters that Unicode counts as line ends.
    return [line.removesuffix("\r") for line in text.split("\n")]


def bpe_files(
    vocab: Mapping[str, Any], merges: bytes, added: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """vocab.json, merges.txt and added_tokens.json in the shape of a tokenizer.json.

    Added tokens are special unless tokenizer_config.json says otherwise.
    """
    lines = [
        line for line in _lines(merges, "merges.txt") if line.strip() and not line.startswith("#version")
    ]
    ordinary = [entry.get("content") for entry in _decoder(settings) if entry.get("special") is False]
    listed = [{"content": text, "id": i, "special": text not in ordinary} for text, i in added.items()]
    model = {"type": "BPE", "vocab": vocab, "merges": lines}
    return {"model": model, "added_tokens": listed, "post_processor": {"type": "ByteLevel"}}


def _decoder(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, Mapping) else []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def wordpiece_file(data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
    """vocab.txt in the shape of a tokenizer.json; BERT's names of special tokens are added to `settings`.

    Raises UnsupportedError where tokenizer_config.json names a class that is no WordPiece.
    """
    kind = str(settings.get("tokenizer_class") or "BertTokenizer")
    if not any(word in kind for word in _BERT_LIKE) or kind.startswith(_NOT_BERT):
        raise UnsupportedError(
            f"vocab.txt of a {kind} is not supported, only that of WordPiece tokenizers",
            path="vocab.txt",
            hint="save the tokenizer with transformers' fast tokenizer, which writes tokenizer.json",
        )
    lines = _lines(data, "vocab.txt")
    vocab = {text: i for i, text in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    for role, text in _BERT_ROLES.items():
        settings.setdefault(f"{role}_token", text if text in vocab else None)
    lowercase = settings.get("do_lower_case") is not False
    specials = named_specials(settings)
    return {
        "model": {"type": "WordPiece", "vocab": vocab, "unk_token": _text(settings["unk_token"]) or "[UNK]"},
        "added_tokens": [{"id": i, "content": t, "special": True} for t, i in vocab.items() if t in specials],
        "normalizer": {
            "type": "BertNormalizer",
            "lowercase": lowercase,
            "strip_accents": settings.get("strip_accents"),
        },
    }


def _text(value: object) -> Any:
    return value.get("content") if isinstance(value, Mapping) else value


def sentencepiece_draft(
    data: bytes, path: str, listed: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Draft, list[Added]]:
    """A tokenizer.model with added_tokens.json (`listed`) and tokenizer_config.json on top of it.

    Raises:
        CorruptError: no SentencePiece model, or added tokens of a wrong form.
        UnsupportedError: the algorithms "word" and "char", or spaces at the ends of words.
    """
    model = sentencepiece.read(data, path)
    if model.model_type not in (sentencepiece.UNIGRAM, sentencepiece.BPE) or model.suffix:
        kind = "with spaces as suffixes" if model.suffix else f"of type {model.model_type}"
        raise UnsupportedError(f"a SentencePiece model {kind} is not supported", path=path)
    special = {entry.get("content") for entry in _decoder(settings) if entry.get("special") is True}
    entries = [{"content": text, "id": i, "special": text in special} for text, i in listed.items()]
    added = added_tokens({"added_tokens": entries}, settings, {}, "added_tokens.json")
    named = named_specials(settings)
    pieces = model.pieces
    tokens, types = place(((piece.text, i) for i, piece in enumerate(pieces)), added, named, path)
    changed = {token.id for token in added}
    for i, piece in enumerate(pieces):
        if piece.type != TokenType.NORMAL and (i not in changed or piece.type == TokenType.UNKNOWN):
            types[i] = piece.type
            if piece.type == TokenType.USER_DEFINED:
                tokens[i] = piece.text.replace(UNDERLINE, " ")
    scores = [
        HOLE_SCORE if i >= len(pieces) and kind == TokenType.UNUSED
        else ADDED_SCORE if i >= len(pieces) or (i in changed and kind != TokenType.UNKNOWN)
        else pieces[i].score
        for i, kind in enumerate(types)
    ]  # fmt: skip
    draft = Draft("llama", tokens, types, scores=scores, flags={"add_space_prefix": model.add_dummy_prefix})
    draft.special = {role: i for role, i in model.ids.items() if i < len(pieces)}
    if model.model_type == sentencepiece.UNIGRAM and model.byte_fallback:
        draft.notes.append(GREEDY_NOTE)
    elif model.model_type == sentencepiece.UNIGRAM:
        draft.model = "t5"
        draft.flags["remove_extra_whitespaces"] = model.remove_extra_whitespaces
        if model.charsmap:
            check_charsmap(model.charsmap, path)
            draft.extra[CHARSMAP] = (("ARRAY", "UINT8"), model.charsmap)
    return draft, added
