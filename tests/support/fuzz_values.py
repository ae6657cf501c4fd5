"""Hostile values, and edits of trees of values (JSON, MessagePack, protobuf) and of plain bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 1000, 4096, 16384, 65535, 65536, 1 << 20),
    *((1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63),
    *((1 << 64) - 32, (1 << 64) - 1, -1, -2, -128, -(1 << 31), -(1 << 63)),
)

_RAW = "\ue000raw{}\ue001"
_RAW_TEXTS = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-0", "1E+2", "0.1e-400", "9" * 400, "9" * 5000, "1.0", "0x10", "01"),
    *("[" * 200 + "]" * 200, "[" * 100_000, '{"a":' * 150 + "1" + "}" * 150, '"\\ud800"', '"\\udc00x"', '"\\u0000"'),
    *("'a'", "", "nul", "//", "\x00", '"\x01"', "[1,]"),
)
"""What json.dumps would not write."""

STRINGS = (
    *(
        "",
        " ",
        "a",
        "a" * 300,
        "a" * 70_000,
        "\0",
        "\x1b[31mred",
        "\ud800",
        "é",
        "\u202e",
        "\n",
        "../x",
        "/x",
        "..",
        ".",
    ),
    *(
        "a/b",
        "x" * 255,
        "é" * 200,
        "a\\b",
        "con",
        "m.safetensors",
        "config.json",
        "model.safetensors",
        "{e}",
        "%s",
        "{}",
    ),
    *("F32", "F16", "BF16", "F64", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "Q4_0", "Q4_K", "Q8_0", "IQ2_XXS"),
    *("AprQ4", "AprQ8", "MXFP4", "llama", "qwen2", "gemma", "gemma2", "mixtral", "mamba", "bert", "gpt2", "phi3", "t5"),
    *("LlamaForCausalLM", "Gemma2ForCausalLM", "MambaForCausalLM", "BertModel", "DeepseekV3ForCausalLM", "default"),
    *("BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Metaspace", "Sequence", "Split", "Digits", "NFC"),
    *("Precompiled", "Prepend", "Replace", "Strip", "ByteFallback", "Fuse", "TemplateProcessing", "BertPreTokenizer"),
    *("gguf", "hf", "safetensors", "linear", "dynamic", "yarn", "llama3", "longrope", "gptq", "awq", "fp8", "mxfp4"),
    *("compressed-tensors", "bitsandbytes", "pack-quantized", "nvfp4-pack-quantized", "apache-2.0", "MIT OR", "auto"),
)


def number(rng: Random, near: int = 0) -> int:
    """A hostile integer, often one beside `near`."""
    if rng.random() < 0.4:
        return near + rng.choice((-1, 1, -2, 2, 8, -8, 32, 64, near, -near, -near - 1, near << 32, 1 << 32, 1 << 63))
    return rng.choice(NUMBERS)


def text(rng: Random, near: str = "") -> str:
    """A hostile string, often a changed `near`."""
    if not near or rng.random() < 0.5:
        return rng.choice(STRINGS)
    at = rng.randrange(len(near))
    return rng.choice((
        near[:at], near[:at] + near[at + 1 :], near + near, near[:at] + chr(rng.randrange(1, 0x250)) + near[at:],
        near[at:] + near[:at], near.upper(), near[:at] + "\0" + near[at:], near + " ",
    ))  # fmt: skip


def value(rng: Random, near: object = None) -> Any:
    """A hostile value of any type, mostly of that of `near`."""
    if rng.random() < 0.6:
        if isinstance(near, bool):
            return rng.choice((not near, int(near), str(near), None))
        if isinstance(near, int):
            return number(rng, near)
        if isinstance(near, float):
            return rng.choice(
                (0.0, -near, near * 1e30, 1e308, 5e-324, 1e-46, 3.5e38, int(near) if abs(near) < 1e300 else 0)
            )
        if isinstance(near, str):
            return text(rng, near)
    return rng.choice((
        None, True, False, 0, -1, 1.5, number(rng), text(rng), [], {}, [[]], [None], {"a": 1}, [1, 2], ["a"],
        str(near)[:99], [near], {"0": near}, _RAW.format(rng.randrange(len(_RAW_TEXTS))),
    ))  # fmt: skip


# --- trees ---

PREFERRED = re.compile(
    r"aprfmt|segments|files|mapping|model|quantization|rope|weight_map|tokenizer\.|vocab|merges|added|config_groups|"
    r"data_offsets|shape|pre_tokenizer|normalizer|metadata"
)


def nodes(tree: Any, rng: Random) -> tuple[Any, Any]:
    """A container inside `tree`, and one of its keys: down from the top, a step at a time."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        likely = [key for key in keys if isinstance(key, str) and PREFERRED.search(key)]
        key = rng.choice(likely if likely and rng.random() < 0.5 else keys)
        child = tree[key]
        if not isinstance(child, dict | list) or not child or rng.random() < 0.15:
            return tree, key
        tree = child


def _all_values(tree: Any, rng: Random) -> Any:
    at, key = nodes(tree, rng)
    return at[key]


def edit_tree(tree: Any, rng: Random) -> None:
    """One edit of a non-empty list or dict: a value replaced, taken away, copied, moved, renamed."""
    at, key = nodes(tree, rng)
    kind = rng.random()
    if kind < 0.5:
        at[key] = value(rng, at[key])
    elif kind < 0.6:
        del at[key]
    elif kind < 0.7:  # a value of elsewhere
        at[key] = json.loads(json.dumps(_all_values(tree, rng)))
    elif kind < 0.78 and len(at) > 1:  # two values change places
        other = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at[key], at[other] = at[other], at[key]
    elif isinstance(at, list):
        at.insert(rng.randrange(len(at) + 1), at[key] if rng.random() < 0.6 else value(rng, at[key]))
        if rng.random() < 0.1:
            at += [at[key]] * rng.choice((10, 300, 300 if isinstance(at[key], list | dict) else 70_000))
    elif rng.random() < 0.6:
        at[text(rng, str(key))] = at.pop(key)
    else:
        at[text(rng, str(key))] = at[key]
    if rng.random() < 0.02:
        for _ in range(rng.choice((10, 126, 200))):
            at = at[key] = [None] if isinstance(at, dict) or key == 0 else {"0": None}
            key = 0 if isinstance(at, list) else "0"


def edit_json(data: bytes, rng: Random, edit: Callable[[Any, Random], None] = edit_tree) -> bytes:
    """A JSON text after one edit of its tree, sometimes of the text itself. Raises ValueError for what is not JSON."""
    tree = json.loads(data)
    if not isinstance(tree, dict | list) or not tree:
        return dump(value(rng), rng)
    edit(tree, rng)
    out = dump(tree, rng)
    if rng.random() < 0.04 and out[:1] == b"{":  # a key twice
        out = b'{"%s":%s,' % (str(next(iter(tree), "a")).encode("utf-8", "replace"), dump(value(rng), rng)) + out[1:]
    if rng.random() < 0.02:
        out = rng.choice((b"\xef\xbb\xbf" + out, out + b"x", b" \n" + out, out[:-1], out + b"\0"))
    return out


def dump(tree: Any, rng: Random) -> bytes:
    """JSON text, with what json.dumps would not write where `value` put it."""
    try:
        out = json.dumps(tree, ensure_ascii=rng.random() < 0.3, separators=(",", ":"))
    except (ValueError, RecursionError):  # a list that holds itself
        return b"[]"
    for n, raw in enumerate(_RAW_TEXTS):
        for mark in (_RAW.format(n), json.dumps(_RAW.format(n))[1:-1]):
            out = out.replace(f'"{mark}"', raw)
    return out.encode("utf-8", "surrogatepass")


# --- bytes ---


def edit_bytes(data: bytes, rng: Random, other: bytes = b"") -> bytes:
    """One edit of bytes that knows nothing of them."""
    if not data:
        return other[:64] or bytes([rng.randrange(256)])
    at = rng.randrange(min(len(data), rng.choice((16, 64, 512, 4096, len(data)))))
    end = min(len(data), at + rng.choice((1, 2, 4, 8, 16, 64, 300)))
    kind = rng.randrange(10)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))]) + data[at + 1 :]
    if kind == 2:
        size = rng.choice((1, 2, 4, 8))
        return data[:at] + (number(rng) % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]
    if kind == 3:
        return data[: rng.choice((at, rng.randrange(len(data)), len(data) - 1))]
    if kind == 4:
        return data[:at] + data[end:]
    if kind == 5:
        return data[:at] + rng.randbytes(end - at) + data[at:]
    if kind == 6:
        to = rng.randrange(len(data))
        return data[:to] + data[at:end] + data[to + end - at :]
    if kind == 7:
        return data[:at] + bytes([rng.choice((0, 0xFF, 0x20))]) * (end - at) + data[end:]
    if kind == 8 and other:
        to = rng.randrange(len(other))
        return data[:at] + other[to:] if rng.random() < 0.5 else data[:at] + other[to : to + 64] + data[end:]
    return data + rng.randbytes(rng.choice((1, 4, 64)))


_LINES = (
    *(
        "a: &a [*a]",
        "a: &a [x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b,*b]",
        "!!python/object:os.x {}",
    ),
    *(
        "license: [" + "[" * 500,
        "license: 2001-12-14t21:59:43.10-05:00",
        "language: no",
        "license: 0o17",
        "datasets: {a: b}",
    ),
    *(
        "? [a]\n: b",
        "<<: *x",
        "tags: |\n  x",
        "%YAML 9.9",
        "---",
        "...",
        "\t- x",
        "x: !!binary aGk=",
        "x: 1e999",
        "x: .nan",
    ),
    *(
        "x: " + "9" * 5000,
        "base_model:\n- a\n- {b: c}",
        "a b c d",
        "Ġ",
        "#version",
        "\x85",
        "\u2028",
        "x: !!set {a}",
        "- - - -",
    ),
    *(
        "license: mit\nlicense: gpl",
        "x: 0b1_1",
        "x: 1:2:3",
        "x: !!timestamp 9999-99-99",
        "{% for x in y %}",
        "x: \ud83d",
    ),
)


def edit_lines(data: bytes, rng: Random) -> bytes:
    """One edit of the lines of a text."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    at = rng.randrange(len(lines))
    kind = rng.randrange(6)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, rng.choice(_LINES))
    elif kind == 2:
        lines[at] = text(rng, lines[at])
    elif kind == 3:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif kind == 4:
        lines[at] = lines[at].partition(":")[0] + ": " + text(rng)
    else:
        lines[at] = rng.choice(("  ", "- ", "\t")) + lines[at]
    return "\n".join(lines).encode("utf-8", "surrogatepass" if rng.random() < 0.2 else "replace")
