"""tiktoken files, a tekken.json and an RWKV vocabulary with the tokens of real tokenizers."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aprfmt.tokenizer.byte_letters import BYTE_LETTERS
from aprfmt.tokenizer.ranks import OLD_SPECIALS

_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


def ranks_of(tokenizer_json: bytes, n: int | None = None) -> dict[bytes, int]:
    """The tokens of a byte-level tokenizer.json by their bytes; the first `n` by id."""
    vocab: Mapping[str, int] = json.loads(tokenizer_json)["model"]["vocab"]
    found = {bytes(_BYTES[letter] for letter in text): i for text, i in sorted(vocab.items(), key=lambda e: e[1])}
    return {token: i for token, i in found.items() if n is None or i < n}


def tiktoken_file(ranks: Mapping[bytes, int]) -> bytes:
    """A tiktoken file."""
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())


def tekken_file(ranks: Mapping[bytes, int], pattern: str, *, specials: int = 1000, version: str = "v3") -> bytes:
    """A tekken.json: the bytes come first, as in Mistral's."""
    singles = [bytes([byte]) for byte in range(256)]
    order = [*singles, *(token for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)]

    def entry(rank: int, token: bytes) -> dict[str, Any]:
        try:
            text: str | None = token.decode()
        except UnicodeDecodeError:
            text = None
        return {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": text}

    named = OLD_SPECIALS[: min(specials, len(OLD_SPECIALS))]
    body = {
        "config": {
            "pattern": pattern,
            "num_vocab_tokens": len(order),
            "default_vocab_size": len(order) + specials,
            "default_num_special_tokens": specials,
            "version": version,
        },
        "vocab": [entry(rank, token) for rank, token in enumerate(order)],
        "special_tokens": [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(named)],
    }
    return json.dumps(body, ensure_ascii=False, indent=2).encode()


def rwkv_file(tokens: Sequence[bytes]) -> bytes:
    """A vocabulary of RWKV: all bytes, then the tokens."""
    lines = []
    every = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *tokens])
    for i, token in enumerate(every, 1):
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{i} {literal} {len(token)}\n")
    return "".join(lines).encode()


REMOTE = '''"""A tokenizer class as repositories bring it: what llama.cpp's converter asks of it."""

import base64
import json
import os

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizer

HERE = os.path.dirname(os.path.abspath(__file__))


class {name}(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "{file}"}}

    def __init__(self, vocab_file, **options):
        with open(vocab_file, "rb") as lines:
            pairs = [line.split() for line in lines if line.strip()]
        self.mergeable_ranks = {{base64.b64decode(token): int(rank) for token, rank in pairs}}
        with open("{specials}") as file:
            self.special_tokens = json.load(file)
        self.fast = Tokenizer.from_file("{fast}")
        self.model = self
        self._mergeable_ranks = self.mergeable_ranks
        super().__init__(**options)

    @property
    def vocab_size(self):
        return {size}

    def get_vocab(self):
        return {{**{{str(token): rank for token, rank in self.mergeable_ranks.items()}}, **self.special_tokens}}

    def encode(self, text, **options):
        return self.fast.encode(text).ids

    def __len__(self):
        return {size}
'''
"""Python source with the places name, file, specials, fast and size."""


def remote_folder(
    folder: Path, name: str, file: str, specials: Mapping[str, int], fast: Path, size: int, **settings: Any
) -> None:
    """Puts a remote-code class into `folder` whose texts are encoded by the tokenizer.json `fast`."""
    (folder / "specials.json").write_text(json.dumps(dict(specials)))
    source = REMOTE.format(name=name, file=file, specials=folder / "specials.json", fast=fast, size=size)
    (folder / "tokenization_remote.py").write_text(source)
    body = {"tokenizer_class": name, "auto_map": {"AutoTokenizer": [f"tokenization_remote.{name}", None]}, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(body))
