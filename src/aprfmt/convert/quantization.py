"""Resolve `--dtype PRESET` and its options into a dtype for each tensor of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from aprfmt.arch import hparams as hp
from aprfmt.arch import names, scopes
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link
from aprfmt.arch.loaders import needs_head
from aprfmt.arch.row import Architecture
from aprfmt.canonical.model import Canonical, from_gguf
from aprfmt.canonical.sides import links
from aprfmt.canonical.tensor import CanonicalTensor, Losses, is_float
from aprfmt.codecs import ggml
from aprfmt.codecs.dtypes import DTYPES, find_dtype
from aprfmt.codecs.plain import EIGHT_BITS
from aprfmt.codecs.serving import SERVING, find_scheme
from aprfmt.convert.options import PRESET_OPTIONS, Options
from aprfmt.convert.presets import (
    EMBEDDINGS,
    OUTPUT,
    PRESETS,
    PresetContext,
    QuantizationPreset,
    QuantizeOverrides,
    choose,
    counterpart,
    find_preset,
    needs_weights,
    uniform_preset,
    unknown,
    unknown_scheme,
)
from aprfmt.convert.serving import FOLDERS, serving_scheme
from aprfmt.errors import AprError, RefusedError, UsageError
from aprfmt.formats.imatrix import Imatrix, read_imatrix
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.text import first_few, plural
from aprfmt.types import Array, Shape

# Values of --dtype that are not presets.
PLAIN = ("keep", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "aprq4", "aprq8")

_ONLY_WITH_PRESET = ("imatrix", "tensor_type", "output_type", "embedding_type", "pure", "leave_output")


@dataclass(frozen=True, slots=True)
class Recoding:
    """Target dtype of a tensor; `weights` are float32 [matrices * columns], column importances."""

    dtype: str
    weights: Array | None = None


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor that a preset quantizes.

    Attributes:
        tensor: its values.
        target: its type, with column importances.
        is_fixed: whether an option of the user sets that type.
        counts: for a stack of experts, tokens routed to each [matrices]; None: equal.
    """

    tensor: CanonicalTensor
    target: Recoding
    is_fixed: bool
    counts: Array | None = None


Observer = Callable[[str | None, Sequence[QuantizedTensor]], None]
"""Called during planning with the architecture and the tensors of a GGUF that are quantized."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A preset with its options; calls `observe` with what it quantizes."""

    preset: QuantizationPreset
    overrides: QuantizeOverrides = field(default_factory=QuantizeOverrides)
    allow_requantize: bool = False
    imatrix: Imatrix | None = None
    observe: Observer | None = None

    def targets(self, c: Canonical, tensors: Sequence[CanonicalTensor], losses: Losses) -> dict[str, Recoding]:
        """The target of each of the `tensors` of a GGUF for `c`, by name; unchanged tensors are absent.

        Raises RefusedError (a quantized source, importance weights missing or of another model) and
        MissingDependencyError (a dtype that only llama.cpp's library can encode).
        """
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        chosen = choose(shapes, self.preset, network_of(c), self.overrides)
        quantizable = [t for t in tensors if t.name in chosen and (is_float(t.dtype) or t.dtype in EIGHT_BITS)]
        changing = [t for t in quantizable if t.is_decoded or t.dtype != chosen[t.name]]
        losses.warnings += self._remarks(shapes, chosen)
        if not self.allow_requantize:
            losses.warnings += _check_sources(c, changing, chosen)
        weights = self._weights(c, changing, chosen, losses)
        for dtype in sorted({chosen[t.name] for t in changing}):
            if DTYPES[dtype].kind == "ggml" and not ggml.encodable(dtype):
                raise ggml.missing_library(dtype, "encode")
        targets = {t.name: Recoding(chosen[t.name], weights.get(t.name)) for t in quantizable}
        if self.observe is not None:
            counts = self.imatrix.counts if self.imatrix is not None else {}
            found = [
                QuantizedTensor(t, targets[t.name], self.overrides.is_fixed(t.name), counts.get(t.name))
                for t in quantizable
            ]
            self.observe(network_of(c).architecture or None, found)
        return targets

    def _remarks(self, shapes: Mapping[str, Shape], chosen: Mapping[str, str]) -> Iterator[str]:
        """Warnings: overrides without effect, rows that the preset's blocks do not divide."""
        for pattern, dtype in self.overrides.patterns:
            if not any(pattern.search(name) for name in chosen):
                yield f"--tensor-type {pattern.pattern}={dtype.lower()} matches no tensor that the preset quantizes"
        if not chosen:
            yield "the model has no matrix to quantize"
        block = DTYPES[self.preset.dtype].block
        odd = [name for name in chosen if shapes[name][-1] % block and DTYPES[chosen[name]].block < block]
        if odd:
            dtypes = ", ".join(sorted({chosen[name] for name in odd}))
            yield f"{plural(len(odd), 'tensor')} with rows that are not a multiple of {block}: stored as {dtypes}"

    def _weights(
        self, c: Canonical, changing: Sequence[CanonicalTensor], chosen: Mapping[str, str], losses: Losses
    ) -> dict[str, Array]:
        """Importance weights by tensor. Raises RefusedError if a tensor that needs them lacks them."""
        found: dict[str, Array] = {}
        missing = []
        entries = {} if self.imatrix is None else self.imatrix.entries
        for name, shape in ((tensor.name, tensor.shape) for tensor in changing):
            values, expected = entries.get(name), shape[-1] * n_matrices(shape)
            if values is not None and values.size == expected:
                found[name] = values
            elif values is not None and name not in EMBEDDINGS and self.imatrix is not None:
                raise self.imatrix.misfit(f"{values.size} values instead of {expected}", c.model.path, name)
            elif needs_weights(name, chosen[name], self.preset):
                message, hint = ("needs an importance matrix", "add one with --imatrix, or choose a larger type")
                if self.imatrix is not None:
                    message = "needs importance weights, and the importance matrix has none for this tensor"
                    hint = f"choose another dtype: --tensor-type {name.replace('.', '[.]')}=q4_k"
                raise RefusedError(f"{chosen[name]} {message}", path=c.model.path, tensor=name, hint=hint)
            elif name not in (*EMBEDDINGS, OUTPUT):
                missing.append(name)
        if self.imatrix is not None and entries and missing:
            if not found:
                why = f"it has no entry for {missing[0]}, but one for {next(iter(entries))}"
                raise self.imatrix.misfit(why, c.model.path)
            losses.warnings.append(f"the importance matrix has no entry for {first_few(missing)}")
        return found


_RELEASED = ("FP8", "NVFP4", "MXFP4")
"""Quantization methods in which models are trained or released, so float weights do not exist."""


def _check_sources(c: Canonical, changing: Sequence[CanonicalTensor], chosen: Mapping[str, str]) -> list[str]:
    """Warnings on quantized sources. Raises RefusedError for weights that were quantized from floats."""
    packed = {weight.name: weight.scheme for weight in c.packs.weights} if c.packs.decoded else {}
    released: set[str] = set()
    for tensor in changing:
        schemes = [packed[source.name] for source in tensor.sources if source.name in packed]
        if tensor.mapping is not None and tensor.mapping.pack and not tensor.inverse:
            schemes.append(tensor.dtype)  # packed by its publisher as in a GGUF
        if schemes and set(schemes) <= set(_RELEASED):
            released |= set(schemes)
            continue
        dtypes = (d for d in (tensor.sources[0].dtype, tensor.dtype) if DTYPES[d].is_quantized or d in EIGHT_BITS)
        was = next(iter([*schemes, *dtypes]), None)
        if was is not None:
            raise RefusedError(
                f"{was} is already quantized; requantizing it to {chosen[tensor.name]} loses precision twice",
                path=c.model.path,
                tensor=tensor.name,
                hint="start from the unquantized model, or add --allow-requantize",
            )
    return [f"the model was released in {name}: its weights are decoded before quantizing" for name in sorted(released)]


def n_matrices(shape: Shape) -> int:
    """Number of matrices stacked in a tensor of the shape."""
    return shape[-3] if len(shape) > 2 else 1


def network_of(c: Canonical) -> PresetContext:
    """The properties of the network that a preset's rules depend on."""
    drafts = _first(c.hparams.extra.get(scopes.DRAFTS.hf[0])) if from_gguf(c) else 0
    if c.model.convention == "gguf":
        return _context(str(c.model.metadata.get("general.architecture", "")), c.model.metadata, c.hparams, drafts)
    if c.arch is not None:
        return context_of(c.arch, c.hparams, drafts)
    return _context(c.hparams.architecture or "", {}, c.hparams, drafts)


def context_of(row: Architecture, h: Hyperparams, drafts: int = 0) -> PresetContext:
    """`network_of` for a network of the architecture `row`; `drafts`: MTP layers that none of its keys counts."""
    kv = {key: value for key, _, value in hp.to_gguf(h, row, complete=False, misfits=True)}
    return _context(row.gguf, kv, h, drafts)


def _context(word: str, kv: Mapping[str, object], h: Hyperparams, drafts: int) -> PresetContext:
    heads = _first(kv.get(f"{word}.attention.head_count", h.num_heads))
    n_layers = _first(kv.get(f"{word}.block_count", h.num_layers))
    return PresetContext(
        architecture=word,
        n_layers=n_layers + (drafts if f"{word}.{scopes.DRAFTS.gguf}" not in kv else 0),
        n_heads=heads,
        n_kv_heads=_first(kv.get(f"{word}.attention.head_count_kv", heads)),
        n_experts=_first(kv.get(f"{word}.expert_count", 0)),
    )


def _first(value: object) -> int:
    """The number, or the first of a per-layer list."""
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if type(value) is int else 0


def preset_of(c: Canonical, tensors: Sequence[OutTensor]) -> QuantizationPreset | None:
    """The first preset that yields exactly the types of the `tensors` of a GGUF, or None."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    types = {tensor.name: tensor.dtype for tensor in tensors}
    network = network_of(c)
    for preset in (preset for preset in PRESETS.values() if preset.dtype in types.values()):
        for imatrix in (False, True):
            try:
                chosen = choose(shapes, preset, network, QuantizeOverrides(imatrix=imatrix))
            except RefusedError:
                continue  # an MTP layer
            if all(types[name] == target for name, target in chosen.items()):
                return preset
    return None


# --- options ---


def quantization_of(options: Options, target: str, takes: Collection[str]) -> Quantization | None:
    """The quantization that `options` request for `target`, which takes the options `takes`; None without a preset.

    Raises UsageError (unknown names, a broken pattern, options that only go with a preset) and what read_imatrix does.
    """
    scheme = serving_scheme(options.dtype, target) if target in FOLDERS else None
    is_scheme = options.dtype.lower() in SERVING or (find_scheme(options.dtype) and not counterpart(options.dtype))
    if target not in FOLDERS and is_scheme and options.dtype.upper() not in DTYPES:
        raise UsageError(
            f"{options.dtype} is a quantization scheme of Hugging Face folders", hint="write one with --format hf"
        )
    preset = _preset(options, target) if scheme is None else None
    if preset is None:
        taken = ("imatrix", "tensor_type") if target == "mlx" else () if scheme is None else ("imatrix",)
        given = next((name for name in _ONLY_WITH_PRESET if getattr(options, name) and name not in taken), None)
        if given is not None:
            word = given.replace("_", "-")
            raise UsageError(
                f"--{word} only applies to a quantization preset, not to dtype {options.dtype}",
                hint="apr quantize --list shows the presets",
            )
        return None
    if not set(takes) >= PRESET_OPTIONS:
        container = "safetensors" if target in (*FOLDERS, "mlx") else target
        raise RefusedError(
            f"{container} has no dtype {preset.dtype}: a quantization preset needs a .gguf or .apr output",
            hint="write a .gguf or .apr file, or use --dtype f32, f16 or bf16",
        )
    if options.leave_output and options.output_type:
        raise UsageError("--leave-output and --output-type are mutually exclusive", hint="use one of them")
    imatrix = read_imatrix(options.imatrix) if options.imatrix is not None else None
    overrides = QuantizeOverrides(
        pure=options.pure,
        output=_parse_override_dtype(options.output_type, "--output-type"),
        embedding=_parse_override_dtype(options.embedding_type, "--embedding-type"),
        patterns=tuple(map(_pattern, options.tensor_type)),
        leave_output=options.leave_output,
        imatrix=imatrix is not None,
        # The native ids of an .apr for these two allow padded rows.
        padded=("Q4_K", "Q6_K") if options.pure and target == "apr" else (),
    )
    return Quantization(preset, overrides, options.allow_requantize, imatrix)


def _preset(options: Options, target: str) -> QuantizationPreset | None:
    if (preset := find_preset(options.dtype)) is not None:
        return preset
    try:
        row = find_dtype(options.dtype) if options.dtype != "keep" else None
    except AprError:
        if target in FOLDERS:
            raise unknown_scheme(options.dtype, [*PLAIN, *SERVING]) from None
        raise unknown(options.dtype, *PLAIN) from None
    if row is None or row.kind != "ggml":
        return None
    uniform = uniform_preset(row.name)
    if uniform is None:
        raise unknown(options.dtype, *PLAIN)
    if not options.pure:
        raise UsageError(f"{row.name} is not a quantization preset", hint="add --pure to use it for every matrix")
    return uniform


def _pattern(text: str) -> tuple[re.Pattern[str], str]:
    """`REGEX=TYPE` as a pattern and a dtype."""
    pattern, _, name = text.rpartition("=")
    if not pattern or not name:
        raise UsageError(f"--tensor-type {text!r} is not REGEX=TYPE", hint="example: --tensor-type ffn_down=q6_k")
    dtype = _parse_override_dtype(name, f"--tensor-type {pattern}")
    assert dtype is not None
    try:
        return re.compile(pattern, re.IGNORECASE), dtype
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"--tensor-type {text!r}: {error}", hint="example: --tensor-type ffn_down=q6_k") from None


def _parse_override_dtype(name: str | None, option: str) -> str | None:
    """The dtype that `option` gives to a tensor; None if it is not set. Raises UsageError."""
    if name is None:
        return None
    blocks = [row.name for row in DTYPES.values() if row.kind == "ggml" and row.name not in ("Q8_1", "Q8_K")]
    allowed = ["F32", "F16", "BF16", *blocks]
    with suppress(AprError):
        if (found := find_dtype(name).name) in allowed:
            return found
    raise UsageError(
        f"{option}: {name!r} is not a dtype for a single tensor", hint="one of " + ", ".join(allowed).lower()
    )


# --- .apr ---


def with_apr_names(
    c: Canonical, side: Sequence[CanonicalTensor], chosen: Mapping[str, Recoding]
) -> tuple[Canonical, dict[str, Recoding]]:
    """`c` and its targets for an `.apr`, from the targets `chosen` for the tensors `side` of a GGUF.

    Tensors keep their Hugging Face names if the GGUF's blocks can be reordered without dequantization, as in an import
    of that GGUF; the others get their GGUF names.
    """
    row = c.arch
    if row is None:
        return c, dict(chosen)
    targets, moved = targets_in_hf_order(row, c.hparams, c.tensors, side, chosen)
    made = {tensor.name: tensor for tensor in side}
    changed = [name for name, target in chosen.items() if target.dtype != made[name].dtype]
    if any(link.row.pack and set(link.gguf).intersection(changed) for link in links(row, c.hparams, c.tensors)):
        extra = {key: value for key, value in c.hparams.extra.items() if key != "quantization_config"}
        c = replace(c, hparams=replace(c.hparams, extra=extra))
    if not moved:
        return c, targets
    tensors: dict[str, CanonicalTensor] = {}
    for name, tensor in c.tensors.items():
        if name in moved:
            tensors |= {gguf: made[gguf] for gguf in moved[name].gguf if gguf not in tensors}
        else:
            tensors[name] = tensor
    return replace(c, tensors=tensors), targets


def targets_in_hf_order(
    row: Architecture,
    h: Hyperparams,
    tensors: Mapping[str, CanonicalTensor],
    side: Sequence[CanonicalTensor],
    chosen: Mapping[str, Recoding],
) -> tuple[dict[str, Recoding], dict[str, Link]]:
    """The targets of the Hugging Face `tensors`, from the targets `chosen` for the tensors `side` of a GGUF.

    The second dict has the Hugging Face names whose blocks only the order of the GGUF holds: these are stored under
    their GGUF names, with the targets of those.
    """
    # `chosen` speaks of GGUF names. A tensor that stands alone under its Hugging Face name keeps its target; what a
    # link connects gets the target in Hugging Face order where whole rows of blocks can be moved back, else it is
    # stored under the GGUF name, in the GGUF's order.
    made = {tensor.name: tensor for tensor in side}
    changed = {name for name, target in chosen.items() if target.dtype != made[name].dtype}
    targets = {name: target for name, target in chosen.items() if name in tensors}
    moved: dict[str, Link] = {}
    for link in links(row, h, tensors):
        if changed.isdisjoint(link.gguf):
            continue
        here = _in_hf_order(link, chosen)
        targets |= here or {name: chosen[name] for name in link.gguf if name in chosen}
        moved |= {} if here else dict.fromkeys(link.hf, link)
    # The GGUF holds a copy of the embedding as its head; the `.apr` has the embedding alone, in the head's type.
    if needs_head(row.gguf) and names.head(row) not in tensors and OUTPUT in chosen:
        targets[names.embedding(row)] = chosen[OUTPUT]
    return targets, moved


def _in_hf_order(link: Link, chosen: Mapping[str, Recoding]) -> dict[str, Recoding]:
    """Targets of the Hugging Face tensors of a link; {} if its blocks cannot be reordered."""
    mapping = link.mapping
    found = [chosen.get(name) for name in link.gguf]
    first = found[0]
    if first is None or any(target is None or target.dtype != first.dtype for target in found):
        return {}
    shapes: tuple[Shape, ...] = (*mapping.before, *mapping.after)
    whole_rows = mapping.moves_rows_only and not mapping.flat and not (mapping.skip or mapping.lead)
    if not whole_rows or any(shape[-1] != mapping.row_elements for shape in shapes):
        return {}
    if all(target is None or target.weights is None for target in found):
        return dict.fromkeys(link.hf, first)
    return _weighted(link, first) if len(found) == 1 else {}


def _weighted(link: Link, target: Recoding) -> dict[str, Recoding]:
    """`_in_hf_order` for a single GGUF tensor whose matrices have importances of their own: splits the importances."""
    mapping, weights = link.mapping, target.weights
    after: Shape = mapping.after[0]
    cols, rows = after[-1], after[-2]
    if n_matrices(after) == 1:
        return dict.fromkeys(link.hf, target)
    out, start = {}, 0
    for name, shape in zip(link.hf, mapping.before, strict=True):
        n_rows = math.prod(shape[:-1])
        first, last = start // rows, -(-(start + n_rows) // rows)
        inside = last - first == 1 and len(shape) == 2
        if mapping.orders or not (inside or (start % rows == 0 and shape[1:] == after[1:])):
            return {}
        assert weights is not None
        out[name] = Recoding(target.dtype, weights[first * cols : last * cols])
        start += n_rows
    return out
