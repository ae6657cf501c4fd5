"""Extracts an adapter from two models: the best low-rank approximation (SVD) of each weight's difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

from aprfmt.canonical.lora import is_turned
from aprfmt.canonical.lora_blocks import made
from aprfmt.canonical.lora_pairs import Adapter, Base, LoraPair
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.model_kinds import ADAPTER
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.stream import regroup
from aprfmt.errors import RefusedError
from aprfmt.formats import lora
from aprfmt.io.recent import RecentValues
from aprfmt.model import Model
from aprfmt.text import plural
from aprfmt.types import Array

_HELD = 4
"""Cached decompositions: A and B of a weight are read one after the other."""

_COMPARED_BYTES = 1 << 20
_MORE, _STEPS = 16, 6


@dataclass(slots=True)
class Extraction:
    """Totals, known once all of an adapter is written.

    Attributes:
        total, kept: sums of squares of the differences, and of their approximations.
    """

    total: float = 0.0
    kept: float = 0.0
    _counted: set[str] = field(default_factory=set)
    _held: RecentValues[str, tuple[Array, Array]] = field(default_factory=partial(RecentValues, _HELD))

    def factors(self, name: str, delta: Callable[[], Array], rank: int) -> tuple[Array, Array]:
        """A and B of a weight, float32; `delta` returns the difference, [(n,) out, in]."""
        return self._held.get(name, lambda: self._decompose(name, delta(), rank))

    def _decompose(self, name: str, changed: Array, rank: int) -> tuple[Array, Array]:
        import numpy as np

        parts = [decompose(one, rank) for one in (changed if changed.ndim == 3 else changed[None])]
        a, b = (np.stack([part[i] for part in parts]).astype(np.float32) for i in (0, 1))
        if name not in self._counted:
            self._counted.add(name)
            self.total += float(np.square(changed).sum())
            self.kept += float(sum(np.square(part[2]).sum() for part in parts))
        return (a, b) if changed.ndim == 3 else (a[0], b[0])


def decompose(delta: Array, rank: int) -> tuple[Array, Array, Array]:
    """A [rank, in], B [out, rank] and the singular values of the best approximation of `delta` [out, in], float64.

    A small rank of a large matrix uses a random projection with power iterations (Halko, Martinsson, Tropp: Finding
    structure with randomness, 2011), always with the same seed.
    """
    import numpy as np

    if 4 * (rank + _MORE) < min(delta.shape):
        basis = delta @ np.random.default_rng(0).standard_normal((delta.shape[1], rank + _MORE))
        for _ in range(_STEPS):
            basis = np.linalg.qr(basis)[0]
            basis = np.linalg.qr(delta.T @ basis)[0]
            basis = delta @ basis
        basis = np.linalg.qr(basis)[0]
        u, s, v = np.linalg.svd(basis.T @ delta, full_matrices=False)
        u = basis @ u
    else:
        u, s, v = np.linalg.svd(delta, full_matrices=False)
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    root = np.sqrt(s)
    return root[:, None] * v, u * root, s


def extracted(base: Canonical, tuned: Canonical, rank: int) -> tuple[Canonical, list[str], Extraction]:
    """The adapter of `rank` that turns `base` into `tuned`, what is left out, and the totals.

    Weights that are not matrices are stored whole. Raises RefusedError for models of different networks, and if nothing
    changed.
    """
    row = base.arch
    if row is None or tuned.arch is not row:
        raise RefusedError(
            f"the models have different architectures, {base.hparams.architecture} and {tuned.hparams.architecture}",
            path=tuned.model.path,
        )
    found = Extraction()
    pairs: dict[str, LoraPair] = {}
    whole: dict[str, CanonicalTensor] = {}
    short = 0
    for name, new in tuned.tensors.items():
        old = base.tensors.get(name)
        if old is None and name == base.head:
            old = base.tensors.get(base.embedding)
        if old is None or old.shape != new.shape:
            have = "missing" if old is None else str(list(old.shape))
            raise RefusedError(
                f"shapes differ: {list(new.shape)} in the fine-tune, {have} in the base",
                path=tuned.model.path,
                tensor=name,
            )
        if _is_same(old, new):
            continue
        is_stack = len(new.shape) == 3 and not name.endswith(".weight")
        if not is_stack and not (len(new.shape) == 2 and name.endswith(".weight")):
            whole[name] = CanonicalTensor(name, (new.as_source(),))
            continue
        own = min(rank, *new.shape[-2:])
        short += own < min(new.shape[-2:])
        pairs[name] = _pair(found, name, old, new, own, is_turned(row, name))
    missing = next((name for name in base.tensors if name not in tuned.tensors and name != base.head), None)
    if missing is not None:
        raise RefusedError("the weight is missing from the fine-tune", path=tuned.model.path, tensor=missing)
    if not pairs and not whole:
        raise RefusedError("the two models have the same weights: nothing to extract", path=tuned.model.path)
    most = max((pair.rank for pair in pairs.values()), default=rank)
    adapter = Adapter(pairs, whole, most, float(most), str(base.model.path), of=Base(row, base.hparams))
    notes = [f"{plural(short, 'weight')}: changes beyond rank {rank} are dropped"] if short else []
    model = Model(
        path=tuned.model.path,
        format="extracted",
        label="two models",
        sources=(*base.model.sources, *tuned.model.sources),
        tensors=(),
    )
    info = {"name": f"{tuned.info['name']} adapter"} if tuned.info.get("name") else {}
    c = Canonical(
        model, None, replace(base.hparams), None, info, {}, extras=adapter.tensors, part=ADAPTER, adapter=adapter
    )
    return c, notes, found


def _pair(
    found: Extraction, name: str, old: CanonicalTensor, new: CanonicalTensor, rank: int, turned: bool
) -> LoraPair:
    def delta() -> Array:
        import numpy as np

        changed = new.produced.values().astype(np.float64) - old.produced.values().astype(np.float64)
        return changed.swapaxes(-1, -2) if turned else changed

    *n, rows, columns = new.shape
    out, inside = (columns, rows) if turned else (rows, columns)
    a = made(name + lora.A, "F32", (*n, rank, inside), lambda: found.factors(name, delta, rank)[0])
    b = made(name + lora.B, "F32", (*n, out, rank), lambda: found.factors(name, delta, rank)[1])
    return LoraPair(name, a, b, 1.0)


def _is_same(a: CanonicalTensor, b: CanonicalTensor) -> bool:
    """Whether two tensors have the same values."""
    if a.dtype != b.dtype:
        return bool((a.produced.values() == b.produced.values()).all())
    streams = (regroup(side.chunks(), _COMPARED_BYTES, _COMPARED_BYTES) for side in (a, b))
    return prod(a.shape) == 0 or all(p == q for p, q in zip(*streams, strict=True))
