"""The tokenizer value that every container is read into and written from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from enum import IntEnum
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from aprfmt.errors import CorruptError, LimitError, RefusedError, UsageError
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_TEMPLATE_CHARS
from aprfmt.text import plural

_T = TypeVar("_T")
UNDERLINE = "\u2581"
"""SentencePiece's space."""

NO_VOCABULARY = "none"
"""`Tokenizer.model` of a GGUF that declares no vocabulary."""

NAMED_TEMPLATES = ("rwkv-world", "mistral-v3-tekken", "mistral-v7-tekken")
"""Names of llama.cpp's built-in chat templates, which a GGUF may have instead of a template."""

KvType: TypeAlias = str | tuple[str, str]
"""A GGUF type by name: "UINT32", or ("ARRAY", "STRING")."""


def read_value(value: object, kind: type[_T], where: str) -> _T | None:
    """A value of untrusted metadata, or None. Raises CorruptError for one of another type."""
    if value is not None and (not isinstance(value, kind) or type(value) is not kind):
        raise CorruptError(f"{where} is not of type {kind.__name__}")
    return value


def read_list(value: object, kind: type[_T], where: str) -> list[_T]:
    """The same for arrays, [] if missing; integers too where floats are expected."""
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


def _module(name: str) -> Any:
    """A module that runs tokenizers: it imports this one, so that this one looks it up when it is needed."""
    return import_module(f"aprfmt.tokenizer.{name}")


@light_dataclass(slots=True, repr=False, weakref_slot=True)
class Tokenizer:
    """A tokenizer as data; `encode`, `decode` and `apply_chat_template` run it.

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
    shared: Tokenizer | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raises LimitError for a chat template above the maximum size."""
        for text in (self.chat_template or "", *self.chat_templates.values()):
            if len(text) > MAX_TEMPLATE_CHARS:
                raise LimitError(f"a chat template has {len(text):,} characters; the limit is {MAX_TEMPLATE_CHARS:,}")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; special tokens that are spelled out in it are parsed.

        `add_special_tokens` adds what the model expects around a text (such as BOS). Raises UnsupportedError if the
        tokenizer cannot be run, MissingDependencyError without the package tokenizers.
        """
        ids: list[int] = _module("encoding").loaded(self).encode([text], special=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids. Raises as `encode`, and UsageError for an id that is not in the vocabulary."""
        for i in ids:
            if type(i) is not int or not 0 <= i < len(self.tokens):
                raise UsageError(f"token id {i!r:.40} is not in the vocabulary of {len(self.tokens):,}")
        if skip_special_tokens:
            control = {i for i, kind in enumerate(self.types) if kind == TokenType.CONTROL} | {*self.special.values()}
            ids = [i for i in ids if i not in control]
        return str(_module("encoding").loaded(self).decode(ids))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: object,
    ) -> str | list[int]:
        """A conversation in the model's format: ids, or without `tokenize` the text.

        Args:
            messages: {"role": ..., "content": ...} each, the oldest first.
            add_generation_prompt: end with the beginning of an answer.
            tokenize: give ids instead of the text.
            variables: further variables of the template, such as tools or enable_thinking.

        Raises:
            RefusedError: the tokenizer has no template, or the template rejects the conversation.
            UnsupportedError: the template cannot be rendered.
        """
        template = _module("chat_format").template_of(self)
        if template is None:
            raise RefusedError("the tokenizer has no chat template")
        text: str = template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def __repr__(self) -> str:
        special = ", ".join(f"{role} {i}" for role, i in self.special.items())
        return (
            f"Tokenizer({self.model!r}, {plural(len(self.tokens), 'token')}, {plural(len(self.merges), 'merge')}, "
            f"pre {self.pre!r}, special: {special})"
        )


def without_padding(tok: Tokenizer) -> list[str]:
    """The tokens without trailing padding of the embedding."""
    end = len(tok.tokens)
    while end and end <= len(tok.types) and tok.types[end - 1] == TokenType.UNUSED:
        end -= 1
    return tok.tokens[:end]
