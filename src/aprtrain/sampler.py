"""The student's own continuations of prompts, for on-policy distillation (Agarwal et al., 2024, arXiv 2306.13649).

Prompts are continued in batches by the student's decoder with a cache of keys and values. The continuations are packed
like any other documents; the teacher scores them, and only the sampled tokens are labels.

Shape suffixes: N rows, T positions so far, L all positions, V ids.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from aprfmt.errors import RefusedError
from aprfmt.texts.encoding import HIDDEN, Encoder, Ids
from aprfmt.texts.records import RecordReader, is_blank
from aprfmt.texts.sequences import Windows
from aprfmt.texts.shards import part_of
from aprfmt.texts.sources import list_files
from aprtrain.data.batches import Batch, batch_of, shuffle_index
from aprtrain.network.attention import AttentionPlan, KeyValueCache
from aprtrain.network.decoder import Decoder, soft_cap
from aprtrain.network.rotation import cos_sin_of
from aprtrain.network.shape import Shape

_MOST_ROWS = 256  # prompts per batch
_CACHE_BYTES = 1 << 30


def sampling_bytes(shape: Shape) -> int:
    """Peak memory of sampling in bytes: the KV cache, and the logits of one position."""
    return _CACHE_BYTES + 16 * _MOST_ROWS * shape.vocab_rows


def read_prompts(path: Path, encoder: Encoder, text_field: str, longest: int, log: Callable[[str], None]) -> list[Ids]:
    """Token ids of the prompts in a file or folder: conversations up to their first answer, or whole texts.

    Prompts with more than `longest` tokens are skipped and counted. Raises RefusedError if none is left; else as
    `list_files` and `RecordReader`.
    """
    skipped: Counter[str] = Counter()
    reader = RecordReader(
        separator=encoder.separator,
        render=encoder.render,
        text_field=text_field,
        strict=False,
        skipped=skipped,
        log=log,
    )
    files = list_files([path], skipped)
    documents = [each for file in files for each in reader.documents(file) if not is_blank(each)]
    found = []
    for ids in encoder.encode(documents):
        learned = np.flatnonzero(ids < HIDDEN)
        is_chat = bool((ids >= HIDDEN).any())
        end = int(learned[0]) if is_chat and len(learned) else len(ids) - (int(ids[-1]) == encoder.separator)
        found.append(ids[:end] & ~HIDDEN)
    kept = [ids for ids in found if 0 < len(ids) <= longest]
    if not kept:
        raise RefusedError(
            f"none of {len(found)} prompts has 1 to {longest} tokens", path=path,
            hint="use shorter prompts, a longer --seq-len, or fewer --new-tokens",
        )  # fmt: skip
    if len(kept) < len(found):
        log(f"{len(found) - len(kept)} of {len(found)} prompts are empty or longer than {longest} tokens and left out")
    return kept


@torch.no_grad()
def continue_prompts(
    decoder: Decoder, prompts: Sequence[Ids], n_new: int, end: int, generator: torch.Generator, temperature: float = 1.0
) -> list[list[int]]:
    """Samples continuations of up to `n_new` tokens, each ending with `end` if the model produces it; temperature 0:
    greedy.
    """
    s, device = decoder.shape, decoder.norm.device
    longest = max(map(len, prompts))
    total = longest + n_new
    pads_N = torch.tensor([longest - len(ids) for ids in prompts], device=device)
    tokens_NL = torch.full((len(prompts), total), end, dtype=torch.int64, device=device)
    for row, ids in enumerate(prompts):  # aligned at their ends: all rows get the same next position
        tokens_NL[row, longest - len(ids) : longest] = torch.from_numpy(ids.astype(np.int64)).to(device)
    caches = [KeyValueCache(total) for _ in decoder.blocks]
    frequencies = [decoder.frequencies(device)[n] for n in range(len(s.ropes))]
    places_L = torch.arange(total, device=device)
    going_N = torch.ones(len(prompts), dtype=torch.bool, device=device)
    first = 0
    for at in range(longest, total):
        x_NTD = decoder.embed_tokens(tokens_NL[:, first:at])
        position_NT = (places_L[first:at] - pads_N[:, None]).clamp(min=0)
        lengths_NT = (total - pads_N)[:, None].expand_as(position_NT)
        tables = [cos_sin_of(kind, f, position_NT, lengths_NT) for kind, f in zip(s.ropes, frequencies, strict=True)]
        back = places_L[first:at, None] - places_L[None, :at]
        for block, cache, window, rope in zip(decoder.blocks, caches, s.windows, s.layer_ropes, strict=True):
            seen = (back >= 0) & (back < window) if window else back >= 0
            seen_NTT = seen[None] & ((places_L[:at] >= pads_N[:, None])[:, None] | (back == 0)[None])  # no empty row
            plan = AttentionPlan(
                "eager" if s.attn_softcap or s.has("sinks") else "mask", seen_NTT[:, None], cache=cache
            )
            x_NTD = decoder.run_block(block, x_NTD, tables[rope] if rope >= 0 else None, plan)
        hidden_ND = decoder.final_norm(x_NTD[:, -1:])[:, 0]
        head_VD = decoder.head_weight[: s.vocab_rows]
        logits_NV = soft_cap(functional.linear(hidden_ND, head_VD).float(), s.logit_softcap)
        if temperature:
            next_N = torch.multinomial((logits_NV / temperature).softmax(1), 1, generator=generator)[:, 0]
        else:
            next_N = logits_NV.argmax(1)
        tokens_NL[:, at] = torch.where(going_N, next_N, end)
        going_N = going_N & (next_N != end)
        first = at
        if not bool(going_N.any()):
            break
    rows = tokens_NL[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@dataclass
class Sampler:
    """Batches of the student's own continuations.

    Attributes:
        student: the current student: samples are never older than the weights that learn from them.
        prompts: each step uses some of them.
        seq_len, rows, rows_at_once: sequence length; rows per step in this process, and per micro-batch.
        n_new: maximum number of tokens per continuation.
        separator: id that ends a continuation.
        begin: id of BOS; None: no BOS.
        seed, rank, world: determine a step's prompts and random numbers.
    """

    student: Decoder
    prompts: list[Ids]
    seq_len: int
    rows: int
    rows_at_once: int
    n_new: int
    separator: int
    begin: int | None
    seed: int
    rank: int = 0
    world: int = 1
    seconds: float = 0.0
    n_tokens: int = 0

    def batches(self, step: int) -> list[Batch]:
        """This process's micro-batches for a step; `n_valid` counts the labels of this process only."""
        began = time.monotonic()
        device = self.student.norm.device
        each = self.rows * max(1, self.seq_len // (max(map(len, self.prompts)) + self.n_new))
        generator = torch.Generator(device).manual_seed(hash((self.seed, step, self.rank)) & ((1 << 62) - 1))
        n, start = len(self.prompts), (step * self.world + self.rank) * each
        places = [divmod(start + i, n) for i in range(each)]
        chosen = [self.prompts[shuffle_index(place, n, self.seed, epoch)] for epoch, place in places]
        documents: list[Ids] = []
        self.n_tokens = 0
        total = max(map(len, self.prompts)) + self.n_new
        values = (
            2 * total * max(self.student.shape.kv_rows, self.student.shape.q_rows if self.student.shape.latent else 0)
        )
        row_bytes = values * self.student.norm.element_size() * len(self.student.blocks)
        n_rows = max(1, min(_MOST_ROWS, _CACHE_BYTES // row_bytes))
        for at in range(0, each, n_rows):
            some = chosen[at : at + n_rows]
            made = continue_prompts(self.student, some, self.n_new, self.separator, generator)
            self.n_tokens += sum(map(len, made))
            for prompt, new in zip(some, made, strict=True):
                documents.append(np.concatenate([prompt | HIDDEN, np.array(new, np.uint32)]))
        windows = Windows(part_of(documents, self.begin), self.seq_len, self.separator)
        ids = range(min(len(windows), self.rows))
        n_valid = windows.n_labels(ids)
        made_of = [ids[i : i + self.rows_at_once] for i in range(0, len(ids), self.rows_at_once)]
        found = [batch_of(windows, some, n_valid=n_valid) for some in made_of]
        self.seconds = time.monotonic() - began
        return found
