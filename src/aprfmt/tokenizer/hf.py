"""Tokenizers out of a Hugging Face folder, whatever form its files have, as llama.cpp's lists.

A function for each algorithm (BPE, Unigram, WordPiece, SentencePiece) gives a Tokenizer with tokens, types, merges or
scores. Special ids, add-flags and chat templates are chosen as llama.cpp's converter chooses them.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import add, methodcaller
from weakref import WeakValueDictionary

from aprfmt.errors import CorruptError, LimitError, RefusedError, UnsupportedError
from aprfmt.io.jsonx import check_size
from aprfmt.limits import MAX_TEXT_FILE_BYTES, MAX_TOKEN_ID, MAX_VOCAB_HOLES
from aprfmt.tokenizer import generation, pre, ranks, rwkv, sentencepiece
from aprfmt.tokenizer.ggml import CHARSMAP, TOKEN_TYPE_COUNT
from aprfmt.tokenizer.model import UNDERLINE, KvType, Tokenizer, TokenType, is_unicode
from aprfmt.types import Json, JsonObject

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
        "tiktoken.model",
        "chat_template.jinja",
        "chat_template.json",
    }
)
"""Files of a folder that belong to its tokenizer, beside those that is_tokenizer_file knows otherwise."""

_UNSUPPORTED_FILES = ("sentencepiece.bpe.model",)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")
_VERSIONED = "tokenizer.model.v"
"""How the names of Mistral's SentencePiece models begin; what follows is the version of its chat format."""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_FLAGS = ("add_bos", "add_eos", "add_sep", "add_space_prefix")
_LLAMA_TYPES = ("llama", "mistral")
_HEAD = 1 << 13
"""Bytes of a file by which its kind is known."""
_NO_BOS_VOCAB_SIZE = 49152
"""Small code-model vocabularies under llama classes (Granite, SmolLM): never a BOS in front."""

ADDED_SCORE = -1000.0
HOLE_SCORE = -10000.0
_REACHED_BY_NO_MERGE = -1e6
_MERGE_SPACE = "\u0120"
"""Stands for a space inside a half of a merge, which is itself written as two halves around a space."""
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PRE_BY_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_BERT_ROLES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_BERT_LIKE = ("Bert", "Electra", "MPNet", "LayoutLM", "Funnel", "Lxmert", "DPR", "Splinter")
_NOT_BERT = ("BertJapanese", "Bertweet", "CamemBert", "PhoBert", "Roberta", "BertGeneration")
_GREEDY_NOTE = (
    "a Unigram model with byte tokens: llama.cpp lacks this algorithm and uses SentencePiece merges, so ids can differ"
)


@dataclass(frozen=True, slots=True)
class Document:
    """The files of one tokenizer, parsed.

    Attributes:
        source: the name of the file that the vocabulary is from, for messages.
        parsed: tokenizer.json, or another file in its shape.
        model: its `model`.
        settings: tokenizer_config.json over special_tokens_map.json.
        config: config.json.
        files: all files as they are, by name.
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


def is_tokenizer_file(name: str) -> bool:
    """Whether the relative path `name` is a tokenizer file."""
    if name.startswith("additional_chat_templates/"):
        return name.endswith(".jinja")
    own = name in TOKENIZER_FILES or name.startswith(_VERSIONED)
    return own or name.endswith(".tiktoken") or rwkv.is_vocabulary(name)


def has_vocabulary(names: Iterable[str]) -> bool:
    """Whether one of the files makes a tokenizer by itself."""
    return any(
        name in _VOCABULARIES or (is_tokenizer_file(name) and name not in TOKENIZER_FILES and "/" not in name)
        for name in names
    )


def read_files(files: Mapping[str, bytes], config: Mapping[str, Json] | None = None) -> Tokenizer | None:
    """The tokenizer of a folder's files, None where there is none.

    Of several forms RWKV's vocabulary counts, then tokenizer.json, vocab.json with merges.txt, tekken.json, tiktoken
    files, tokenizer.model, vocab.txt.

    Args:
        files: contents by relative path; of others than tokenizer files only generation_config.json counts.
        config: the parsed config.json, for special ids that the tokenizer files leave open.

    Raises:
        CorruptError: a file is not JSON, or holds values of the wrong type, ids out of range, unknown merges.
        RefusedError: the settings ask for a token that is not in the vocabulary.
        UnsupportedError: an algorithm that llama.cpp does not have, or only files of other tokenizer libraries.
    """
    kept = {name: bytes(data) for name, data in files.items() if is_tokenizer_file(name)}
    key = _digest(kept, config)
    known = _KNOWN.get(key)
    tokenizer = known if known is not None else _read_files(kept, config)
    if tokenizer is None:
        return None
    _KNOWN[key] = tokenizer
    small = {name: copy(getattr(tokenizer, name)) for name in _CHANGEABLE}
    own = replace(tokenizer, **small, shared=tokenizer)
    own.extra |= generation.suppressed(files.get(generation.FILE_NAME))
    return own


_KNOWN: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()
"""Tokenizers that somebody holds, by their files: models that are merged or compared have one of a large vocabulary."""

_CHANGEABLE = ("special", "flags", "chat_templates", "files", "extra", "gguf_keys", "notes")


def _digest(files: Mapping[str, bytes], config: Mapping[str, Json] | None) -> bytes:
    digest = blake2b(repr(sorted((config or {}).items())).encode(errors="surrogatepass"))
    for name, data in sorted(files.items()):
        digest.update(f"\0{name}\0{len(data)}\0".encode(errors="surrogatepass"))
        digest.update(data)
    return digest.digest()


def _read_files(kept: dict[str, bytes], config: Mapping[str, Json] | None) -> Tokenizer | None:
    # Roles of special_tokens_map.json count where tokenizer_config.json does not name one.
    special_map = read_object(kept, "special_tokens_map.json").items()
    settings = {key: value for key, value in special_map if key.endswith(("_token", "_special_tokens"))}
    settings |= read_object(kept, "tokenizer_config.json")
    versioned = sorted((name for name in kept if name.startswith(_VERSIONED)), reverse=True)
    spm = next((name for name in ("tokenizer.model", "spiece.model", *versioned) if name in kept), None)
    world = next(filter(rwkv.is_vocabulary, kept), None)
    if world is not None:
        tokenizer = rwkv.read_vocabulary(read_text(kept, world), world)
        return _finish(tokenizer, [], Document(world, {}, {}, settings, config or {}, kept), tokenizer.special)
    if "tokenizer.json" in kept:
        parsed, source = read_object(kept, "tokenizer.json"), "tokenizer.json"
    elif "vocab.json" in kept and "merges.txt" in kept:
        parsed, source = bpe_document(kept, settings), "vocab.json"
    elif "tekken.json" in kept:
        tokenizer = ranks.read_tekken(read_object(kept, "tekken.json"), "tekken.json")
        document = Document("tekken.json", {}, {}, settings, config or {}, kept)
        return _finish(tokenizer, [], document, tokenizer.special)
    elif (tiktoken := _tiktoken_file(kept)) is not None:
        return read_tiktoken(Document(tiktoken, {}, {}, settings, config or {}, kept))
    elif spm is not None:
        tokenizer, added = read_sentencepiece(kept, spm, settings)
        if spm in versioned:  # their texts begin with a BOS, and what has no pad takes the EOS
            tokenizer.flags |= {"add_bos": True, "add_eos": False}
            tokenizer.special.setdefault("pad", tokenizer.special.get("eos", 0))
        return _finish(tokenizer, added, Document(spm, {}, {}, settings, config or {}, kept))
    elif "vocab.txt" in kept:
        parsed, source = wordpiece_document(kept, settings), "vocab.txt"
    else:
        for name in _UNSUPPORTED_FILES:
            if name in kept:
                raise UnsupportedError(
                    f"a tokenizer that exists only as {name} is not supported",
                    path=name,
                    hint="save it with transformers' fast tokenizer, which writes tokenizer.json",
                )
        return None
    model = parsed.get("model")
    if not isinstance(model, dict):
        raise CorruptError("there is no `model` object", path=source)
    return _read_document(Document(source, parsed, model, settings, config or {}, kept))


def _read_document(document: Document) -> Tokenizer:
    parsed, settings, source = document.parsed, document.settings, document.source
    stored = document.model.get("vocab")
    kind = document.model.get("type", "Unigram" if isinstance(stored, list) else "BPE")
    if kind not in ("BPE", "Unigram", "WordPiece"):
        raise UnsupportedError(
            f"a {kind} model is not supported, only BPE, Unigram and WordPiece",
            path=source,
            hint="llama.cpp does not support this tokenizer either",
        )
    if kind == "Unigram":  # entries of another form are for read_unigram to refuse
        pieces = stored if isinstance(stored, list) else []
        vocab = {p[0]: i for i, p in enumerate(pieces) if isinstance(p, list) and p and isinstance(p[0], str)}
    else:
        vocab = read_vocab(document)
    added, named = read_added(parsed, settings, vocab, source), named_specials(settings)
    if kind == "Unigram":
        tokenizer = read_unigram(document, added, named)
    elif kind == "BPE":
        tokenizer = read_bpe(document, vocab, added, named)
    else:
        tokenizer = read_wordpiece(document, vocab, added, named)
    return _finish(tokenizer, added, document)


def _finish(
    tokenizer: Tokenizer, added: list[Added], document: Document, fixed: Mapping[str, int] | None = None
) -> Tokenizer:
    """The algorithm's lists together with what all have in common: special ids, flags and chat templates.

    `fixed` special ids are those of the algorithm, whatever the settings say.
    """
    special, flags = _special_ids(document, tokenizer, {token.content: token.id for token in reversed(added)})
    if tokenizer.model == "t5":  # llama.cpp ends such texts with EOS unless told otherwise
        flags = {"add_bos": False, "add_eos": False, **flags}
    end = generation.turn_end(document.config)
    if end is not None and end < len(tokenizer.tokens):
        special["eot"] = end
        if tokenizer.types:
            tokenizer.types[end] = int(TokenType.CONTROL)
    template, templates = chat_templates(document.files, document.settings)
    return replace(
        tokenizer,
        special={**tokenizer.special, **special, **(fixed or {})},
        flags={**flags, **tokenizer.flags},
        chat_template=template if template is not None or templates else tokenizer.chat_template,
        chat_templates=templates,
        n_added=len({token.id for token in added}) or tokenizer.n_added,
        files=document.files,
    )


# --- files ---


def read_json(files: Mapping[str, bytes], name: str) -> Json:
    """The JSON value in a file. Raises CorruptError, LimitError."""
    data = _read_bytes(files, name)
    check_size(data)
    try:
        value: Json = json.loads(data.decode("utf-8"))  # of bytes it takes UTF-16 too
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not valid JSON: {error}", path=name) from error
    return value


def read_object(files: Mapping[str, bytes], name: str) -> JsonObject:
    """The JSON object in a file, {} where the file is not there."""
    value = read_json(files, name) if name in files else {}
    if not isinstance(value, dict):
        raise CorruptError("the top level is not a JSON object", path=name)
    return value


def read_text(files: Mapping[str, bytes], name: str) -> str:
    """The text in a file. Raises CorruptError, LimitError."""
    try:
        return _read_bytes(files, name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(f"not UTF-8 text: {error}", path=name) from error


def _read_bytes(files: Mapping[str, bytes], name: str) -> bytes:
    data = files[name]
    if len(data) > MAX_TEXT_FILE_BYTES:
        raise LimitError(f"{len(data)} bytes are too many for a tokenizer file", path=name)
    return data


def _read_lines(files: Mapping[str, bytes], name: str) -> list[str]:
    # Not splitlines: a token may hold any of the characters that Unicode counts as line ends.
    return [line.removesuffix("\r") for line in read_text(files, name).split("\n")]


def bpe_document(files: dict[str, bytes], settings: JsonObject) -> JsonObject:
    """vocab.json, merges.txt and added_tokens.json in the shape of a tokenizer.json.

    Added tokens are special unless tokenizer_config.json says otherwise.
    """
    lines = _read_lines(files, "merges.txt")
    merges: list[Json] = [line for line in lines if line.strip() and not line.startswith("#version")]
    ordinary = [entry.get("content") for entry in _decoder(settings) if entry.get("special") is False]
    listed = read_object(files, "added_tokens.json").items()
    return {
        "model": {"type": "BPE", "vocab": read_object(files, "vocab.json"), "merges": merges},
        "added_tokens": [{"content": t, "id": i, "special": t not in ordinary} for t, i in listed],
        "post_processor": {"type": "ByteLevel"},
    }


def wordpiece_document(files: dict[str, bytes], settings: JsonObject) -> JsonObject:
    """vocab.txt in the shape of a tokenizer.json; BERT's names of special tokens are added to `settings`.

    Raises UnsupportedError where tokenizer_config.json names a class that is not WordPiece.
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


# --- added tokens, and the text and type of every id ---


def token_text(value: Json) -> str | None:
    """A special token's text, which files give as a string or as an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def named_specials(settings: JsonObject) -> set[str]:
    """Texts with a role in tokenizer_config.json: special to transformers, whatever their flag says."""
    more = settings.get("additional_special_tokens")
    values = [value for key, value in settings.items() if key.endswith("_token")]
    values += more if isinstance(more, list) else []
    return {text for value in values if (text := token_text(value)) is not None}


def _decoder(settings: JsonObject) -> list[JsonObject]:
    decoder = settings.get("added_tokens_decoder")
    entries = decoder.values() if isinstance(decoder, dict) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def read_added(parsed: JsonObject, settings: JsonObject, vocab: Mapping[str, int], source: str) -> list[Added]:
    """Added tokens of tokenizer.json, then those that only tokenizer_config.json lists."""
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
    """llama.cpp's rule for added tokens that are control tokens although their file does not say so."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<\uff5c") and text.endswith("\uff5c>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _place(
    vocab: Iterable[tuple[str, int]], added: list[Added], named: set[str], source: str
) -> tuple[list[str], list[int]]:
    """Text and GGML type of each id, by llama.cpp's rule; ids that nothing names become unused pads.

    Raises:
        CorruptError: no token at all.
        LimitError: ids far beyond the number of tokens.
    """
    vocab = list(vocab)
    ids = {*(i for _, i in vocab), *(token.id for token in added)}
    if not ids:
        raise CorruptError("the vocabulary is empty", path=source)
    size = max(ids) + 1
    if size - len(ids) > len(ids) + MAX_VOCAB_HOLES:
        raise LimitError(f"ids reach {size - 1}, but there are only {len(ids)} tokens", path=source)
    tokens = [f"[PAD{i}]" for i in range(size)] if len(ids) < size else [""] * size
    types = [int(TokenType.UNUSED)] * size
    normal = int(TokenType.NORMAL)
    for text, i in vocab:
        tokens[i], types[i] = text, normal
    for token in added:
        control = token.special or token.content in named or _looks_special(token.content)
        types[token.id] = int(TokenType.CONTROL if control else TokenType.USER_DEFINED)
        # llama.cpp looks for user-defined texts in the input as it is, where a space is a space.
        tokens[token.id] = token.content if control else token.content.replace(UNDERLINE, " ")
    return tokens, types


def read_vocab(document: Document) -> dict[str, int]:
    """model.vocab as id by text. Raises CorruptError unless it is one."""
    vocab, found = document.model.get("vocab"), {}
    if not isinstance(vocab, dict):
        raise CorruptError("model.vocab is not a JSON object", path=document.source)
    for text, i in vocab.items():
        if type(i) is not int or not 0 <= i <= MAX_TOKEN_ID:
            raise CorruptError(f"model.vocab[{text!r}] is not a token id: {i!r}", path=document.source)
        found[text] = i
    _check_unicode("".join(vocab), document.source)
    return found


def _check_unicode(texts: str, source: str) -> None:
    if not is_unicode(texts):
        raise CorruptError("model.vocab holds a text with a lone surrogate", path=source)


def steps_of(step: Json) -> Iterator[JsonObject]:
    """A normaliser or pre-tokenizer and all the steps inside it; a crafted file nests them thousands deep."""
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


# --- BPE ---


def is_byte_level(pre_tokenizer: Json) -> bool:
    """Whether a pre-tokenizer turns text into GPT-2's byte alphabet."""
    return any(step.get("type") == "ByteLevel" for step in steps_of(pre_tokenizer))


def read_bpe(document: Document, vocab: Mapping[str, int], added: list[Added], named: set[str]) -> Tokenizer:
    """A BPE model: "gpt2", or "llama" when it works on pieces with single bytes for what is not a piece.

    Raises:
        CorruptError: merges of another form or of unknown tokens.
        UnsupportedError: affixes, which llama.cpp's algorithm does not have.
    """
    parsed, model, source = document.parsed, document.model, document.source
    affixes = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if affixes:
        raise UnsupportedError(f"a BPE model with {affixes[0]} is not supported", path=source)
    tokens, types = _place(vocab.items(), added, named, source)
    merges = _read_merges(model.get("merges", []), vocab.keys() | {token.content for token in added}, source)
    if model.get("byte_fallback") is True and not is_byte_level(parsed.get("pre_tokenizer")):
        unk = model.get("unk_token")
        for i, text in enumerate(tokens):
            if text == unk:
                types[i] = int(TokenType.UNKNOWN)
            elif _BYTE.fullmatch(text):
                types[i] = int(TokenType.BYTE)
        flags = {"add_space_prefix": adds_space_prefix(parsed)}
        scores = _scores_of_merges(tokens, types, merges)
        return Tokenizer("llama", tokens, merges, types, scores, pre="default", flags=flags)
    if "tokenizer.json" not in document.files:
        kind = str(document.settings.get("tokenizer_class", "")).removesuffix("Fast")
        name = _PRE_BY_CLASS.get(kind)
        note = "" if name else "vocab.json and merges.txt do not say how text is split into words"
        return Tokenizer("gpt2", tokens, merges, types, pre=name, pre_note=note)
    choice = pre.detect(document.files["tokenizer.json"], parsed)
    return Tokenizer("gpt2", tokens, merges, types, pre=choice.name, pre_note=choice.detail)


def _read_merges(merges: Json, texts: set[str], source: str) -> list[str]:
    """Merges as "left right" whichever way the file spells them; each half and the whole must be a token."""
    if not isinstance(merges, list):
        raise CorruptError("model.merges is not an array", path=source)
    if (whole := _read_plain_merges(merges, texts)) is not None:
        return whole
    result = []
    for n, merge in enumerate(merges):
        halves = merge.split(" ") if isinstance(merge, str) else merge
        left, right = halves if isinstance(halves, list) and len(halves) == 2 else (None, None)
        if not isinstance(left, str) or not isinstance(right, str):
            raise CorruptError(f"model.merges[{n}] is not a pair of tokens: {merge!r}", path=source)
        if left not in texts or right not in texts or left + right not in texts:
            raise CorruptError(f"model.merges[{n}] names a token that is not in the vocabulary: {halves}", path=source)
        result.append(f"{left.replace(' ', _MERGE_SPACE)} {right.replace(' ', _MERGE_SPACE)}")
    return result


def _read_plain_merges(merges: list[Json], texts: set[str]) -> list[str] | None:
    """The same for lists where all is well and no token has a space: hundreds of thousands at a time."""
    pairs = [merge for merge in merges if isinstance(merge, list)]
    lines = [merge for merge in merges if isinstance(merge, str)]
    if pairs and set(map(len, pairs)) == {2} and not any(" " in text for text in texts):
        try:
            lines = list(map(" ".join, pairs))  # type: ignore[arg-type]  # a TypeError where they are not texts
        except TypeError:
            return None
    if len(lines) < len(merges) or set(map(methodcaller("count", " "), lines)) != {1}:
        return None
    halves = " ".join(lines).split(" ")
    lefts, rights = halves[0::2], halves[1::2]
    if not texts.issuperset(lefts) or not texts.issuperset(rights):
        return None
    return lines if texts.issuperset(map(add, lefts, rights)) else None


def _scores_of_merges(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Scores that make a best-score-first merger do what the ranked merges do: minus the rank.

    llama.cpp's SentencePiece merges the adjacent pair whose joined text has the best score; a text that
    several merges give takes the rank of the first. Single characters and bytes need no merge and score 0.
    """
    rank: dict[str, int] = {}
    for n, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), n)
    fixed = {
        int(TokenType.CONTROL): ADDED_SCORE,
        int(TokenType.USER_DEFINED): ADDED_SCORE,
        int(TokenType.UNUSED): HOLE_SCORE,
        int(TokenType.BYTE): 0.0,
        int(TokenType.UNKNOWN): 0.0,
    }

    def score(text: str, kind: int) -> float:
        if kind in fixed:
            return fixed[kind]
        return -float(rank[text]) if text in rank else 0.0 if len(text) == 1 else _REACHED_BY_NO_MERGE

    return [score(text, kind) for text, kind in zip(tokens, types, strict=True)]


# --- Unigram ---


def read_unigram(document: Document, added: list[Added], named: set[str]) -> Tokenizer:
    """A Unigram model: "t5" for llama.cpp, or "llama" where single bytes stand for what is not a piece.

    Raises CorruptError for entries of another form, LimitError for ids far beyond the pieces.
    """
    parsed, model, source = document.parsed, document.model, document.source
    pieces = _read_pieces(model.get("vocab"), source)
    tokens, types = _place(((text, i) for i, (text, _) in enumerate(pieces)), added, named, source)
    unk = model.get("unk_id")
    if unk is not None:
        if type(unk) is not int or not 0 <= unk < len(pieces):
            raise CorruptError(f"model.unk_id is {unk!r}, but there are {len(pieces)} pieces", path=source)
        types[unk] = int(TokenType.UNKNOWN)
    stored = [score for _, score in pieces] + [ADDED_SCORE] * (len(tokens) - len(pieces))
    greedy = model.get("byte_fallback") is True
    if greedy:
        for i, text in enumerate(tokens):
            if _BYTE.fullmatch(text):
                types[i] = int(TokenType.BYTE)
    tokenizer = Tokenizer(
        model="llama" if greedy else "t5",
        tokens=tokens,
        types=types,
        scores=[HOLE_SCORE if k == TokenType.UNUSED else s for k, s in zip(types, stored, strict=True)],
        pre="default",
        flags={"add_space_prefix": adds_space_prefix(parsed)},
        special={} if unk is None else {"unk": unk},
    )
    if greedy:
        tokenizer.notes.append(_GREEDY_NOTE)
        return tokenizer
    tokenizer.flags["remove_extra_whitespaces"] = _merges_spaces(parsed)
    tokenizer.extra |= _read_charsmap(parsed, source) | _token_type_count(document.config)
    return tokenizer


def _read_pieces(vocab: Json, source: str) -> list[tuple[str, float]]:
    if not isinstance(vocab, list):
        raise CorruptError("model.vocab is not an array of pieces and scores", path=source)
    pieces = []
    for n, entry in enumerate(vocab):
        text, score = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        is_score = isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < 1e30
        if not isinstance(text, str) or not isinstance(score, int | float) or not is_score:
            raise CorruptError(f"model.vocab[{n}] is not a piece with a score: {entry!r}", path=source)
        pieces.append((text, float(score)))
    _check_unicode("".join(text for text, _ in pieces), source)
    return pieces


def _read_charsmap(parsed: JsonObject, source: str) -> dict[str, tuple[KvType, object]]:
    """SentencePiece's compiled normalisation, where the normaliser has one."""
    for step in steps_of(parsed.get("normalizer")):
        stored = step.get("precompiled_charsmap")
        if step.get("type") == "Precompiled" and stored:
            try:
                data = base64.b64decode(stored if isinstance(stored, str) else b"?", validate=True)
            except (binascii.Error, ValueError) as error:
                raise CorruptError(f"precompiled_charsmap is not base64: {error}", path=source) from error
            return _charsmap(data, source)
    return {}


def _charsmap(data: bytes, source: str) -> dict[str, tuple[KvType, object]]:
    """The entry for a charsmap. Raises CorruptError for one that llama.cpp would not load: u32 length of a trie,
    trie, texts.
    """
    trie = int.from_bytes(data[:4], "little")
    if len(data) < 5 or trie + 4 >= len(data) or trie % 4:
        raise CorruptError(f"precompiled_charsmap of {len(data)} bytes has a trie of {trie}", path=source)
    return {CHARSMAP: (("ARRAY", "UINT8"), data)}


def _merges_spaces(parsed: JsonObject) -> bool:
    """Whether runs of spaces count as one."""
    if any(step.get("type") == "WhitespaceSplit" for step in steps_of(parsed.get("pre_tokenizer"))):
        return True
    return any(
        step.get("type") == "Replace" and step.get("pattern") == {"Regex": " {2,}"}
        for step in steps_of(parsed.get("normalizer"))
    )


def _token_type_count(config: Mapping[str, Json]) -> dict[str, tuple[KvType, object]]:
    count = config.get("type_vocab_size")
    return {TOKEN_TYPE_COUNT: ("UINT32", count)} if type(count) is int and 0 <= count < 1 << 32 else {}


# --- WordPiece ---


def to_phantom(text: str, kind: int, prefix: str = "##") -> str:
    """llama.cpp's spelling of a WordPiece token: words begin with U+2581, the rest of a word with nothing."""
    if kind != TokenType.NORMAL:
        return text
    return text.removeprefix(prefix) if text.startswith(prefix) else UNDERLINE + text


def read_wordpiece(document: Document, vocab: Mapping[str, int], added: list[Added], named: set[str]) -> Tokenizer:
    """A WordPiece model: "bert". Raises CorruptError, UnsupportedError for rules that llama.cpp does not have."""
    source = document.source
    prefix = document.model.get("continuing_subword_prefix", "##")
    if not isinstance(prefix, str) or not prefix:
        raise UnsupportedError("a WordPiece model without a prefix for the tails of words", path=source)
    unk = document.model.get("unk_token", "[UNK]")
    if not isinstance(unk, str) or unk not in vocab:
        raise CorruptError(f"model.unk_token {unk!r} is not in the vocabulary", path=source)
    tokens, types = _place(vocab.items(), added, named, source)
    return Tokenizer(
        model="bert",
        tokens=[to_phantom(text, kind, prefix) for text, kind in zip(tokens, types, strict=True)],
        types=types,
        pre=pre.hash_name(document.files.get("tokenizer.json", b"")) or "default",
        flags=_bert_flags(document.parsed.get("normalizer")),
        special={"unk": vocab[unk]},
        extra=_token_type_count(document.config),
    )


def _bert_flags(normalizer: Json) -> dict[str, bool]:
    """Lower-casing and accents; what strips no accents by itself does it with the lower-casing, as BERT does."""
    flags = {"lowercase": False, "strip_accents": False}
    for step in steps_of(normalizer):
        kind = step.get("type")
        if kind == "BertNormalizer":
            lowercase, accents = step.get("lowercase", True) is True, step.get("strip_accents")
            strips = lowercase if accents is None else accents is True
            flags = {"lowercase": lowercase, "strip_accents": strips}
        elif kind in ("Lowercase", "StripAccents"):
            flags["lowercase" if kind == "Lowercase" else "strip_accents"] = True
    return flags


# --- SentencePiece ---


def read_sentencepiece(files: Mapping[str, bytes], path: str, settings: JsonObject) -> tuple[Tokenizer, list[Added]]:
    """A tokenizer.model with added_tokens.json and tokenizer_config.json on top of it.

    Raises:
        CorruptError: not a SentencePiece model, or added tokens of a wrong form.
        UnsupportedError: the algorithms "word" and "char", or spaces at the ends of words.
    """
    listed = read_object(files, "added_tokens.json")
    model = sentencepiece.read(files[path], path)
    if model.model_type not in (sentencepiece.UNIGRAM, sentencepiece.BPE) or model.suffix:
        kind = "with spaces as suffixes" if model.suffix else f"of type {model.model_type}"
        raise UnsupportedError(f"a SentencePiece model {kind} is not supported", path=path)
    special = [entry.get("content") for entry in _decoder(settings) if entry.get("special") is True]
    entries: list[Json] = [{"content": t, "id": i, "special": t in special} for t, i in listed.items()]
    added = read_added({"added_tokens": entries}, settings, {}, "added_tokens.json")
    pieces = model.pieces
    vocab = ((piece.text, i) for i, piece in enumerate(pieces))
    tokens, types = _place(vocab, added, named_specials(settings), path)
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
    flags = {"add_space_prefix": model.add_dummy_prefix}
    ids = {role: i for role, i in model.ids.items() if i < len(pieces)}
    tokenizer = Tokenizer("llama", tokens, [], types, scores, pre="default", special=ids, flags=flags)
    if model.model_type == sentencepiece.UNIGRAM and model.byte_fallback:
        tokenizer.notes.append(_GREEDY_NOTE)
    elif model.model_type == sentencepiece.UNIGRAM:
        tokenizer.model = "t5"
        flags["remove_extra_whitespaces"] = model.remove_extra_whitespaces
        tokenizer.extra |= _charsmap(model.charsmap, path) if model.charsmap else {}
    return tokenizer, added


# --- tiktoken ---


def _tiktoken_file(files: Mapping[str, bytes]) -> str | None:
    """The file of bytes with ranks: `*.tiktoken`, tiktoken.model, or a tokenizer.model that is not SentencePiece's."""
    names = [name for name in files if name.endswith(".tiktoken") or name in ("tiktoken.model", "tokenizer.model")]
    return next((name for name in sorted(names) if ranks.looks_like_ranks(files[name][:_HEAD])), None)


def read_tiktoken(document: Document) -> Tokenizer:
    """A tiktoken file with the special tokens of its class and of tokenizer_config.json.

    Raises CorruptError for lines of another form.
    """
    name, settings = document.source, document.settings
    known = ranks.read_ranks(_read_bytes(document.files, name), name)
    family = ranks.family_of(name, str(settings.get("tokenizer_class", "")).removesuffix("Fast"))
    n = max(known.values()) + 1
    vocab = {ranks.in_letters(token): i for token, i in known.items()}
    added = read_added({}, settings, vocab, name)
    taken, texts = {token.id for token in added}, {token.content for token in added}
    for i, text in enumerate(family.specials(n) if family is not None else [], n):
        if i not in taken and text not in texts:
            added.append(Added(i, text, special=True))
    size = document.config.get("vocab_size")
    beyond = [token for token in added if isinstance(size, int) and token.id >= size]
    added = sorted((token for token in added if token not in beyond), key=lambda token: token.id)
    for token in added:
        token.special = True
    tokens, types = _place(vocab.items(), added, set(), name)
    ids = {token.content: token.id for token in added}
    note = "" if family else f"{name} does not say how text is split into words"
    tokenizer = Tokenizer(
        "gpt2",
        tokens,
        ranks.merges_of_ranks(known),
        types,
        pre=family.pre if family is not None else None,
        special={role: ids[text] for role, text in (family.assumed if family else ()) if text in ids},
        pre_note=note,
    )
    if beyond:
        tokenizer.notes.append(f"special tokens from id {size} on are beyond the model's vocabulary and left out")
    fixed = {role: ids[text] for role, text in (family.roles if family else ()) if text in ids}
    return _finish(tokenizer, added, document, fixed)


# --- special ids and flags ---


def _special_ids(
    document: Document, tokenizer: Tokenizer, added: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, bool]]:
    """Special ids by role, and the add_* flags.

    Ids come from the texts in tokenizer_config.json, then from the ids in config.json (the first of a list).
    Flags come from the post-processor, then from tokenizer_config.json's add_*_token. What the files name and the
    vocabulary does not have is added to the tokenizer's notes. `added` holds the ids of the added tokens by text.

    Raises RefusedError where a token that is put around every text is not in the vocabulary.
    """
    settings, config, tokens, notes = document.settings, document.config, tokenizer.tokens, tokenizer.notes
    texts = {role: token_text(settings.get(f"{role}_token")) or None for role in _ROLES}
    texts["bos"] = texts["bos"] or texts["cls"]
    texts["eos"] = texts["eos"] or texts["sep"]
    flags: dict[str, bool] = {}
    for processor in _processors(document.parsed.get("post_processor")):
        _apply_processor(processor, texts, flags)
    for role in _ROLES:
        value = settings.get(f"add_{role}_token")
        if isinstance(value, bool):
            flags.setdefault(f"add_{role}", value)
    found: dict[str, int] = {}
    for role, text in texts.items():
        if text is None:
            continue
        if text in added:
            found[role] = added[text]
        elif text in tokens:
            found[role] = tokens.index(text)
        elif flags.get(f"add_{role}"):
            raise RefusedError(
                f"every text is to get the {role} token {text!r}, which is not in the vocabulary",
                path="tokenizer_config.json",
                hint="the tokenizer files belong to different models: take all of them from one",
            )
        else:
            notes.append(f"tokenizer_config.json: the {role} token {text!r} is not in the vocabulary")
    _add_from_config(config, len(tokens), found, notes)
    if _is_llama(config):
        prefix = settings.get("add_prefix_space")
        if isinstance(prefix, bool):
            flags["add_space_prefix"] = prefix
        if config.get("vocab_size") == _NO_BOS_VOCAB_SIZE:
            flags["add_bos"] = False
    return found, {flag: value for flag, value in flags.items() if flag in _FLAGS}


def _add_from_config(config: Mapping[str, Json], n: int, found: dict[str, int], notes: list[str]) -> None:
    """Adds to `found` the ids of config.json for roles that are open."""
    size, nested = config.get("vocab_size"), config.get("text_config")
    most = max(n, size if isinstance(size, int) else 0)
    for role in _ROLES:
        key = f"{role}_token_id"
        value = config.get(key)
        if value is None and isinstance(nested, dict):
            value = nested.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if type(value) is not int or value < 0:
            continue
        if value < most:
            found.setdefault(role, value)
        else:
            notes.append(f"config.json: {key} {value} is not an id of the {n} tokens")


def _is_llama(config: Mapping[str, Json]) -> bool:
    classes = config.get("architectures")
    names = classes if isinstance(classes, list) else []
    return config.get("model_type") in _LLAMA_TYPES or any(
        isinstance(name, str) and name.lower().startswith(_LLAMA_TYPES) for name in names
    )


def _processors(post_processor: Json) -> list[JsonObject]:
    if not isinstance(post_processor, dict):
        return []
    inner = post_processor.get("processors", [post_processor])
    return [step for step in inner if isinstance(step, dict)] if isinstance(inner, list) else []


def _apply_processor(step: JsonObject, texts: dict[str, str | None], flags: dict[str, bool]) -> None:
    """What a post-processor adds around a text, into `flags`; it may reveal or overrule special texts too."""
    kind = step.get("type")
    if kind == "ByteLevel":
        flags.setdefault("add_bos", False)
        flags.setdefault("add_eos", False)
    elif kind in ("RobertaProcessing", "BertProcessing"):
        flags.update(add_bos=True, add_eos=True, add_sep=True)
        for role, stand_in in (("cls", "bos"), ("sep", "eos")):
            pair = step.get(role)
            named = pair[0] if isinstance(pair, list) and pair else None
            texts[role] = texts[role] or (named if isinstance(named, str) else texts[stand_in])
    elif kind == "TemplateProcessing":
        _apply_template(step, texts, flags)


def _apply_template(step: JsonObject, texts: dict[str, str | None], flags: dict[str, bool]) -> None:
    single, pair = step.get("single"), step.get("pair")
    parts = single if isinstance(single, list) else []
    first, last = (_special_text(parts[0]), _special_text(parts[-1])) if len(parts) > 1 else (None, None)
    if first is not None:
        if first not in (texts["bos"], texts["cls"]):
            texts["bos"] = texts["bos"] or first
        flags["add_bos"] = first in (texts["bos"], texts["cls"])
    if last is not None:
        if texts["eos"] is not None and last != texts["eos"]:
            # The template ends texts with another token than the configured one, which then only ends turns.
            texts["eot" if texts.get("eot") is None else "eom"] = texts["eos"]
        texts["eos"] = last
        flags["add_eos"] = True
    middle = _separators(pair if isinstance(pair, list) else [], first, last)
    if middle:
        separators = {texts["sep"], texts["eos"]} - {None}
        # One separator is the end token of A where the template ends with one; a second one always counts.
        counted = middle[1:2] if last is not None or len(middle) == 2 else middle[:1]
        flags["add_sep"] = any(_special_text(part) in separators for part in counted) or (
            last is None and _special_text(middle[0]) in separators
        )


def _template_id(part: Json, kind: str) -> str | None:
    """The id of a template part that is a `kind`: "SpecialToken" (the text that it inserts) or "Sequence"."""
    inner = part.get(kind) if isinstance(part, dict) else None
    name = inner.get("id") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _special_text(part: Json) -> str | None:
    return _template_id(part, "SpecialToken")


def _separators(pair: Sequence[Json], first: str | None, last: str | None) -> Sequence[Json]:
    """What a pair template puts between its sequences, [] unless its form is [first] A ... B [last]."""
    if pair and first is not None and _special_text(pair[0]) == first:
        pair = pair[1:]
    if pair and last is not None and _special_text(pair[-1]) == last:
        pair = pair[:-1]
    if len(pair) < 2 or _template_id(pair[0], "Sequence") != "A" or _template_id(pair[-1], "Sequence") != "B":
        return []
    return pair[1:-1]


# --- chat templates ---


def chat_templates(files: Mapping[str, bytes], settings: Mapping[str, Json]) -> tuple[str | None, dict[str, str]]:
    """The default chat template and the further ones by name.

    Template files win over tokenizer_config.json, as they do for transformers. Raises CorruptError for files
    that are not UTF-8 text or not JSON, and for templates that are not text.
    """
    folder, suffix = "additional_chat_templates/", ".jinja"
    named = {
        name[len(folder) : -len(suffix)]: read_text(files, name)
        for name in sorted(files)
        if name.startswith(folder) and name.endswith(suffix)
    }
    stored = settings.get("chat_template")
    if "chat_template.jinja" in files:
        stored = read_text(files, "chat_template.jinja")
    elif stored is None and "chat_template.json" in files:
        holder = read_json(files, "chat_template.json")
        stored = holder.get("chat_template") if isinstance(holder, dict) else holder
    if isinstance(stored, list):
        named = {**_read_templates(stored), **named}
        return named.pop("default", None), named
    if stored is not None and not isinstance(stored, str):
        raise CorruptError(f"chat_template is not text: {str(stored)[:60]}", path="tokenizer_config.json")
    return stored, named


def _read_templates(entries: list[Json]) -> dict[str, str]:
    named = {}
    for n, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise CorruptError(f"chat_template[{n}] is not a name with a text", path="tokenizer_config.json")
        named[name] = text
    return named
