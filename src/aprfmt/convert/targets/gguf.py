"""Write a model as GGUF: the source's own bytes if nothing changed, else new keys and tensors for llama.cpp."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from aprfmt.arch import names, rope_factors, scopes
from aprfmt.arch.differences import differences
from aprfmt.arch.extra_tensors import unsupported_parts
from aprfmt.arch.flat_norms import all_flat_norms
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.row import OF_TENSOR, Architecture
from aprfmt.arch.zero_biases import zero_biases
from aprfmt.canonical.drafts import only_mtp_layers, with_mtp_layers_counted, without_mtp_layers
from aprfmt.canonical.model import Canonical, from_gguf
from aprfmt.canonical.model_kinds import ADAPTER
from aprfmt.canonical.reranker import ANSWERS, as_reranker, with_two_outputs
from aprfmt.canonical.sides import gguf_side
from aprfmt.canonical.tensor import CanonicalTensor, Losses, is_matrix, plain_dtype
from aprfmt.canonical.tensor_scales import scale_name
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import SCALE
from aprfmt.codecs.recode import is_padded
from aprfmt.convert.files import dropped_files_loss, losses_without_keys, record_differences
from aprfmt.convert.gguf_metadata import (
    base_keys,
    checked_keys,
    extras_in_gguf,
    is_model,
    keys_of,
    sidecar_holds,
    unsplit_entries,
)
from aprfmt.convert.gguf_parts import rename_parts, split_gguf
from aprfmt.convert.modelfile import NAME as MODELFILE
from aprfmt.convert.modelfile import modelfile
from aprfmt.convert.presets import fitting
from aprfmt.convert.source_manifest_writer import restorable
from aprfmt.convert.targets.base import Output, Work
from aprfmt.convert.towers import has_tower
from aprfmt.errors import CorruptError, RefusedError, UnmappedError
from aprfmt.formats import gguf, gguf_write
from aprfmt.formats.gguf import DEFAULT_ALIGNMENT
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, Literal
from aprfmt.text import first_few, plural
from aprfmt.tokenizer import ggml
from aprfmt.tokenizer.data import NO_VOCABULARY
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.tokenizer.pre import age_note


def layouts(c: Canonical, work: Work) -> Output:
    """The GGUF for `c`, and an Ollama Modelfile next to it if requested. Raises as model_layouts."""
    output = model_layouts(c, work)
    if not work.options.modelfile:
        return output
    if len(output.layouts) > 1:
        raise RefusedError(
            "Ollama cannot load a split GGUF", path=c.model.path, hint="write one file with --shard-size 0"
        )
    data, notes = modelfile(c, work.name)
    work.losses.warnings += notes
    return replace(output, layouts=[*output.layouts, FileLayout(MODELFILE, [Literal(data)])])


def model_layouts(c: Canonical, work: Work) -> Output:
    """Plans the GGUF of a model, in one file or split: the imported GGUF itself if nothing changed.

    Args:
        c: the model under Hugging Face names.
        work: output name, options and preset; its `losses` get what the GGUF cannot store, and warnings.

    Raises:
        RefusedError, UnmappedError: llama.cpp cannot load the result.
    """
    options = work.options
    _refuse_without_network(c)
    c = _with_layers_asked_for(c, work)
    c = _as_classifier(c, work.losses)
    # The keys of a GGUF do not need a manifest.
    manifest = restorable(c, "gguf") if options.dtype == "keep" or c.model.convention == "apr" else None
    base = base_keys(c, manifest)
    c = c if base is not None else with_mtp_layers_counted(c)
    if options.no_mtp:
        c = _without_key(c)
    if (
        base is not None
        and manifest is not None
        and not (options.shard_bytes or (len(manifest.files) > 1 and _joins(c, work)))
        and options.dtype == "keep"
        and keys_of(c, work, base, [], copied=True) == list(unsplit_entries(base).values())
        and sidecar_holds(c, base)
    ):
        kept = [tensor.out(tensor.name) for tensor in c.all_tensors.values()]
        return Output(rename_parts(manifest.layouts(), work.name), kept, lossless=True)
    if c.tokenizer is None and c.arch is not None and c.arch.no_vocabulary:
        c = replace(c, tokenizer=Tokenizer(NO_VOCABULARY, []))
    if c.tokenizer is None and is_model(c, base):
        raise RefusedError(
            "the model has no tokenizer, and llama.cpp cannot load a GGUF without one",
            path=c.model.path,
            hint="add one with --tokenizer DIR, or write a GGUF for token ids only with --no-tokenizer",
        )
    _check_name_of_model(c)
    if c.arch is not None:
        record_differences(c, work.losses)
        work.losses.others += [str(found["what"]) for found in work.losses.differences]
        if not options.allow_different:
            _refuse_differences(c)
    if options.no_tokenizer:
        _tell_no_tokenizer(c, work.losses)
    note = age_note(c.tokenizer.pre) if c.tokenizer is not None and options.pre is None else None
    if note is not None and c.model.convention != "gguf":
        work.losses.warnings.append(note)
    tensors = _in_source_order(c, list(_tensors(c, work)))
    keys = keys_of(c, work, base, tensors)
    if c.model.convention != "gguf":  # keys of a source GGUF are kept unchecked
        keys = list(checked_keys(c, keys, tensors))
    alignment = base.get("general.alignment", DEFAULT_ALIGNMENT) if base is not None else DEFAULT_ALIGNMENT
    if type(alignment) is not int:
        raise CorruptError(f"general.alignment is {alignment!r}, not a valid size", path=c.model.path)
    if options.shard_bytes:
        return Output(split_gguf(work.name, keys, tensors, alignment, options.shard_bytes), tensors)
    return Output([FileLayout(work.name, gguf_write.layout(keys, tensors, alignment=alignment))], tensors)


def _refuse_without_network(c: Canonical) -> None:
    """Raises RefusedError for a network of the table that llama.cpp does not have."""
    if c.arch is not None and loader_of(c.arch.gguf) is None:
        raise RefusedError(
            f"llama.cpp has no network for {c.hparams.hf_architecture or c.arch.hf_class}",
            path=c.model.path,
            hint=f"transformers runs it: write a folder with apr export {c.model.path} -o FOLDER --format hf",
        )


def _with_layers_asked_for(c: Canonical, work: Work) -> Canonical:
    """`c` reduced to its MTP layers, or without those that need a GGUF of their own."""
    if work.options.mtp_only:
        c, n_left = only_mtp_layers(c)
        work.losses.add(f"{plural(n_left, 'tensor')} of the main model dropped (--mtp-only)")
    elif c.arch is not None and c.arch.drafts_apart and not from_gguf(c):
        c, left = without_mtp_layers(c)
        work.losses.others += [f"{part} dropped: --mtp-only writes them to a separate GGUF" for part in left]
    return c


def _joins(c: Canonical, work: Work) -> bool:
    """Whether the parts of a split model are joined: on request, or if the output name is not that of a part."""
    if work.options.shard_bytes is not None:
        return work.options.shard_bytes == 0
    return c.model.convention == "gguf" and gguf.PART_NAME.fullmatch(work.name) is None


def _as_classifier(c: Canonical, losses: Losses) -> Canonical:
    """`c` with the outputs that llama.cpp expects of a reranker, and a warning; other models unchanged."""
    if (padded := with_two_outputs(c)) is not None:
        losses.warnings.append("its score s is written as two outputs; llama.cpp returns 1 / (1 + exp(-s))")
        return padded
    reranker = as_reranker(c)
    if reranker is None:
        return c
    losses.warnings.append(
        f"written as a reranker, as its name suggests: cls.output holds the rows of {' and '.join(ANSWERS)}"
    )
    if c.head in c.tensors:
        losses.add(f"{c.head} dropped except for two rows: the GGUF of a reranker has no output head")
    return reranker


def _refuse_differences(c: Canonical) -> None:
    """Raises RefusedError if logits of short texts differ between llama.cpp and transformers."""
    refused = [found.what for found in differences(c.arch, c.hparams) if found.refused] if c.arch is not None else []
    if refused:
        raise RefusedError(
            f"llama.cpp would compute different logits: {'; '.join(refused)}",
            path=c.model.path,
            hint="write it anyway with --allow-different, or use another output format: -o NAME.apr, -o NAME --format "
            "hf",
        )


def _check_name_of_model(c: Canonical) -> None:
    part, missing = ggml.missing_by_name(c.tokenizer, c.info.get("name", "")) if c.tokenizer is not None else ("", [])
    if missing:
        raise RefusedError(
            f"llama.cpp cannot load a model with {part!r} in its name ({c.info['name']!r}) whose tokenizer lacks "
            f"{first_few(missing)}",
            path=c.model.path,
            hint="change the name: apr import SRC -o X.apr; apr stamp X.apr --in-place --set 'name=\"tiny\"'",
        )


def _without_key(c: Canonical) -> Canonical:
    """`c` without the config key that counts MTP layers."""
    extra = {name: value for name, value in c.hparams.extra.items() if name not in scopes.drafts_key(c.arch).hf}
    return replace(c, hparams=replace(c.hparams, extra=extra))


def _tell_no_tokenizer(c: Canonical, losses: Losses) -> None:
    losses.warnings.append("written without a tokenizer: llama.cpp accepts and returns token ids only")
    known = c.model.tokenizer
    if known is not None and known.tokens:
        losses.add(f"the tokenizer of {plural(len(known.tokens), 'token')} is dropped")


def _in_source_order(c: Canonical, tensors: list[OutTensor]) -> list[OutTensor]:
    """Tensors in the order of the source GGUF, new ones last."""
    if c.model.convention != "gguf":
        return tensors
    place = {tensor.name: i for i, tensor in enumerate(c.model.tensors.entries)}
    return sorted(tensors, key=lambda tensor: place.get(tensor.name, len(place)))


def _tensors(c: Canonical, work: Work) -> Iterator[OutTensor]:
    quantization, losses = work.quantization, work.losses
    wanted = plain_dtype(work.options.dtype) if quantization is None else None
    if wanted is not None and DTYPES[wanted].ggml_id is None:
        raise RefusedError(
            f"GGUF has no dtype {wanted}", path=c.model.path, hint="list its types with apr quantize --list"
        )
    row = c.arch
    if row is None and ((c.extras and not from_gguf(c)) or (c.part == ADAPTER and c.model.convention != "gguf")):
        raise RefusedError(
            "the file contains an adapter, not a model",
            path=c.model.path,
            hint="write it as a folder with --format hf, or as -o adapter.safetensors",
        )
    if row is None and not (work.options.allow_unmapped or c.part):
        raise UnmappedError(
            f"architecture {c.hparams.architecture!r} is not supported: its GGUF tensor names are unknown",
            path=c.model.path,
            hint="add --allow-unmapped to keep the tensor names",
        )
    if row is not None:
        made = rope_factors.factor_tensors(c.hparams, row) | all_flat_norms(c.hparams, row)
        for name, values in (made | zero_biases(c.hparams, row)).items():
            if name not in c.tensors:
                yield _factors(name, values)
    numbers = {key.hf[0] for key in row.keys if key.role == OF_TENSOR} if row is not None else set[str]()
    placeless = [
        name
        for name in c.tensors
        if row is not None and names.is_hf_only(row, name) and names.template_of(row, name) not in numbers
    ]
    _record_dropped(c, placeless, losses)
    losses.others += [*losses_without_keys(c), *dropped_files_loss(c, "a GGUF cannot hold files")]
    carried = extras_in_gguf(c)
    stay = replace(c, extras={name: tensor for name, tensor in c.extras.items() if name not in carried})
    for part in stay.extra_parts():
        losses.add(f"{part} dropped: the GGUF of a language model cannot hold them")
    if stay.extras and has_tower(c):
        losses.add(f"write the towers to a separate GGUF: apr export {c.model.path} -o mmproj.gguf --mmproj")
    tensors = c.tensors | carried
    side = gguf_side(row, c.hparams, tensors) if row is not None else list(tensors.values())
    targets = quantization.targets(c, side, losses) if quantization is not None else {}
    for tensor in _with_scales(side, row, losses):
        _check_name(tensor.name, c)
        target = targets.get(tensor.name)
        if target is None:
            out = tensor.out(tensor.name, _dtype(tensor, wanted, losses), losses.overflow)
        else:
            losses.note_quantized(tensor, target.dtype)
            out = tensor.out(tensor.name, target.dtype, losses.overflow, target.weights, rounded=losses.round_blocks)
        yield out
        yield from tensor.scale_outs(out, gguf=True)


def _with_scales(
    side: Sequence[CanonicalTensor], row: Architecture | None, losses: Losses
) -> Iterator[CanonicalTensor]:
    """The tensors, dequantized if llama.cpp's network would ignore their separate tensor scale."""
    loader = loader_of(row.gguf) if row is not None else None
    decoded: Counter[str] = Counter()
    for tensor in side:
        factors = tensor.scales.get(SCALE, ())
        name = scale_name(tensor.name, SCALE, gguf=True)
        if loader is not None and any(factor != 1 for factor in factors) and not loader.multiplies(name):
            decoded[tensor.dtype] += 1
            yield tensor.decoded()
        else:
            yield tensor
    for dtype, n in decoded.items():
        assert row is not None
        losses.add(
            f"{plural(n, 'tensor')} decoded from {dtype}: llama.cpp's {row.gguf} network ignores their tensor scale"
        )


def _record_dropped(c: Canonical, placeless: Sequence[str], losses: Losses) -> None:
    """Adds a loss for each tensor of the network and each module after it that a GGUF cannot store."""
    for sentence in unsupported_parts(placeless, c.hparams.hf_architecture):
        losses.add(sentence)
    modules = c.hparams.extra.get("other_modules")
    for module in modules if isinstance(modules, list) else []:
        losses.add(f"llama.cpp does not support {module}: it returns the embedding before that module")


def _check_name(name: str, c: Canonical) -> None:
    if len(name.encode(errors="surrogateescape")) > gguf.LOADER_NAME_BYTES and c.model.convention != "gguf":
        raise RefusedError(
            f"tensor name too long: llama.cpp loads up to {gguf.LOADER_NAME_BYTES} bytes",
            path=c.model.path,
            tensor=name,
        )


def _factors(name: str, factors: list[float]) -> OutTensor:
    data = struct.pack(f"<{len(factors)}f", *factors)
    return OutTensor(name, "F32", (len(factors),), len(data), lambda: [data])


def _dtype(tensor: CanonicalTensor, wanted: str | None, losses: Losses) -> str:
    row = DTYPES[tensor.dtype]
    if wanted is not None and is_matrix(tensor.name, tensor.shape):
        target = fitting(wanted, tensor.shape)
    elif is_padded(row, tensor.shape) and is_matrix(tensor.name, tensor.shape):
        target = fitting("Q8_0", tensor.shape)  # APR's row-padded K-quants do not exist in GGUF
    elif row.kind == "aprq" or is_padded(row, tensor.shape) or tensor.is_decoded:
        # nor do APR's own blocks
        target = "F16" if is_matrix(tensor.name, tensor.shape) else "F32"
    elif row.ggml_id is None:
        raise RefusedError(f"GGUF has no dtype {tensor.dtype}", tensor=tensor.name, hint="convert it with --dtype f16")
    elif row.name == "F64" or (row.name in ("F16", "BF16") and not is_matrix(tensor.name, tensor.shape)):
        target = "F32"  # llama.cpp computes nothing in F64, and norms and biases in F32 only
    else:
        target = tensor.dtype
    losses.note(tensor.original_dtype, target)
    return target
