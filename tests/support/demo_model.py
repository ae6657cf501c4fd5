"""A tiny llama GGUF with a byte-level BPE tokenizer of 300 tokens: what `apr demo` runs on, and many tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from aprfmt.formats import gguf_write
from aprfmt.formats.gguf_fields import GgufType as T
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, write_layout
from aprfmt.io.sink import AtomicFile

N_TOKENS = 300
HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 2, 128, 256
_SEED = 20240817

# Merges by rank; every left and right part is a byte or an earlier result. The leading Ġ is a space.
MERGES = (
    *("h e", "Ġ t", "Ġ a", "i n", "Ġt he", "e r", "o n", "r e", "Ġ s", "a t", "e n", "Ġ w", "o r", "Ġ o"),
    *("i t", "e s", "a n", "Ġ c", "i s", "Ġ b", "Ġo f", "in g", "e d", "Ġ p", "Ġ m", "a l", "Ġ f", "a r"),
    *("Ġt o", "Ġa n", "Ġan d", "Ġ in", "Ġ d", "o u", "Ġ h", "l e", "i c", "t h", "Ġ th", "a s"),
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character of each byte value, the alphabet of byte-level BPE as GPT-2 defined it."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [value for value in range(256) if value not in shown]
    return [chr(value) if value in shown else chr(0x100 + hidden.index(value)) for value in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """(tokens by id, merges by rank): specials, bytes, then one token a merge."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*_SPECIAL, *byte_characters(), *merged], list(MERGES)


def build(path: Path) -> None:
    """Writes the model of the constants above to `path`, which must not exist: the same bytes on every machine."""
    layout = FileLayout(path.name, gguf_write.layout(_metadata(), list(_tensors())))
    with AtomicFile(path, n_bytes=layout.n_bytes) as sink:
        write_layout(layout, sink)


def _metadata() -> list[gguf_write.KV]:
    tokens, merges = vocabulary()
    types = [3 if i < len(_SPECIAL) else 1 for i in range(len(tokens))]
    return [
        ("general.architecture", T.STRING, "llama"),
        ("general.type", T.STRING, "model"),
        ("general.name", T.STRING, "apr demo"),
        ("general.license", T.STRING, "mit"),
        ("llama.block_count", T.UINT32, LAYERS),
        ("llama.context_length", T.UINT32, CONTEXT),
        ("llama.embedding_length", T.UINT32, HIDDEN),
        ("llama.feed_forward_length", T.UINT32, FEED_FORWARD),
        ("llama.attention.head_count", T.UINT32, HEADS),
        ("llama.attention.head_count_kv", T.UINT32, KV_HEADS),
        ("llama.rope.freq_base", T.FLOAT32, 10000.0),
        ("llama.attention.layer_norm_rms_epsilon", T.FLOAT32, 1e-5),
        ("llama.rope.dimension_count", T.UINT32, HIDDEN // HEADS),
        ("llama.vocab_size", T.UINT32, N_TOKENS),
        ("general.file_type", T.UINT32, 1),
        ("general.quantization_version", T.UINT32, 2),
        ("tokenizer.ggml.model", T.STRING, "gpt2"),
        ("tokenizer.ggml.pre", T.STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", (T.ARRAY, T.STRING), tokens),
        ("tokenizer.ggml.token_type", (T.ARRAY, T.INT32), types),
        ("tokenizer.ggml.merges", (T.ARRAY, T.STRING), merges),
        ("tokenizer.ggml.bos_token_id", T.UINT32, 1),
        ("tokenizer.ggml.eos_token_id", T.UINT32, 2),
        ("tokenizer.ggml.unknown_token_id", T.UINT32, 0),
        ("tokenizer.ggml.padding_token_id", T.UINT32, 3),
        ("tokenizer.ggml.add_bos_token", T.BOOL, False),
        ("tokenizer.chat_template", T.STRING, _TEMPLATE),
    ]


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    yield "token_embd.weight", (N_TOKENS, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (HIDDEN,)
        yield block + "ffn_down.weight", (HIDDEN, FEED_FORWARD)
        yield block + "ffn_gate.weight", (FEED_FORWARD, HIDDEN)
        yield block + "ffn_up.weight", (FEED_FORWARD, HIDDEN)
        yield block + "ffn_norm.weight", (HIDDEN,)
        yield block + "attn_k.weight", (kv, HIDDEN)
        yield block + "attn_output.weight", (HIDDEN, HIDDEN)
        yield block + "attn_q.weight", (HIDDEN, HIDDEN)
        yield block + "attn_v.weight", (kv, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)


def _tensors() -> Iterator[OutTensor]:
    for index, (name, shape) in enumerate(_shapes()):
        dtype, data = _weights(shape, random.Random(_SEED + index))

        yield OutTensor(name, dtype, shape, len(data), partial(iter, (data,)))


def _weights(shape: tuple[int, ...], rng: random.Random) -> tuple[str, bytes]:
    """Norms are 1 as F32; matrices are F16, uniform with the deviation 1 / sqrt(columns)."""
    if len(shape) == 1:
        return "F32", np.ones(shape, "<f4").tobytes()
    n = shape[0] * shape[1]
    integers = np.frombuffer(rng.randbytes(2 * n), "<i2").astype("<f4")
    return "F16", (integers / 32768 * (3 / shape[1]) ** 0.5).astype("<f2").tobytes()
