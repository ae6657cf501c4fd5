"""Gates that compare a file with its original: keys, tensors, and logits computed by other programs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aprfmt import formats
from aprfmt.canonical.read import canonical
from aprfmt.canonical.tensor_scales import scale_name
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import SCALE
from aprfmt.codecs.values import values
from aprfmt.convert.api import convert
from aprfmt.convert.logits import SourceLogits, matrix_dtypes
from aprfmt.errors import MissingDependencyError, OutOfMemoryError, UnsupportedError, UsageError
from aprfmt.inspection.diff import same_value
from aprfmt.running.diseases import DEFAULTS, DISEASES, KEYS
from aprfmt.running.examined import ModelUnderTest
from aprfmt.running.findings import GateFinding, SkippedError
from aprfmt.text import first_few
from aprfmt.types import Array

if TYPE_CHECKING:
    from aprfmt.model import Model, Tensor

NO_ORIGINAL = "no original to compare with: --against FILE"


class _Difference(NamedTuple):
    """A key or a tensor that differs, and the disease that it indicates."""

    disease: str
    name: str
    text: str
    value: object = None


def _original(x: ModelUnderTest) -> Model:
    if x.against is None:
        raise SkippedError(NO_ORIGINAL, required=False)
    return x.original_gguf


def _finding(found: Sequence[_Difference], passed: str) -> GateFinding:
    """The first disease in table order, with all its signs; counts the others."""
    if not found:
        return GateFinding(True, passed, value=0, threshold=0)
    order = [*DISEASES]
    disease = min((each.disease for each in found), key=order.index)
    own = [each for each in found if each.disease == disease]
    text = f"{DISEASES[disease].sentence}: {first_few(each.text for each in own)}"
    if others := dict.fromkeys(each.disease for each in found if each.disease != disease):
        text += f"; also {', '.join(others)}"
    return GateFinding(False, text, len(found), 0, disease, {"key": own[0].name, "value": own[0].value})


def logits(x: ModelUnderTest) -> GateFinding:
    """Compares the logits of a few tokens with those of the original in transformers or the trainer's decoder."""
    if x.against is None:
        raise SkippedError(NO_ORIGINAL, required=False)
    if formats.detect(x.against) == "gguf":
        raise SkippedError("the original is a GGUF: llama.cpp computes both", required=False)
    try:
        with formats.open(x.against) as model:
            source = SourceLogits.of(canonical(model), "gguf", convert)
    except (MissingDependencyError, OutOfMemoryError, UnsupportedError, UsageError) as error:
        raise SkippedError(f"{error.message} ({error.hint})" if error.hint else error.message) from error
    dtypes = matrix_dtypes(x.gguf)
    keeps = dtypes == matrix_dtypes(x.original_gguf) and not x.packed_bits
    packed = min(x.packed_bits.values(), default=None)
    found = source.compare(x.gguf.path, x.file, dtypes, keeps=keeps, packed_bits=packed)
    text = f"{found['what']} of {found['tokens']} tokens: {found['engine']} and {found['source_engine']} agree"
    return GateFinding(True, text, value=found["relative_error"], threshold=found["limit"])


# --- keys ---


def header(x: ModelUnderTest) -> GateFinding:
    """Compares the keys that change what llama.cpp computes."""
    original = _original(x).metadata
    arch = str(original.get("general.architecture"))
    own_arch = str(x.gguf.metadata.get("general.architecture"))
    if own_arch != arch:
        text = f"the architecture is {own_arch}, the original's {arch}"
        return GateFinding(False, text, 1, 0, "values")
    keys = [key for key in dict.fromkeys((*original, *x.gguf.metadata)) if isinstance(key, str)]
    found = []
    for key in keys:
        name = re.sub(f"^{re.escape(arch)}\\.", "ARCH.", key)
        disease = next((disease for pattern, disease in KEYS if pattern.fullmatch(name)), None)
        if disease is None:
            continue
        default = DEFAULTS.get(name)
        a, b = (kv.get(key, default) for kv in (x.gguf.metadata, original))
        if a is not None and b is not None and not same_value(a, b):
            value = _typed(b) if not hasattr(b, "__len__") or isinstance(b, str) else None
            found.append(_Difference(disease, key, _words(key, a, b), value))
    return _finding(found, f"{len(keys)} keys: hyper-parameters and tokenizer match the original")


def _words(key: str, a: object, b: object) -> str:
    if any(hasattr(value, "__len__") and len(value) > 40 for value in (a, b)):
        return f"{key} differs"
    return f"{key} is {_typed(a)}, the original's {_typed(b)}"


def _typed(value: object) -> str:
    """A value in the syntax of `apr stamp --set`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.7g}"
    return str(value)


# --- tensors ---

_LIMITS = ((16.0, 0.01), (8.0, 0.03), (6.0, 0.06), (5.0, 0.1), (4.0, 0.2), (3.0, 0.35), (2.0, 0.6), (0.0, 0.9))
"""(bits of the coarser dtype, maximum relative RMSE of a tensor): about twice that of llama.cpp's quantization."""

_ROWS, _EXPERT_ROWS = 256, 4
_LOW_RANK = 0.9
"""Fraction of a difference's energy in a quarter of its rank: 1 for an adapter, 0.4 for rounding."""

_EXPERTS = re.compile(r"_exps\.|ffn_gate_inp\.")
_QK = re.compile(r"\.attn_([qk])\.(?:weight|bias)$")


def tensors(x: ModelUnderTest) -> GateFinding:
    """Compares a sample of every tensor: 256 rows of a matrix, 4 rows of each expert."""
    original = _original(x)
    ours, theirs = ({t.name: t for t in model.tensors.entries} for model in (x.gguf, original))
    found, unread = [*_missing(ours, theirs)], []
    for name in (name for name in ours if name in theirs):
        try:
            each = _compare(x, ours[name], theirs[name])
        except UnsupportedError:
            unread.append(name)
            continue
        found += [each] if each is not None else []
    text = f"{len(ours) - len(unread):,} tensors match the original"
    return _finding(found, f"{text}; {len(unread)} not compared: their dtype cannot be decoded" if unread else text)


def _missing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Iterator[_Difference]:
    head, embedding = "output.weight", "token_embd.weight"
    for name in (name for name in theirs if name not in ours):
        is_copy = name == head and embedding in theirs and _is_copy(theirs[head], theirs[embedding])
        if name.startswith("rope_") or is_copy:
            continue
        yield _Difference("tied-head" if name == head else "values", name, f"{name} is missing")
    for name in (name for name in ours if name not in theirs):
        if name == head and embedding in ours and not _is_copy(ours[head], ours[embedding]):
            yield _Difference("tied-head", name, f"{name} is not the token embedding, which the original uses")


def _is_copy(head: Tensor, embedding: Tensor) -> bool:
    import numpy as np

    if head.shape != embedding.shape:
        return False
    a, b = (_rows(t, 0, min(_ROWS, t.shape[0])) for t in (embedding, head))
    return float(np.linalg.norm(a - b)) <= _limit(head, embedding) * float(np.linalg.norm(a))


def _limit(*both: Tensor, packed_bits: float = math.inf) -> float:
    bits = min(packed_bits, *(8 * DTYPES[t.dtype].block_bytes / DTYPES[t.dtype].block for t in both))
    return next(limit for least, limit in _LIMITS if bits >= least)


def _rows(tensor: Tensor, first: int, n: int) -> Array:
    """Decoded rows [n, columns] of a tensor, all leading dimensions flattened; for a vector its values [n, 1]."""
    import numpy as np

    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    size = tensor.n_bytes // max(1, math.prod(tensor.shape) // columns)
    data = bytes(tensor.source.read(tensor.offset + first * size, n * size))
    parts = [np.asarray(part, np.float64) for part in values(tensor.dtype, (n, columns), lambda: [data])]
    found: Array = np.concatenate(parts).reshape(n, columns)
    return found


def _scale_of(model: Model, name: str) -> Array:
    """The scale of the tensor `name` of a GGUF: 1, or one per matrix [n, 1] for NVFP4 weights."""
    import numpy as np

    scale = model.tensors.get(scale_name(name, SCALE, gguf=True))
    if scale is None:
        return np.ones((1, 1))
    values: Array = _rows(scale, 0, scale.shape[0])
    return values


def _sample(tensor: Tensor) -> Array:
    """The rows to compare: of stacked experts some of each."""
    import numpy as np

    if len(tensor.shape) < 3:
        is_vector = len(tensor.shape) == 1
        return _rows(tensor, 0, tensor.shape[0] if is_vector else min(_ROWS, tensor.shape[0]))
    n, rows = tensor.shape[0], math.prod(tensor.shape[1:-1])
    some = min(_EXPERT_ROWS, rows)
    return np.stack([_rows(tensor, i * rows, some).reshape(-1) for i in range(n)])


def _compare(x: ModelUnderTest, ours: Tensor, theirs: Tensor) -> _Difference | None:
    """What is wrong with a tensor; None if its values match the original's within the error of its dtype."""
    import numpy as np

    name = ours.name
    if ours.shape != theirs.shape:
        return _Difference("values", name, f"{name} is {[*ours.shape]}, the original's {[*theirs.shape]}")
    if 0 in ours.shape:
        return None
    a, b = _sample(theirs) * _scale_of(x.original_gguf, name), _sample(ours) * _scale_of(x.gguf, name)
    limit = _limit(ours, theirs, packed_bits=x.packed_bits.get(name, math.inf))
    size = max(float(np.linalg.norm(a)), 1e-30)

    def is_same(other: Array) -> bool:
        return bool(np.linalg.norm(b - other) <= limit * size)

    if is_same(a) or not np.isfinite(a).all():
        return None
    disease, text = "values", name
    if not np.isfinite(b).all():
        disease = "nan"
    elif not b.any():
        disease = "zeros"
    elif "norm" in name and (is_same(a + 1) or is_same(a - 1)):
        disease = "norm-plus-one"
    elif (part := _QK.search(name)) is not None and any(map(is_same, _reordered(x, a, part[1]))):
        disease = "rope-order"
    elif _EXPERTS.search(name) and (order := _order(a, b, limit)) is not None:
        disease, text = "experts", f"{name} has expert {order[1]} in place of {order[0]}"
    elif min(b.shape) >= 8 and _low_rank(b - a) >= _LOW_RANK:
        disease = "adapter-scale"
    elif np.isfinite(b).all():
        text = f"{name} differs by {float(np.linalg.norm(b - a)) / size:.2g}"
    return _Difference(disease, name, text)


def _reordered(x: ModelUnderTest, rows: Array, part: str) -> Iterator[Array]:
    """The rows of the first heads in the two orders that conversions confuse."""
    n_heads = x.metadata("ARCH.attention.head_count" + ("_kv" if part == "k" else ""))
    total = x.metadata("ARCH.embedding_length")
    n_q = x.metadata("ARCH.attention.head_count")
    if not (isinstance(n_heads, int) and isinstance(n_q, int) and isinstance(total, int) and n_q):
        return
    stated = x.metadata("ARCH.attention.key_length")
    size = stated if isinstance(stated, int) else total // n_q
    n = len(rows) // size if size > 1 and size % 2 == 0 else 0
    heads = rows[: n * size]
    if not n or len(heads) != len(rows):
        return
    for pairs in (heads.reshape(n, size // 2, 2, -1), heads.reshape(n, 2, size // 2, -1)):
        yield pairs.swapaxes(1, 2).reshape(rows.shape)


def _order(a: Array, b: Array, limit: float) -> tuple[int, int] | None:
    """(position, the original's expert there) of the first permuted expert, if all experts are the original's."""
    import numpy as np

    products = b @ a.T
    nearest = np.argmax(products / np.maximum(np.linalg.norm(a, axis=1), 1e-30), axis=1)
    if len({*nearest.tolist()}) < len(b) or np.linalg.norm(b - a[nearest]) > limit * np.linalg.norm(a):
        return None
    place = int(np.flatnonzero(nearest != np.arange(len(b)))[0])
    return place, int(nearest[place])


def _low_rank(difference: Array) -> float:
    """Fraction of the energy in the largest quarter of the singular values."""
    import numpy as np

    energy = np.linalg.svd(difference, compute_uv=False) ** 2
    return float(energy[: max(1, min(difference.shape) // 4)].sum() / max(float(energy.sum()), 1e-300))
