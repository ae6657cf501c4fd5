"""Quantizes the weights of a Hugging Face folder for serving engines, and describes them in config.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from aprfmt.arch import names
from aprfmt.canonical.merged_adapters import MergedTensor
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.packed import HF_QUANT, BlockChange, PackedTensor, change_sentences, packed_weights
from aprfmt.canonical.tensor import CanonicalTensor, Losses, is_matrix, scale_outs
from aprfmt.codecs import affine, mxfp4, nvfp4, plain
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import INPUT_SCALE, SCALE, PackedBlocks, flat
from aprfmt.codecs.plain import EIGHT_BITS
from aprfmt.codecs.serving import (
    LAYOUTS,
    NVFP4_MOST,
    SERVING,
    ServingScheme,
    find_scheme,
    in_layout,
    not_finite,
    stored_scheme,
)
from aprfmt.codecs.split import Split, SplitStream, TransposedStream
from aprfmt.codecs.stream import STEP, blocks
from aprfmt.convert.options import Options
from aprfmt.convert.presets import EMBEDDINGS, OUTPUT
from aprfmt.convert.relaid_codes import nvfp4_blocks, relaid
from aprfmt.convert.scale_search import ScaleSearch, scale_search
from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import Item, Job, run_jobs
from aprfmt.io.source import Buffer, Source
from aprfmt.model import Tensor
from aprfmt.text import first_few, plural
from aprfmt.types import Array, Shape

_FUSED = re.compile(r"(.*\.)(?:(?:q|k|v)_proj|(gate_proj|up_proj|w1|w3))\.weight$")
"""Weights that engines fuse, which must share a tensor scale."""

FOLDERS = ("hf", *LAYOUTS)
"""Formats whose folders may hold quantized weights for serving engines."""
_DEFAULTS = {"gptq": "w4a16", "awq": "w4a16-asym", "modelopt": "nvfp4a16"}
"""The scheme of a layout, unless the weights have one or --quantize names one."""
_OF_BLOCKS = {"Q4_0": "w4a16-g32", "Q4_1": "w4a16-g32-asym", "Q8_0": "w8a16-g32", "NVFP4": "nvfp4a16"}
"""The schemes of the same codes."""


def serving_scheme(name: str, layout: str = "hf") -> ServingScheme | None:
    """The scheme called `name` in a layout, None for a dtype.

    Raises UsageError for 8-bit floats without scales, and for a scheme or dtype that the layout does not have.
    """
    scheme = _named_scheme(name)
    if layout == "hf" or (scheme is None and name == "keep"):
        return scheme
    found = in_layout(scheme.id, layout) if scheme is not None else None
    if found is None:
        fitting = ", ".join(known for known in SERVING if in_layout(known, layout) is not None)
        raise UsageError(f"the format {layout} has no {name} weights", hint=f"--quantize one of: {fitting}")
    return found


def _named_scheme(name: str) -> ServingScheme | None:
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
    return find_scheme(name)


def packed_modules(c: Canonical, options: Options) -> PackedModules:
    """The modules of a folder as `options` quantize them; those of a merged checkpoint get its scheme again."""
    layout = (options.format or "hf").lower()
    layout = layout if layout in LAYOUTS else "hf"
    sources = [source for t in c.tensors.values() for source in t.sources]
    merged = [s for s in sources if isinstance(s, MergedTensor)]
    # An adapter of embeddings or the head alone changes no quantized weight.
    bases = [s.base for s in merged if s.deltas and isinstance(s.base, PackedTensor)] or (sources if merged else [])
    found = {stored_scheme(base.form.settings) for base in bases if isinstance(base, PackedTensor)}
    scheme = found.pop() if len(found) == 1 else None
    if options.dtype != "keep" or (layout != "hf" and scheme is None):
        scheme = serving_scheme(options.dtype if options.dtype != "keep" else _own_scheme(c, layout), layout)
        return PackedModules(c, scheme, scale_search(options, scheme))
    if scheme is not None and layout != "hf":
        scheme = serving_scheme(scheme.id, layout)
    if scheme is None:
        return PackedModules(c, None, scale_search(options, None))
    # A search finds the scales of codes that an adapter hardly changes; those from the maximum may differ.
    return PackedModules(c, scheme, ScaleSearch() if scheme.is_searched or scheme.kind == "int" else None, again=True)


def _own_scheme(c: Canonical, layout: str) -> str:
    """The scheme of a layout that most weights have already, else its default."""
    found: Counter[str] = Counter()
    for tensor in c.tensors.values():
        source = tensor.sources[0]
        own = stored_scheme(source.form.settings) if isinstance(source, PackedTensor) else None
        name = own.id if own is not None else _OF_BLOCKS.get(tensor.dtype)
        if name is not None and in_layout(name, layout) is not None:
            found[name] += 1
    return found.most_common(1)[0][0] if found else _DEFAULTS[layout]


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
        uneven: those of them whose rows the groups do not divide, with their shapes.
        inputs: whether NVFP4 modules have scales of their inputs, too.
        relaid: names of the quantized weights that keep their codes.
    """

    c: Canonical
    scheme: ServingScheme | None = None
    search: ScaleSearch | None = None
    again: bool = False
    packed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    uneven: dict[str, Shape] = field(default_factory=dict)
    inputs: bool = False
    relaid: set[str] = field(default_factory=set)
    _overall: dict[str, Callable[[], float]] = field(default_factory=dict)

    def outs(self, tensor: CanonicalTensor, name: str, losses: Losses) -> list[OutTensor]:
        """The tensors that hold `tensor`, whose name in the folder is `name`, as it is quantized; [] where none do."""
        made: list[OutTensor] = []
        if len(tensor.shape) == 2 and name.endswith(".weight"):
            if self.scheme is not None:
                made = self._quantize_weight(self.scheme, tensor, name, losses)
            elif tensor.dtype == "NVFP4":
                made = self._with_codes_of(tensor, name, losses)
            (self.packed if made else self.left).append(name)
        return made

    def check(self, losses: Losses) -> None:
        """Warns about weights that stay floats. Raises RefusedError if all do."""
        if self.scheme is None:
            return
        what = f"groups of {self.scheme.group or 'whole rows'} do not divide the rows"
        if self.scheme.is_transposed:
            what += f", or words of {self.scheme.rows} values the columns"
        if not self.packed:
            name = next(iter(self.uneven), None)
            layout = self.scheme.format if self.scheme.format in LAYOUTS else None
            known = [s if layout is None else in_layout(s.id, layout) for s in SERVING.values()]
            fitting = [s.id for s in known if s is not None and (name is None or s.divides(*self.uneven[name]))]
            raise RefusedError(
                f"{self.scheme.id}: no weight can be quantized" + (f", as {what}" if name else ""),
                path=self.c.model.path,
                tensor=name,
                hint=f"choose another scheme: {', '.join(fitting)}" if fitting else "no scheme divides them",
            )
        if self.uneven:
            losses.warnings.append(f"{plural(len(self.uneven), 'weight')} not quantized, as {what}: "
                                   f"{first_few(self.uneven)}")  # fmt: skip
        if self.again or self.relaid:
            decoded = self.c.packs.losses()
            losses.others = [sentence for sentence in losses.others if sentence not in decoded]
            weights = () if self.again else [w for w in self.c.packs.weights if w.name not in self.relaid]
            losses.others += replace(self.c.packs, weights=weights).losses()
        if self.search is not None:
            self.search.check(self.c, len(self.packed), losses)
        losses.others += change_sentences(losses.changes)
        stacks = [t.name for t in self.c.tensors.values() if len(t.shape) == 3 and t.shape[-1] > 4]
        if stacks:
            losses.warnings.append(f"{plural(len(stacks), 'stack')} of experts not quantized: {first_few(stacks)}")

    def settings(self) -> dict[str, object]:
        """The `quantization_config`."""
        # A tied head has no tensor, but is a Linear module.
        left = dict.fromkeys((*self.left, self.c.head))
        scheme, ignored = self.scheme, [name.removesuffix(".weight") for name in left]
        if scheme is None or scheme.format == "modelopt":
            return self._modelopt_settings(ignored)
        if scheme.format == "fp8":
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                    "weight_block_size": [128, 128], "modules_to_not_convert": ignored}  # fmt: skip
        if scheme.format == "awq":
            return {"quant_method": "awq", "version": "gemm", "bits": scheme.bits, "group_size": scheme.group,
                    "zero_point": True, "modules_to_not_convert": ignored}  # fmt: skip
        if scheme.format == "gptq":
            # Engines take each linear layer but the head for a quantized one, unless a rule excludes it.
            rules: dict[str, object] = {f"-:^{re.escape(name)}$": {} for name in ignored if name not in self._ends()}
            return {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": scheme.bits,
                    "group_size": scheme.group or -1, "sym": scheme.symmetric, "desc_act": False, "lm_head": False,
                    "pack_dtype": "int32", **({"dynamic": rules} if rules else {})}  # fmt: skip
        inputs = dict(scheme.inputs) if scheme.inputs is not None else None
        entry = {"targets": ["Linear"], "weights": scheme.settings(), "input_activations": inputs,
                 "output_activations": None, "format": scheme.format}  # fmt: skip
        return {"quant_method": "compressed-tensors", "format": scheme.format, "quantization_status": "compressed",
                "config_groups": {"group_0": entry}, "ignore": ignored}  # fmt: skip

    def files(self) -> dict[str, Mapping[str, object]]:
        """Files beside config.json that say the same: ModelOpt's, which some engines read instead."""
        settings = self.settings()
        if settings["quant_method"] != "modelopt":
            return {}
        quantization = {"quant_algo": settings["quant_algo"], "kv_cache_quant_algo": None,
                        "group_size": nvfp4.GROUP, "exclude_modules": settings["ignore"]}  # fmt: skip
        return {HF_QUANT: {"producer": {"name": "modelopt"}, "quantization": quantization}}

    def _ends(self) -> tuple[str, ...]:
        """The modules of embeddings and head."""
        return tuple(str(name).removesuffix(".weight") for name in (self.c.embedding, self.c.head))

    def _modelopt_settings(self, ignored: Sequence[str]) -> dict[str, object]:
        numbers = {"num_bits": 4, "type": "float", "group_size": nvfp4.GROUP, "dynamic": False}
        group: dict[str, object] = {"weights": numbers, "targets": ["Linear"]}
        group |= {"input_activations": numbers} if self.inputs else {}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4" if self.inputs else "W4A16_NVFP4",
                "producer": {"name": "modelopt"}, "config_groups": {"group_0": group}, "ignore": ignored}  # fmt: skip

    def _quantize_weight(
        self, scheme: ServingScheme, tensor: CanonicalTensor, name: str, losses: Losses
    ) -> list[OutTensor]:
        """Codes and scales of a weight; [] if it stays in floats: embeddings, heads, extra tensors, uneven rows."""
        source = tensor.sources[0]
        packed = source.base if isinstance(source, MergedTensor) else source
        if not self._is_linear(tensor) or (self.again and not isinstance(packed, PackedTensor)):
            return []
        unchanged = tensor.mapping is None and not scheme.is_transposed
        if isinstance(source, PackedTensor) and unchanged and stored_scheme(source.form.settings) is scheme:
            self.relaid.add(source.name)
            return _as_stored(source, name)
        if not scheme.divides(*tensor.shape):
            self.uneven[name] = tensor.shape
            return []
        made = self._with_codes_of(tensor, name, losses) if scheme.has_tensor_scale else []
        if not made and (codes := relaid(scheme, tensor)) is not None:
            was = source.scheme if isinstance(source, PackedTensor) else tensor.dtype
            self._note_change(was, codes.change, name, losses)
            stream = _stream(scheme, tensor.shape, codes.unit, codes.row_numbers, codes.parts, codes.dtype)
            made = _parts(scheme, name, tensor.shape, codes.dtype, stream)
        if not made and tensor.dtype == "MXFP4" and scheme.id == "mxfp4":
            made = _parts(scheme, name, tensor.shape, "F16", _mxfp4_stream(tensor))
        if made:
            self.relaid.update(source.name for source in tensor.sources)
            return made
        if not self.again:
            self._check_source(tensor, scheme)
        return self._encoded(scheme, tensor, name, losses)

    def _with_codes_of(self, tensor: CanonicalTensor, name: str, losses: Losses) -> list[OutTensor]:
        """The parts of a weight of NVFP4 blocks, codes and scales unchanged; [] for another one."""
        import numpy as np

        found = nvfp4_blocks(tensor)
        if found is None or len(found.scales[SCALE]) != 1:
            return []
        self.inputs = self.inputs or INPUT_SCALE in found.scales
        change = found.change
        if self.scheme is None or self.scheme.format == "modelopt":
            scales = [*scale_outs(found.scales, name, gguf=False)]
        else:
            scale = found.scales[SCALE][0]
            change = abs(float(np.float32(1 / scale)) * scale - 1)
            scales = _scale_of_tensor(self.scheme, name, lambda: 1 / scale)
        self._note_change("NVFP4", change, name, losses)
        return [*_nvfp4(found, tensor.shape, name, self.scheme), *scales]

    def _note_change(self, was: str, change: float, name: str, losses: Losses) -> None:
        """Notes the relative change of a weight whose codes are kept and whose scales are rounded."""
        if change:
            to = self.scheme.id if self.scheme is not None else was
            losses.changes.append(
                BlockChange({"tensor": name, "from": was, "to": to, "largest_relative_change": change})
            )

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
        # ModelOpt computes scales in float32, compressed-tensors in the dtype of the weight.
        dtype = tensor.dtype if tensor.dtype in ("BF16", "F16") and scheme.format != "modelopt" else "F32"
        overall = self._tensor_scale(tensor, dtype) if scheme.has_tensor_scale else lambda: 1.0
        if self.again and isinstance(packed, PackedTensor) and tensor.mapping is None:
            was = packed.scheme
            overall = partial(_stored_scale, packed) if scheme.has_tensor_scale else overall
            packed = replace(packed, dtype="F32")  # a sum in bfloat16 would be rounded twice
            sources = packed if merged is None else replace(merged, base=packed, dtype="F32")
            tensor = replace(tensor, sources=(sources,))
        losses.changed[was, scheme.id] += 1
        importance = self.search.importance(self.c, tensor) if self.search is not None else lambda: None
        settings = PackedModules(self.c, scheme).settings()
        stored = tensor.dtype if tensor.dtype in ("BF16", "F16") else "F32"
        row_bytes = DTYPES[stored].n_bytes((columns,))

        def encode(data: Buffer) -> Sequence[Buffer]:
            import numpy as np

            values = plain.encode("F32", plain.decode(stored, data)).reshape(-1, columns)
            if not np.isfinite(values).all():
                raise not_finite(name)
            parts = scheme.encode(scheme, values, dtype, overall(), importance())
            if merged is not None and merged.errors is not None:
                stored_values = _decoded(scheme, settings, parts, dtype, values.shape, overall())
                merged.errors.add(name, was, scheme.id, values, stored_values)
            return parts

        def make(data: Buffer) -> Sequence[Buffer]:
            import numpy as np

            if stored == dtype == "BF16" and scheme.encode_bf16 is not None and merged is None:
                return scheme.encode_bf16(np.frombuffer(data, "<u2").reshape(-1, columns))
            unit = scheme.rows * row_bytes
            n_pieces = -(-len(data) * columns // row_bytes // STEP)
            pieces = blocks(len(data), -(-len(data) // unit // n_pieces) * unit)
            made = [encode(memoryview(data)[piece]) for piece in pieces]
            lines = [part.shape(1, columns)[0] if part.transposed else 1 for part in scheme.parts]
            return made[0] if len(made) == 1 else [*map(_joined, lines, zip(*made, strict=True))]

        items = tensor.items if stored == tensor.dtype else lambda unit: tensor.out(name, stored).chunks()
        stream = _stream(scheme, tensor.shape, scheme.rows * row_bytes, items, make, dtype)
        made = _parts(scheme, name, tensor.shape, dtype, stream)
        return [*made, *(_scale_of_tensor(scheme, name, overall) if scheme.has_tensor_scale else ())]

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
                hint="start from the unquantized model, or decode this one first: apr convert FILE -o FOLDER "
                "--format hf --dtype bf16",
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
                raise not_finite(tensor.name)
            most = max(most, largest)
    with np.errstate(over="ignore"):  # as torch divides a number by a tensor: by its reciprocal
        reciprocal = affine.rounded(1 / np.array([most], "<f4"), dtype)
        scale = float(affine.rounded(reciprocal * np.float32(NVFP4_MOST), dtype)[0])
    return scale if np.isfinite(scale) else 1.0


def _joined(lines: int, pieces: Sequence[Buffer]) -> Buffer:
    """Pieces of a part side by side, each of that many lines."""
    import numpy as np

    return np.concatenate([np.frombuffer(piece, "u1").reshape(lines, -1) for piece in pieces], axis=1).reshape(-1).data


def _stream(
    scheme: ServingScheme,
    shape: Shape,
    unit: int,
    values: Callable[[int], Iterable[Item]],
    make: Callable[[Buffer], Sequence[Buffer]],
    dtype: str,
) -> Split:
    """Splits a weight into the tensors of `scheme`; `make` computes them for `unit` bytes, `scheme.rows` rows."""

    def sizes(n_bytes: int) -> list[int]:
        rows = n_bytes * scheme.rows // unit
        return [DTYPES[part.dtype or dtype].n_bytes(part.shape(rows, shape[1])) for part in scheme.parts]

    if not scheme.is_transposed:
        return SplitStream(unit, values, sizes, make)
    shapes = [part.shape(*shape) for part in scheme.parts]
    lines = [(n, DTYPES[part.dtype].n_bytes((across,))) for part, (n, across) in zip(scheme.parts, shapes, strict=True)]
    return TransposedStream(unit, values, lines, make)


def _parts(scheme: ServingScheme, name: str, shape: Shape, dtype: str, stream: Split) -> list[OutTensor]:
    """The parts of a weight, and what has its shape or the order of its columns."""
    base = name.removesuffix("weight")
    parts = [(base + part.ending, part.dtype or dtype, part.shape(*shape)) for part in scheme.parts]
    made = split_outs(stream, parts)
    if scheme.format == "pack-quantized":
        made.append(_constant(f"{base}weight_shape", "I64", (2,), lambda: _integers("<i8", shape)))
    if scheme.format == "gptq":
        group = scheme.group or shape[1]
        index = lambda: _integers("<i4", (column // group for column in range(shape[1])))  # noqa: E731
        made.append(_constant(f"{base}g_idx", "I32", (shape[1],), index))
    return made


def _scale_of_tensor(scheme: ServingScheme, name: str, overall: Callable[[], float]) -> list[OutTensor]:
    """What multiplies, or of compressed-tensors divides, the values of a weight; `overall` divides."""
    base = name.removesuffix("weight")
    if scheme.format == "modelopt":
        return [_constant(f"{base}weight_scale_2", "F32", (), lambda: _float32(1 / overall()))]
    return [_constant(f"{base}weight_global_scale", "F32", (1,), lambda: _float32(overall()))]


def _mxfp4_stream(tensor: CanonicalTensor) -> SplitStream:
    sizes = (mxfp4.PIECE_BYTES, mxfp4.SCALE_BYTES)
    return SplitStream(
        mxfp4.ROW_BYTES, tensor.items, lambda n: [n // mxfp4.ROW_BYTES * size for size in sizes], mxfp4.unpack
    )


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
        stored.append(("weight_shape", "I64", (2,), _integers("<i8", shape)))
    if scheme.has_tensor_scale:
        (scale,) = _scale_of_tensor(scheme, "weight", lambda: tensor_scale)
        stored.append((scale.name, "F32", (1,), scale.data()))
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


def _integers(dtype: str, values: Iterable[int]) -> bytes:
    import numpy as np

    return np.array([*values], dtype).tobytes()


def _float32(value: float) -> bytes:
    import numpy as np

    return np.float32(value).tobytes()


def _nvfp4(blocks: PackedBlocks, shape: Shape, name: str, scheme: ServingScheme | None) -> list[OutTensor]:
    """The codes and scales of NVFP4 blocks, under ModelOpt's names without a scheme."""
    unit, (rows, columns) = nvfp4.BLOCK_BYTES, shape
    n_blocks, step = rows * columns // nvfp4.CODES // 2, STEP // nvfp4.CODES // 2

    def pieces(unit: int) -> Iterator[Job]:
        for start in range(0, n_blocks, step):
            stop = min(start + step, n_blocks)
            yield Job((stop - start) * unit, partial(blocks.between, start, stop))

    stream = SplitStream(
        unit, pieces, lambda n_bytes: (n_bytes // unit * nvfp4.CODES, n_bytes // unit * nvfp4.SCALES), nvfp4.unpack
    )
    codes = name if scheme is None else name.removesuffix("weight") + scheme.parts[0].ending
    parts = ((codes, "U8", (rows, columns // 2)), (f"{name}_scale", "F8_E4M3", (rows, columns // nvfp4.GROUP)))
    return split_outs(stream, parts)


def split_outs(stream: Split, parts: Sequence[tuple[str, str, Shape]]) -> list[OutTensor]:
    """The parts of a stream (name, dtype, shape) as tensors of a file."""
    outs = [
        OutTensor(name, dtype, shape, DTYPES[dtype].n_bytes(shape), partial(stream.items, i))
        for i, (name, dtype, shape) in enumerate(parts)
    ]
    whole = isinstance(stream, TransposedStream)
    kept = sum(out.n_bytes for out in outs[0 if whole else 1 :])
    return [
        OutTensor(out.name, out.dtype, out.shape, out.n_bytes, out.chunks, kept if i == 0 or whole else out.n_bytes)
        for i, out in enumerate(outs)
    ]
