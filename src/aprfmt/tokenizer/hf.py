"""Reads tokenizers from a Hugging Face folder, in any file format, as llama.cpp's lists.

A function per algorithm (BPE, Unigram, WordPiece, SentencePiece) returns a Tokenizer with tokens, types, merges or
scores.
Special ids, add-flags and chat templates are chosen as in llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from weakref import WeakValueDictionary

from aprfmt.errors import CorruptError, UnsupportedError
from aprfmt.tokenizer import generation, ranks, rwkv
from aprfmt.tokenizer.byte_letters import in_letters
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.hf_algorithms import read_bpe, read_rwkv, read_sentencepiece, read_unigram, read_wordpiece
from aprfmt.tokenizer.hf_documents import (
    Added,
    Document,
    bpe_document,
    named_specials,
    place_added,
    read_added,
    read_bytes,
    read_object,
    read_text,
    read_vocab,
    wordpiece_document,
)
from aprfmt.tokenizer.hf_specials import chat_templates, special_ids
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Json

TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
        "tiktoken.model", "chat_template.jinja", "chat_template.json",
    }
)  # fmt: skip
"""Files of a folder that belong to its tokenizer, besides those that is_tokenizer_file recognizes."""

_UNSUPPORTED_FILES = ("sentencepiece.bpe.model",)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")
_VERSIONED = "tokenizer.model.v"
"""Name prefix of Mistral's SentencePiece models, followed by the version of the chat format."""
_HEAD = 1 << 13
"""Leading bytes that identify the kind of a file."""


def is_tokenizer_file(name: str) -> bool:
    """Whether the relative path `name` is a tokenizer file."""
    if name.startswith("additional_chat_templates/"):
        return name.endswith(".jinja")
    own = name in TOKENIZER_FILES or name.startswith(_VERSIONED)
    return own or name.endswith(".tiktoken") or rwkv.is_vocabulary(name)


def has_vocabulary(names: Iterable[str]) -> bool:
    """Whether one of the files is sufficient for a tokenizer."""
    return any(
        name in _VOCABULARIES or (is_tokenizer_file(name) and name not in TOKENIZER_FILES and "/" not in name)
        for name in names
    )


def read_files(files: Mapping[str, bytes], config: Mapping[str, Json] | None = None) -> Tokenizer | None:
    """The tokenizer of a folder's files, or None.

    Order of preference: RWKV's vocabulary, tokenizer.json, vocab.json with merges.txt, tekken.json, tiktoken files,
    tokenizer.model, vocab.txt.

    Args:
        files: contents by relative path; besides tokenizer files only generation_config.json matters.
        config: the parsed config.json, for special ids that the tokenizer files leave open.

    Raises:
        CorruptError: a file is not JSON, or has values of the wrong type, ids out of range, unknown merges.
        RefusedError: the settings require a token that is not in the vocabulary.
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
"""Live tokenizers by their files: merged or compared models share a large vocabulary."""

_CHANGEABLE = ("special", "flags", "chat_templates", "files", "extra", "gguf_keys", "notes")


def _digest(files: Mapping[str, bytes], config: Mapping[str, Json] | None) -> bytes:
    digest = blake2b(repr(sorted((config or {}).items())).encode(errors="surrogatepass"))
    for name, data in sorted(files.items()):
        digest.update(f"\0{name}\0{len(data)}\0".encode(errors="surrogatepass"))
        digest.update(data)
    return digest.digest()


def _read_files(kept: dict[str, bytes], config: Mapping[str, Json] | None) -> Tokenizer | None:
    # Roles of special_tokens_map.json apply if tokenizer_config.json does not state them.
    special_map = read_object(kept, "special_tokens_map.json").items()
    settings = {key: value for key, value in special_map if key.endswith(("_token", "_special_tokens"))}
    settings |= read_object(kept, "tokenizer_config.json")
    versioned = sorted((name for name in kept if name.startswith(_VERSIONED)), reverse=True)
    spm = next((name for name in ("tokenizer.model", "spiece.model", *versioned) if name in kept), None)
    world = next(filter(rwkv.is_vocabulary, kept), None)
    if world is not None:
        tokenizer = read_rwkv(read_text(kept, world), world)
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
        if spm in versioned:  # their texts begin with BOS, and without a pad token EOS is used
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
        raise CorruptError("the `model` object is missing", path=source)
    return _read_document(Document(source, parsed, model, settings, config or {}, kept))


def _read_document(document: Document) -> Tokenizer:
    parsed, settings, source = document.parsed, document.settings, document.source
    stored = document.model.get("vocab")
    kind = document.model.get("type", "Unigram" if isinstance(stored, list) else "BPE")
    if kind not in ("BPE", "Unigram", "WordPiece"):
        raise UnsupportedError(
            f"unsupported {kind} model; supported: BPE, Unigram and WordPiece",
            path=source,
            hint="llama.cpp does not support this tokenizer either",
        )
    if kind == "Unigram":  # read_unigram refuses entries of another form
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
    """Combines the algorithm's lists with what all share: special ids, flags and chat templates.

    `fixed` special ids belong to the algorithm, whatever the settings say.
    """
    special, flags = special_ids(document, tokenizer, {token.content: token.id for token in reversed(added)})
    if tokenizer.model == "t5":  # llama.cpp ends such texts with EOS by default
        flags = {"add_bos": False, "add_eos": False, **flags}
    end = generation.turn_end(document.config)
    if end is not None and end < len(tokenizer.tokens):
        special["eot"] = end
        if tokenizer.types:
            tokenizer.types[end] = int(TokenType.CONTROL)
    template, templates = chat_templates(document.files, document.settings)
    return replace(
        tokenizer, special={**tokenizer.special, **special, **(fixed or {})}, flags={**flags, **tokenizer.flags},
        chat_template=template if template is not None or templates else tokenizer.chat_template,
        chat_templates=templates, n_added=len({token.id for token in added}) or tokenizer.n_added, files=document.files,
    )  # fmt: skip


# --- tiktoken ---


def _tiktoken_file(files: Mapping[str, bytes]) -> str | None:
    """The file of byte tokens with ranks: `*.tiktoken`, tiktoken.model, or a tokenizer.model that is not
    SentencePiece's.
    """
    names = [name for name in files if name.endswith(".tiktoken") or name in ("tiktoken.model", "tokenizer.model")]
    return next((name for name in sorted(names) if ranks.looks_like_ranks(files[name][:_HEAD])), None)


def read_tiktoken(document: Document) -> Tokenizer:
    """A tiktoken file with the special tokens of its class and of tokenizer_config.json.

    Raises CorruptError for lines of another form.
    """
    name, settings = document.source, document.settings
    known = ranks.read_ranks(read_bytes(document.files, name), name)
    tokenizer_class = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    family = ranks.family_of(name, tokenizer_class, str(document.config.get("model_type")), len(known))
    n = max(known.values()) + 1
    vocab = {in_letters(token): i for token, i in known.items()}
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
    tokens, types = place_added(vocab.items(), added, set(), name)
    ids = {token.content: token.id for token in added}
    note = "" if family else f"{name} does not define a pre-tokenizer"
    tokenizer = Tokenizer(
        "gpt2", tokens, ranks.merges_of_ranks(known), types, pre=family.pre if family is not None else None,
        special={role: ids[text] for role, text in (family.assumed if family else ()) if text in ids}, pre_note=note,
    )  # fmt: skip
    if beyond:
        tokenizer.notes.append(f"special tokens from id {size} on exceed the model's vocabulary and are dropped")
    fixed = {role: ids[text] for role, text in (family.roles if family else ()) if text in ids}
    return _finish(tokenizer, added, document, fixed)
