"""Expert pruning: fewer routed experts in each MoE layer, with unchanged values; which ones is decided later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

from aprfmt.arch.extra_tensors import is_draft
from aprfmt.arch.grammar import dims_of
from aprfmt.arch.names import Match, is_gguf_only, matches
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.sides import hf_side
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import recode_jobs
from aprfmt.codecs.stream import regroup
from aprfmt.errors import RefusedError, UsageError
from aprfmt.io.pipe import run_jobs
from aprfmt.io.source import Buffer
from aprfmt.types import Shape


@dataclass
class KeptExperts:
    """The experts that a pruned network keeps.

    Attributes:
        n: how many in each layer.
        of_layer: for each layer of the original network the indices of its kept experts, ascending; to be filled in
            before weights are read.
    """

    n: int
    of_layer: Sequence[Sequence[int]] = ()


def most_salient(saliency: Sequence[Sequence[float]], n: int) -> list[list[int]]:
    """The `n` experts of each layer with the largest saliency, ascending; [] for a layer without experts."""
    return [sorted(sorted(range(len(of)), key=lambda e: (-of[e], e))[:n]) for of in saliency]


def with_fewer_experts(c: Canonical, n: int) -> tuple[Canonical, KeptExperts]:
    """`c` with `n` experts in each MoE layer, and what says which ones.

    Raises:
        UsageError: not fewer experts than the network has, or fewer than a token uses.
        RefusedError: a network without experts, or with groups of them; an MTP layer with experts.
    """
    row, h, path = c.arch, deepcopy(c.hparams), c.model.path
    if row is None or not h.num_experts:
        raise RefusedError(
            f"the model has no experts to prune: its architecture is {h.architecture}", path=path,
            hint="prune layers or widths instead",
        )  # fmt: skip
    if drafts := [name for name in c.extras if is_draft(row, name) and "experts" in name]:
        raise RefusedError(
            "the experts of an MTP layer cannot be pruned", path=path, tensor=drafts[0],
            hint="drop all MTP layers with --no-mtp",
        )  # fmt: skip
    if h.extra.get("n_group") not in (None, 1):
        raise RefusedError(f"the routers of a {row.id} select groups of experts, which cannot be pruned", path=path)
    least = h.num_experts_per_tok or 1
    if not least <= n < h.num_experts:
        raise UsageError(
            f"cannot keep {n} experts: the model has {h.num_experts} and uses {least} per token",
            hint=f"keep {least} to {h.num_experts - 1}",
        )
    kept, tensors = KeptExperts(n), hf_side(row, c.tensors)
    out = {name: tensor for name, tensor in c.tensors.items() if is_gguf_only(row, name)}
    single: dict[tuple[int | None, str], dict[int, CanonicalTensor]] = {}
    for tensor in tensors:
        match = next(iter(matches(row, tensor.name)), None)
        if match is not None and match.expert is not None:
            single.setdefault((match.layer, match.row.hf[match.position]), {})[match.expert] = tensor
    for tensor in tensors:
        match = next(iter(matches(row, tensor.name)), None)
        axes = dims_of(match.row.dims[min(match.position, len(match.row.dims) - 1)]) if match is not None else []
        if match is None or (match.expert is None and axes[:1] != ["experts"]):
            out[tensor.name] = tensor
        elif match.expert is None:
            shape = (n, *tensor.shape[1:])
            out[tensor.name] = _lazy(tensor, shape, partial(_of_stack, kept, tensor, match))
        elif match.expert < n:
            those = single[match.layer, match.row.hf[match.position]]
            out[tensor.name] = _lazy(tensor, tensor.shape, partial(_of_single, kept, those, match))
    h.num_experts = n
    return replace(c, hparams=h, tensors=out, is_whole=False, sidecar=None), kept


def _lazy(like: CanonicalTensor, shape: Shape, make: Callable[[], Iterator[Buffer]]) -> CanonicalTensor:
    return CanonicalTensor(like.name, (BufferedTensor(like.name, _dtype(like), shape, make),))


def _dtype(tensor: CanonicalTensor) -> str:
    """Its own, unless that has scales or blocks across its rows."""
    return tensor.dtype if DTYPES[tensor.dtype].kind != "aprq" else "F32"


def _chunks(tensor: CanonicalTensor, dtype: str) -> Iterator[Buffer]:
    made = tensor.produced
    yield from run_jobs(
        made.items(1) if dtype == made.dtype else recode_jobs(made.dtype, dtype, made.shape, made.items)
    )


def _of_stack(kept: KeptExperts, tensor: CanonicalTensor, match: Match) -> Iterator[Buffer]:
    """The kept ones of a tensor whose first dimension counts experts."""
    dtype, size = _dtype(tensor), DTYPES[_dtype(tensor)].n_bytes(tensor.shape[1:] or (1,))
    chosen = frozenset(kept.of_layer[match.layer or 0])
    for expert, chunk in enumerate(regroup(_chunks(tensor, dtype), size, size)):
        if expert in chosen:
            yield chunk


def _of_single(kept: KeptExperts, those: dict[int, CanonicalTensor], match: Match) -> Iterator[Buffer]:
    """The tensor of the kept expert that gets the number `match.expert`."""
    yield from _chunks(those[kept.of_layer[match.layer or 0][match.expert or 0]], _dtype(those[match.expert or 0]))
