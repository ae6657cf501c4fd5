"""Write a model as GGUF: the source's own bytes if nothing changed, else new keys and tensors for llama.cpp."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from aprfmt.arch import hparams as hp
from aprfmt.arch import names, rope_factors, scopes
from aprfmt.arch.differences import differences
from aprfmt.arch.fields import Misfit, shorten
from aprfmt.arch.flat_norms import all_flat_norms
from aprfmt.arch.gguf_keys import key_problems
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.outside import without_place
from aprfmt.arch.row import OF_TENSOR, Architecture
from aprfmt.canonical import sidecar
from aprfmt.canonical.completion import complete_from_shapes
from aprfmt.canonical.drafts import drafts_alone, named_drafts, with_drafts_counted, without_drafts
from aprfmt.canonical.metadata import apr_metadata_of
from aprfmt.canonical.model import Canonical, embedding_rows, from_gguf
from aprfmt.canonical.model_kinds import ADAPTER
from aprfmt.canonical.packed import scale_name
from aprfmt.canonical.reranker import ANSWERS, as_reranker, with_two_outputs
from aprfmt.canonical.sidecar import Sidecar
from aprfmt.canonical.sides import gguf_side, links
from aprfmt.canonical.tensor import CanonicalTensor, Losses, is_exact, is_matrix, plain_dtype
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.packed import SCALE
from aprfmt.codecs.recode import is_padded
from aprfmt.convert.files import say_left_behind, say_what_has_no_key, tell_differences
from aprfmt.convert.modelfile import NAME as MODELFILE
from aprfmt.convert.modelfile import modelfile
from aprfmt.convert.options import Options
from aprfmt.convert.presets import file_type_of, fitting
from aprfmt.convert.quantization import Quantization, preset_of
from aprfmt.convert.source_manifest import SourceManifest, overlay
from aprfmt.convert.source_manifest_writer import restorable
from aprfmt.convert.targets.base import Output, Work
from aprfmt.convert.towers import has_tower
from aprfmt.errors import CorruptError, RefusedError, UnmappedError, storage_errors
from aprfmt.formats import apr2, gguf, gguf_write
from aprfmt.formats.gguf import DEFAULT_ALIGNMENT, GgufNative
from aprfmt.formats.gguf_fields import GgufType, KvMapping
from aprfmt.formats.gguf_write import KV
from aprfmt.formats.out_tensor import OutTensor, dominant_dtype, group_by_size
from aprfmt.io.pipe import FileLayout, Literal
from aprfmt.io.source import padding
from aprfmt.limits import MAX_SPLITS
from aprfmt.provenance import provenance
from aprfmt.text import first_few, plural
from aprfmt.tokenizer import ggml
from aprfmt.tokenizer.model import NO_VOCABULARY, Tokenizer
from aprfmt.tokenizer.pre import age_note, check_name


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
    """The GGUF for `c`, in one file or split: the imported GGUF itself if nothing changed.

    Raises RefusedError or UnmappedError where llama.cpp could not load the result.
    """
    options = work.options
    c = _with_layers_asked_for(c, work)
    c = _as_classifier(c, work.losses)
    # The keys of a GGUF do not need a manifest.
    manifest = restorable(c, "gguf") if options.dtype == "keep" or c.model.convention == "apr" else None
    base = _base_keys(c, manifest)
    c = c if base is not None else with_drafts_counted(c)
    if options.no_mtp:
        c = _without_key(c)
    if (
        base is not None
        and manifest is not None
        and not (options.shard_bytes or (len(manifest.files) > 1 and _joins(c, work)))
        and options.dtype == "keep"
        and _keys(c, work, base, [], copied=True) == list(_unsplit_entries(base).values())
        and _sidecar_holds(c, base)
    ):
        kept = [tensor.out(tensor.name) for tensor in c.all_tensors.values()]
        return Output(rename_parts(manifest.layouts(), work.name), kept, lossless=True)
    if c.tokenizer is None and c.arch is not None and c.arch.no_vocabulary:
        c = replace(c, tokenizer=Tokenizer(NO_VOCABULARY, []))
    if c.tokenizer is None and _is_model(c, base):
        raise RefusedError(
            "the model has no tokenizer, and llama.cpp cannot load a GGUF without one",
            path=c.model.path,
            hint="add one with --tokenizer DIR, or write a GGUF for token ids only with --no-tokenizer",
        )
    _check_name_of_model(c)
    if c.arch is not None:
        tell_differences(c, work.losses)
        work.losses.others += [str(found["what"]) for found in work.losses.differences]
        if not options.allow_different:
            _refuse_differences(c)
    if options.no_tokenizer:
        _tell_no_tokenizer(c, work.losses)
    note = age_note(c.tokenizer.pre) if c.tokenizer is not None and options.pre is None else None
    if note is not None and c.model.convention != "gguf":
        work.losses.warnings.append(note)
    tensors = _in_source_order(c, list(_tensors(c, work)))
    keys = _keys(c, work, base, tensors)
    if c.model.convention != "gguf":  # keys of a source GGUF are kept unchecked
        keys = list(_checked(c, keys, tensors))
    alignment = base.get("general.alignment", DEFAULT_ALIGNMENT) if base is not None else DEFAULT_ALIGNMENT
    if type(alignment) is not int:
        raise CorruptError(f"general.alignment is {alignment!r}, not a size", path=c.model.path)
    if options.shard_bytes:
        return Output(split_gguf(work.name, keys, tensors, alignment, options.shard_bytes), tensors)
    return Output([FileLayout(work.name, gguf_write.layout(keys, tensors, alignment=alignment))], tensors)


def _with_layers_asked_for(c: Canonical, work: Work) -> Canonical:
    """`c` reduced to its MTP layers, or without those that need a GGUF of their own."""
    if work.options.mtp_only:
        c, n_left = drafts_alone(c)
        work.losses.add(f"{plural(n_left, 'tensor')} of the main model dropped (--mtp-only)")
    elif c.arch is not None and c.arch.drafts_apart and not from_gguf(c):
        c, left = without_drafts(c)
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
    """Raises RefusedError where llama.cpp gives short texts other logits than transformers."""
    refused = [found.what for found in differences(c.arch, c.hparams) if found.refused] if c.arch is not None else []
    if refused:
        raise RefusedError(
            f"the GGUF would give other logits: {'; '.join(refused)}",
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


def _extras(c: Canonical) -> dict[str, CanonicalTensor]:
    """The extra tensors in the GGUF of `c`: those of a source GGUF, and MTP layers that the architecture names."""
    if c.tower is not None:
        c = replace(c, extras={name: t for name, t in c.extras.items() if not c.tower.has(name)})
    if c.arch is None or from_gguf(c):
        return c.extras
    counted = with_drafts_counted(c).hparams
    keys = {key: value for key, _, value in hp.to_gguf(counted, c.arch, complete=False)}
    if not keys.get(scopes.full_key(c.arch, scopes.DRAFTS.gguf)):
        return {}
    drafts = named_drafts(c)
    names.check_drafts(c.arch, c.hparams, {name: t.shape for name, t in drafts.items()})
    return drafts


def _without_key(c: Canonical) -> Canonical:
    """`c` without the config key that counts MTP layers."""
    extra = {name: value for name, value in c.hparams.extra.items() if name not in scopes.drafts_key(c.arch).hf}
    return replace(c, hparams=replace(c.hparams, extra=extra))


def _is_model(c: Canonical, base: KvMapping | None) -> bool:
    """Whether llama.cpp would load the GGUF by itself; adapters, projectors and the like have no tokenizer."""
    return c.arch is not None and (base is None or base.get("general.type", "model") == "model")


def _tell_no_tokenizer(c: Canonical, losses: Losses) -> None:
    losses.warnings.append("written without a tokenizer: llama.cpp accepts and returns token ids only")
    known = c.model.tokenizer
    if known is not None and known.tokens:
        losses.add(f"the tokenizer of {plural(len(known.tokens), 'token')} is dropped")


def _checked(c: Canonical, keys: list[KV | bytes], tensors: list[OutTensor]) -> list[bytes]:
    """The encoded keys, checked for llama.cpp, with the sidecar metadata of an `.apr`."""
    entries = [item if isinstance(item, bytes) else gguf_write.encode_kv(*item) for item in keys]
    is_apr = apr2.native_of(c.model) is not None
    pairs = _pairs(c, sidecar.strip(entries) if is_apr else entries)
    for item in keys:  # the vocabulary was encoded a moment ago
        if not isinstance(item, bytes) and isinstance(item[2], list) and item[1] == (GgufType.ARRAY, GgufType.STRING):
            pairs.remember(item[0], [*item[2]])
    _check_keys(c, pairs, tensors)
    if not is_apr:
        return entries
    imported = _metadata_after_import(c, pairs, _extras(c))
    told = sidecar.differences(c.model, imported) if _is_of_its_class(c) else {}
    kept = sidecar.corrections(c.tensors, links(c.arch, c.hparams, c.tensors)) if c.arch is not None else {}
    return sidecar.seal(entries, Sidecar(told, _stored_dtypes(c, tensors), kept))


def _is_of_its_class(c: Canonical) -> bool:
    """Whether the GGUF has the class and outputs of the source, rather than being a reranker derived from it."""
    own = c.model.hparams
    return c.hparams.hf_architecture == own.hf_architecture and c.hparams.extra.get("num_labels") == own.extra.get(
        "num_labels"
    )


def _check_keys(c: Canonical, pairs: KvMapping, tensors: list[OutTensor]) -> None:
    """Raises RefusedError for missing or wrong keys that llama.cpp needs to load the architecture."""
    if c.arch is None or not tensors or not _is_model(c, pairs):
        return
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    rows = next(iter(shapes.get("token_embd.weight", ())), None)
    vocabulary = ggml.key_problems(pairs, c.arch.gguf, rows) if c.tokenizer is not None and c.tokenizer.tokens else ()
    for key, problem in (*key_problems(c.arch, pairs, shapes), *vocabulary):
        raise RefusedError(
            f"llama.cpp would not load the GGUF: {key} {problem}",
            path=c.model.path,
            hint="correct config.json or the tokenizer files"
            if c.model.convention == "hf"
            else "correct the metadata: apr stamp FILE --in-place --set KEY=JSON",
        )


def _sidecar_holds(c: Canonical, base: KvMapping) -> bool:
    """Whether the sidecar metadata in the GGUF still matches the `.apr`."""
    if apr2.native_of(c.model) is None:
        return True
    found, warning = sidecar.read_sidecar(base)
    if warning is not None or c.model.metadata.get(sidecar.LEFT_ASIDE):
        return True  # it had no part in the import either
    pairs = _pairs(c, sidecar.strip(_unsplit_entries(base).values()))
    missing = sidecar.differences(c.model, _metadata_after_import(c, pairs, c.extras))
    # A GGUF by another program needs one only for what it cannot have brought itself.
    return found.metadata == missing if found is not None else not sidecar.folder_fields(missing)


def _pairs(c: Canonical, entries: list[bytes]) -> KvMapping:
    head = b"".join((b"GGUF", struct.pack("<IQQ", 3, 0, len(entries)), *entries))
    return gguf.read_pairs(head, str(c.model.path))


def _metadata_after_import(c: Canonical, pairs: KvMapping, extras: dict[str, CanonicalTensor]) -> dict[str, object]:
    """The metadata of an import of a GGUF with these keys, the tensors of `c` and the extra tensors `extras`."""
    source = replace(_as_import(c, pairs), extras=extras)
    if c.arch is not None:
        identity = hp.hf_identity(source.hparams, c.arch)
        source.hparams.hf_architecture, source.hparams.hf_model_type = identity
    if source.hparams.vocab_size is None:
        source.hparams.vocab_size = embedding_rows(c)
    tensors = [t.out(t.name) for t in source.all_tensors.values()]
    return apr_metadata_of(source, tensors) | {"original_format": "gguf"}


def _stored_dtypes(c: Canonical, tensors: list[OutTensor]) -> dict[str, str]:
    """Original dtype, by Hugging Face name, of tensors that the GGUF stores losslessly in a wider dtype."""
    out = {t.name: t.dtype for t in tensors}
    wide = {}
    for t in (c.tensors | _extras(c)).values():
        target = out.get((names.gguf_name(c.arch, t.name, c.hparams) if c.arch else None) or t.name, t.dtype)
        if target != t.dtype and DTYPES[t.dtype].kind == "plain" and is_exact(t.dtype, target):
            wide[t.name] = t.dtype
    return wide


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
            "the file holds an adapter, not a model",
            path=c.model.path,
            hint="write it as a folder with --format hf, or as -o adapter.safetensors",
        )
    if row is None and not (work.options.allow_unmapped or c.part):
        raise UnmappedError(
            f"architecture {c.hparams.architecture!r} is not supported: its GGUF tensor names are unknown",
            path=c.model.path,
            hint="add --allow-unmapped to keep the tensor names as they are",
        )
    if row is not None:
        for name, factors in (rope_factors.factor_tensors(c.hparams, row) | all_flat_norms(c.hparams, row)).items():
            if name not in c.tensors:
                yield _factors(name, factors)
    numbers = {key.hf[0] for key in row.keys if key.role == OF_TENSOR} if row is not None else set[str]()
    placeless = [
        name
        for name in c.tensors
        if row is not None and names.is_hf_only(row, name) and names.template_of(row, name) not in numbers
    ]
    _tell_left(c, placeless, losses)
    losses.others += [*say_what_has_no_key(c), *say_left_behind(c, "a GGUF cannot hold files")]
    carried = _extras(c)
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
            losses.note(tensor.original_dtype, target.dtype)
            out = tensor.out(tensor.name, target.dtype, losses.overflow, target.weights)
        yield out
        yield from tensor.scale_outs(out, gguf=True)


def _with_scales(
    side: Sequence[CanonicalTensor], row: Architecture | None, losses: Losses
) -> Iterator[CanonicalTensor]:
    """The tensors, decoded where llama.cpp's network would ignore the scale that their blocks need beside them."""
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


def _tell_left(c: Canonical, placeless: Sequence[str], losses: Losses) -> None:
    """Adds a loss for each tensor of the network and each module after it that a GGUF cannot hold."""
    for sentence in without_place(placeless, c.hparams.hf_architecture):
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


def _base_keys(c: Canonical, manifest: SourceManifest | None) -> KvMapping | None:
    """The key-value pairs of the GGUF that `c` came from."""
    if (source := c.model.native_as(GgufNative)) is not None:
        return source.parts[0].kv
    if manifest is not None:
        return gguf.read_pairs(manifest.head(next(iter(manifest.files))), str(c.model.path))
    return None


def _keys(
    c: Canonical, work: Work, base: KvMapping | None, tensors: list[OutTensor], *, copied: bool = False
) -> list[KV | bytes]:
    """The keys to write; those of `base` that no edit or option changes keep their bytes.

    Raises RefusedError, CorruptError for a value that its key cannot hold; `copied` takes it as the source has it.
    """
    if base is None:
        return list(derive_keys(c, work, tensors))
    now = {kv[0]: _rounded(kv) for kv in derive_keys(c, work, tensors, overlaid=True)}
    # What derive_keys gives for the source itself, before any edit.
    plain = replace(work, options=Options(), quantization=None)
    then = {kv[0]: _rounded(kv) for kv in derive_keys(_as_import(c, base), plain, [], overlaid=True)}
    if work.options.dtype == "keep":  # the source's own word for its mix of types stays
        del now["general.file_type"]
    del then["general.file_type"]
    misfit = next((value for _, _, value in now.values() if isinstance(value, Misfit)), None)
    if misfit is not None and not copied:
        raise misfit.error
    return list(overlay(_unsplit_entries(base), then, now).values())


def _rounded(kv: KV) -> KV:
    """`kv` with a float32 where an `.apr` stores one: a source may hold the number in another type."""
    key, kind, value = kv
    return (key, kind, shorten(value)) if kind is GgufType.FLOAT32 and isinstance(value, float) else kv


def _unsplit_entries(base: KvMapping) -> dict[str, bytes]:
    """The entries of a model that is not split."""
    return {key: bytes(base.raw(key)) for key in base if not key.startswith("split.")}


def _as_import(c: Canonical, base: KvMapping) -> Canonical:
    """`c` as an import of a GGUF with the keys `base` gives it."""
    tensor_names = gguf_names(c)
    hparams = hp.from_gguf(base, tensor_names)
    if c.arch is not None:
        hparams.architecture = c.arch.id
    if hparams.head_dim is None and c.model.convention == "apr":
        complete_from_shapes(hparams, c.tensors)
    known = provenance.from_gguf(base)
    # An .apr without a word on these keys never removed any of them.
    general = known.general if c.general is not None else None
    return Canonical(c.model, c.arch, hparams, ggml.from_gguf(base), known.info, c.tensors, general=general)


def derive_keys(c: Canonical, work: Work, tensors: list[OutTensor], *, overlaid: bool = False) -> list[KV]:
    """Every key of a GGUF for `c`, in the order of llama.cpp's own converter.

    `overlaid`: they go over a GGUF's own keys, where a pre-tokenizer or a dimension may be missing.
    """
    architecture = c.arch.gguf if c.arch else c.hparams.architecture or "unknown"
    keys: list[KV] = [
        ("general.architecture", GgufType.STRING, architecture),
        ("general.type", GgufType.STRING, "model"),
    ]
    keys += provenance.to_gguf(c.info, c.general)
    n_rows = embedding_rows(c)
    if c.arch is not None:
        found = hp.to_gguf(c.hparams, c.arch, vocab_size=n_rows, complete=not overlaid, misfits=overlaid)
        keys += [gguf_write.typed_kv(kv) for kv in found]
    if c.tokenizer is not None and c.tokenizer.model == NO_VOCABULARY and n_rows is not None:
        size: KV = (f"{architecture}.vocab_size", GgufType.UINT32, n_rows)  # llama.cpp counts no tokens then
        keys += [size] if size not in keys else []
    keys.append(("general.file_type", GgufType.UINT32, _file_type(c, work.quantization, tensors)))
    if c.tokenizer is not None:
        own = {key for key, _, _ in keys}  # a network may say how many token types its tokenizer has
        found = ggml.to_gguf(
            _with_pre(c, c.tokenizer, work.options.pre, overlaid=overlaid),
            vocab_size=n_rows,
            pad_style=work.options.pad_style,
        )
        keys += [gguf_write.typed_kv(kv) for kv in found if kv[0] not in own]
    keys.append(("general.quantization_version", GgufType.UINT32, 2))
    return keys + _imatrix_keys(work.quantization)


def _file_type(c: Canonical, quantization: Quantization | None, tensors: list[OutTensor]) -> int:
    """The `general.file_type` of the requested or detected preset, else of the dtype with the most bytes."""
    if quantization is not None:
        return quantization.preset.file_type
    preset = preset_of(c, tensors)
    return preset.file_type if preset is not None else file_type_of(dominant_dtype(tensors))


def _imatrix_keys(quantization: Quantization | None) -> list[KV]:
    """The keys that llama-quantize writes for the importance matrix; it truncates strings to 127 bytes."""
    imatrix = quantization.imatrix if quantization is not None else None
    if imatrix is None:
        return []
    keys: list[KV] = [("quantize.imatrix.file", GgufType.STRING, _cut(imatrix.path))]
    if imatrix.datasets:
        keys.append(("quantize.imatrix.dataset", GgufType.STRING, _cut(imatrix.datasets[0])))
    keys.append(("quantize.imatrix.entries_count", GgufType.UINT32, len(imatrix.entries)))
    if imatrix.chunks > 0:
        keys.append(("quantize.imatrix.chunks_count", GgufType.UINT32, imatrix.chunks))
    return keys


def _cut(text: str) -> str:
    return text.encode(errors="surrogateescape")[:127].decode(errors="surrogateescape")


def gguf_names(c: Canonical) -> list[str]:
    """The GGUF names of all tensors."""
    if c.arch is None:
        return list(c.tensors)
    found = (m for t in c.tensors for m in names.matches(c.arch, t)[:1])
    made = {name for m in found for name in names.gguf_names(m.row, m.layer, c.hparams)}
    return [*made, *(t for t in c.tensors if not names.matches(c.arch, t))]


def _with_pre(c: Canonical, tokenizer: Tokenizer, pre: str | None, *, overlaid: bool) -> Tokenizer:
    if overlaid:  # the JSON of an .apr sorts by name, which is not an edit
        tokenizer = replace(tokenizer, chat_templates=dict(sorted(tokenizer.chat_templates.items())))
    if pre is not None:
        check_name(pre)
        return replace(tokenizer, pre=pre)
    if tokenizer.pre is None and tokenizer.model == "gpt2" and not overlaid:
        raise RefusedError(
            "llama.cpp has no pre-tokenizer that matches this tokenizer",
            path=c.model.path,
            hint=f"{tokenizer.pre_note or 'the file names none'}; set one with --pre NAME",
        )
    return tokenizer


# --- parts ---

_PART = re.compile(r"-\d{5}-of-\d{5}$")


def part_names(name: str, count: int) -> list[str]:
    """File names of the parts of a split GGUF that the user calls `name`, counted from 1 (llama_split_path)."""
    stem = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    stem = _PART.sub("", stem)
    return [f"{stem}-{no:05d}-of-{count:05d}.gguf" for no in range(1, count + 1)]


def older_outputs(first: Path, new: Collection[str]) -> list[str]:
    """Names of GGUFs in the folder of `first` that differ from it in the part number only and are not in `new`."""
    stem = _PART.sub("", first.stem)
    with storage_errors(first.parent):
        found = [path for path in first.parent.iterdir() if path.suffix == ".gguf"]
    return sorted(path.name for path in found if _PART.sub("", path.stem) == stem and path.name not in new)


def split_gguf(
    name: str, keys: Sequence[KV | bytes], tensors: Sequence[OutTensor], alignment: int, max_bytes: int
) -> list[FileLayout]:
    """The parts of a GGUF, none larger than `max_bytes` unless the keys or a single tensor are.

    All keys go into the first part; each has split.no, split.count and split.tensors.count, as gguf-split writes
    them. A model that fits into one file is not split. Raises as gguf_write.layout, RefusedError for too many parts.
    """
    whole = FileLayout(name, gguf_write.layout(keys, tensors, alignment=alignment))
    if whole.n_bytes <= max_bytes:
        return [whole]
    room = FileLayout("", gguf_write.layout(_split_keys(MAX_SPLITS, MAX_SPLITS, 0), [])).n_bytes + alignment
    first = FileLayout("", gguf_write.layout(keys, [], alignment=alignment)).n_bytes + room
    groups = group_by_size(tensors, max_bytes, lambda tensor: _gguf_cost(tensor, alignment), first, room)
    if len(groups) > MAX_SPLITS:
        raise RefusedError(
            f"too many parts: {len(groups)}, the limit is {MAX_SPLITS}", hint="use a larger --shard-size"
        )
    if len(groups) == 1:
        return [whole]
    layouts = []
    for no, (part, group) in enumerate(zip(part_names(name, len(groups)), groups, strict=True)):
        numbers = _split_keys(no, len(groups), len(tensors))
        # The alignment is a key of the first part, so the others have the default one.
        segments = (
            gguf_write.layout(numbers, group)
            if no
            else gguf_write.layout([*keys, *numbers], group, alignment=alignment)
        )
        layouts.append(FileLayout(part, segments))
    return layouts


def _split_keys(no: int, count: int, n_tensors: int) -> list[KV | bytes]:
    return [
        ("split.no", GgufType.UINT16, no),
        ("split.count", GgufType.UINT16, count),
        ("split.tensors.count", GgufType.INT32, n_tensors),
    ]


def _gguf_cost(tensor: OutTensor, alignment: int) -> int:
    """Bytes of a tensor in a part: its info, its data, padding."""
    info = 24 + len(tensor.name.encode("utf-8", "surrogateescape")) + 8 * len(tensor.shape)
    return info + tensor.n_bytes + padding(tensor.n_bytes, alignment)


def rename_parts(layouts: Sequence[FileLayout], name: str) -> list[FileLayout]:
    """The parts of an imported split GGUF, renamed after the output `name`."""
    names = part_names(name, len(layouts)) if len(layouts) > 1 else [name]
    return [replace(layout, name=new) for layout, new in zip(layouts, names, strict=True)]
