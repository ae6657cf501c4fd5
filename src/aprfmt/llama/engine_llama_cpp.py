"""llama-cpp-python: llama.cpp's C functions through ctypes."""

from __future__ import annotations

import ctypes
import os

import llama_cpp
import numpy as np

from aprfmt.llama.engine import POOLINGS, EngineError, LoadRequest, require_finite

_LONGEST_PIECE = 4096


class LoadedModel:
    """A model and a context of llama.cpp."""

    def __init__(self, request: LoadRequest) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = request.extra_buffers
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(request.path), params)
        if not self._model:
            raise EngineError("llama.cpp does not load the file")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = request.n_ctx
        processors = os.cpu_count() or 1
        options.n_threads, options.n_threads_batch = max(1, processors // 2), processors
        if request.pooling is not None:
            options.embeddings, options.pooling_type = True, POOLINGS.index(request.pooling)
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise EngineError("llama.cpp makes no context for the model")

    def _tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()  # no token is shorter than a byte; some are added
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[: max(n, 0)]) or [max(0, llama_cpp.llama_vocab_bos(self._vocab))]

    def _text(self, ids: list[int]) -> str:
        buffer, pieces = ctypes.create_string_buffer(_LONGEST_PIECE), []
        for token in ids:
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, _LONGEST_PIECE, 0, False)
            pieces.append(buffer.raw[: max(n, 0)])
        return b"".join(pieces).decode(errors="replace")

    def _decode(self, ids: list[int]) -> None:
        memory = (llama_cpp.llama_token * len(ids))(*ids)
        code = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(memory, len(ids)))
        if code:
            raise EngineError(f"llama.cpp does not compute the model (code {code})")

    def _forget(self) -> None:
        memory = llama_cpp.llama_get_memory(self._context)
        if memory:  # an encoder has none
            llama_cpp.llama_memory_clear(memory, True)

    def generate(self, prompt: str, n_tokens: int) -> tuple[list[int], str]:
        """See Model.generate."""
        self._forget()
        self._decode(self._tokenize(prompt))
        ids: list[int] = []
        while len(ids) < n_tokens:
            pointer = llama_cpp.llama_get_logits_ith(self._context, -1)
            logits = np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))
            if not np.isfinite(logits).all():
                raise EngineError("the model computes NaN or infinite logits")
            ids.append(int(logits.argmax()))
            if llama_cpp.llama_vocab_is_eog(self._vocab, ids[-1]):
                break
            if len(ids) < n_tokens:
                self._decode(ids[-1:])
        return ids, self._text(ids)

    def embed(self, text: str) -> list[float]:
        """See Model.embed."""
        self._forget()
        self._decode(self._tokenize(text))
        pointer = llama_cpp.llama_get_embeddings_seq(self._context, 0)
        if not pointer:
            raise EngineError("llama.cpp gives no embedding")
        vector = [float(x) for x in pointer[: llama_cpp.llama_model_n_embd(self._model)]]
        require_finite(vector, "embeddings")
        return vector
