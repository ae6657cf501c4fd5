"""The parts of a Hugging Face tokenizer's files: JSON, vocabularies, added tokens, steps of normalizers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from aprfmt.errors import CorruptError, LimitError, UnsupportedError
from aprfmt.io.jsonx import check_size
from aprfmt.limits import MAX_TEXT_FILE_BYTES, MAX_TOKEN_ID, MAX_VOCAB_HOLES
from aprfmt.tokenizer.data import UNDERLINE, TokenType, is_unicode
from aprfmt.types import Json, JsonObject

_BERT_ROLES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}


_BERT_LIKE = ("Bert", "Electra", "MPNet", "LayoutLM", "Funnel", "Lxmert", "DPR", "Splinter")


_NOT_BERT = ("BertJapanese", "Bertweet", "CamemBert", "PhoBert", "Roberta", "BertGeneration")


@dataclass(frozen=True, slots=True)
class Document:
    """The files of one tokenizer, parsed.

    Attributes:
        source: the vocabulary's file name, for messages.
        parsed: tokenizer.json, or another file converted to its structure.
        model: its `model`.
        settings: tokenizer_config.json over special_tokens_map.json.
        config: config.json.
        files: all files by name, unparsed.
    """

    source: str
    parsed: JsonObject
    model: JsonObject
    settings: JsonObject
    config: Mapping[str, Json]
    files: dict[str, bytes]


@dataclass(slots=True)
class Added:
    """One added token, from whichever file."""

    id: int
    content: str
    special: bool


def read_json(files: Mapping[str, bytes], name: str) -> Json:
    """The JSON value in a file. Raises CorruptError, LimitError."""
    data = read_bytes(files, name)
    check_size(data)
    try:
        value: Json = json.loads(data.decode("utf-8"))  # given bytes it would accept UTF-16 too
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not valid JSON: {error}", path=name) from error
    return value


def read_object(files: Mapping[str, bytes], name: str) -> JsonObject:
    """The JSON object in a file, {} if the file is missing."""
    value = read_json(files, name) if name in files else {}
    if not isinstance(value, dict):
        raise CorruptError("the top level is not a JSON object", path=name)
    return value


def read_text(files: Mapping[str, bytes], name: str) -> str:
    """The text in a file. Raises CorruptError, LimitError."""
    try:
        return read_bytes(files, name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"not UTF-8 text: {error}", path=name) from error


def read_bytes(files: Mapping[str, bytes], name: str) -> bytes:
    """A file of `files`. Raises LimitError."""
    data = files[name]
    if len(data) > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"{len(data)} bytes exceed the size limit of a tokenizer file", path=name)
    return data


def _read_lines(files: Mapping[str, bytes], name: str) -> list[str]:
    # Not splitlines: a token may contain any of Unicode's line ends.
    return [line.removesuffix("\r") for line in read_text(files, name).split("\n")]


def bpe_document(files: dict[str, bytes], settings: JsonObject) -> JsonObject:
    """vocab.json, merges.txt and added_tokens.json as a tokenizer.json.

    Added tokens are special unless tokenizer_config.json says otherwise.
    """
    lines = _read_lines(files, "merges.txt")
    merges: list[Json] = [line for line in lines if line.strip() and not line.startswith("#version")]
    ordinary = [entry.get("content") for entry in added_decoder(settings) if entry.get("special") is False]
    listed = read_object(files, "added_tokens.json").items()
    return {
        "model": {"type": "BPE", "vocab": read_object(files, "vocab.json"), "merges": merges},
        "added_tokens": [{"content": t, "id": i, "special": t not in ordinary} for t, i in listed],
        "post_processor": {"type": "ByteLevel"},
    }


def wordpiece_document(files: dict[str, bytes], settings: JsonObject) -> JsonObject:
    """vocab.txt as a tokenizer.json; BERT's names of special tokens are added to `settings`.

    Raises UnsupportedError if tokenizer_config.json names a class that is not WordPiece.
    """
    kind = str(settings.get("tokenizer_class") or "BertTokenizer")
    if not any(word in kind for word in _BERT_LIKE) or kind.startswith(_NOT_BERT):
        raise UnsupportedError(
            f"vocab.txt of a {kind} is not supported, only that of WordPiece tokenizers",
            path="vocab.txt",
            hint="save the tokenizer with transformers' fast tokenizer, which writes tokenizer.json",
        )
    lines = _read_lines(files, "vocab.txt")
    vocab: JsonObject = {text: i for i, text in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    for role, text in _BERT_ROLES.items():
        settings.setdefault(f"{role}_token", text if text in vocab else None)
    specials = named_specials(settings)
    return {
        "model": {"type": "WordPiece", "vocab": vocab, "unk_token": token_text(settings["unk_token"]) or "[UNK]"},
        "added_tokens": [{"id": i, "content": t, "special": True} for t, i in vocab.items() if t in specials],
        "normalizer": {
            "type": "BertNormalizer",
            "lowercase": settings.get("do_lower_case") is not False,
            "strip_accents": settings.get("strip_accents"),
        },
    }


def token_text(value: Json) -> str | None:
    """A special token's text: a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def named_specials(settings: JsonObject) -> set[str]:
    """Texts with a role in tokenizer_config.json: special in transformers, whatever their flag says."""
    more = settings.get("additional_special_tokens")
    values = [value for key, value in settings.items() if key.endswith("_token")]
    values += more if isinstance(more, list) else []
    return {text for value in values if (text := token_text(value)) is not None}


def added_decoder(settings: JsonObject) -> list[JsonObject]:
    """The added tokens of a tokenizer_config.json."""
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, dict) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def read_added(parsed: JsonObject, settings: JsonObject, vocab: Mapping[str, int], source: str) -> list[Added]:
    """Added tokens of tokenizer.json, then those only in tokenizer_config.json."""
    listed = parsed.get("added_tokens") or []
    if not isinstance(listed, list):
        raise CorruptError("added_tokens is not an array", path=source)
    added = [_read_entry(entry, f"added_tokens[{n}]", source) for n, entry in enumerate(listed)]
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise CorruptError("added_tokens_decoder is not a JSON object", path="tokenizer_config.json")
    ids, texts = {token.id for token in added} | set(vocab.values()), {token.content for token in added}
    for key, entry in decoder.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key
        entry = {**entry, "id": token_id} if isinstance(entry, dict) else entry
        token = _read_entry(entry, f"added_tokens_decoder[{key!r}]", "tokenizer_config.json")
        if token.content not in texts and (token.id not in ids or vocab.get(token.content) == token.id):
            added.append(token)
    return added


def _read_entry(entry: Json, where: str, source: str) -> Added:
    if not isinstance(entry, dict):
        raise CorruptError(f"{where} is not a JSON object", path=source)
    token_id, content = entry.get("id"), entry.get("content")
    if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
        raise CorruptError(f"{where} has no usable id: {token_id!r}", path=source)
    if not isinstance(content, str) or not is_unicode(content):
        raise CorruptError(f"{where} has no usable content: {content!r}", path=source)
    return Added(token_id, content, entry.get("special") is True)


def _looks_special(text: str) -> bool:
    """llama.cpp's rule for added tokens that are control tokens although the file does not say so."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def place_added(
    vocab: Iterable[tuple[str, int]], added: list[Added], named: set[str], source: str
) -> tuple[list[str], list[int]]:
    """Text and GGML type of each id, by llama.cpp's rule; unnamed ids become unused pads.

    Raises:
        CorruptError: no tokens.
        LimitError: ids far beyond the number of tokens.
    """
    vocab = list(vocab)
    ids = {*(i for _, i in vocab), *(token.id for token in added)}
    if not ids:
        raise CorruptError("the vocabulary is empty", path=source)
    size = max(ids) + 1
    if size - len(ids) > len(ids) + MAX_VOCAB_HOLES:
        raise LimitError(f"ids reach {size - 1}, but the vocabulary has only {len(ids)} tokens", path=source)
    tokens = [f"[PAD{i}]" for i in range(size)] if len(ids) < size else [""] * size
    types = [int(TokenType.UNUSED)] * size
    normal = int(TokenType.NORMAL)
    for text, i in vocab:
        tokens[i], types[i] = text, normal
    for token in added:
        control = token.special or token.content in named or _looks_special(token.content)
        types[token.id] = int(TokenType.CONTROL if control else TokenType.USER_DEFINED)
        # llama.cpp searches for user-defined texts in the raw input, where a space is a space.
        tokens[token.id] = token.content if control else token.content.replace(UNDERLINE, " ")
    return tokens, types


def read_vocab(document: Document) -> dict[str, int]:
    """model.vocab as id by text. Raises CorruptError if invalid."""
    vocab, found = document.model.get("vocab"), {}
    if not isinstance(vocab, dict):
        raise CorruptError("model.vocab is not a JSON object", path=document.source)
    for text, i in vocab.items():
        if type(i) is not int or not 0 <= i <= MAX_TOKEN_ID:
            raise CorruptError(f"model.vocab[{text!r}] is not a token id: {i!r}", path=document.source)
        found[text] = i
    check_unicode("".join(vocab), document.source)
    return found


def check_unicode(texts: str, source: str) -> None:
    """Raises CorruptError for a lone surrogate."""
    if not is_unicode(texts):
        raise CorruptError("model.vocab has a text with a lone surrogate", path=source)


def steps_of(step: Json) -> Iterator[JsonObject]:
    """A normalizer or pre-tokenizer and all inner steps; a crafted file nests them thousands deep."""
    left = [step]
    while left:
        step = left.pop()
        if isinstance(step, dict):
            yield step
            inner = step.get("normalizers") or step.get("pretokenizers")
            left += inner if isinstance(inner, list) else []


def adds_space_prefix(parsed: JsonObject) -> bool:
    """Whether a SentencePiece-style tokenizer puts a space before the text."""

    def prepends(step: JsonObject) -> bool:
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space") else "never")
        return step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and scheme != "never")

    both = ("normalizer", "pre_tokenizer")
    return any(prepends(step) for key in both for step in steps_of(parsed.get(key)))


def is_byte_level(pre_tokenizer: Json) -> bool:
    """Whether a pre-tokenizer turns text into GPT-2's byte alphabet."""
    return any(step.get("type") == "ByteLevel" for step in steps_of(pre_tokenizer))
