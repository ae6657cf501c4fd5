"""The student's own continuations of prompts, for on-policy distillation (Agarwal et al., 2024, arXiv 2306.13649).

Prompts are continued in batches by the student's decoder with a cache of keys and values. The continuations are packed
like any other documents; the teacher scores them, and only the sampled tokens are labels.

Shape suffixes: N rows, T positions so far, L all positions, V ids.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aprfmt.errors import RefusedError
from aprfmt.texts.encoding import HIDDEN, Encoder, Ids
from aprfmt.texts.records import RecordReader, is_blank
from aprfmt.texts.sequences import Windows
from aprfmt.texts.shards import part_of
from aprfmt.texts.sources import list_files
from aprfmt.types import JsonObject
from aprtrain.data.batches import Batch, batch_of, shuffle_index
from aprtrain.features import importable
from aprtrain.network.attention import AttentionPlan, KeyValueCache
from aprtrain.network.decoder import Decoder, soft_cap
from aprtrain.network.rotation import cos_sin_of
from aprtrain.network.shape import Shape
from aprtrain.report.metrics import SampledValues

_MOST_ROWS = 1024  # prompts per batch
_CACHE_BYTES = 4 << 30
_LOGIT_BYTES = 1 << 30  # of one position, with what sampling makes of them
_VALUE_BYTES = 16  # of a logit: in bfloat16, in float32, scaled, and its probability
_FILLED = 0.95  # of a step's rows: packing leaves gaps, and what does not fit is lost
_MASK_ALIGNMENT = 8  # positions, for torch's kernels
_LOOK_EVERY = 8  # tokens between two looks at whether all texts have ended, which wait for the GPU


def sampling_bytes(shape: Shape) -> int:
    """Peak memory of sampling in bytes: the KV cache, and the logits of one position."""
    return _CACHE_BYTES + max(_LOGIT_BYTES, _VALUE_BYTES * shape.vocab_rows)


def read_prompts(path: Path, encoder: Encoder, text_field: str, longest: int, log: Callable[[str], None]) -> list[Ids]:
    """Token ids of the prompts in a file or folder: conversations up to their first answer, or whole texts.

    Prompts with more than `longest` tokens are skipped and counted. Raises RefusedError if none is left; else as
    `list_files` and `RecordReader`.
    """
    skipped: Counter[str] = Counter()
    reader = RecordReader(
        separator=encoder.separator, render=encoder.render, text_field=text_field, skipped=skipped, log=log
    )
    files = list_files([path], skipped)
    documents = [each for file in files for each in reader.documents(file) if not is_blank(each)]
    found = []
    for ids in encoder.encode(documents):
        learned = np.flatnonzero(ids < HIDDEN)
        is_chat = bool((ids >= HIDDEN).any())
        end = int(learned[0]) if is_chat and len(learned) else len(ids) - (int(ids[-1]) == encoder.separator)
        found.append(ids[:end] & ~HIDDEN)
    if not found:
        raise RefusedError(
            "no prompts in it", path=path, hint=f"use a file of conversations, or of texts in the field {text_field!r}"
        )
    kept = [ids for ids in found if 0 < len(ids) <= longest]
    if not kept:
        raise RefusedError(
            f"none of {len(found)} prompts has 1 to {longest} tokens", path=path,
            hint="use shorter prompts, a longer --seq-len, or fewer --new-tokens",
        )  # fmt: skip
    if len(kept) < len(found):
        log(f"{len(found) - len(kept)} of {len(found)} prompts are empty or longer than {longest} tokens and left out")
    return kept


class _Generation:
    """A batch of texts that grows by one position at a time, with keys and values cached.

    On one GPU, a CUDA graph replays a step: launching its kernels one by one takes longer than they run.
    """

    def __init__(self, decoder: Decoder, pads_N: Tensor, total: int) -> None:
        """Of rows that begin after `pads_N` positions of padding, and have `total` positions in the end."""
        device = pads_N.device
        self._decoder, self._pads_N, self._total = decoder, pads_N, total
        room = -(-total // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
        self._places_L = torch.arange(room, device=device)
        self._caches = [KeyValueCache(room) for _ in decoder.blocks]
        self._token_N1 = torch.zeros(len(pads_N), 1, dtype=torch.int64, device=device)
        self._place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits_NV: Tensor | None = None

    def begin(self, tokens_NT: Tensor) -> Tensor:
        """Logits after the prompts, float32 [N, vocab_rows]."""
        n = tokens_NT.shape[1]
        self._place_1.fill_(n)
        with self._decoder.running():
            return self._advance(tokens_NT, self._places_L[:n])

    def extend(self, token_N: Tensor) -> Tensor:
        """Logits after one more token, float32 [N, vocab_rows]; valid until the next call."""
        self._token_N1.copy_(token_N[:, None])
        if self._graph is not None:
            self._graph.replay()
        else:
            with self._decoder.running(self._decoder.decode_block):
                if self._logits_NV is None or not self._is_replayable:  # the first step compiles kernels
                    self._logits_NV = self._advance(self._token_N1, self._place_1)
                else:
                    self._graph = self._captured()
                    self._graph.replay()
        self._place_1 += 1
        assert self._logits_NV is not None
        return self._logits_NV

    @property
    def _is_replayable(self) -> bool:
        """Whether a step never waits for the GPU, and the weights keep their addresses.

        FSDP2 gathers them for each use; grouped products of experts are kernels in bfloat16 on Hopper, elsewhere loops
        on the CPU.
        """
        weight = self._decoder.norm
        if not weight.is_cuda or type(weight) is not torch.nn.Parameter:
            return False
        is_hopper = torch.cuda.get_device_capability(weight.device)[0] >= 9
        return self._decoder.shape.experts is None or (weight.dtype == torch.bfloat16 and is_hopper)

    def _captured(self) -> torch.cuda.CUDAGraph:
        # Not torch.cuda.graph: it returns all cached memory to the driver each time.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin()
            self._logits_NV = self._advance(self._token_N1, self._place_1)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def _advance(self, tokens_NT: Tensor, places_T: Tensor) -> Tensor:
        decoder, s, pads_N = self._decoder, self._decoder.shape, self._pads_N
        x_NTD = decoder.embed_tokens(tokens_NT)
        position_NT = (places_T - pads_N[:, None]).clamp(min=0)
        lengths_NT = (self._total - pads_N)[:, None].expand_as(position_NT)
        frequencies = decoder.frequencies(pads_N.device)
        tables = [cos_sin_of(kind, f, position_NT, lengths_NT) for kind, f in zip(s.ropes, frequencies, strict=True)]
        of_window = {window: self._plan(places_T, window) for window in dict.fromkeys(s.windows)}
        plans = [
            of_window[window]._replace(cache=cache, places_T=places_T, positions_NT=position_NT)
            for cache, window in zip(self._caches, s.windows, strict=True)
        ]
        x_NTD = decoder.run_blocks(x_NTD, tokens_NT, tables, plans)
        hidden_ND = decoder.final_norm(x_NTD[:, -1:])[:, 0]
        logits_NV = functional.linear(hidden_ND, decoder.head_weight[: s.vocab_rows])
        return soft_cap(logits_NV.float(), s.logit_softcap)

    def _plan(self, places_T: Tensor, window: int) -> AttentionPlan:
        """Attention of the tokens at these places, in layers with this window (0: none)."""
        s, pads_N = self._decoder.shape, self._pads_N
        is_written = bool(s.attn_softcap) or s.has("sinks")
        if len(places_T) == 1 and pads_N.is_cuda and not is_written and importable("triton"):
            return AttentionPlan("decode", first_N=pads_N.clamp(min=places_T - window + 1) if window else pads_N)
        back_TL = places_T[:, None] - self._places_L
        is_text_NL = self._places_L >= pads_N[:, None]
        seen_TL = (back_TL >= 0) & (back_TL < window) if window else back_TL >= 0
        # Padding sees itself: no empty row.
        mask = (seen_TL & is_text_NL[:, None] | (back_TL == 0))[:, None]
        return AttentionPlan("eager" if is_written else "mask", mask)


@torch.no_grad()
def continue_prompts(
    decoder: Decoder, prompts: Sequence[Ids], n_new: int, end: int, generator: torch.Generator, temperature: float = 1.0
) -> list[list[int]]:
    """Samples continuations of up to `n_new` tokens, each ending with `end` if the model produces it; temperature 0:
    greedy.
    """
    device = decoder.norm.device
    longest = max(map(len, prompts))
    total = longest + n_new
    pads_N = torch.tensor([longest - len(ids) for ids in prompts], device=device)
    tokens_NL = torch.full((len(prompts), total), end, dtype=torch.int64, device=device)
    for row, ids in enumerate(prompts):  # aligned at their ends: all rows get the same next position
        tokens_NL[row, longest - len(ids) : longest] = torch.from_numpy(ids.astype(np.int64)).to(device)
    going_N = torch.ones(len(prompts), dtype=torch.bool, device=device)
    texts = _Generation(decoder, pads_N, total)
    logits_NV = texts.begin(tokens_NL[:, :longest])
    for at in range(longest, total):
        if temperature:
            next_N = torch.multinomial((logits_NV / temperature).softmax(1), 1, generator=generator)[:, 0]
        else:
            next_N = logits_NV.argmax(1)
        tokens_NL[:, at] = torch.where(going_N, next_N, end)
        going_N &= next_N != end
        is_last = at + 1 == total or (at % _LOOK_EVERY == 0 and not bool(going_N.any()))
        if is_last:
            break
        logits_NV = texts.extend(tokens_NL[:, at])
    rows = tokens_NL[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@dataclass(frozen=True, slots=True)
class Continuations:
    """What was sampled at once.

    Attributes:
        at: the step whose weights sampled.
        of_step: the continuations of each step that learns from them, in the order of its prompts.
    """

    at: int
    of_step: dict[int, list[list[int]]]

    def to_json(self) -> JsonObject:
        """For a checkpoint."""
        rows: JsonObject = {str(step): [[*ids] for ids in texts] for step, texts in self.of_step.items()}
        return {"at": self.at, "of_step": rows}

    @classmethod
    def from_json(cls, value: Any) -> Continuations:
        """Of a checkpoint. Raises ValueError unless `to_json` made it."""
        try:
            texts = {int(step): [[*map(int, ids)] for ids in rows] for step, rows in value["of_step"].items()}
            return cls(int(value["at"]), texts)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(error) from error


@dataclass
class Sampler:
    """Batches of the student's own continuations, for `share` of the steps.

    Attributes:
        student: the current student.
        prompts: each step uses some of them.
        seq_len, rows, rows_at_once: sequence length; rows per step in this process, and per micro-batch.
        n_new: maximum number of tokens per continuation.
        separator: id that ends a continuation.
        begin: id of BOS; None: no BOS.
        seed, rank, world: determine a step's prompts and random numbers.
        share: of the steps that learn from continuations.
        every: such steps whose continuations are sampled at once, from the weights before the first of them: a token of
            a large batch takes a fraction of the time.
        end: no step is sampled from this one on.
        drawn: the last continuations; a checkpoint keeps them.
        seconds, n_tokens: time of the last sampling, and the tokens that it drew.
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
    share: float = 1.0
    every: int = 1
    end: int = 1 << 62
    drawn: Continuations = field(default_factory=lambda: Continuations(0, {}))
    seconds: float = 0.0
    n_tokens: int = 0

    def is_due(self, step: int) -> bool:
        """Whether a step learns from continuations."""
        return self._index(step + 1) > self._index(step)

    def batches(self, step: int) -> list[Batch]:
        """This process's micro-batches for a step; `n_valid` counts the labels of this process only."""
        if len(self.drawn.of_step.get(step, ())) != self._n_prompts():
            self._sample(step)
        found = self.drawn.of_step[step]
        documents = [
            np.concatenate([prompt | HIDDEN, np.array(new, np.uint32)])
            for prompt, new in zip(self._prompts_of(step), found, strict=True)
        ]
        windows = Windows(part_of(documents, self.begin), self.seq_len, self.separator)
        ids = [*range(min(len(windows), self.rows))]
        n_valid = windows.n_labels(ids)
        # Rows without labels fill the last micro-batch, so that compiled blocks always get the same shape; with several
        # processes they fill all, which then run the same number of passes.
        ids += [-1] * ((self.rows if self.world > 1 else _up(len(ids), self.rows_at_once, self.rows)) - len(ids))
        made_of = [ids[i : i + self.rows_at_once] for i in range(0, len(ids), self.rows_at_once)]
        return [batch_of(windows, rows, n_valid=n_valid) for rows in made_of]

    def values(self, step: int) -> SampledValues:
        """What the log tells of the continuations of a step; of their sampling, if it sampled."""
        values: SampledValues = {
            "sampled_tokens": sum(map(len, self.drawn.of_step[step])),
            "sampler_age": step - self.drawn.at,
        }
        if step == self.drawn.at:
            values["sampler_seconds"] = self.seconds
            values["sampler_tokens_per_s"] = self.n_tokens / max(self.seconds, 1e-9)
        return values

    def _sample(self, step: int) -> None:
        """Draws the continuations of this step and of those that are sampled with it."""
        began = time.monotonic()
        generator = torch.Generator(self.student.norm.device)
        generator.manual_seed(hash((self.seed, step, self.rank)) & ((1 << 62) - 1))
        last = self._index(step) // self.every * self.every + self.every  # groups begin at the same steps in any run
        ahead = takewhile(lambda each: each < self.end and self._index(each) < last, count(step + 1))
        steps = [step, *filter(self.is_due, ahead)]
        chosen = [prompt for each in steps for prompt in self._prompts_of(each)]
        found: dict[int, list[int]] = {}
        left = sorted(range(len(chosen)), key=lambda i: -len(chosen[i]))  # rows of a batch are as long as its longest
        while left:
            n_rows = self._most_rows(len(chosen[left[0]]))
            some, left = left[:n_rows], left[n_rows:]
            made = continue_prompts(self.student, [chosen[i] for i in some], self.n_new, self.separator, generator)
            found |= dict(zip(some, made, strict=True))
        each = self._n_prompts()
        texts = {s: [found[i * each + k] for k in range(each)] for i, s in enumerate(steps)}
        self.drawn = Continuations(step, texts)
        self.n_tokens = sum(map(len, found.values()))
        self.seconds = time.monotonic() - began

    def _index(self, step: int) -> int:
        """Number of steps before this one that learn from continuations."""
        return int(step * self.share)

    def _prompts_of(self, step: int) -> list[Ids]:
        each, n = self._n_prompts(), len(self.prompts)
        start = (step * self.world + self.rank) * each
        places = [divmod(start + i, n) for i in range(each)]
        return [self.prompts[shuffle_index(place, n, self.seed, epoch)] for epoch, place in places]

    def _most_rows(self, longest: int) -> int:
        """Prompts of up to `longest` tokens that are continued at once: each takes a fixed time per token."""
        s = self.student.shape
        values = (longest + self.n_new) * s.cached_values * self.student.norm.element_size()
        row_bytes = (values + 4 * s.state_values) * len(self.student.blocks)
        limits = _MOST_ROWS, _CACHE_BYTES // row_bytes, _LOGIT_BYTES // (_VALUE_BYTES * s.vocab_rows)
        return max(1, min(limits))

    def _n_prompts(self) -> int:
        """Prompts per step: about as many as fill its rows if no continuation ends early."""
        mean = sum(map(len, self.prompts)) / len(self.prompts) + self.n_new
        return max(self.rows, int(_FILLED * self.rows * self.seq_len / mean))


def _up(value: int, step: int, most: int) -> int:
    return min(-(-value // step) * step, most)
