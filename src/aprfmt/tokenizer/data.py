"""A tokenizer as data: what every container is read into and written from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import IntEnum
from typing import TypeAlias, TypeVar

from aprfmt.errors import CorruptError, LimitError
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_TEMPLATE_CHARS
from aprfmt.text import plural

_T = TypeVar("_T")
UNDERLINE = "\u2581"
"""SentencePiece's space."""

NO_VOCABULARY = "none"
"""`TokenizerData.model` of a GGUF that declares no vocabulary."""

NAMED_TEMPLATES = ("rwkv-world", "mistral-v3-tekken", "mistral-v7-tekken")
"""Names of llama.cpp's built-in chat templates, which a GGUF may have instead of a template."""

CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
"""GGUF key of SentencePiece's compiled normalization, in `TokenizerData.extra`."""

TOKEN_TYPE_COUNT = "tokenizer.ggml.token_type_count"
"""GGUF key of the number of rows of BERT's segment embedding, in `TokenizerData.extra`."""

KvType: TypeAlias = str | tuple[str, str]
"""A GGUF type by name: "UINT32", or ("ARRAY", "STRING")."""


def read_value(value: object, kind: type[_T], where: str) -> _T | None:
    """A value of untrusted metadata, or None. Raises CorruptError for one of another type."""
    if value is not None and (not isinstance(value, kind) or type(value) is not kind):
        raise CorruptError(f"{where} is not of type {kind.__name__}")
    return value


def read_list(value: object, kind: type[_T], where: str) -> list[_T]:
    """An array of untrusted metadata as a list, [] if missing. Raises CorruptError for other elements than `kind`.

    For float, integers are accepted too.
    """
    if value is None:
        return []
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise CorruptError(f"{where} is not an array")
    items: list[_T] = list(value)
    kinds = (int, float) if kind is float else kind
    if not all(issubclass(seen, kinds) and seen is not bool for seen in set(map(type, items))):
        raise CorruptError(f"{where} is not an array of {kind.__name__} values")
    return items


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: without lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class TokenType(IntEnum):
    """GGML token types (llama.h `llama_token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@light_dataclass(slots=True, repr=False, weakref_slot=True)
class TokenizerData:
    """A vocabulary and its settings; `tokenizer.model.Tokenizer` can run it.

    Attributes:
        model: GGUF's word for the algorithm: "gpt2" (byte-level BPE), "llama" (SentencePiece merges), "t5"
            (Unigram), "bert" (WordPiece; words begin with U+2581 instead of their tails with ##), "gemma4",
            "rwkv", "none".
        tokens: text of each id, added tokens included; holes are `[PAD{id}]` with type UNUSED.
        merges: "left right", by rank; empty for non-BPE.
        types: one TokenType per id; empty if the source has none.
        scores: one per id; empty if the source has none.
        pre: llama.cpp's pre-tokenizer name, None if unknown.
        special: ids by role under GGUF's names: bos, eos, unk, pad (GGUF: padding), sep, mask, cls, eot, eom,
            fim_pre, fim_suf, fim_mid, fim_pad, fim_rep, fim_sep.
        flags: add_bos, add_eos, add_sep, add_space_prefix, remove_extra_whitespaces, lowercase and
            strip_accents, if the source states them.
        chat_template: the default Jinja template.
        chat_templates: further templates by name.
        n_added: number of ids from added_tokens (0 if unknown).
        files: original Hugging Face tokenizer files by name: tokenizer.json, tokenizer_config.json, ...
        extra: further `tokenizer.*` keys of GGUF without an attribute, as (type name, value); byte arrays as `bytes`.
        gguf_keys: the GGUF keys in file order; not compared.
        pre_note: how `pre` was chosen, or why no known one matches; one sentence for the user.
        notes: harmless oddities of its files.
        shared: the tokenizer with which it shares tokens and merges, if the same files were read before.
    """

    model: str
    tokens: list[str]
    merges: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    pre: str | None = None
    special: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    chat_template: str | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)
    n_added: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    extra: dict[str, tuple[KvType, object]] = field(default_factory=dict)
    gguf_keys: list[str] = field(default_factory=list, compare=False)
    pre_note: str = field(default="", compare=False)
    notes: list[str] = field(default_factory=list, compare=False)
    shared: TokenizerData | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raises LimitError for a chat template above the maximum size."""
        for text in (self.chat_template or "", *self.chat_templates.values()):
            if len(text) > MAX_TEMPLATE_CHARS:
                raise LimitError(f"a chat template has {len(text):,} characters; the limit is {MAX_TEMPLATE_CHARS:,}")

    def __repr__(self) -> str:
        special = ", ".join(f"{role} {i}" for role, i in self.special.items())
        sizes = f"{plural(len(self.tokens), 'token')}, {plural(len(self.merges), 'merge')}"
        return f"{type(self).__name__}({self.model!r}, {sizes}, pre {self.pre!r}, special: {special})"


def without_padding(tok: TokenizerData) -> list[str]:
    """The tokens without trailing padding of the embedding."""
    end = len(tok.tokens)
    while end and end <= len(tok.types) and tok.types[end - 1] == TokenType.UNUSED:
        end -= 1
    return tok.tokens[:end]
