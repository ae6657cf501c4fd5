"""Every kind of tokenizer as a GGUF for llama.cpp and as a tokenizer.json, and the texts for which their ids differ."""

from __future__ import annotations

import json
import os
import random
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import rank_files
from llama_peer import LlamaPeer
from texts import make_texts

from aprfmt import formats
from aprfmt.tokenizer import ggml, hf, hf_write, rules, rwkv
from aprfmt.tokenizer.byte_letters import BYTE_LETTERS
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.model import Tokenizer

MATERIAL = Path(os.environ.get("APR_MATERIAL", Path.home() / ".cache" / "aprfmt" / "material"))
_BATCH = 500


@dataclass(slots=True)
class Outcome:
    """Texts that were encoded, those whose ids differ, how many of them for which reason, and those without one."""

    texts: int
    different: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)


def from_gguf(name: str) -> Tokenizer:
    """The tokenizer of one of llama.cpp's vocabularies."""
    with formats.open(MATERIAL / "llama.cpp-models" / f"ggml-vocab-{name}.gguf") as model:
        assert model.tokenizer is not None
        return replace(model.tokenizer, notes=[])


def with_rule(name: str) -> Tokenizer:
    """A vocabulary for the pre-tokenizer `name`: its own where there is one, else one with many merges."""
    own = MATERIAL / "llama.cpp-models" / f"ggml-vocab-{name}.gguf"
    row = rules.rule(name)
    assert row is not None
    if row.letters == "pieces":
        return replace(from_gguf("gemma-4"), model="gpt2", pre=name, flags={})
    if row.letters == "words":
        return replace(from_gguf("gemma-4"), model="whitespace", pre=name, flags={"lowercase": False})
    if own.is_file():
        return from_gguf(name)
    # A token that no merge gives tells whether whole tokens come first.
    return replace(from_gguf("command-r" if "digits" in row.splits else "qwen2"), pre=name, flags={})


def from_files(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of a folder's files, as a GGUF of it holds it."""
    found = hf.read_files(files)
    assert found is not None
    return replace(found, files={})


def _ranks(name: str, n: int | None = None) -> dict[bytes, int]:
    return rank_files.ranks_of((MATERIAL / "tokenizers" / name / "tokenizer.json").read_bytes(), n)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "tiktoken, Qwen": lambda: from_files({"qwen.tiktoken": rank_files.tiktoken_file(_ranks("qwen2_5"))}),
    "tiktoken, Kimi": lambda: from_files({"tiktoken.model": rank_files.tiktoken_file(_ranks("gpt4o"))}),
    "tekken.json": lambda: from_files({"tekken.json": rank_files.tekken_file(_ranks("gpt4o", 130_000), "")}),
    "rwkv": lambda: from_files({rwkv.FILE_NAME: rank_files.rwkv_file([*_ranks("gpt4o", 65_000)])}),
    "spm": lambda: from_gguf("llama-spm"),
    "wpm": lambda: from_gguf("bert-bge"),
    "ugm": lambda: from_gguf("nomic-bert-moe"),
    "gemma4 (algorithm)": lambda: from_gguf("gemma-4"),
    **{name: partial(with_rule, name) for name in sorted(rules.NAMES)},
}


def in_llama(tok: Tokenizer) -> dict[str, Any]:
    """The tokenizer.json with llama.cpp's own regexes, and without the normalisation that it does not have."""
    parsed = json.loads(hf_write.to_hf_files(tok)["tokenizer.json"])
    row = rules.rule(tok.pre or rules.UNNAMED)
    if tok.model != "gpt2" or row is None or row.letters != "bytes":
        return dict(parsed)
    splits = row.llama or tuple(split.replace(rules.SUFFIX, rules.SUFFIX_BY_CLASSES) for split in row.splits)
    own = json.loads(hf_write.to_hf_files(replace(tok, pre="dbrx"))["tokenizer.json"])["pre_tokenizer"]
    shape, final = own["pretokenizers"][0], own["pretokenizers"][-1]
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits if split == "digits" else {**shape, "pattern": {"Regex": split}} for split in splits]
    parsed["pre_tokenizer"] = {
        "type": "Sequence", "pretokenizers": [*steps, {**final, "use_regex": row.gpt2_regex}],
    }  # fmt: skip
    return {**parsed, "normalizer": None}


def write_gguf(tok: Tokenizer, path: Path) -> None:
    """A GGUF with nothing but the tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, kind, value in ggml.to_gguf(tok, vocab_size=len(tok.tokens)):
        if isinstance(kind, tuple):
            sub_type = gguf.GGUFValueType[kind[1]]
            writer.add_key_value(key, value, gguf.GGUFValueType[kind[0]], sub_type=sub_type)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def random_texts(n: int, specials: list[str], seed: int) -> Iterator[str]:
    """Random code points of all planes, contractions in any case, digits, runs of white space, special tokens."""
    rng = random.Random(seed)
    planes = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1000, 0x2000),
              (0x2000, 0x3100), (0x3040, 0x3400), (0x3400, 0xA000), (0xA000, 0xD800), (0xF900, 0x10000),
              (0x10000, 0x1FFFF), (0x20000, 0x2FA20), (0x30000, 0x3FFFF), (0xE0000, 0xF0000),
              (0x100000, 0x10FFFE)]  # fmt: skip
    marks = [c for i in range(0x300, 0x3100) if unicodedata.category(c := chr(i)).startswith("M")]
    while n > 0:
        n -= 1
        parts = []
        for _ in range(rng.randint(1, 12)):
            low, high = rng.choice(planes)
            kind = rng.random()
            if kind < 0.4:
                parts.append("".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 5))))
            elif kind < 0.5:
                parts.append(rng.choice(["'s", "'T", "'re", "'VE", "'m", "'lL", "'D", "'"]))
            elif kind < 0.6:
                parts.append(str(rng.randrange(10 ** rng.randint(1, 12))))
            elif kind < 0.75:
                parts.append(rng.choice(" \n\t\r\x0b\u00a0\u2003\u3000") * rng.randint(1, 9))
            elif kind < 0.85:
                parts.append(rng.choice("aeiouAEOUnN\u0915\u0e01\u05d0") + rng.choice(marks))
            elif kind < 0.9 and specials:
                parts.append(rng.choice(specials))
            else:
                parts.append(
                    rng.choice(
                        ["Hello", "HELLO", "helloWorld", "\u00c9cole", "\u00e9\u00c9", "\u6f22\u5b57", "x\u2019s"]
                    )
                )
        yield "".join(parts)


def invalid(rng: random.Random, text: str) -> str:
    """The text with bytes in it that are not UTF-8, as surrogate escapes."""
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 3)):
        data.insert(rng.randrange(len(data) + 1), rng.choice(b"\x80\xbf\xc3\xe4\xf0\xff"))
    damaged = bytes(data).decode("utf-8", "surrogateescape")
    try:
        as_read(damaged)
    except ValueError:  # a code point beyond the last, which ends llama.cpp with an exception
        return text
    return damaged


def as_read(text: str) -> str:
    """What llama.cpp reads of such a text: U+FFFD for each byte that begins no code point.

    It looks at the marks of UTF-8 alone, so that it takes an overlong code for its code point.
    """
    if not any("\udc80" <= c <= "\udcff" for c in text):
        return text
    data, found, at = text.encode("utf-8", "surrogateescape"), "", 0
    while at < len(data):
        lead = data[at]
        size = 1 if lead < 0x80 else 2 if lead >> 5 == 6 else 3 if lead >> 4 == 14 else 4 if lead >> 3 == 30 else 0
        tail = data[at + 1 : at + size]
        if size == 0 or len(tail) < size - 1 or any(byte >> 6 != 2 for byte in tail):
            found, at = found + "\ufffd", at + 1
            continue
        code = lead & (0x7F if size == 1 else 0x7F >> size)
        for byte in tail:
            code = code << 6 | byte & 0x3F
        found, at = found + chr(code), at + size
    return found


def all_texts(n: int, specials: list[str], seed: int, with_invalid: bool) -> list[str]:
    """Half mixed sentences, half random ones, a tenth of all with invalid bytes."""
    found = make_texts(n // 2, specials, seed)
    found += random_texts(n - len(found), specials, seed)
    rng = random.Random(seed)
    if with_invalid:
        for i in range(0, len(found), 10):
            found[i] = invalid(rng, found[i])
    return found


def specials_of(tok: Tokenizer) -> list[str]:
    """Texts that are looked for before anything else."""
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return [text for text, kind in zip(tok.tokens, tok.types, strict=False) if kind in kinds and text][:200]


def _different(peer: Any, fast: Any, texts: list[str]) -> list[str]:
    found = []
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        known = peer.tokenize(batch, add_bos=True)
        ours = fast.encode_batch_fast([as_read(text).encode("utf-8", "replace").decode() for text in batch])
        found += [text for text, ids, own in zip(batch, known, ours, strict=True) if ids != own.ids]
    return found


def compare(kind: str, n: int, seed: int = 7) -> Outcome:
    """Encodes `n` texts both ways."""
    from tokenizers import Tokenizer as Fast

    tok = KINDS[kind]()
    files = hf_write.to_hf_files(tok)
    # What works on bytes keeps an invalid one, for which no text of Python can stand.
    texts = all_texts(n, specials_of(tok), seed, with_invalid=tok.model == "gpt2")
    with tempfile.TemporaryDirectory() as folder, LlamaPeer() as llama:
        path = Path(folder, "m.gguf")
        write_gguf(tok, path)
        peer = llama.vocabulary(path)
        outcome = Outcome(len(texts), _different(peer, Fast.from_buffer(files["tokenizer.json"]), texts))
        if outcome.different:
            own = Fast.from_str(json.dumps(in_llama(tok)))
            known = set(tok.tokens)
            left = set(_different(peer, own, outcome.different))
            for text in outcome.different:
                reason = reason_of(tok, known, text) if text in left else reason_of_rules(tok, text)
                outcome.reasons[reason or "?"] += 1
                outcome.unexplained += [] if reason else [text]
    return outcome


NORMALISED = "llama.cpp does not normalize to NFC"
RULES = "llama.cpp uses different regexes"
NEWER = "code points newer than Unicode 14"
NO_BYTE = "bytes that are not tokens: `tokenizers` drops them before merging, llama.cpp after it"
BERT = "llama.cpp keeps only the first letter of a Hangul syllable, drops spacing marks, splits at some controls"
_BERT_KINDS = {"Mc", "Me", "Cc", "Cf", "Zl"}
RECATEGORIZED = "code points whose category differs between the Unicode versions of the two"
CLUSTERS = "`tokenizers` normalizes whole grapheme clusters, llama.cpp code points"
SURROGATES = "bytes that llama.cpp decodes as half a surrogate pair"


def reason_of_rules(tok: Tokenizer, text: str) -> str:
    """Why the ids of a text differ that are equal with llama.cpp's own rules."""
    row = rules.rule(tok.pre)
    normalises = row is not None and row.nfc and not unicodedata.is_normalized("NFC", as_read(text))
    return NORMALISED if normalises else RULES


def reason_of(tok: Tokenizer, known: set[str], text: str) -> str:
    """Why the ids of a text differ even with llama.cpp's own rules; empty where nothing is known."""
    read = as_read(text)
    if any("\ud800" <= c <= "\udfff" for c in read):
        return SURROGATES
    if tok.model == "gpt2" and not {BYTE_LETTERS[byte] for byte in read.encode()} <= known:
        return NO_BYTE
    kinds = {unicodedata.category(c) for c in read if c not in "\t\n\r"}
    if tok.model == "bert" and (kinds & _BERT_KINDS or any("\uac00" <= c <= "\ud7a3" for c in read)):
        return BERT
    if tok.model == "bert" and any(map(_is_recategorized, read)):
        return RECATEGORIZED
    if tok.model == "t5" and kinds & {"Mn", "Mc", "Me", "Cf"}:
        return CLUSTERS
    return NEWER if any(unicodedata.category(c) == "Cn" for c in read) else ""


def _is_recategorized(char: str) -> bool:
    return unicodedata.category(char) != unicodedata.ucd_3_2_0.category(char)


def explain(outcome: Outcome) -> str:
    """The reasons for differences, the most frequent first."""
    return "; ".join(f"{reason} ({n:,})" for reason, n in outcome.reasons.most_common())
