"""RWKV vocabularies: encoding repeatedly takes the longest token that the remaining bytes begin with.

rwkv_vocab_*.txt    a line a token: its id from 1 on, a Python literal of its text or bytes, its length in bytes
GGUF                the bytes as Python spells them, without the quotes: letters, \\n, \\x80
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from itertools import pairwise

from aprfmt.errors import CorruptError
from aprfmt.tokenizer.byte_letters import BYTE_LETTERS, in_letters
from aprfmt.tokenizer.data import TokenizerData, TokenType

FILE_NAME = "rwkv_vocab_v20230424.txt"
"""The name that other programs look for."""
END_OF_TEXT = "<s>"
"""The token of id 0, which the file does not list."""
_LONGEST_LINE = 1 << 12
_LINE = re.compile(r"(\d{1,8}) (b?(?:'.*'|\".*\")) (\d{1,5})", re.DOTALL)
_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def is_vocabulary(name: str) -> bool:
    """Whether a file of that name is an RWKV vocabulary."""
    return name.startswith("rwkv_vocab") and name.endswith(".txt")


def read_tokens(text: str, path: str) -> list[str]:
    """The tokens of a vocabulary file by id, as a GGUF spells them. Raises CorruptError for a malformed line."""
    tokens = [END_OF_TEXT]
    lines = text.split("\n")
    for n, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        tokens.append(to_escaped(_token(line.removesuffix("\r"), n, path)))
    if len(set(tokens)) < len(tokens):
        raise CorruptError("duplicate token", path=path)
    return tokens


def _token(line: str, n: int, path: str) -> bytes:
    match = _LINE.fullmatch(line) if len(line) <= _LONGEST_LINE else None
    try:
        value = ast.literal_eval(match[2]) if match is not None else None
        token = value.encode() if isinstance(value, str) else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        token = None
    if match is None or not isinstance(token, bytes) or len(token) != int(match[3]) or not token:
        raise CorruptError(f"line {n} is not an id, a Python literal and its length in bytes: {line[:60]!r}", path=path)
    if int(match[1]) != n:
        raise CorruptError(f"line {n} has the id {match[1]}: the ids must be consecutive, starting at 1", path=path)
    return token


def to_escaped(token: bytes) -> str:
    """The bytes of a token as a GGUF spells them."""
    return repr(token)[2:-1]


def from_escaped(text: str) -> bytes:
    """The bytes that a token of a GGUF stands for."""
    data = text.encode("utf-8", "surrogateescape")
    return _ESCAPE.sub(lambda m: bytes.fromhex(m[1].decode()) if m[1] else _NAMED.get(m[2], m[2]), data)


def _entries(tok: TokenizerData) -> list[tuple[int, str]]:
    """Ids and texts without the pads."""
    types = tok.types or [int(TokenType.NORMAL)] * len(tok.tokens)
    found = enumerate(zip(tok.tokens, types, strict=True))
    return [(i, text) for i, (text, kind) in found if kind != TokenType.UNUSED]


def to_vocabulary(tok: TokenizerData) -> str | None:
    """The vocabulary file, without id 0 and the pads; None unless the other ids count from 1."""
    lines = []
    for n, (i, text) in enumerate(_entries(tok)):
        token = from_escaped(text)
        if i != n:
            return None
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{i} {literal} {len(token)}\n")
    return "".join(lines[1:])


# --- tokenizer.json: WordPiece takes the longest token too, and takes time with the square of a word's length ---

_CLASSES = {"L": "A-Za-z", "N": "0-9", "S": " ", "B": "\\n", "T": "\\t\\r", "P": "!-/:-@\\[-`{-~"}
_OTHER = "O"


def splits(tokens: list[bytes]) -> str:
    """A regex for the positions of a text that no token spans, empty if none."""
    crossed = set()
    for token in tokens:
        # Parts of a code point do not matter, only that it is not ASCII.
        kinds = [_class_of(c) for c in token.decode("utf-8", "replace")]
        crossed |= set(pairwise(kinds))
    classes = {**_CLASSES, _OTHER: "^\\x00-\\x7f"}
    free = [(a, b) for a in classes for b in classes if (a, b) not in crossed]
    return "|".join(f"(?<=[{classes[a]}])(?=[{classes[b]}])" for a, b in free)


def _class_of(char: str) -> str:
    if ord(char) > 0x7F:
        return _OTHER
    kinds = {"\n": "B", " ": "S", "\t": "T", "\r": "T"}
    return kinds.get(char) or ("L" if char.isalpha() else "N" if char.isdigit() else "P" if char.isprintable() else "C")


def word_pieces(tok: TokenizerData) -> Mapping[str, int]:
    """Ids by text in byte letters, without pads; of equal tokens llama.cpp finds the last."""
    return {in_letters(from_escaped(text)): i for i, text in _entries(tok)}


def missing_bytes(vocabulary: Mapping[str, int]) -> list[int]:
    """Bytes that are not tokens."""
    return [byte for byte, letter in enumerate(BYTE_LETTERS) if letter not in vocabulary]
