"""A model loaded in llama.cpp, in the worker process; its methods are the requests that a client can make."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.llama.capi import ChatMessage, LlamaBatch, LlamaLibrary, Token
from aprfmt.llama.engine import (
    BATCH,
    POOLINGS,
    EngineError,
    LayerEffects,
    LoadRequest,
    RoomError,
    Sampling,
    StateSketch,
)
from aprfmt.llama.importance import ActivationSums, Collector
from aprfmt.llama.media import Handle, MediaContext
from aprfmt.llama.moments import MomentSums
from aprfmt.llama.text_stream import TextStream
from aprfmt.llama.watch import Watcher, sketch
from aprfmt.types import JsonObject

if TYPE_CHECKING:
    import numpy.typing as npt

_LONGEST_PIECE = 4096
_LOAD_INTO_MEMORY = 0
"""llama_load_mode: the weights are read, not mapped from the file."""

_F32, _NO_FLASH = 0, 0
"""ggml_type, llama_flash_attn_type."""

_MICRO_BATCH = 512
"""Batch size and micro-batch size: llama.cpp's own defaults."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A prompt with images or audio at the start of the context, and its tokens there."""

    prompt: str
    media: list[str]
    n_past: int


_NO_TOKEN = -1
"""Replaces the tokens of an image or audio."""


class Session:
    """A model and a context of llama.cpp.

    The methods named in worker.CALLS take and return JSON; generators yield parts before their result. All raise
    EngineError.

    Args:
        library: the functions of llama.cpp.
        request: what to load.
        stopped: polled between tokens: whether the client wants to stop.
    """

    def __init__(self, library: LlamaLibrary, request: LoadRequest, stopped: Callable[[], bool]) -> None:
        self._c, self._stopped = library, stopped
        started = time.perf_counter()
        params = library.model_params()
        params.n_gpu_layers = request.gpu_layers
        params.use_extra_bufts = request.extra_buffers and not request.watched
        if request.watched:
            params.load_mode = _LOAD_INTO_MEMORY
        self._model = library.model_load_from_file(os.fsencode(request.path), params)
        if not self._model:
            raise EngineError("llama.cpp cannot load the file")
        self._threads = request.n_threads or max(1, _processors() // 2)
        self._vocab = library.model_get_vocab(self._model)
        self.n_vocab: int = library.vocab_n_tokens(self._vocab)
        self._pooling = request.pooling
        moments = MomentSums(request.moments) if request.moments is not None else None
        self._collector = Collector(library, request.importance == "output", moments) if request.importance else None
        self._watcher = Watcher(library) if request.watched else None
        self._context = library.init_from_model(self._model, self._options(request))
        if not self._context:
            raise EngineError("llama.cpp cannot create a context for the model")
        self._apply(request.adapters)
        self._tower = (
            MediaContext(library.package, request.tower, self._model, self._threads, use_gpu=request.gpu_layers > 0)
            if request.tower
            else None
        )
        self._seconds = time.perf_counter() - started
        self._past: list[int] = []
        self._seen: _Seen | None = None

    def _options(self, request: LoadRequest) -> ctypes.Structure:
        options = self._c.context_params()
        n_ctx = request.n_ctx or self._c.model_n_ctx_train(self._model)
        options.n_ctx = n_ctx
        # An encoder computes a whole text at once, an importance matrix a whole chunk.
        whole = request.pooling or self._collector or self._c.model_has_encoder(self._model)
        options.n_batch = n_ctx if whole else min(n_ctx, BATCH)
        # Tokens of an image may attend to each other, so they are computed together.
        options.n_ubatch = options.n_batch if whole or request.tower else min(n_ctx, _MICRO_BATCH)
        options.n_threads = options.n_threads_batch = self._threads
        if request.exact:
            options.type_k = options.type_v = _F32
            options.flash_attn_type = _NO_FLASH
        if request.n_seq > 1:
            options.n_seq_max, options.kv_unified = request.n_seq, True
        if request.pooling is not None:
            options.embeddings, options.pooling_type = True, POOLINGS.index(request.pooling)
        if self._collector is not None:
            self._c.callback(options, "cb_eval", self._collector.callback)
        if self._watcher is not None:
            self._c.callback(options, "cb_eval", self._watcher.callback)
        return options

    def _apply(self, adapters: Sequence[tuple[str, float]]) -> None:
        loaded = [self._c.adapter_lora_init(self._model, os.fsencode(path)) for path, _ in adapters]
        for (path, _), adapter in zip(adapters, loaded, strict=True):
            if not adapter:
                raise EngineError(f"llama.cpp cannot load the adapter {path}")
        if loaded:
            pointers = (ctypes.c_void_p * len(loaded))(*loaded)
            scales = (ctypes.c_float * len(loaded))(*(scale for _, scale in adapters))
            if self._c.set_adapters_lora(self._context, pointers, len(loaded), scales):
                raise EngineError("llama.cpp cannot apply the adapters")

    def facts(self) -> JsonObject:
        """The properties of a loaded model: see client.LoadedModel."""
        return {
            "n_vocab": self.n_vocab, "n_ctx": self._c.n_ctx(self._context),
            "n_ctx_train": self._c.model_n_ctx_train(self._model), "n_threads": self._threads,
            "load_seconds": self._seconds, "weight_bytes": self._c.model_size(self._model),
            "bos": self._c.vocab_bos(self._vocab), "eos": self._c.vocab_eos(self._vocab),
            "has_encoder": self._c.model_has_encoder(self._model), "adds_bos": self._c.vocab_get_add_bos(self._vocab),
        }  # fmt: skip

    def system(self) -> str:
        """llama.cpp's list of the processor features it was built for."""
        text: bytes = self._c.print_system_info()
        return text.decode(errors="replace").strip(" |")

    # --- tokens and text ---

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Encodes a text."""
        data = text.encode()
        ids = (Token * (len(data) + 8))()  # no token is shorter than a byte; some are added
        n = self._c.tokenize(self._vocab, data, len(data), ids, len(ids), add_special, parse_special)
        return list(ids[: max(n, 0)])

    def pair(self, query: str, document: str) -> list[int]:
        """The ids of a text pair for a reranker, with the special tokens of its vocabulary."""
        first, second = (self.tokenize(text, add_special=False, parse_special=False) for text in (query, document))
        eos = self._c.vocab_eos(self._vocab)
        end = [eos if eos >= 0 else self._c.vocab_sep(self._vocab)] if self._c.vocab_get_add_eos(self._vocab) else []
        between = [self._c.vocab_sep(self._vocab)] if self._c.vocab_get_add_sep(self._vocab) else []
        begin = [self._c.vocab_bos(self._vocab)] if self._c.vocab_get_add_bos(self._vocab) else []
        return [token for token in (*begin, *first, *end, *between, *second, *end) if token >= 0]

    def chat(self, name: str, messages: Sequence[dict[str, str]]) -> str:
        """Renders a conversation with one of llama.cpp's own templates, including the start of an answer."""
        entries = [ChatMessage(message["role"].encode(), message["content"].encode()) for message in messages]
        given = (ChatMessage * len(entries))(*entries)
        size = 2 * sum(len(m.role) + len(m.content) for m in entries) + _LONGEST_PIECE
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = self._c.chat_apply_template(name.encode(), given, len(entries), True, buffer, size)
            if n < 0:
                raise EngineError(f"llama.cpp has no chat template {name!r}")
            if n <= size:
                return buffer.raw[:n].decode(errors="replace")
            size = n

    def detokenize(self, ids: Sequence[int], special: bool = False) -> str:
        """Decodes ids; includes the text of special tokens on request."""
        return b"".join(self._piece(token, special) for token in ids).decode(errors="replace")

    def _piece(self, token: int, special: bool = False) -> bytes:
        buffer = ctypes.create_string_buffer(_LONGEST_PIECE)
        n = self._c.token_to_piece(self._vocab, token, buffer, _LONGEST_PIECE, 0, special)
        return buffer.raw[: max(n, 0)]

    # --- computing ---

    def _compute(self, ids: Sequence[int], first: int | None = None) -> None:
        """Computes ids that follow the context, with outputs from index `first` on; None: for the last one."""
        memory = (Token * len(ids))(*ids)
        last = len(ids) - 1
        start = last if first is None else min(first, last)
        wanted = (ctypes.c_int8 * len(ids))(*(i >= start for i in range(len(ids))))
        code = self._c.decode(self._context, LlamaBatch(n_tokens=len(ids), token=memory, logits=wanted))
        if code:
            raise EngineError(f"llama.cpp failed to evaluate the model (code {code})")
        self._past += ids

    def _decode(self, ids: Sequence[int]) -> None:
        step = self._c.n_batch(self._context)
        room = self._c.n_ctx(self._context) - len(self._past)
        if len(ids) > room:
            raise RoomError(f"the text has {len(ids):,} tokens, but the context has room for {room:,}")
        for start in range(0, len(ids), step):
            if start and self._stopped():
                return
            self._compute(ids[start : start + step])

    def _forget(self, keep: int = 0) -> int:
        """Removes all but the first `keep` tokens from the context; returns how many were kept."""
        memory = self._c.get_memory(self._context)
        if memory and not (keep and self._c.memory_seq_rm(memory, 0, keep, -1)):  # an encoder has none
            self._c.memory_clear(memory, True)
            keep = 0
        del self._past[keep:]
        self._seen = None
        return keep

    def _row(self, index: int) -> npt.NDArray[np.float32]:
        """The logits of an output, in memory that llama.cpp's next call overwrites."""
        pointer = self._c.get_logits_ith(self._context, index)
        if not pointer:
            raise EngineError("llama.cpp returned no logits")
        logits = np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))
        # A network may mask tokens with -inf.
        if np.isnan(logits).any() or np.isposinf(logits).any() or np.isneginf(logits).all():
            raise EngineError("the model produces NaN or infinite logits")
        return logits

    def _begin(self, ids: list[int], reuse: bool) -> None:
        """Computes a prompt, reusing the tokens that the context already has."""
        ids = ids or [max(0, self._c.vocab_bos(self._vocab))]  # a vocabulary that cannot encode the prompt
        if self._c.model_has_encoder(self._model) and self._c.model_has_decoder(self._model):
            self._forget()
            self._encode(ids)
            start = self._c.model_decoder_start_token(self._model)
            self._decode([start if start >= 0 else max(0, self._c.vocab_bos(self._vocab))])
            return
        same = next((i for i, (a, b) in enumerate(zip(self._past, ids, strict=False)) if a != b), len(self._past))
        kept = self._forget(min(same, len(ids) - 1) if reuse else 0)
        self._decode(ids[kept:])

    def _encode(self, ids: list[int]) -> None:
        """Computes the encoder's states of a text."""
        if len(ids) > (room := self._c.n_ctx(self._context)):
            raise RoomError(f"the text has {len(ids):,} tokens, but the context has room for {room:,}")
        code = self._c.encode(self._context, LlamaBatch(n_tokens=len(ids), token=(Token * len(ids))(*ids)))
        if code:
            raise EngineError(f"llama.cpp failed to evaluate the encoder (code {code})")

    def _look(self, prompt: str, media: Sequence[str], reuse: bool) -> int:
        """Computes a prompt with images and audio, reusing the start of the context; returns its number of tokens."""
        if self._tower is None:
            raise EngineError("the model has no vision or audio tower")
        seen = self._seen
        if reuse and seen is not None and seen.media == [*media]:
            known = seen.prompt + self.detokenize(self._past[seen.n_past :], special=True)
            more = self.tokenize(prompt.removeprefix(known), add_special=False)
            if prompt.startswith(known) and more:
                self._decode(more)
                return len(self._past)
        self._forget()
        n_batch = self._c.n_batch(self._context)
        n = self._tower.feed(self._context, prompt, media, n_batch, self._c.n_ctx(self._context))
        self._past, self._seen = [_NO_TOKEN] * n, _Seen(prompt, [*media], n)
        return n

    def generate(
        self,
        prompt: str | list[int],
        n_tokens: int,
        sampling: dict[str, float] | None = None,
        stop: Sequence[str] = (),
        reuse: bool = False,
        parse_special: bool = True,
        media: Sequence[str] = (),
    ) -> Generator[dict[str, str], None, dict[str, object]]:
        """Continues a prompt. Parts: {"text": text that is final}. The result: see client.Generated."""
        started = time.perf_counter()
        if media:
            n_prompt = self._look(str(prompt), media, reuse)
        else:
            ids = self.tokenize(prompt, parse_special=parse_special) if isinstance(prompt, str) else prompt
            n_prompt = len(ids)
            self._begin(ids, reuse)
        first = time.perf_counter()
        sampler = self._sampler(Sampling(**(sampling or {})))  # type: ignore[arg-type]  # JSON of our client
        words = TextStream(stop)
        made: list[int] = []
        ended = "length"
        room = self._c.n_ctx(self._context) - len(self._past)
        try:
            while len(made) < n_tokens:
                if self._stopped():
                    ended = "interrupt"
                    break
                self._row(-1)  # checks for NaN
                made.append(self._c.sampler_sample(sampler, self._context, -1))
                if self._c.vocab_is_eog(self._vocab, made[-1]):
                    ended = "end"
                    break
                if text := words.add(self._piece(made[-1])):
                    yield {"text": text}
                if words.stopped:
                    ended = "stop"
                    break
                if len(made) > room:
                    ended = "context"
                    break
                if len(made) < n_tokens:
                    self._decode(made[-1:])
        finally:
            self._c.sampler_free(sampler)
        if rest := words.end():
            yield {"text": rest}
        last = time.perf_counter()
        return {
            "ids": made, "text": words.text, "ended": ended, "prompt_tokens": n_prompt,
            "prompt_seconds": first - started, "seconds": last - first,
        }  # fmt: skip

    def _sampler(self, sampling: Sampling) -> Handle:
        chain = self._c.sampler_chain()
        if sampling.temperature <= 0:
            links = [self._c.sampler_init_greedy()]
        else:
            links = [
                self._c.sampler_init_top_k(sampling.top_k),
                self._c.sampler_init_top_p(sampling.top_p, 1),
                self._c.sampler_init_min_p(sampling.min_p, 1),
                self._c.sampler_init_temp(sampling.temperature),
                self._c.sampler_init_dist(sampling.seed & 0xFFFFFFFF),
            ]
        for link in links:
            self._c.sampler_chain_add(chain, link)
        return chain

    def embed(self, text: str | list[int]) -> list[float]:
        """The embedding of a text or of ids; for a reranker (pooling "rank") its scores."""
        return self.vectors([self.tokenize(text) if isinstance(text, str) else text])[0][0]

    def vectors(self, texts: list[list[int]]) -> list[list[list[float]]]:
        """Embeds the texts in one batch: one vector each, or with pooling "none" one per token."""
        self._forget()
        texts = [ids or [max(0, self._c.vocab_bos(self._vocab))] for ids in texts]
        n, room = sum(map(len, texts)), self._c.n_ctx(self._context)
        if n > room:
            raise RoomError(f"the text has {n:,} tokens, but the context has room for {room:,}")
        if len(texts) == 1:
            self._compute(texts[0], first=0)
        else:
            self._compute_batch(texts)
        size = (self._c.model_n_cls_out if self._pooling == "rank" else self._c.model_n_embd_out)(self._model)
        if self._pooling == "none":
            places = iter(range(n))
            pointers = [[self._c.get_embeddings_ith(self._context, next(places)) for _ in ids] for ids in texts]
        else:
            pointers = [[self._c.get_embeddings_seq(self._context, i)] for i in range(len(texts))]
        return [[self._vector(pointer, size) for pointer in some] for some in pointers]

    @staticmethod
    def _vector(pointer: ctypes._Pointer[ctypes.c_float], size: int) -> list[float]:
        if not pointer:
            raise EngineError("llama.cpp returned no embedding")
        vector = np.ctypeslib.as_array(pointer, shape=(size,))
        if not np.isfinite(vector).all():
            raise EngineError("the model produces NaN or infinite embeddings")
        return [float(x) for x in vector]

    def _compute_batch(self, texts: list[list[int]]) -> None:
        """Computes several texts at once, one sequence each."""
        ids = [token for text in texts for token in text]
        n = len(ids)
        rows = [ctypes.c_int32(i) for i, text in enumerate(texts) for _ in text]
        batch = LlamaBatch(
            n_tokens=n,
            token=(Token * n)(*ids),
            pos=(ctypes.c_int32 * n)(*(i for text in texts for i in range(len(text)))),
            n_seq_id=(ctypes.c_int32 * n)(*[1] * n),
            seq_id=(ctypes.POINTER(ctypes.c_int32) * n)(*(ctypes.pointer(row) for row in rows)),
            logits=(ctypes.c_int8 * n)(*[True] * n),
        )
        if code := self._c.decode(self._context, batch):
            raise EngineError(f"llama.cpp failed to evaluate the model (code {code})")
        self._past += ids

    def logits(self, ids: list[int], path: str, follow: bool = False, encoded: list[int] | None = None) -> int:
        """Writes the logits after each of `ids` to an existing file: float32, tokens x vocabulary; returns the number
        of tokens.

        `follow` keeps the context before them; otherwise it starts with them. `encoded` is the encoder's input in an
        encoder-decoder.
        """
        if not follow:
            self._forget()
        if encoded is not None:
            self._encode(encoded)
        rows = np.memmap(path, np.float32, "r+", shape=(len(ids), self.n_vocab))
        step = self._c.n_batch(self._context)
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            self._compute(some, first=0)
            for i in range(len(some)):
                rows[start + i] = self._row(i)
        return len(ids)

    def compute(self, ids: list[int], first: int, follow: bool) -> int:
        """Computes ids in one batch, with outputs from index `first` on; `follow` keeps the context before them."""
        if not follow:
            self._forget()
        self._compute(ids, first)
        return len(ids)

    def outputs(self, first: int, count: int, path: str) -> int:
        """Writes logits of the last batch, from index `first` on, to an existing file: float32, count x vocabulary."""
        rows = np.memmap(path, np.float32, "r+", shape=(count, self.n_vocab))
        for i in range(count):
            rows[i] = self._row(first + i)
        return count

    def last_logits(self, ids: list[int], path: str) -> None:
        """Writes the logits after the last of `ids` to a file: float32. Reuses a common prefix in the context."""
        self._begin(ids, reuse=True)
        self._row(-1).tofile(path)

    def measure(self, prompt_tokens: int, tokens: int) -> dict[str, float | int]:
        """Computes a prompt of arbitrary tokens and, from an empty context, greedily generates `tokens` tokens.

        Returns:
            prompt_seconds: for the prompt; first_seconds: until the first token after it; seconds: for the generation.
            peak_bytes: peak memory of the process so far.
        """
        ids = np.random.default_rng(0).integers(0, self.n_vocab, prompt_tokens).tolist()
        sampler = self._sampler(Sampling())
        try:
            self._forget()
            self._c.synchronize(self._context)
            started = time.perf_counter()
            self._decode(ids)
            self._c.synchronize(self._context)
            computed = time.perf_counter()
            self._c.sampler_sample(sampler, self._context, -1)
            first = time.perf_counter()
            self._forget()
            self._decode([max(0, self._c.vocab_bos(self._vocab))])
            self._c.synchronize(self._context)
            begun = time.perf_counter()
            for _ in range(tokens):
                self._decode([self._c.sampler_sample(sampler, self._context, -1)])
                self._c.synchronize(self._context)
            ended = time.perf_counter()
        finally:
            self._c.sampler_free(sampler)
        self._row(-1)
        return {
            "prompt_seconds": computed - started,
            "first_seconds": first - started,
            "seconds": ended - begun,
            "peak_bytes": _peak_bytes(),
        }

    # --- weights in memory ---

    def effects(self, ids: list[int]) -> LayerEffects:
        """Computes ids from an empty context: how far each layer moves its states, and the weights in use."""
        assert self._watcher is not None
        self._forget()
        self._watcher.begin()
        self._compute(ids, first=0)
        self._row(-1)
        found = self._watcher.effects()
        return {"effects": [found.get(i) for i in range(max(found, default=-1) + 1)], "weights": self._watcher.names()}

    def states(self, ids: list[int]) -> dict[str, StateSketch]:
        """Computes ids from an empty context: the states after each layer, by `sketch`; "-1": the embeddings."""
        assert self._watcher is not None
        self._forget()
        self._watcher.begin()
        self._compute(ids, first=0)
        self._row(-1)
        return {str(layer): sketch(state) for layer, state in sorted(self._watcher.states().items())}

    def reorder(self, heads: list[tuple[str, int, int, int]], halves: bool) -> int:
        """Reorders rows of weights by Watcher.reorder: (name, first row, heads, rows per head); returns the number of
        weights.
        """
        assert self._watcher is not None
        for name, first, n_heads, size in heads:
            self._watcher.reorder(name, first, n_heads, size, halves)
        return len(heads)

    def replace(self, name: str, path: str) -> None:
        """Overwrites a weight by Watcher.replace."""
        assert self._watcher is not None
        self._watcher.replace(name, path)

    # --- importance ---

    def collect(self, ids: list[int], follow: bool = True) -> dict[str, int]:
        """Computes ids from an empty context and adds the inputs of its products to the sums.

        Returns:
            weights: how many have sums so far; unused: their experts that no token reached.
        """
        assert self._collector is not None
        if not follow:
            self._collector.sums.clear()
        self._forget()
        self._collector.begin()
        self._compute(ids, first=0)
        self._collector.end()
        if not self._collector.is_cut:
            self._row(-1)
        sums = self._collector.sums.values()
        return {"weights": len(sums), "unused": sum(int((entry.counts == 0).sum()) for entry in sums)}

    def moments(self) -> dict[str, list[int]]:
        """By the name of a weight: number of its input in the folder of second moments, columns, tokens."""
        assert self._collector is not None
        assert self._collector.moments is not None
        found = self._collector.moments
        return {name: [number, columns, found.rows[number]] for name, (number, columns) in found.inputs.items()}

    def save_collected(self, path: str) -> int:
        """Saves the activation sums as .npz: NAME.squares (float64) and NAME.counts (int64); the number of weights."""
        assert self._collector is not None
        arrays: dict[str, Any] = {f"{name}.squares": entry.squares for name, entry in self._collector.sums.items()}
        arrays |= {f"{name}.counts": entry.counts for name, entry in self._collector.sums.items()}
        with open(path, "wb") as file:
            np.savez(file, **arrays)
        return len(self._collector.sums)

    def load_collected(self, path: str) -> int:
        """Replaces the activation sums with those that `save_collected` wrote; the number of weights."""
        assert self._collector is not None
        self._collector.sums.clear()
        with np.load(path) as arrays:
            for name in {key.rpartition(".")[0] for key in arrays}:
                self._collector.sums[name] = ActivationSums(arrays[f"{name}.squares"], arrays[f"{name}.counts"])
        return len(self._collector.sums)


def _peak_bytes() -> int:
    """Peak memory of this process; 0 if the system does not tell."""
    if sys.platform == "win32":
        return 0
    with suppress(OSError), open("/proc/self/status", "rb") as file:
        if found := re.search(rb"VmHWM:\s*(\d+) kB", file.read()):
            return int(found[1]) << 10
    import resource  # which on Linux includes that of the process that started this one

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
