"""Measures the cost of errors in each part of a model: weights are perturbed in llama.cpp's memory, and the KL is
measured.

A group of tensors, one role in neighbouring layers, is replaced by its quantized values. The divergence from the
unchanged model divided by the sum of the relative errors is the cost per unit of error in this group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from aprfmt import formats
from aprfmt.codecs.recode import recode, recode_jobs
from aprfmt.errors import RefusedError, storage_errors
from aprfmt.io.pipe import Item, run_jobs, source_jobs
from aprfmt.io.source import Buffer
from aprfmt.io.temporary import scratch_folder
from aprfmt.model import Tensor
from aprfmt.running.decoders import open_decoder
from aprfmt.running.divergence import DEFAULT_CTX, compare, sample_chunks, write_logits
from aprfmt.types import Array

BANDS = 4
"""Groups of layers of each role."""

_LAYER = re.compile(r"^(?:blk|(?:.*\.)?layers)\.(\d{1,6})\.")


def role_of(name: str) -> str:
    """The name of a tensor, in a GGUF or an MLX folder, without its layer and ".weight"."""
    return _LAYER.sub("", name).removesuffix(".weight")


def groups_of(names: Iterable[str], n_bands: int = BANDS) -> dict[str, list[str]]:
    """The tensors by role and band of layers, such as "ffn_down 12-17"."""
    roles: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = _LAYER.match(name)
        roles.setdefault(role_of(name), []).append((int(match[1]) if match else -1, name))
    groups = {}
    for role, members in roles.items():
        members.sort()
        n = min(n_bands, len(members))
        for i in range(n):
            part = members[i * len(members) // n : (i + 1) * len(members) // n]
            first, last = part[0][0], part[-1][0]
            label = role if first < 0 else f"{role} {first}" if first == last else f"{role} {first}-{last}"
            groups[label] = [name for _, name in part]
    return groups


class PerturbedModel:
    """A model loaded in llama.cpp whose weights can be replaced by their quantized values. Use in `with`.

    Args:
        gguf: the model, with float weights.
        name: what errors call it.
        texts: held-out text.
        n_tokens: tokens of it to compute, whole chunks of DEFAULT_CTX spread over the text.
        weights: importance of the columns by tensor, as for `CanonicalTensor.out`.
    """

    def __init__(
        self,
        gguf: str,
        name: str,
        texts: Sequence[Path],
        n_tokens: int,
        weights: Mapping[str, Array],
        *,
        text_field: str = "text",
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._name, self._weights = name, weights
        self._texts, self._n_tokens, self._text_field = texts, n_tokens, text_field
        with ExitStack() as stack:
            self._folder = stack.enter_context(scratch_folder("perturbed"))
            self._model = stack.enter_context(formats.open(gguf))
            self._llama = stack.enter_context(open_decoder(gguf, n_ctx=DEFAULT_CTX, watched=True, say=log))
            chunks = sample_chunks(self._llama, texts, n_tokens, text_field)
            self._reference = os.path.join(self._folder, "reference.kld")
            self._computed = {*self._llama.effects(chunks[0][:2])[1]}
            write_logits(self._llama, chunks, self._reference)
            self._stack = stack.pop_all()

    def __enter__(self) -> PerturbedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def divergence(self, types: Mapping[str, str]) -> float:
        """The mean KL(model || model with these tensors quantized), in nats; the weights are restored.

        0 for tensors that llama.cpp does not compute with. Raises RefusedError for weights that are quantized already,
        RunError.
        """
        names = [name for name in types if name in self._computed]
        if not names:
            return 0.0
        for name in names:
            self._replace(name, types[name])
        found = float(compare(self._llama, self._reference)[0].mean())
        for name in names:
            self._replace(name, None)
        return found

    def divergence_of(self, gguf: str, times: int = 1) -> float:
        """The mean KL(model || the model in another file), in nats, on `times` as many tokens."""
        with open_decoder(gguf, n_ctx=DEFAULT_CTX) as llama:
            if times == 1:
                return float(compare(llama, self._reference)[0].mean())
            chunks = sample_chunks(self._llama, self._texts, times * self._n_tokens, self._text_field)
            step = max(1, self._n_tokens // DEFAULT_CTX)  # a logits file of all of them may be large
            path = os.path.join(self._folder, "part.kld")
            total = 0.0
            for first in range(0, len(chunks), step):
                write_logits(self._llama, part := chunks[first : first + step], path, force=True)
                total += float(compare(llama, path)[0].mean()) * len(part)
            return total / len(chunks)

    def _replace(self, name: str, dtype: str | None) -> None:
        """Replaces a tensor by its values in `dtype`; None: by its own."""
        tensor = self._model.tensors[name]
        path = os.path.join(self._folder, "weight")
        with storage_errors(path), open(path, "wb") as file:
            for data in self._values(tensor, dtype):
                file.write(data)
        self._llama.replace(name, path)

    def _values(self, tensor: Tensor, dtype: str | None) -> Iterable[Buffer]:
        def stored(unit: int) -> Iterable[Item]:
            return source_jobs(tensor.source, tensor.offset, tensor.n_bytes, unit)

        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise RefusedError(
                f"{tensor.dtype} is already quantized: its sensitivity cannot be measured",
                path=self._name,
                tensor=tensor.name,
                hint="start from the unquantized model, or leave out --measure",
            )
        if dtype is None or dtype == tensor.dtype:
            return run_jobs(stored(1))
        weights = self._weights.get(tensor.name)
        return recode(
            dtype,
            tensor.dtype,
            tensor.shape,
            lambda: run_jobs(recode_jobs(tensor.dtype, dtype, tensor.shape, stored, weights=weights)),
        )
