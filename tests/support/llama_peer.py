"""llama.cpp as a peer to compare with: llama-cpp-python's C functions, in a process of its own that may die.

python llama_peer.py    reads [name, arguments] a line, writes {"ok": …} or {"error": message} a line
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train_children import die_with_parent

from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.io.child import Child, ChildDiedError
from aprfmt.llama.client import reason_in

_SECONDS = 300.0
_F32 = 0
_RANK = 4
_TYPE_LINE = re.compile(r"\[ *\d+/ *\d+\] +(\S+) +- \[.*?\], type = +(\w+), (.*)")


class LlamaError(Exception):
    """llama.cpp does not load or compute a file; the message is one line."""


class LlamaPeer:
    """A running llama.cpp, started on the first question and again after a crash. Use in `with`.

    `seconds` is how long an answer may take.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._worker: Child | None = None

    @property
    def process(self) -> Child | None:
        """The one that runs; after a crash it is another."""
        return self._worker

    def start(self) -> None:
        """Starts it before the first question, so that forks of this process can ask it."""
        if self._worker is None:
            self._worker = Child([os.path.abspath(__file__)])

    def __enter__(self) -> LlamaPeer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def logits(
        self,
        gguf: Path,
        ids: Sequence[int],
        kind: str = "causal",
        adapters: Mapping[Path, float] | None = None,
        *,
        dense: bool = False,
    ) -> Any:
        """(tokens, vocabulary) float32, or (tokens, hidden) states, by the kind of ArchCase; with GGUFs of `adapters`
        and their scales. `dense`: networks that choose blocks of positions attend to all. Raises LlamaError.
        """
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "logits.npy")
            scales = {str(path): scale for path, scale in (adapters or {}).items()}
            self._ask("logits", gguf=str(gguf), ids=list(ids), kind=kind, out=str(out), adapters=scales, dense=dense)
            return np.load(out)

    def embedding(self, gguf: Path, ids: Sequence[int]) -> Any:
        """What llama.cpp gives of a text, pooled as the file says: (values,) or (tokens, values). Raises LlamaError."""
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "embedding.npy")
            self._ask("embedding", gguf=str(gguf), ids=list(ids), out=str(out))
            return np.load(out)

    def load(self, gguf: Path) -> None:
        """Loads a file, weights and all, and computes nothing. Raises LlamaError."""
        self._ask("load", gguf=str(gguf))

    def embed(self, text: Path, mmproj: Path, media: Any) -> Any:
        """What mtmd gives the language model `text` for an image, [height, width, 3] bytes, or for samples of float32.

        (tokens, width) float32. Raises LlamaError.
        """
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            given, out = Path(folder, "media.npy"), Path(folder, "embedded.npy")
            np.save(given, media)
            self._ask("embed", text=str(text), mmproj=str(mmproj), media=str(given), out=str(out))
            return np.load(out)

    def vocabulary(self, gguf: Path) -> Vocabulary:
        """The tokenizer of a file."""
        size = self._ask("vocabulary_size", gguf=str(gguf))
        return Vocabulary(size, lambda **arguments: self._ask("tokenize", gguf=str(gguf), **arguments))

    def quantize(
        self,
        source: Path,
        target: Path | None,
        file_type: int,
        *,
        imatrix: Mapping[str, Any] | None = None,
        overrides: Sequence[tuple[str, str]] = (),
        **options: Any,
    ) -> dict[str, str]:
        """Writes `target` by llama_model_quantize; without one it is a dry run that gives {tensor: dtype}.

        Options: pure, output, embedding, leave_output, allow_requantize. Raises LlamaError with what llama.cpp said.
        """
        weights = {name: [float(x) for x in values] for name, values in (imatrix or {}).items()}
        types: dict[str, str] = self._ask(
            "quantize",
            source=str(source),
            target=str(target) if target else None,
            file_type=file_type,
            imatrix=weights,
            overrides=list(overrides),
            **options,
        )
        return types

    def _ask(self, call: str, **arguments: Any) -> Any:
        self.start()
        assert self._worker is not None
        try:
            answer = self._worker.ask([call, arguments], self._seconds)
        except ChildDiedError as death:
            self.__exit__()
            raise LlamaError(f"llama.cpp {death}: {reason_in(death.log)}") from None
        if "error" in answer:
            raise LlamaError(answer["error"])
        return answer["ok"]


class Vocabulary:
    """A tokenizer of llama.cpp."""

    def __init__(self, size: int, ask: Callable[..., list[list[int]]]) -> None:
        self.size = size
        self._ask = ask

    def tokenize(self, texts: Sequence[str], *, add_bos: bool, special: bool = True) -> list[list[int]]:
        """The ids of each text."""
        return self._ask(texts=list(texts), add_bos=add_bos, special=special)


# --- in the process of llama.cpp ---


def _serve() -> None:
    import llama_cpp

    llama_cpp.llama_backend_init()
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints now and then
    calls: dict[str, Callable[..., Any]] = {
        "logits": _logits,
        "embedding": _embedding,
        "load": _load_whole,
        "embed": _embed,
        "vocabulary_size": _vocabulary_size,
        "tokenize": _tokenize,
        "quantize": _quantize,
    }

    @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
    def keep(level: int, text: bytes, data: Any) -> None:
        _SAID.append(text.decode("utf-8", "replace"))
        print(_SAID[-1], end="", file=sys.stderr, flush=True)  # for the case that it dies

    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
    import llama_cpp.mtmd_cpp as mtmd

    mtmd._libmtmd.mtmd_log_set(keep, ctypes.c_void_p(0))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        _SAID.clear()
        answer: dict[str, Any]
        try:
            answer = {"ok": calls[name](llama_cpp, **arguments)}
        except Exception as failure:
            answer = {"error": reason_in("".join(_SAID)) or f"{type(failure).__name__}: {failure}"}
        print(json.dumps(answer), file=reply, flush=True)


_SAID: list[str] = []
"""What llama.cpp says of the question."""


def _load(llama_cpp: Any, gguf: str, *, vocab_only: bool) -> Any:
    """The model, which is kept for the next question."""
    status = os.stat(gguf)
    key = (gguf, vocab_only, status.st_ino, status.st_mtime_ns, status.st_size)
    if key in _LOADED:
        return _LOADED[key]
    for model in _LOADED.values():
        llama_cpp.llama_model_free(model)
    _LOADED.clear()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers, options.vocab_only = 0, vocab_only
    model = llama_cpp.llama_model_load_from_file(gguf.encode(), options)
    if not model:
        raise ValueError("llama.cpp does not load the file")
    _LOADED[key] = model
    return model


_LOADED: dict[tuple[object, ...], Any] = {}


def _load_whole(llama_cpp: Any, gguf: str) -> None:
    _load(llama_cpp, gguf, vocab_only=False)


def _embed(llama_cpp: Any, text: str, mmproj: str, media: str, out: str) -> None:
    import llama_cpp.mtmd_cpp as mtmd
    import numpy as np

    model = _load(llama_cpp, text, vocab_only=False)
    options = mtmd.mtmd_context_params_default()
    options.use_gpu, options.n_threads, options.warmup, options.flash_attn_type = False, 1, False, 0
    context = mtmd.mtmd_init_from_file(mmproj.encode(), model, options)
    if not context:
        raise ValueError("mtmd does not load the file")
    given = np.load(media)
    if given.ndim == 1:
        bitmap = mtmd.mtmd_bitmap_init_from_audio(len(given), given.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
    else:
        data = given.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(given.shape[1], given.shape[0], data)
    chunks = mtmd.mtmd_input_chunks_init()
    prompt = mtmd.mtmd_input_text()
    marker: bytes = mtmd.mtmd_default_marker()
    prompt.text, prompt.text_len, prompt.add_special, prompt.parse_special = marker, len(marker), False, True
    code = mtmd.mtmd_tokenize(context, chunks, ctypes.byref(prompt), (ctypes.c_void_p * 1)(bitmap), 1)
    if code:
        raise ValueError(f"mtmd does not prepare the input (code {code})")
    width, found = llama_cpp.llama_model_n_embd_inp(model), []
    for i in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, i)
        if mtmd.mtmd_input_chunk_get_type(chunk) == 0:
            continue  # text
        if code := mtmd.mtmd_encode_chunk(context, chunk):
            raise ValueError(f"mtmd does not compute the input (code {code})")
        pointer = mtmd.mtmd_get_output_embd(context)
        shape = (mtmd.mtmd_input_chunk_get_n_tokens(chunk), width)
        found.append(np.ctypeslib.as_array(pointer, shape=shape).copy())
    np.save(out, np.concatenate(found))
    mtmd.mtmd_input_chunks_free(chunks)
    mtmd.mtmd_bitmap_free(bitmap)
    mtmd.mtmd_free(context)


def _vocabulary_size(llama_cpp: Any, gguf: str) -> int:
    vocab = llama_cpp.llama_model_get_vocab(_load(llama_cpp, gguf, vocab_only=True))
    return int(llama_cpp.llama_vocab_n_tokens(vocab))


def _tokenize(llama_cpp: Any, gguf: str, texts: list[str], add_bos: bool, special: bool) -> list[list[int]]:
    vocab = llama_cpp.llama_model_get_vocab(_load(llama_cpp, gguf, vocab_only=True))
    out = []
    for text in texts:
        data = text.encode("utf-8", "surrogateescape")
        ids = (llama_cpp.llama_token * (2 * len(data) + 8))()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), add_bos, special)
        if n < 0:
            raise ValueError(f"{-n} tokens for {len(data)} bytes")
        out.append(list(ids[:n]))
    return out


def _logits(
    llama_cpp: Any, gguf: str, ids: list[int], kind: str, out: str, adapters: Mapping[str, float], dense: bool
) -> None:
    import numpy as np

    states, scores = kind in ("encoder", "decoder", "states"), kind in ("rank", "rank_decoder")
    model = _load(llama_cpp, gguf, vocab_only=False)
    # Before the context, whose graph has room for the adapters that are there; they end with the model.
    loaded = [llama_cpp.llama_adapter_lora_init(model, path.encode()) for path in adapters]
    if not all(loaded):
        raise ValueError("llama.cpp does not load the adapter")
    options = _context_options(llama_cpp, len(ids), states or scores)
    if scores:
        options.pooling_type = _RANK
    if not dense and _architecture(llama_cpp, model) in _ONLY_FLASH:
        options.flash_attn_type = 1
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise ValueError("llama.cpp makes no context for the file")
    if loaded:
        pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(loaded))(*loaded)
        scales = (ctypes.c_float * len(loaded))(*adapters.values())
        llama_cpp.llama_set_adapters_lora(context, pointers, len(loaded), scales)
    width = (
        llama_cpp.llama_model_n_embd_out(model)
        if states
        else llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    )
    get = llama_cpp.llama_get_embeddings_ith if states else llama_cpp.llama_get_logits_ith
    try:
        two_stacks = kind in ("seq2seq", "decoder")
        if two_stacks or kind in ("encoder", "rank"):
            _compute(llama_cpp, context, ids, llama_cpp.llama_encode)
        if kind not in ("encoder", "rank"):
            _compute(llama_cpp, context, ids[::-1] if two_stacks else ids, llama_cpp.llama_decode)
        if scores:
            pointer = llama_cpp.llama_get_embeddings_seq(context, 0)
            np.save(out, np.ctypeslib.as_array(pointer, shape=(llama_cpp.llama_model_n_cls_out(model),)))
            return
        rows = [np.ctypeslib.as_array(get(context, i), shape=(width,)) for i in range(len(ids))]
        np.save(out, np.stack(rows))
    finally:
        llama_cpp.llama_free(context)


def _embedding(llama_cpp: Any, gguf: str, ids: list[int], out: str) -> None:
    import numpy as np

    model = _load(llama_cpp, gguf, vocab_only=False)
    options = _context_options(llama_cpp, len(ids), states=True)
    options.pooling_type = -1  # what the file says
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise ValueError("llama.cpp makes no context for the file")
    try:
        _compute(llama_cpp, context, ids, llama_cpp.llama_decode)
        width, pooled = llama_cpp.llama_model_n_embd_out(model), llama_cpp.llama_pooling_type(context)
        get = llama_cpp.llama_get_embeddings_ith
        rows = [np.ctypeslib.as_array(get(context, i), shape=(width,)) for i in range(0 if pooled else len(ids))]
        whole = (
            np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_seq(context, 0), shape=(width,)) if pooled else None
        )
        np.save(out, np.stack(rows) if whole is None else whole)
    finally:
        llama_cpp.llama_free(context)


_ONLY_FLASH = ("minimax-m3",)
"""Networks that attend to all positions unless llama.cpp computes attention in one step."""


def _architecture(llama_cpp: Any, model: Any) -> str:
    import ctypes

    word = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, b"general.architecture", word, len(word))
    return word.value.decode()


def _context_options(llama_cpp: Any, n: int, states: bool) -> Any:
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = max(64, n)
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = _F32  # with F16, its default, llama.cpp itself rounds to 1e-3
    options.flash_attn_type = 0
    options.embeddings = states
    if states:
        options.pooling_type = 0
    return options


def _compute(llama_cpp: Any, context: Any, ids: Sequence[int], run: Callable[[Any, Any], int]) -> None:
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i] = token
        batch.pos[i] = i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = 1
    code = run(context, batch)
    llama_cpp.llama_batch_free(batch)
    if code:
        raise ValueError(f"llama.cpp does not compute the file (code {code})")


def _quantize(
    llama_cpp: Any,
    source: str,
    target: str | None,
    file_type: int,
    *,
    imatrix: Mapping[str, Sequence[float]],
    overrides: Sequence[tuple[str, str]],
    pure: bool = False,
    output: str | None = None,
    embedding: str | None = None,
    leave_output: bool = False,
    allow_requantize: bool = False,
) -> dict[str, str]:
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 1, file_type
    params.pure, params.allow_requantize = pure, allow_requantize
    params.quantize_output_tensor, params.dry_run = not leave_output, target is None
    if output:
        params.output_tensor_type = DTYPES[find_dtype(output).name].ggml_id
    if embedding:
        params.token_embedding_type = DTYPES[find_dtype(embedding).name].ggml_id
    kept = []  # what the C side points at
    if imatrix:
        entries = (llama_cpp.llama_model_imatrix_data * (len(imatrix) + 1))()
        for entry, (name, values) in zip(entries, imatrix.items(), strict=False):
            data = (ctypes.c_float * len(values))(*values)
            kept.append(data)
            entry.name, entry.size = name.encode(), len(values)
            entry.data = ctypes.cast(data, ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    if overrides:
        patterns = (llama_cpp.llama_model_tensor_override * (len(overrides) + 1))()
        for item, (pattern, name) in zip(patterns, overrides, strict=False):
            item.pattern, item.type = pattern.encode(), DTYPES[find_dtype(name).name].ggml_id
        params.tt_overrides = patterns
    out = target or f"{source}.none"
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), params):
        raise ValueError("llama.cpp does not quantize the file")
    return dict(_types("".join(_SAID)))


def _types(text: str) -> Iterator[tuple[str, str]]:
    for name, old, rest in _TYPE_LINE.findall(re.sub(r"\nwarning: .*|\n=+ .*", "", text)):
        found = re.search(r"\((\w+)\)|converting to (\w+)", rest)
        yield name, find_dtype(next(filter(None, found.groups())) if found else old).name


if __name__ == "__main__":
    die_with_parent()
    _serve()
