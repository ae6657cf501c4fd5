"""Quantizes the weights of a Hugging Face folder for serving engines, and describes them in config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from aprfmt.arch import names
from aprfmt.canonical.merged_adapters import MergedTensor
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.packed import PackedTensor, packed_weights
from aprfmt.canonical.tensor import CanonicalTensor, Losses, is_matrix, scale_outs
from aprfmt.codecs import affine, mxfp4, nvfp4
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import INPUT_SCALE, SCALE, flat
from aprfmt.codecs.plain import EIGHT_BITS
from aprfmt.codecs.serving import NVFP4_MOST, SERVING, ServingScheme, equivalent_scheme, scheme_of
from aprfmt.codecs.split import SplitStream
from aprfmt.convert.options import Options
from aprfmt.convert.presets import EMBEDDINGS, OUTPUT
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats.imatrix import Imatrix, read_imatrix
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import Item, run_jobs
from aprfmt.io.source import Buffer, Source
from aprfmt.model import Tensor
from aprfmt.text import first_few, plural
from aprfmt.types import Array, Shape

_FUSED = re.compile(r"(.*\.)(?:(?:q|k|v)_proj|(gate|up)_proj)\.weight$")
"""Weights that engines fuse, which must share a tensor scale."""


def serving_scheme(name: str) -> ServingScheme | None:
    """The scheme called `name`, None for a dtype. Raises UsageError for 8-bit floats without scales."""
    word = name.lower().replace("_", "-")
    if word in ("f8-e4m3", "f8-e5m2"):
        raise UsageError(
            f"{name} in a folder needs scales: serving engines would load 8-bit floats without scales",
            hint="use --quantize fp8-dynamic, or write one file: -o model.safetensors",
        )
    if word == "nvfp4":
        raise UsageError(
            "nvfp4 needs scales of activations from calibration data", hint="use --quantize nvfp4a16: weights only"
        )
    return SERVING.get({"fp8": "fp8-dynamic", "mxfp4a16": "mxfp4", "mxfp8a16": "mxfp8"}.get(word, word))


@dataclass(slots=True)
class ScaleSearch:
    """Chooses scales for the least error, weighted by an importance matrix if given.

    Attributes:
        imatrix: the matrix.
        missing: weights without an entry.
    """

    imatrix: Imatrix | None = None
    missing: list[str] = field(default_factory=list)

    def weights(self, c: Canonical, tensor: CanonicalTensor) -> Array:
        """Column importances of a weight, float32 [columns]; ones without an entry.

        Raises RefusedError for an importance matrix of another model.
        """
        import numpy as np

        columns = tensor.shape[1]
        if self.imatrix is None:
            return np.ones(columns, "f4")
        match = next(iter(names.matches(c.arch, tensor.name)), None) if c.arch is not None else None
        gguf = names.gguf_name(c.arch, tensor.name, c.hparams) if c.arch is not None else None
        values = self.imatrix.entries.get(gguf or tensor.name)
        if values is None or match is None or match.row.columns:
            self.missing.append(tensor.name)
            return np.ones(columns, "f4")
        if match.expert is not None and values.size > columns:  # one entry for all experts of a layer
            values = values[match.expert * columns : (match.expert + 1) * columns]
        if values.size != columns:
            raise RefusedError(
                f"the importance matrix belongs to another model: {values.size} values instead of {columns}",
                path=self.imatrix.path,
                tensor=tensor.name,
            )
        mean = float(values.mean())
        return np.ascontiguousarray(values, "f4") / np.float32(mean) if mean > 0 else np.ones(columns, "f4")

    def check(self, n_weights: int, losses: Losses) -> None:
        """Warns about weights without an entry. Raises RefusedError if all `n_weights` lack one."""
        if self.imatrix is None or not self.missing:
            return
        if len(self.missing) == n_weights:
            raise RefusedError(
                f"the importance matrix belongs to another model: it has no entry for {self.missing[0]}",
                path=self.imatrix.path,
            )
        losses.warnings.append(f"the importance matrix has no entry for {first_few(self.missing)}")


def scale_search(options: Options, scheme: ServingScheme | None) -> ScaleSearch | None:
    """The search that `options` request. Raises UsageError if it does not apply to the scheme."""
    if not options.search:
        if options.imatrix is not None and scheme is not None:
            raise UsageError(f"--imatrix applies to {scheme.id} only with --search", hint="add --search")
        return None
    if scheme is None or not scheme.is_searched:
        fitting = ", ".join(name for name, row in SERVING.items() if row.is_searched)
        raise UsageError("--search applies to schemes of 4 bits in a folder", hint=f"--quantize one of: {fitting}")
    return ScaleSearch(read_imatrix(options.imatrix) if options.imatrix is not None else None)


def packed_modules(c: Canonical, options: Options) -> PackedModules:
    """The modules of a folder as `options` quantize them; those of a merged checkpoint get its scheme again."""
    if options.dtype != "keep":
        scheme = serving_scheme(options.dtype)
        return PackedModules(c, scheme, scale_search(options, scheme))
    bases = [s.base for t in c.tensors.values() for s in t.sources if isinstance(s, MergedTensor) and s.deltas]
    found = {equivalent_scheme(base.form.settings) for base in bases if isinstance(base, PackedTensor)}
    scheme = found.pop() if len(found) == 1 else None
    if scheme is None:
        return PackedModules(c, None, scale_search(options, None))
    # A search finds the scales of codes that an adapter hardly changes; those from the maximum may differ.
    return PackedModules(c, scheme, ScaleSearch() if scheme.is_searched or scheme.kind == "int" else None, again=True)


@dataclass(slots=True)
class PackedModules:
    """The modules of a folder whose weights are quantized.

    Attributes:
        c: the model.
        scheme: how they are quantized; without one, NVFP4 blocks keep their codes under ModelOpt's names.
        search: how scales are chosen; without one, they are those that the largest value gives.
        again: whether they were quantized already: only those that were are quantized, others stay floats.
        packed: names of their weights.
        left: names of matrices that stay floats.
        uneven: those of them whose rows the groups do not divide.
        inputs: whether NVFP4 modules have scales of their inputs, too.
    """

    c: Canonical
    scheme: ServingScheme | None = None
    search: ScaleSearch | None = None
    again: bool = False
    packed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    uneven: list[str] = field(default_factory=list)
    inputs: bool = False
    _overall: dict[str, Callable[[], float]] = field(default_factory=dict)

    def outs(self, tensor: CanonicalTensor, name: str, losses: Losses) -> list[OutTensor]:
        """The tensors that hold `tensor`, whose name in the folder is `name`, as it is quantized; [] where none do."""
        made: list[OutTensor] = []
        if len(tensor.shape) == 2 and name.endswith(".weight"):
            if self.scheme is not None:
                made = self._quantize_weight(self.scheme, tensor, name, losses)
            elif tensor.dtype == "NVFP4":
                self.inputs = self.inputs or INPUT_SCALE in tensor.scales
                scales = tensor.scales if SCALE in tensor.scales else {SCALE: (1.0,), **tensor.scales}
                made = [*_nvfp4(tensor, name), *scale_outs(scales, name, gguf=False)]
            (self.packed if made else self.left).append(name)
        return made

    def check(self, losses: Losses) -> None:
        """Warns about weights that stay floats. Raises RefusedError if all do."""
        if self.scheme is None:
            return
        what = f"groups of {self.scheme.group or 'whole rows'} do not divide the rows"
        if not self.packed:
            name = self.uneven[0] if self.uneven else None
            raise RefusedError(
                f"{self.scheme.id}: no weight can be quantized" + (f", as {what}" if name else ""),
                path=self.c.model.path,
                tensor=name,
                hint="choose another scheme: " + ", ".join(SERVING),
            )
        if self.uneven:
            losses.warnings.append(f"{plural(len(self.uneven), 'weight')} not quantized, as {what}: "
                                   f"{first_few(self.uneven)}")  # fmt: skip
        if self.again:
            decoded = self.c.packs.losses()
            losses.others = [sentence for sentence in losses.others if sentence not in decoded]
        if self.search is not None:
            self.search.check(len(self.packed), losses)
        stacks = [t.name for t in self.c.tensors.values() if len(t.shape) == 3 and t.shape[-1] > 4]
        if stacks:
            losses.warnings.append(f"{plural(len(stacks), 'stack')} of experts not quantized: {first_few(stacks)}")

    def settings(self) -> dict[str, object]:
        """The `quantization_config`."""
        # A tied head has no tensor, but is a Linear module.
        left = dict.fromkeys((*self.left, self.c.head))
        scheme, ignored = self.scheme, [name.removesuffix(".weight") for name in left]
        if scheme is None:
            numbers = {"num_bits": 4, "type": "float", "group_size": nvfp4.GROUP, "dynamic": False}
            group = {"weights": numbers, "targets": ["Linear"]}
            group |= {"input_activations": numbers} if self.inputs else {}
            algorithm = "NVFP4" if self.inputs else "W4A16_NVFP4"
            return {"quant_method": "modelopt", "quant_algo": algorithm, "config_groups": {"group_0": group},
                    "ignore": ignored}  # fmt: skip
        if scheme.format == "fp8":
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                    "weight_block_size": [128, 128], "modules_to_not_convert": ignored}  # fmt: skip
        inputs = dict(scheme.inputs) if scheme.inputs is not None else None
        entry = {"targets": ["Linear"], "weights": scheme.settings(), "input_activations": inputs,
                 "output_activations": None, "format": scheme.format}  # fmt: skip
        return {"quant_method": "compressed-tensors", "format": scheme.format, "quantization_status": "compressed",
                "config_groups": {"group_0": entry}, "ignore": ignored}  # fmt: skip

    def _quantize_weight(
        self, scheme: ServingScheme, tensor: CanonicalTensor, name: str, losses: Losses
    ) -> list[OutTensor]:
        """Codes and scales of a weight; [] if it stays in floats: embeddings, heads, extra tensors, uneven rows."""
        source = tensor.sources[0]
        packed = source.base if isinstance(source, MergedTensor) else source
        if not self._is_linear(tensor) or (self.again and not isinstance(packed, PackedTensor)):
            return []
        if isinstance(source, PackedTensor) and tensor.mapping is None and scheme_of(source.form.settings) is scheme:
            return _as_stored(source, name)
        if not scheme.divides(tensor.shape[1]):
            self.uneven.append(name)
            return []
        base = name.removesuffix("weight")
        shape = [_constant(f"{base}weight_shape", "I64", (2,), _int64(tensor.shape))]
        shape = shape if scheme.format == "pack-quantized" else []
        if (stream := _regrouped(scheme, tensor)) is not None:
            return [*_parts(scheme, base, tensor.shape, "F16", stream), *shape]
        if not self.again:
            self._check_source(tensor, scheme)
        return [*self._encoded(scheme, tensor, name, losses), *shape]

    def _is_linear(self, tensor: CanonicalTensor) -> bool:
        """Whether it is a matrix of the network that engines quantize: no embedding, head or extra tensor."""
        gguf = (names.gguf_name(self.c.arch, tensor.name, self.c.hparams) if self.c.arch else None) or tensor.name
        if gguf in (*EMBEDDINGS, OUTPUT) or tensor.name in (self.c.embedding, self.c.head):
            return False
        return is_matrix(gguf, tensor.shape) and tensor.name in self.c.tensors

    def _encoded(self, scheme: ServingScheme, tensor: CanonicalTensor, name: str, losses: Losses) -> list[OutTensor]:
        """Codes and scales computed from a weight's values."""
        columns, source, was = tensor.shape[1], tensor.sources[0], tensor.original_dtype
        merged = source if isinstance(source, MergedTensor) else None
        packed = merged.base if merged is not None else source
        dtype = tensor.dtype if tensor.dtype in ("BF16", "F16") else "F32"
        overall = self._tensor_scale(tensor, dtype) if scheme.has_tensor_scale else lambda: 1.0
        if self.again and isinstance(packed, PackedTensor) and tensor.mapping is None:
            was = packed.scheme
            overall = partial(_stored_scale, packed) if scheme.has_tensor_scale else overall
            packed = replace(packed, dtype="F32")  # a sum in bfloat16 would be rounded twice
            sources = packed if merged is None else replace(merged, base=packed, dtype="F32")
            tensor = replace(tensor, sources=(sources,))
        losses.changed[was, scheme.id] += 1
        weights = self.search.weights(self.c, tensor) if self.search is not None else None
        settings = PackedModules(self.c, scheme).settings()
        out = tensor.out(name, "F32")

        def make(data: Buffer) -> Sequence[Buffer]:
            import numpy as np

            values = np.frombuffer(data, "<f4").reshape(-1, columns)
            if not np.isfinite(values).all():
                raise _not_finite(name)
            parts = scheme.encode(scheme, values, dtype, overall(), weights)
            if merged is not None and merged.errors is not None:
                stored = _decoded(scheme, settings, parts, dtype, values.shape, overall())
                merged.errors.add(name, was, scheme.id, values, stored)
            return parts

        stream = SplitStream(
            scheme.rows * columns * 4, lambda unit: out.chunks(), partial(_sizes, scheme, dtype, columns), make
        )
        base = name.removesuffix("weight")
        made = _parts(scheme, base, tensor.shape, dtype, stream)
        if scheme.has_tensor_scale:
            made.append(_constant(f"{base}weight_global_scale", "F32", (1,), lambda: _float32(overall())))
        return made

    def _check_source(self, tensor: CanonicalTensor, scheme: ServingScheme) -> None:
        quantized = {w.name: w.scheme for w in self.c.packs.weights if w.scheme not in ("FP8", "NVFP4", "MXFP4")}
        was = next((quantized[source.name] for source in tensor.sources if source.name in quantized), None)
        own = tensor.original_dtype
        was = was or (own if DTYPES[own].is_quantized or own in EIGHT_BITS else None)
        if was is not None:
            raise RefusedError(
                f"{was} is already quantized; quantizing it again to {scheme.id} loses precision twice",
                path=self.c.model.path,
                tensor=tensor.name,
                hint="start from the unquantized model",
            )

    def _tensor_scale(self, tensor: CanonicalTensor, dtype: str) -> Callable[[], float]:
        """The tensor scale, shared by weights that engines fuse; computed on demand."""
        match = _FUSED.match(tensor.name)
        key = f"{match[1]}{match[2] is not None}" if match else tensor.name
        found = self._overall.get(key)
        if found is None:
            kin = [t for n, t in self.c.tensors.items() if (m := _FUSED.match(n)) and match
                   and (m[1], m[2] is None) == (match[1], match[2] is None)] or [tensor]  # fmt: skip
            found = self._overall[key] = cache(partial(_scale_over, kin, dtype))
        return found


def _scale_over(tensors: Sequence[CanonicalTensor], dtype: str) -> float:
    """Maps the largest value of the tensors to the largest of NVFP4."""
    import numpy as np

    most = np.float32(np.finfo("f4").tiny)
    for tensor in tensors:
        for chunk in run_jobs(tensor.out("", "F32").chunks()):
            largest = np.abs(np.frombuffer(chunk, "<f4")).max(initial=0)
            if not np.isfinite(largest):
                raise _not_finite(tensor.name)
            most = max(most, largest)
    with np.errstate(over="ignore"):  # as torch divides a number by a tensor: by its reciprocal
        reciprocal = affine.rounded(1 / np.array([most], "<f4"), dtype)
        scale = float(affine.rounded(reciprocal * np.float32(NVFP4_MOST), dtype)[0])
    return scale if np.isfinite(scale) else 1.0


def _not_finite(name: str) -> RefusedError:
    return RefusedError("the weight has NaN or infinite values", tensor=name, hint="apr validate shows them")


def _sizes(scheme: ServingScheme, dtype: str, columns: int, n_bytes: int) -> list[int]:
    rows = n_bytes // (4 * columns)
    return [DTYPES[part.dtype or dtype].n_bytes(part.shape(rows, columns)) for part in scheme.parts]


def _parts(scheme: ServingScheme, base: str, shape: Shape, dtype: str, stream: SplitStream) -> list[OutTensor]:
    rows, columns = shape
    parts = [(base + part.ending, part.dtype or dtype, part.shape(rows, columns)) for part in scheme.parts]
    return split_outs(stream, parts)


def _regrouped(scheme: ServingScheme, tensor: CanonicalTensor) -> SplitStream | None:
    """GGML blocks with the codes and scales of the scheme, repacked as its parts without rounding."""
    bits = {"Q4_0": 4, "Q8_0": 8}.get(tensor.dtype)
    if tensor.scales:
        return None
    if bits == scheme.bits and (scheme.kind, scheme.group, scheme.symmetric) == ("int", affine.BLOCK, True):
        stream = affine.regrouped(tensor.name, tensor.dtype, tensor.items)
        return SplitStream(
            stream.unit, stream.values, lambda n: stream.sizes(n)[:2], lambda data: stream.make(data)[:2]
        )
    if tensor.dtype == "MXFP4" and scheme.id == "mxfp4":
        sizes = (mxfp4.PIECE_BYTES, mxfp4.SCALE_BYTES)
        return SplitStream(
            mxfp4.ROW_BYTES, tensor.items, lambda n: [n // mxfp4.ROW_BYTES * size for size in sizes], mxfp4.unpack
        )
    return None


def _decoded(
    scheme: ServingScheme,
    settings: Mapping[str, object],
    parts: Sequence[Buffer],
    dtype: str,
    shape: Shape,
    tensor_scale: float,
) -> Array:
    """A few rows as a reader of the folder dequantizes them, 1-d."""
    stored = [(part.ending, part.dtype or dtype, part.shape(*shape), data)
              for part, data in zip(scheme.parts, parts, strict=True)]  # fmt: skip
    if scheme.format == "pack-quantized":
        stored.append(("weight_shape", "I64", (2,), _int64(shape)()))
    if scheme.has_tensor_scale:
        stored.append(("weight_global_scale", "F32", (1,), _float32(tensor_scale)))
    tensors = {}
    for ending, kind, form, data in stored:
        source = Source.from_bytes(memoryview(data).cast("B"), ending)
        tensors[f".{ending}"] = Tensor(f".{ending}", kind, form, 0, source.size, source)
    (weight,) = packed_weights(tensors, {"quantization_config": settings})
    return weight.decoded.between(0, shape[0] * shape[1])


def _as_stored(weight: PackedTensor, name: str) -> list[OutTensor]:
    """The tensors of a weight that already has the scheme, unchanged."""
    base, own = weight.name.removesuffix("weight"), name.removesuffix("weight")
    return [
        OutTensor(own + part.name.removeprefix(base), part.dtype, part.shape, part.n_bytes, partial(_whole, part))
        for part in weight.sources
    ]


def _whole(part: Tensor) -> Iterable[Item]:
    return CanonicalTensor(part.name, (part,)).produced.items(1)


def _stored_scale(weight: PackedTensor) -> float:
    """The stored scale, which engines expect to be equal in fused weights; it divides."""
    import numpy as np

    ending = next(e for e in (".weight_global_scale", ".weight_scale_2") if e in weight.form.endings)
    source = weight.sources[weight.form.endings.index(ending)]
    value = np.float32(flat(source)[0])
    return float(value if ending == ".weight_global_scale" else np.float32(1) / value)


def _constant(name: str, dtype: str, shape: Shape, make: Callable[[], bytes]) -> OutTensor:
    return OutTensor(name, dtype, shape, DTYPES[dtype].n_bytes(shape), lambda: [make()])


def _int64(values: Shape) -> Callable[[], bytes]:
    import numpy as np

    return lambda: np.array(values, "<i8").tobytes()


def _float32(value: float) -> bytes:
    import numpy as np

    return np.float32(value).tobytes()


def _nvfp4(tensor: CanonicalTensor, name: str) -> list[OutTensor]:
    unit, (rows, columns) = nvfp4.BLOCK_BYTES, tensor.shape
    stream = SplitStream(
        unit,
        tensor.items,
        lambda n_bytes: (n_bytes // unit * nvfp4.CODES, n_bytes // unit * nvfp4.SCALES),
        nvfp4.unpack,
    )
    parts = ((name, "U8", (rows, columns // 2)), (f"{name}_scale", "F8_E4M3", (rows, columns // nvfp4.GROUP)))
    return split_outs(stream, parts)


def split_outs(stream: SplitStream, parts: Sequence[tuple[str, str, Shape]]) -> list[OutTensor]:
    """The parts of a stream (name, dtype, shape) as tensors of a file."""
    outs = [
        OutTensor(name, dtype, shape, DTYPES[dtype].n_bytes(shape), partial(stream.items, i))
        for i, (name, dtype, shape) in enumerate(parts)
    ]
    kept = sum(out.n_bytes for out in outs[1:])
    return [
        OutTensor(out.name, out.dtype, out.shape, out.n_bytes, out.chunks, kept if i == 0 else out.n_bytes)
        for i, out in enumerate(outs)
    ]
