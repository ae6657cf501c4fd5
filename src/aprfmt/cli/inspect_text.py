"""What `apr inspect` says of a file; without typer, which takes longer to import than a file takes to be read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import aprfmt
from aprfmt.cli.output import as_text, out, pairs, printable, shorten, table
from aprfmt.errors import UnknownFormatError
from aprfmt.inspection.quantized import as_words
from aprfmt.text import first_few, format_bytes, format_count, format_shape, plural

if TYPE_CHECKING:
    from aprfmt.codecs.dtypes import DtypeTotals
    from aprfmt.formats.stored_keys import StoredKey
    from aprfmt.inspection.describe import AdapterInfo, Carried, Inspection, TowerInfo
    from aprfmt.inspection.head import HeadInfo
    from aprfmt.inspection.quality import Quality
    from aprfmt.inspection.tokenizer_info import TokenizerInfo

_IDENTITY = ("name", "description", "author", "version", "source", "original_format", "created_at")
_PROVENANCE = (("license", "license"), ("data_source", "data source"), ("data_license", "data license"))
_LEAST_VALUE = 24
_VALUE_WIDTH = 72


def show(
    file: str, *, vocab: bool = False, weights: bool = False, quality: bool = False, metadata: bool = False
) -> None:
    """Prints what `file` is, in the mode of the run; the options are those of aprfmt.inspect."""
    try:
        found = aprfmt.inspect(file, vocab=vocab, weights=weights, quality=quality, metadata=metadata)
    except UnknownFormatError:
        if not _show_models(file):
            raise
        return
    out.result(found.to_json(), _inspection(found))


def _show_models(folder: str) -> bool:
    """Lists the models in a folder; returns False if it has none."""
    if not os.path.isdir(folder):
        return False
    from aprfmt.inspection.model_folder import models_in

    found = models_in(folder)
    if found.models or found.skipped:
        cells = [
            [printable(row.path), row.format, str(row.files), format_bytes(row.size_bytes)] for row in found.models
        ]
        lines = table(["model", "format", "files", "size"], cells, right="files size", spare="files", indent=0)
        unreadable = [f"unreadable: {printable(path)}: {printable(why)}" for path, why in found.skipped.items()]
        out.result(found.to_json(), [*(lines if cells else []), *unreadable])
    return bool(found.models or found.skipped)


def _inspection(found: Inspection) -> Iterator[str]:
    yield out.style(printable(found.file), "bold")
    yield from pairs(_container(found))
    yield from _network(found.metadata)
    if found.dtypes:
        yield from ("", out.style("Weights", "bold"), *_dtypes(found.dtypes))
    yield from ("", out.style("Tokenizer", "bold"), *pairs(_tokenizer(found.tokenizer)))
    yield from ("", out.style("Provenance", "bold"), *pairs(_provenance(found.metadata)))
    if found.quality is not None:
        yield from _quality(found.quality)
    if found.stored is not None:
        yield from ("", *key_table(found.stored))
    if found.tensors is not None:
        rows = [[t.name, t.dtype, format_shape(t.shape), format_bytes(t.n_bytes)] for t in found.tensors]
        yield from ("", *table(["tensor", "dtype", "shape", "size"], rows, right="size", spare="size shape"))
    if found.vocabulary:
        tokens = [[str(i), repr(token)] for i, token in enumerate(found.vocabulary)]
        yield from ("", *table(["id", "token"], tokens, right="id"))


def key_table(keys: Sequence[StoredKey]) -> list[str]:
    """Metadata keys with types and shortened values."""
    cells = [[key.key, _stored_type(key), shorten(as_text(key.value), _VALUE_WIDTH)] for key in keys]
    return table(["key", "type", "value"], cells, spare="type", wrap=_LEAST_VALUE)


def _stored_type(key: StoredKey) -> str:
    return key.type if key.count is None else f"{key.type} ({key.count:,})"


def _container(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "format", f"{found.format}, {format_bytes(found.size_bytes)}"
    yield "tensors", f"{found.tensor_count:,} ({format_count(found.param_count)} parameters)"
    if found.quantized:
        yield "quantized", as_words(found.quantized)
    elif found.dtypes:
        yield "quantization", _quantization(found.dtypes)
    if found.adapter is not None:
        yield "adapter", _adapter(found.adapter)
    elif found.carried.tensors or found.carried.files:
        yield "also contains", _carried(found.carried)
    if found.towers is not None:
        yield "towers", _towers(found.towers)
    if found.head is not None:
        yield "head", _head(found.head)
    if set(found.checksum.values()) != {"none"}:
        words = {"unchecked": "not checked (large file; apr validate checks it)"}
        yield ("checksum", ", ".join(f"{part} {words.get(state, state)}" for part, state in found.checksum.items()))
    if found.signature is not None:
        yield "signature", found.signature.sentence()
    if flags := [name for name, value in found.flags.items() if value]:
        yield "flags", ", ".join(flags)
    if found.format.startswith("APR v2"):
        reasons = "; ".join(found.compat.reasons)
        yield "reference apr", "can run it" if found.compat.reference_runtime else f"cannot run it: {reasons}"
    for warning in found.warnings:
        yield "note", warning


def _quantization(dtypes: Mapping[str, DtypeTotals]) -> str:
    """The dtype of most weights, its share of them, and the mean bits per weight."""
    from aprfmt.codecs.dtypes import DTYPES

    n_params = sum(row["params"] for row in dtypes.values()) or 1
    main, row = max(dtypes.items(), key=lambda item: item[1]["params"])
    bits = 8 * sum(row["bytes"] for row in dtypes.values()) / n_params
    if not DTYPES[main].is_quantized:
        return f"none: {main}, {bits:.2f} bits per weight"
    return f"{main} ({row['params'] / n_params:.0%} of the weights), {bits:.2f} bits per weight"


def _adapter(found: AdapterInfo) -> str:
    if found.rank is None:
        return f"unknown: {found.kind}"
    scales = ", ".join(f"{scale:g}" for scale in found.scales)
    text = f"LoRA of rank {found.rank}, alpha {found.alpha:g} (scale {scales}) on {plural(found.weights, 'weight')}"
    text += f" ({', '.join(found.modules)})" if found.modules else ""
    text += f", {plural(found.whole, 'weight')} replaced" if found.whole else ""
    return text + (f", for {found.base}" if found.base else "")


def _towers(found: TowerInfo) -> str:
    what = " and ".join(word for word, there in (("images", found.sees), ("sounds", found.hears)) if there)
    text = f"for {what or 'nothing'}, projector {', '.join(found.projectors) or 'unknown'}"
    text += f", {found.width:,} values per position" if found.width is not None else ""
    return text + (f", of {first_few(found.classes)}" if found.classes else ", unknown tower architecture")


def _head(found: HeadInfo) -> str:
    parts = [found.task] if found.task is not None else []
    if found.n_labels is not None:
        parts.append(f"{plural(found.n_labels, 'output')}" + (f" ({first_few(found.labels)})" if found.labels else ""))
    parts += [f"pooling {found.pooling}"] if found.pooling is not None else []
    parts += [f"a {n_in} x {n_out} layer" for n_in, n_out in found.dense]
    return ", ".join([*parts, *found.modules])


def _carried(found: Carried) -> str:
    kinds = [f"{plural(row['tensors'], 'tensor')} of the {kind}" for kind, row in found.kinds.items()]
    files = f"{plural(found.files, 'file')} ({format_bytes(found.file_bytes)})"
    return ", ".join([*kinds, *([files] if found.files else [])])


def _network(metadata: Mapping[str, object]) -> Iterator[str]:
    from aprfmt.inspection.describe import DIMS

    dims = [f"{label} {_number(metadata[key])}" for key, label in DIMS if metadata.get(key) is not None]
    classes = [str(metadata[key]) for key in ("hf_architecture", "hf_model_type") if metadata.get(key)]
    name = metadata.get("architecture")
    if not (dims or name):
        return
    rows = [("architecture", f"{name or '(unknown)'}" + (f" ({', '.join(classes)})" if classes else ""))]
    rows += [("dimensions", ", ".join(dims))] if dims else []
    yield from ("", out.style("Network", "bold"), *pairs(rows))


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _dtypes(dtypes: Mapping[str, DtypeTotals]) -> list[str]:
    total = sum(row["bytes"] for row in dtypes.values())
    rows = [
        [
            name,
            f"{row['tensors']:,}",
            format_count(row["params"]),
            format_bytes(row["bytes"]),
            f"{row['bytes'] / total:.1%}" if total else "",
            f"{8 * row['bytes'] / row['params']:.2f}" if row["params"] else "",
        ]
        for name, row in dtypes.items()
    ]
    header = ["dtype", "tensors", "params", "size", "share", "bits/weight"]
    return table(header, rows, right="tensors params size share bits/weight")


def _tokenizer(info: TokenizerInfo | None) -> Iterator[tuple[str, str]]:
    if info is None:
        yield "model", "(none embedded)"
        return
    yield "model", info.model + (f", pre-tokenizer {info.pre}" if info.pre else "")
    counts = f"{info.vocab_size:,} tokens"
    counts += f", {info.merges:,} merges" if info.merges else ""
    yield "vocabulary", counts + (f", {info.added:,} added" if info.added else "")
    ids = {"bos": info.bos_id, "eos": info.eos_id, "pad": info.pad_id, "unk": info.unk_id}
    yield "special ids", ", ".join(f"{role} {i}" for role, i in ids.items() if i is not None) or "(none)"
    yield "chat template", "yes" if info.chat_template else "no"


def _provenance(metadata: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key in _IDENTITY:
        if metadata.get(key):
            yield key.replace("_", " "), str(metadata[key])
    for key, label in _PROVENANCE:
        yield label, str(metadata.get(key) or "(missing)")


def _quality(quality: Quality) -> Iterator[str]:
    from aprfmt.inspection.quality import QUALITY_THRESHOLD

    verdict = "ready to publish" if quality.score >= QUALITY_THRESHOLD else f"below {QUALITY_THRESHOLD}"
    yield from ("", out.style(f"Quality {quality.score} of 100 ({verdict})", "bold"))
    for name, part in quality.breakdown.items():
        yield from pairs([(f"{name} {part.points}/{part.max}", f"based on {part.looked_at}")], label=18)
        if part.missing:
            yield from pairs([("", "missing: " + "; ".join(part.missing))], label=18)
