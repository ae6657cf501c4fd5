"""Opens models of any container as trainable networks, and loads their weights tensor by tensor."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import aprfmt
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.names import Match, matches
from aprfmt.arch.rope import FREQS, scaling_of
from aprfmt.arch.row import OPTIONAL, Architecture
from aprfmt.canonical.checks import check_before_writing
from aprfmt.canonical.expert_pruning import KeptExperts
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.packed import AS_VALUES
from aprfmt.canonical.read import canonical
from aprfmt.canonical.sides import hf_side
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.recode import recode_jobs
from aprfmt.errors import CorruptError, RefusedError, UnsupportedError
from aprfmt.io.pipe import run_jobs, source_chunks
from aprfmt.model import Model
from aprfmt.tokenizer.model import Tokenizer
from aprtrain.kernels.blocks import decode, is_kept, upload
from aprtrain.network.decoder import Decoder
from aprtrain.network.names import hf_names, parts_of
from aprtrain.network.shape import Shape, shape_of


@dataclass(frozen=True)
class NetworkSource:
    """A network without its weights, and the source of those.

    Attributes:
        path: the file or folder; for a derived student, that of its origin.
        model: the opened file; None for a derived student, even if its tensors are parts of its teacher's.
        arch: its row of the architecture table.
        shape, hparams, tokenizer: of the network; `tokenizer` is None if the file has none.
        tensors: by Hugging Face name, in Hugging Face row order.
        experts: of a student with fewer experts, those that it keeps; None for all others.
    """

    path: Path
    model: Model | None
    arch: Architecture
    shape: Shape
    hparams: Hyperparams
    tokenizer: Tokenizer | None
    tensors: dict[str, CanonicalTensor]
    experts: KeptExperts | None = None

    def by_parameter(self) -> Iterator[tuple[str, list[CanonicalTensor]]]:
        """(parameter of Decoder, its tensors in the order of rows)."""
        for parameter, parts in parts_of(self.shape).items():
            yield parameter, [self.tensors[name] for name, _, _ in parts]

    def check_intact(self) -> None:
        """Verifies the file's checksum, or the hub's digest, once its weights are loaded.

        Raises ChangedError, ChecksumError.
        """
        if self.model is not None:
            self.model.check_unchanged()
            self.model.check_intact()


@contextmanager
def open_network(path: str | os.PathLike[str]) -> Iterator[NetworkSource]:
    """Opens an `.apr`, a GGUF, safetensors or a Hugging Face folder, and checks that its tensors form a network.

    Reads no weights. Raises what `aprfmt.open` and `shape_of` raise; RefusedError for a file without tensors, with
    missing tensors or tensors of another shape; UnsupportedError for a network that cannot be trained.
    """
    with aprfmt.open(path) as model:
        if model.convention == "apr":
            model.record_reads()
        if not model.tensors:
            raise RefusedError("the file contains no tensors", path=path, hint="pass the file with the weights")
        try:
            network = network_of(canonical(model, decoding=AS_VALUES))
        except UnsupportedError as error:
            error.path = error.path or str(path)
            raise
        yield replace(network, model=model)


def network_of(c: Canonical) -> NetworkSource:
    """`c` as a network, without its file. Raises as `open_network`."""
    path, tensors = Path(c.model.path), {tensor.name: tensor for tensor in hf_side(c.arch, c.tensors)}
    shape = shape_of(c.hparams, c.arch, tensors)
    assert c.arch is not None
    check_before_writing(c, allow_unmapped=False)
    for name in tensors.keys() - hf_names(shape).keys():
        if (found := matches(c.arch, name, "hf")) and not _is_unused(shape, found):
            raise UnsupportedError("the network has an unsupported tensor", path=path, tensor=name)
    _check_frequencies(c)
    return NetworkSource(path, None, c.arch, shape, c.hparams, c.tokenizer, tensors)


def _is_unused(shape: Shape, found: list[Match]) -> bool:
    """Whether a tensor belongs to an MTP layer, or is a key or value of a layer that uses those of another."""
    layer = found[0].layer
    if layer is None or layer >= shape.n_layers:
        return layer is not None
    return shape.kv_layers[layer] != layer and any(match.row.need == OPTIONAL for match in found)


def _check_frequencies(c: Canonical) -> None:
    """Refuses a GGUF whose rope factors no config.json scaling explains: it would compute something else."""
    stored = c.model.tensors.get(FREQS)
    if stored is None or scaling_of(c.hparams):
        return
    if (stored.numpy() != 1).any():
        raise UnsupportedError("the rope frequencies match no known scaling", path=c.model.path, tensor=FREQS)


_BEGINNING = 4096

DAMAGED = "the file is damaged: copy or download it again; apr tensors FILE --stats shows where"
"""The hint for non-finite values."""

CHECKED = 1 << 24
"""Values checked at a time on a device."""

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def values(tensor: CanonicalTensor, dtype: torch.dtype, path: Path | None = None) -> Iterator[Tensor]:
    """The flat values of a tensor in order, as CPU tensors of `dtype` of at most about 2^20 values.

    `path` is for errors. Raises CorruptError for NaN or infinite values.
    """
    made = tensor.produced
    for piece in run_jobs(recode_jobs(made.dtype, _NAMES[dtype], made.shape, made.items)):
        # torch requires a buffer that it could write to.
        part = torch.frombuffer(bytearray(piece), dtype=dtype) if len(piece) else torch.empty(0, dtype=dtype)
        _check_finite(part, tensor.name, path)
        yield part


def _check_finite(part: Tensor, name: str, path: Path | None) -> None:
    if part.numel() and not all(math.isfinite(end) for end in torch.aminmax(part)):
        raise CorruptError("the tensor contains NaN or infinite values", path=path, tensor=name, hint=DAMAGED)


def load_decoder(
    network: NetworkSource, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Loads a network with its weights, piece by piece: no tensor is held in another dtype.

    Raises CorruptError for NaN or infinite values, RefusedError for an all-zero matrix, ChangedError, ChecksumError.
    """
    decoder = Decoder(network.shape, dtype, device)
    for name, target in decoder.hf_tensors().items():
        fill(network, name, target)
    if network.model is not None:
        network.model.check_unchanged()
    return decoder


def fill(network: NetworkSource, name: str, target: Tensor) -> None:
    """Writes a tensor of the network to `target`, a contiguous view of the same shape; raises as `load_decoder`.

    For bfloat16, blocks are dequantized on the target's device: seconds for a large model on CUDA.
    """
    tensor = network.tensors[name]
    if target.dtype == torch.bfloat16 and is_kept(tensor):
        decode(upload(tensor, target.device), target)
        check_values(network, name, torch.split(target.view(-1), CHECKED))
        return
    flat, done, has_nonzero = target.view(-1), 0, False
    for part in values(tensor, target.dtype, network.path):
        flat[done : done + part.numel()].copy_(part)
        done += part.numel()
        has_nonzero = has_nonzero or bool(part.any())
    if done != flat.numel():
        raise CorruptError(f"only {done} of {flat.numel()} values are stored", path=network.path, tensor=name)
    check_not_zero(network, name, target.ndim, has_nonzero)


def check_values(network: NetworkSource, name: str, pieces: Iterable[Tensor]) -> None:
    """Raises CorruptError for NaN or infinite values, RefusedError for an all-zero matrix."""
    has_nonzero = False
    for piece in pieces:
        _check_finite(piece, name, network.path)
        has_nonzero = has_nonzero or bool(piece.any())
    check_not_zero(network, name, 2, has_nonzero)


def refuse_zeros(network: NetworkSource) -> None:
    """Raises RefusedError for a matrix stored as zeros, before it is loaded.

    Reads only the beginning of other matrices.
    """
    for tensor in network.model.tensors.values() if network.model is not None else ():
        has_nonzero = any(tensor.source.read(tensor.offset, min(_BEGINNING, tensor.n_bytes)))
        chunks = () if has_nonzero else source_chunks(tensor.source, tensor.offset, tensor.n_bytes)
        has_nonzero = has_nonzero or any(np.frombuffer(chunk, np.uint8).any() for chunk in chunks)
        check_not_zero(network, tensor.name, len(tensor.shape), has_nonzero)


def check_not_zero(network: NetworkSource, name: str, n_dims: int, has_nonzero: bool) -> None:
    """Raises RefusedError for a matrix unless `has_nonzero`."""
    if n_dims > 1 and not has_nonzero:
        raise RefusedError(
            "all values of the matrix are zero", path=network.path, tensor=name,
            hint="the file is incomplete, or part of the model was never written; download it again",
        )  # fmt: skip


def fingerprint(network: NetworkSource) -> str:
    """SHA-256 of what a network computes with: names, shapes and values rounded to bfloat16, in the network's order.

    Equal for every container and unquantized dtype; a quantized file has another one than its source.
    """
    total = hashlib.sha256()
    for name, (_, _, size) in hf_names(network.shape).items():
        total.update(f"{name} {list(size)}\n".encode())
        for piece in values(network.tensors[name], torch.bfloat16, network.path):
            total.update(piece.view(torch.uint8).numpy().data)
    return total.hexdigest()


# --- of an opened file, as it is stored ---

_EDGE_BYTES = 1 << 16


def edge_fingerprint(model: Model) -> str:
    """SHA-256 over names, dtypes, shapes and both ends of every tensor of an opened file.

    Sufficient to tell two models apart, with a few reads per tensor.
    """
    digest = hashlib.sha256()
    for tensor in sorted(model.tensors.values(), key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        n_bytes = min(_EDGE_BYTES, tensor.n_bytes)
        for start in (tensor.offset, tensor.offset + tensor.n_bytes - n_bytes):
            digest.update(tensor.source.read(start, n_bytes))
    return digest.hexdigest()
