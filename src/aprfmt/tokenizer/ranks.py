"""Tokenizers given as byte tokens with ranks: tiktoken files and Mistral's tekken.json.

tiktoken    a line a token: base64 of its bytes, a space, its rank, which is its id too
tekken      {"config": {"default_vocab_size", "default_num_special_tokens", "version", "pattern"},
             "vocab": [{"rank", "token_bytes": base64}, ...], "special_tokens": [{"rank", "token_str"}, ...]}
            the ids begin with the special tokens, those of the vocabulary follow by rank

The neighbours whose joined bytes have the lowest rank are merged. As merges of two tokens that is either the single
merge by which earlier merges reach the token (tiktoken), or every way to cut it in two (tekken); the ids are the same.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from aprfmt.errors import CorruptError, LimitError
from aprfmt.limits import MAX_MERGE_WORK, MAX_TOKEN_ID
from aprfmt.tokenizer.byte_letters import in_letters
from aprfmt.tokenizer.data import TokenType, is_unicode
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import Json, JsonObject

_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|\Z)")
_LONGEST_TOKEN = 1 << 10
"""Maximum bytes of a token: finding its merges takes quadratic time."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the code of a tiktoken tokenizer adds to its file.

    Attributes:
        pre: llama.cpp's name for its splitting rules.
        specials: texts of the special tokens in order of their ids, given the number of ranks.
        roles: special ids set by the code, whatever the files say.
        assumed: special ids used if the files state none.
    """

    pre: str
    specials: Callable[[int], list[str]] = lambda n: []
    roles: tuple[tuple[str, str], ...] = ()
    assumed: tuple[tuple[str, str], ...] = ()


_EXTRAS = [f"<|extra_{n}|>" for n in range(205)]
_FAMILIES = {
    "QWenTokenizer": Family(
        "qwen2",
        lambda n: ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRAS],
        roles=(("unk", "<|endoftext|>"),),
        assumed=(("bos", "<|endoftext|>"), ("eos", "<|endoftext|>")),
    ),
    "HYTokenizer": Family(
        "hunyuan",
        lambda n: ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRAS],
        roles=(("bos", "<|bos|>"),),
    ),
    "TikTokenTokenizer": Family("kimi-k2", lambda n: [f"<|reserved_token_{i}|>" for i in range(n, n + 256)]),
    "ChatGLM4Tokenizer": Family("chatglm-bpe", roles=(("unk", "<|endoftext|>"), ("eot", "<|user|>"))),
}
"""By tokenizer_class."""
_LLAMA3_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)  # fmt: skip
"""As named by Llama 3.1 to 3.3; Llama 3.0 reserves ids 128004, 128008 and 128010."""
_FAMILIES_BY_SIZE = {
    ("llama", 128000): Family(
        "llama-bpe",
        lambda n: list(_LLAMA3_SPECIALS),
        assumed=(("bos", "<|begin_of_text|>"), ("eos", "<|end_of_text|>")),
    )
}
"""By model type and number of ranks: Llama 3's own tokenizer.model."""
_CLASS_OF_FILE = {"qwen.tiktoken": "QWenTokenizer", "hy.tiktoken": "HYTokenizer", "tiktoken.model": "TikTokenTokenizer"}


def family_of(name: str, tokenizer_class: str, model_type: str, n_ranks: int) -> Family | None:
    """The family of a tiktoken file: by `tokenizer_class`, the file's name, or model type and size."""
    named = _FAMILIES.get(tokenizer_class) or _FAMILIES.get(_CLASS_OF_FILE.get(name, ""))
    return named or _FAMILIES_BY_SIZE.get((model_type, n_ranks))


def looks_like_ranks(data: bytes) -> bool:
    """Whether a file is a tiktoken one: a tokenizer.model may also be SentencePiece's."""
    return _FIRST_LINE.match(data[: 4 * _LONGEST_TOKEN]) is not None


def read_ranks(data: bytes, path: str) -> dict[bytes, int]:
    """The ranks of a tiktoken file by token, in the file's order. Raises CorruptError, LimitError."""
    ranks: dict[bytes, int] = {}
    for n, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        text, _, rank = line.partition(b" ")
        token = _decoded(text.decode("latin-1"), f"line {n}", path)
        if not rank.isdigit() or len(rank) > 8 or int(rank) > MAX_TOKEN_ID:
            raise CorruptError(f"line {n} has no usable rank: {rank[:40]!r}", path=path)
        ranks[token] = int(rank)
    _check_ranks(ranks, path)
    return ranks


def _decoded(text: Json, where: str, path: str) -> bytes:
    try:
        token = base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptError(f"{where} is not base64: {error}", path=path) from error
    if not token:
        raise CorruptError(f"{where} has an empty token", path=path)
    if len(token) > _LONGEST_TOKEN:
        raise LimitError(f"{where} has a token of {len(token)} bytes; the limit is {_LONGEST_TOKEN}", path=path)
    return token


def _check_ranks(ranks: Mapping[bytes, int], path: str) -> None:
    if not ranks:
        raise CorruptError("the file contains no tokens", path=path)
    if len(set(ranks.values())) < len(ranks):
        raise CorruptError("two tokens have the same rank", path=path)
    if sum(len(token) ** 2 for token in ranks) > MAX_MERGE_WORK:
        raise LimitError("too many long tokens: deriving merges would take too long", path=path)


def merges_of_ranks(ranks: Mapping[bytes, int], *, every_cut: bool = False) -> list[str]:
    """Merges "left right" in the order of the ranks: one per token, or with `every_cut` all ways to cut it in two."""
    found = _every_cut(ranks) if every_cut else _reached(ranks)
    return [f"{in_letters(left)} {in_letters(right)}" for left, right in found]


def _every_cut(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _reached(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            best = min(joined)
            if best >= rank:
                break
            at = joined.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


# --- tekken.json ---

OLD_SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Of files that list none."""
_TEMPLATES = {"v3": "mistral-v3-tekken", "v7": "mistral-v7-tekken"}
"""llama.cpp's built-in chat templates by the version of the file."""


def read_tekken(parsed: JsonObject, path: str) -> Tokenizer:
    """The tokenizer of a tekken.json. Raises CorruptError, LimitError."""
    config = parsed.get("config")
    if not isinstance(config, dict):
        raise CorruptError("the `config` object is missing", path=path)
    size, n_special = (_count(config, key, path) for key in ("default_vocab_size", "default_num_special_tokens"))
    ranks = _tekken_ranks(parsed.get("vocab"), size - n_special, path)
    specials = _tekken_specials(parsed.get("special_tokens"), n_special, path)
    order = sorted(ranks, key=ranks.__getitem__)
    if size - n_special > len(order) or ranks[order[-1]] != len(order) - 1:
        raise CorruptError(
            f"default_vocab_size is {size}, but the file has {len(order)} + {n_special} tokens", path=path
        )
    ids = {text: i for i, text in enumerate(specials)}
    special = {role: ids[text] for role, text in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>")) if text in ids}
    if (pad := ids.get("<pad>", special.get("eos"))) is not None:
        special["pad"] = pad
    version = str(config.get("version"))
    notes = [] if version in _TEMPLATES else [f"llama.cpp has no built-in chat template for tekken.json {version}"]
    return Tokenizer(
        "gpt2", tokens=[*specials, *map(in_letters, order)], merges=merges_of_ranks(ranks, every_cut=True),
        types=[int(TokenType.CONTROL)] * n_special + [int(TokenType.NORMAL)] * len(order), scores=[0.0] * size,
        pre="tekken", special=special, flags={"add_bos": True, "add_eos": False}, chat_template=_TEMPLATES.get(version),
        n_added=n_special, notes=notes,
    )  # fmt: skip


def _count(config: JsonObject, key: str, path: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 <= value <= MAX_TOKEN_ID:
        raise CorruptError(f"config.{key} is not a number of tokens: {value!r}", path=path)
    return value


def _tekken_ranks(vocab: Json, n: int, path: str) -> dict[bytes, int]:
    """The ranks below `n`: the file may list more tokens than the model has."""
    ranks: dict[bytes, int] = {}
    for at, entry in enumerate(vocab if isinstance(vocab, list) else []):
        rank = entry.get("rank") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or type(rank) is not int or not 0 <= rank <= MAX_TOKEN_ID:
            raise CorruptError(f"vocab[{at}] has no usable rank", path=path)
        if rank < n:
            ranks[_decoded(entry.get("token_bytes"), f"vocab[{at}].token_bytes", path)] = rank
    _check_ranks(ranks, path)
    return ranks


def _tekken_specials(listed: Json, n: int, path: str) -> list[str]:
    """Texts of the special tokens by rank; unnamed ones are `<SPECIAL_n>`."""
    entries: list[Json] = (
        listed if isinstance(listed, list) else [{"rank": i, "token_str": t} for i, t in enumerate(OLD_SPECIALS)]
    )
    texts = [f"<SPECIAL_{i}>" for i in range(n)]
    for at, entry in enumerate(entries):
        rank, text = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, dict) else (None, None)
        if type(rank) is not int or not 0 <= rank < n or not isinstance(text, str) or not is_unicode(text):
            raise CorruptError(f"special_tokens[{at}] has no usable rank and text", path=path)
        texts[rank] = text
    if len(set(texts)) < n:
        raise CorruptError("two special tokens have the same text", path=path)
    return texts
