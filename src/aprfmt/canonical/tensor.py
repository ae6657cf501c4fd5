"""One tensor under its Hugging Face name, how its bytes come from the source, and its output dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from aprfmt.arch.links import Link, RowMapping
from aprfmt.canonical.packed import BlockChange, PackedTensor
from aprfmt.canonical.row_mapping import Produced, produce, scales_of, unchanged_output
from aprfmt.canonical.tensor_scales import scale_name
from aprfmt.codecs import lattice
from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.codecs.packed import TensorScales
from aprfmt.codecs.plain import EIGHT_BITS
from aprfmt.codecs.recode import OverflowCount, recode_jobs, stored_bytes
from aprfmt.codecs.stream import TensorSource
from aprfmt.errors import UsageError
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import Item
from aprfmt.io.source import Buffer
from aprfmt.model import Tensor
from aprfmt.text import plural
from aprfmt.types import Array, Shape


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """A tensor of the network: a stored one, or one that a link derives from tensors of a GGUF.

    Attributes:
        name: Hugging Face name; the source's own if it has none.
        sources: the stored tensors; a single one, unchanged, without a `mapping`.
        mapping, position: which output of the mapping it is; `inverse` says that the sources are of the GGUF side.
        link: the link that maps it, for tensors of a GGUF.
    """

    name: str
    sources: tuple[TensorSource, ...]
    mapping: RowMapping | None = None
    position: int = 0
    inverse: bool = False
    link: Link | None = None
    _produced: Produced | None = field(default=None, init=False, repr=False, compare=False)
    _on_lattice: bool | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def produced(self) -> Produced:
        """Its bytes in Hugging Face order."""
        if self.mapping is None:  # cheap, and a model may have a hundred thousand of these
            return unchanged_output(self.sources[0])
        if self._produced is None:
            made = produce(self.sources, self.mapping, self.position, inverse=self.inverse)
            object.__setattr__(self, "_produced", made)
            return made
        return self._produced

    @property
    def dtype(self) -> str:
        """Its dtype without conversion."""
        return self.sources[0].dtype if self.mapping is None else self.produced.dtype

    @property
    def shape(self) -> Shape:
        """Row-major shape."""
        return self.sources[0].shape if self.mapping is None else self.produced.shape

    @property
    def is_decoded(self) -> bool:
        """Whether its blocks had to be dequantized to be reordered."""
        return DTYPES[self.sources[0].dtype].kind != "plain" and self.sources[0].dtype != self.dtype

    @property
    def original_dtype(self) -> str:
        """Dtype before dequantization."""
        return self.sources[0].dtype if self.is_decoded else self.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes in that dtype."""
        return self.sources[0].n_bytes if self.mapping is None else self.produced.n_bytes

    @property
    def scales(self) -> TensorScales:
        """The tensor scales that its blocks need."""
        return scales_of(self.sources[0]) if self.mapping is None else self.produced.scales

    @property
    def stored(self) -> Tensor | None:
        """The stored tensor, if it is used unchanged; None if it is derived from others."""
        source = self.sources[0]
        source = source.sources[0] if isinstance(source, PackedTensor) and source.is_stored else source
        unchanged = self.mapping is None or self.mapping.is_plain
        return source if unchanged and isinstance(source, Tensor) else None

    def items(self, unit: int) -> Iterable[Item]:
        """Its bytes as jobs, in chunks that are multiples of `unit` bytes if possible."""
        return self.produced.items(unit)

    def chunks(self) -> Iterator[Buffer]:
        """The bytes in Hugging Face order."""
        return self.produced.chunks()

    def as_source(self) -> TensorSource:
        """This tensor as a source for another mapping."""
        if self.mapping is None or self.mapping.is_plain:
            return self.sources[0]
        return self.produced.as_source(self.name)

    def out(
        self,
        name: str,
        dtype: str | None = None,
        overflow: OverflowCount | None = None,
        weights: Array | None = None,
        *,
        padded: bool = False,
        rounded: OverflowCount | None = None,
    ) -> OutTensor:
        """This tensor as the output tensor `name`, recoded to `dtype` while it is written.

        Args:
            name: in the output file.
            dtype: None keeps the dtype.
            overflow: called with the number of values that become infinite.
            weights: column importances, [matrices * cols], for a quantized dtype.
            padded: pads rows that the block size does not divide, which only an `.apr` can store.
            rounded: called with the number of rounded Q4_0 blocks of a QAT lattice: off the lattice, or with a scale
                that F16 cannot express.

        Raises:
            UsageError: the block size does not divide the rows, without `padded`.
        """
        made = self.produced
        target = find_dtype(dtype or made.dtype).name
        if target == made.dtype:
            return OutTensor(name, target, made.shape, made.n_bytes, partial(made.items, 1), made.held_bytes)
        if target == "Q4_0" and self.is_on_lattice:
            jobs = partial(lattice.jobs, made.items, rounded or (lambda n: None))
            return OutTensor(name, target, made.shape, DTYPES[target].n_bytes(made.shape), jobs, made.held_bytes)
        made = made.without_scales()
        chunks = partial(recode_jobs, made.dtype, target, made.shape, made.items, overflow, weights)
        n_bytes = stored_bytes(target, made.shape, padded=padded)
        return OutTensor(name, target, made.shape, n_bytes, chunks, made.held_bytes)

    @property
    def is_on_lattice(self) -> bool:
        """Whether Q4_0 can store its bfloat16 values exactly, judging by its first blocks."""
        if self._on_lattice is None:
            fits = self.dtype == "BF16" and len(self.shape) > 1 and self.shape[-1] % DTYPES["Q4_0"].block == 0
            object.__setattr__(self, "_on_lattice", fits and self.n_bytes > 0 and lattice.is_on_lattice(self.items))
        return bool(self._on_lattice)

    def decoded(self) -> CanonicalTensor:
        """The tensor with its quantized sources dequantized to their original dtype."""
        return replace(
            self, sources=tuple(p.decoded_source() if isinstance(p, PackedTensor) else p for p in self.sources)
        )

    def scale_outs(self, made: OutTensor, *, gguf: bool) -> Iterator[OutTensor]:
        """The scales that `made`, this tensor in a file, needs as separate tensors; scales of one are omitted."""
        needed = {which: values for which, values in self.scales.items() if any(value != 1 for value in values)}
        return scale_outs(needed if made.dtype == self.dtype else {}, made.name, gguf=gguf)


def scale_outs(scales: TensorScales, weight: str, *, gguf: bool) -> Iterator[OutTensor]:
    """The scales of the tensor `weight` as tensors of a file, F32."""
    import numpy as np

    for which, values in scales.items():
        data = np.array(values, "<f4").tobytes()
        shape = () if len(values) == 1 and not gguf else (len(values),)  # as in ModelOpt
        yield OutTensor(scale_name(weight, which, gguf=gguf), "F32", shape, len(data), partial(list, (data,)))


_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(slots=True)
class Losses:
    """Losses for the report: what the output does not store exactly, and warnings from the target's planning."""

    changed: Counter[tuple[str, str]] = field(default_factory=Counter)
    overflows: int = 0
    on_lattice: int = 0
    rounded_blocks: int = 0
    others: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    differences: list[dict[str, object]] = field(default_factory=list)
    changes: list[BlockChange] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        """Records what the output does not contain at all."""
        self.others.append(sentence)

    def note(self, source: str, target: str) -> None:
        """Counts one tensor converted from dtype `source` to `target`."""
        if not is_exact(source, target):
            self.changed[source, target] += 1

    def note_quantized(self, tensor: CanonicalTensor, target: str) -> None:
        """Counts one tensor quantized to `target`."""
        if target == "Q4_0" and tensor.is_on_lattice:
            self.on_lattice += 1
        else:
            self.note(tensor.original_dtype, target)

    def round_blocks(self, n: int) -> None:
        """Counts blocks of a lattice with a rounded step."""
        self.rounded_blocks += n

    def overflow(self, n: int) -> None:
        """Counts values that became infinite."""
        self.overflows += n

    def sentences(self) -> list[str]:
        """One sentence per kind of loss."""
        out = [f"{plural(n, 'tensor')} rounded from {a} to {b}" for (a, b), n in sorted(self.changed.items())]
        if self.overflows:
            out.append(
                f"{self.overflows} values exceed the range of the target dtype and were stored as infinity or its "
                "largest value"
            )
        if self.on_lattice:
            exactly = f", except {plural(self.rounded_blocks, 'block')}" if self.rounded_blocks else ""
            out.append(
                f"{plural(self.on_lattice, 'tensor')} stored as Q4_0 without error{exactly}: "
                "quantization-aware training left values that Q4_0 represents exactly"
            )
        return out + self.others


# Source dtype -> targets that represent each of its values exactly.
_EXACT = {"F16": {"F32", "F64"}, "BF16": {"F32", "F64"}, "F32": {"F64"}}


def is_exact(source: str, target: str) -> bool:
    """Whether every value of `source` is exact in `target`; dequantized blocks are exact in F32."""
    if source == target or target in _EXACT.get(source, ()):
        return True
    return DTYPES[source].kind != "plain" and target == "F32"


def plain_dtype(dtype: str, also: Sequence[str] = ()) -> str | None:
    """The dtype row that `--dtype` names unless it names a preset, None for "keep".

    Floats, AprQ4, AprQ8 and `also`, what the container supports besides. Raises UsageError for any other.
    """
    if dtype == "keep":
        return None
    name = find_dtype(dtype).name
    writable = ["F32", "F16", "BF16", "AprQ4", "AprQ8", *also]
    if name not in writable:
        raise UsageError(
            f"weights cannot be written as {name}",
            hint="one of: keep, " + ", ".join(writable).lower() + "; or a quantization preset (apr quantize --list)",
        )
    return name


# GGUF tensors of two or more dims that llama.cpp's kernels need in F32 whatever the file's dtype.
_ALWAYS_F32 = (
    "norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight",
    "altup_correct_coef.weight", "altup_predict_coef.weight",
    "token_types.weight", "ssm_conv1d.weight", "shortconv.conv.weight",
    "indexer.proj.weight", "hc_attn_fn.weight", "hc_ffn_fn.weight", "output_hc_fn.weight",
    "ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight",
    "time_mix_first.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "indexer.q_proj.weight", "indexer.k_proj.weight", "indexer_compressor_ape.weight",
    "indexer_compressor_gate.weight", "attn_compressor_ape.weight", "ffn_gate_tid2eid.weight",
    ".norm1.weight", ".norm2.weight",
)  # fmt: skip


def is_matrix(gguf_name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp keeps the GGUF tensor in the model's dtype: weights of two or more dims, few excepted."""
    return (
        len(shape) >= 2
        and gguf_name.endswith((".weight", ".lora_a", ".lora_b"))
        and not gguf_name.endswith(_ALWAYS_F32)
    )


def matrix_dtype(tensor: CanonicalTensor, dtype: str, gguf_name: str) -> str:
    """The dtype of `tensor` in an `.apr` for `dtype` (not a preset): AprQ4 and AprQ8 apply to matrices only.

    Vectors are F32, integers keep their dtype.
    """
    target = plain_dtype(dtype)
    if target is None or not is_float(tensor.dtype):
        return tensor.dtype
    if target in _FLOATS:
        return target
    return target if is_matrix(gguf_name, tensor.shape) else "F32"


def extra_dtype(tensor: CanonicalTensor, dtype: str) -> str:
    """The dtype of an extra `tensor` for `dtype` (not a preset): floats get a float dtype."""
    target = plain_dtype(dtype, EIGHT_BITS)
    return target if target in _FLOATS and is_float(tensor.dtype) else tensor.dtype


def is_float(dtype: str) -> bool:
    """Whether tensors of the dtype are floats, or blocks that decode to floats; 8-bit floats do not count."""
    return dtype in _FLOATS or DTYPES[dtype].kind != "plain"


def is_copy(a: CanonicalTensor, b: CanonicalTensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if (a.dtype, a.shape, a.scales) != (b.dtype, b.shape, b.scales):
        return False
    x, y = a.stored, b.stored
    if x is not None and y is not None and x.source is y.source and x.offset == y.offset:
        return True
    return all(p == q for p, q in zip(a.chunks(), b.chunks(), strict=True))
