"""`--verify=logits`: compares the logits of a conversion's output with those of its source.

Each side is computed in a process of its own: a GGUF by llama.cpp, a Hugging Face folder by transformers, every other
container by the trainer's decoder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aprfmt import formats
from aprfmt.arch.hparams import to_gguf
from aprfmt.canonical.model import Canonical, embedding_rows
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.torch_child import ask_torch
from aprfmt.errors import AprError, MissingDependencyError, RunError, UnsupportedError, UsageError
from aprfmt.io.remote import RemoteSource
from aprfmt.io.temporary import scratch_folder
from aprfmt.llama.client import Llama, LogitsComparison, pooling_of
from aprfmt.tokenizer.encoding import tokenizer_json
from aprfmt.tokenizer.fast import load
from aprfmt.types import Array, PathLike

if TYPE_CHECKING:
    from aprfmt.model import Model

TEXT = "The capital of France is Paris, and the river that runs through it is called the Seine. Water boils at 100 C."
N_TOKENS = 16

_POOLING = {"encoder": "none", "states": "none", "rank": "rank", "rank_decoder": "rank"}
"""Kind of model -> llama.cpp's output that replaces logits."""

_ONLY_FLASH = ("minimax-m3",)
"""Architectures that llama.cpp computes correctly only with flash attention."""

_MASKED = -1e30
"""Logits below it belong to masked tokens."""

_EXACT = 2e-3
"""Maximum relative error between two float32 computations; llama.cpp computes some activations in half precision."""

_FLOATS = {"F64": _EXACT, "F32": _EXACT, "F16": 1.5e-2, "BF16": 6e-2}
_SAME_BLOCKS = 0.15
"""For the same quantized weights: llama.cpp also quantizes activations to 8 bits."""

_QUANTIZED = ((6.0, 0.3), (5.0, 0.4), (4.0, 0.5), (3.0, 0.6), (0.0, 0.75))
"""(bits of the type, maximum relative error). SmolLM2: Q8_0 0.06, Q5_K_M 0.17, Q3_K_M 0.29; Q and K permuted 0.73."""


Convert = Callable[[PathLike, PathLike, Mapping[str, object]], object]
"""convert.api.convert: (source, output, options)."""


class Logits(NamedTuple):
    """Values [positions, values] float32, and the engine that computed them."""

    values: Array
    engine: str


def kind_of(keys: Mapping[str, object]) -> str:
    """What is compared, from the keys of a GGUF.

    "causal" and "seq2seq": logits; "encoder" and "states": hidden states; "rank" and "rank_decoder": scores.
    """
    arch = keys.get("general.architecture")
    pooling, encodes = pooling_of(keys)
    if f"{arch}.decoder_start_token_id" in keys:
        return "seq2seq"
    if pooling == "rank" or f"{arch}.classifier.output_labels" in keys:
        return "rank" if encodes else "rank_decoder"
    return "encoder" if encodes else "causal" if pooling in (None, "none") else "states"


def relative_error(a: Array, b: Array) -> float:
    """Norm of the difference over the norm of `b`; infinite if `a` is not finite or the shapes differ."""
    import numpy as np

    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    never = b < _MASKED
    a, b = np.where(never, 0, a), np.where(never, 0, b)
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)


def tolerance(dtypes: Collection[str], *, same_weights: bool, packed_bits: float | None = None) -> float:
    """The maximum relative error of llama.cpp's logits, from the dtypes of the matrices.

    `same_weights`: whether the other side computes with the same quantized weights; `packed_bits`: bits per value of
    the quantized checkpoint from which the matrices were dequantized.
    """

    def of(name: str) -> float:
        row = DTYPES[name]
        if not row.is_quantized:
            return _FLOATS.get(name, _QUANTIZED[0][1])
        return _SAME_BLOCKS if same_weights else _of_bits(8 * row.block_bytes / row.block)

    packed = _EXACT if packed_bits is None or same_weights else _of_bits(packed_bits)
    return max((packed, *map(of, dtypes)))


def _of_bits(bits: float) -> float:
    return next(most for least, most in _QUANTIZED if bits >= least)


def compute(
    path: PathLike,
    ids: Sequence[int],
    kind: str,
    convert: Convert,
    *,
    name: PathLike | None = None,
    export: str = "gguf",
) -> Logits:
    """What the model at `path`, which errors call `name`, computes of `ids`.

    Args:
        path: a model of any form.
        ids: the tokens; an encoder-decoder decodes them in reverse order.
        kind: as kind_of.
        convert: writes a model as another file, with options.
        name: what errors call it.
        export: the format to export an .apr or safetensors model to that the decoder does not compute.

    Raises:
        MissingDependencyError: nothing that is installed computes the model.
        OutOfMemoryError: the process that computes was killed.
        RunError: the computation failed, or gave NaN.
    """
    called = os.fspath(name if name is not None else path)
    with formats.open(path) as model:
        container, n_bytes = model.format, model.size_bytes
        if any(isinstance(source, RemoteSource) for source in model.sources):
            raise UnsupportedError(
                "comparing logits reads the model twice, so it must be a local file",
                path=called,
                hint="download it first: hf download ORG/REPO --local-dir FOLDER",
            )
        keys = dict(model.metadata) if container == "gguf" else {}
    if container == "gguf":
        return _by_llama(path, keys, ids, kind, called, n_bytes)
    reasons = []
    engines = {"hf": ["transformers", "decoder"]}.get(container, ["decoder"])
    for engine in (engine for engine in engines if engine == "transformers" or kind == "causal"):
        found, reason = _by_torch(engine, path, ids, kind, called, n_bytes)
        if found is not None:
            return found
        reasons.append(reason)
    if container != "hf":
        with scratch_folder("logits") as folder:
            exported = Path(folder, f"model-{export}")
            convert(path, exported, {"format": export, "allow_different": export == "gguf", "fsync": False})
            return compute(exported, ids, kind, convert, name=called)
    raise MissingDependencyError(
        f"its logits cannot be computed: {'; '.join(reasons)}",
        path=called,
        hint="pip install -U transformers torch, or use --verify, which only loads the GGUF",
    )


def _by_llama(
    path: PathLike, keys: Mapping[str, object], ids: Sequence[int], kind: str, name: str, n_bytes: int
) -> Logits:
    import numpy as np

    exact = keys.get("general.architecture") not in _ONLY_FLASH
    pooling = _POOLING.get(kind)
    with Llama(path, n_ctx=64, pooling=pooling, name=name, n_bytes=n_bytes, exact=exact) as llama:
        if pooling is not None:
            values = np.array(llama.vectors([ids])[0], np.float32)
            return Logits(values[0] if pooling == "rank" else values, llama.engine)
        encoded, decoded = (ids, ids[::-1]) if kind == "seq2seq" else (None, ids)
        with scratch_folder("logits") as folder:
            out = Path(folder, "logits")
            out.write_bytes(bytes(4 * len(ids) * llama.n_vocab))
            llama.logits(decoded, out, encoded=encoded)
            return Logits(np.fromfile(out, np.float32).reshape(len(ids), llama.n_vocab), llama.engine)


def _by_torch(
    engine: str, path: PathLike, ids: Sequence[int], kind: str, name: str, n_bytes: int
) -> tuple[Logits | None, str]:
    """(the logits, ""), or (None, why the engine does not compute the model)."""
    import numpy as np

    with scratch_folder("logits") as folder:
        out = os.path.join(folder, "logits.npy")
        request = {"engine": engine, "path": os.path.abspath(path), "ids": [*ids], "kind": kind, "out": out}
        answer = ask_torch("aprtrain.reference", request, "computes the logits", path=name, n_bytes=n_bytes)
        if "error" in answer:
            raise RunError(f"its logits cannot be computed: {answer['error']}", path=name)
        if "ok" not in answer:
            return None, str(answer["reason"])
        return Logits(np.load(out), str(answer["ok"])), ""


@dataclass(frozen=True, slots=True)
class SourceLogits:
    """The outputs of a conversion's source, for comparison with the converted model.

    Attributes:
        path: the source.
        ids, kind: the input tokens, and what is compared.
        logits: of the source.
        dtypes: of the source's matrices, if llama.cpp computed it.
        convert: as for compute.
    """

    path: str
    ids: Sequence[int]
    kind: str
    logits: Logits
    dtypes: frozenset[str]
    convert: Convert

    @classmethod
    def of(cls, c: Canonical, target: str, convert: Convert) -> SourceLogits:
        """Computes the logits of `c`, the source of a conversion to the format `target`. Raises as compute."""
        if c.adapter is not None or c.arch is None:
            raise UsageError(
                "--verify=logits needs a language model of a known architecture",
                path=c.model.path,
                hint="use --verify without =logits",
            )
        pairs = to_gguf(c.hparams, c.arch, complete=False, misfits=True)
        kind = kind_of({key: value for key, _, value in pairs} | {"general.architecture": c.arch.gguf})
        ids = _ids(c)
        logits = compute(c.model.path, ids, kind, convert, export="hf" if target == "gguf" else "gguf")
        is_gguf = c.model.format == "gguf"
        return cls(str(c.model.path), ids, kind, logits, matrix_dtypes(c.model) if is_gguf else frozenset(), convert)

    def compare(
        self, path: PathLike, name: PathLike, dtypes: Collection[str], *, keeps: bool, packed_bits: float | None = None
    ) -> LogitsComparison:
        """Compares with the output at `path`, which errors call `name`.

        `dtypes` are those of its matrices; `keeps` tells whether they are the source's; `packed_bits` as in
        `tolerance`. Raises RunError if the logits differ by more than that.
        """
        found = compute(path, self.ids, self.kind, self.convert, name=name)
        own = tolerance(dtypes, same_weights=keeps, packed_bits=packed_bits)
        limit = max(own, tolerance(self.dtypes, same_weights=True))
        a, b = found.values, self.logits.values
        if a.ndim == b.ndim == 2:  # a vocabulary may be padded
            n = min(a.shape[1], b.shape[1])
            a, b = a[:, :n], b[:, :n]
        error = relative_error(a, b)
        what = WORDS[self.kind]
        if not error <= limit:
            raise RunError(
                f"{what} of {len(self.ids)} tokens differ from the source's by {error:.2g} (relative), more than "
                f"{limit:.2g}: {found.engine} and {self.logits.engine}",
                path=name,
                hint=f"write it without =logits, then: apr qa {os.fspath(name)} --against {self.path}",
            )
        return LogitsComparison(
            what=what, tokens=len(self.ids), engine=found.engine, source_engine=self.logits.engine,
            relative_error=error, limit=limit,
        )  # fmt: skip


WORDS = {
    "causal": "logits", "seq2seq": "decoder logits", "encoder": "embeddings", "states": "embeddings", "rank": "scores",
    "rank_decoder": "scores",
}  # fmt: skip


def matrix_dtypes(model: Model) -> frozenset[str]:
    """The dtypes of a model's matrices; of vectors llama.cpp keeps F32."""
    return frozenset(tensor.dtype for tensor in model.tensors.entries if len(tensor.shape) > 1)


def _ids(c: Canonical) -> list[int]:
    """Token ids of TEXT; without a usable tokenizer ids spread over the vocabulary."""
    rows = embedding_rows(c) or N_TOKENS
    ids: list[int] = []
    if c.tokenizer is not None and c.tokenizer.tokens:
        try:
            ids = load(tokenizer_json(c.tokenizer)).encode([TEXT])[0].ids
        except AprError:
            ids = []
    known = [token for token in ids if token < rows][:N_TOKENS]
    return [*known, *((7919 * i + 11) % rows for i in range(N_TOKENS - len(known)))]
