"""Writes `.apr`: typed metadata, tokenizer, source manifest, tensors in Hugging Face order.

In several files, with a manifest, each shard is an `.apr` with the flag SHARDED and the typed object `sharding`. Shard
0 has the whole metadata, the others only what identifies the model; each states the true dtypes of its own tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from aprfmt.arch import hparams as hp
from aprfmt.arch import names
from aprfmt.canonical.detection import find_row
from aprfmt.canonical.metadata import apr_metadata_of
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.read import canonical
from aprfmt.canonical.sidecar import LEFT_ASIDE
from aprfmt.canonical.sides import gguf_side
from aprfmt.canonical.tensor import CanonicalTensor, Losses, extra_dtype, is_exact, matrix_dtype
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.codecs.recode import decode, encode
from aprfmt.convert.options import Options
from aprfmt.convert.quantization import Recoding, with_apr_names
from aprfmt.convert.source_manifest_writer import deferred_digests, manifest_of_source
from aprfmt.convert.targets.base import DEFAULT_SHARD_BYTES, Output, Work
from aprfmt.errors import AprError, RefusedError, UsageError
from aprfmt.formats import apr2, apr2_write, apr_metadata
from aprfmt.formats.apr2 import ALIGNMENT, FLAGS, HEADER_BYTES, Apr2Native
from aprfmt.formats.apr_metadata import FOOTER, FOOTER_KEY, SOURCE_KEY, TRUE_DTYPES_KEY
from aprfmt.formats.apr_shards import MANIFEST_NAME, JoinedNative, ShardInfo, manifest_text, sort_key
from aprfmt.formats.hfdir import HfNative
from aprfmt.formats.out_tensor import OutTensor, group_by_size
from aprfmt.formats.safetensors import SafetensorsNative
from aprfmt.io.digest import BLAKE3, CRC32
from aprfmt.io.pipe import FileLayout, Literal, Stream, WriteOptions, sha256_of_range, source_jobs, write_layout
from aprfmt.io.sink import AtomicFile, AtomicFolder
from aprfmt.io.source import Buffer, Source, padding
from aprfmt.limits import MAX_SPLITS
from aprfmt.model import Model, Tensor
from aprfmt.provenance.model_card import CARD
from aprfmt.tokenizer import apr as tokenizer_apr
from aprfmt.tokenizer.data import is_unicode

HAS_VOCAB = 0x0200
QUANTIZED = 0x0020
HAS_MODEL_CARD = 0x0080

# Only norms and biases are ever widened; a larger tensor is not decoded to check whether it can be narrowed.
_LARGEST_NARROWED = 16 << 20


def layouts(c: Canonical, work: Work) -> Output:
    """The `.apr` for `c`, with weights in the requested dtype or preset; see apr_contents."""
    targets: dict[str, Recoding] = {}
    dtype = work.options.dtype
    if work.quantization is not None:
        side = gguf_side(c.arch, c.hparams, c.tensors) if c.arch is not None else list(c.tensors.values())
        c, targets = with_apr_names(c, side, work.quantization.targets(c, side, work.losses))
        dtype = "keep"
        kept = (f"{part} not quantized: a preset applies to the language model only" for part in c.extra_parts())
        work.losses.warnings += kept
    with_source = work.options.tokenizer is work.options.target_model is None
    kind = _digest_kind(c, work.options)
    metadata, tensors, flags = apr_contents(c, dtype, work.losses, targets, with_source=with_source, kind=kind)
    if not _is_whole(metadata.get(SOURCE_KEY)):
        own = c.all_tensors
        for tensor in (t for t in tensors if t.name in own):
            work.losses.note_quantized(own[tensor.name], tensor.dtype)
    check_metadata(metadata)
    segments = apr2_write.layout(apr_metadata.dump(metadata), [*tensors, *_files(c)], flags=flags)
    layout = _with_digests(c, FileLayout(work.name, segments, crc_footer=True))
    return Output([layout], tensors, is_lossless(c, metadata))


def _digest_kind(c: Canonical, options: Options) -> str:
    """The digest to record for the source files. Raises UsageError for --hash without source files."""
    if options.hash and c.model.convention == "apr":
        raise UsageError(
            "--hash needs the source files, and the input is an .apr",
            path=c.model.path,
            hint="use it at import: apr import SOURCE -o FILE.apr --hash",
        )
    return BLAKE3 if options.hash else CRC32


def _with_digests(c: Canonical, layout: FileLayout) -> FileLayout:
    """`layout`, whose metadata may contain a manifest, with the digests of the files that are streamed into it."""
    head = layout.segments[0]
    assert isinstance(head, Literal)
    return replace(layout, deferred=deferred_digests(c.model.sources, bytes(head.data)))


def check_metadata(metadata: Mapping[str, object]) -> None:
    """Raises AprError for metadata that could not be read back.

    The vocabulary and the source manifest are skipped: both are large, and were just read or built.
    """
    rest = {k: v for k, v in metadata.items() if k != SOURCE_KEY and not k.startswith(("tokenizer.", "aprfmt.tok"))}
    hp.from_apr(apr_metadata.parse(apr_metadata.dump(rest)))


def check_readable(model: Model) -> None:
    """Raises AprError for an `.apr` that opens but cannot be used, so that it is not copied."""
    _ = model.hparams, model.tokenizer
    if apr2.native_of(model) is not None and model.metadata.get(SOURCE_KEY) is not None:
        manifest_of_source(canonical(model, allow_unmapped=True))


def is_lossless(c: Canonical, metadata: Mapping[str, object]) -> bool:
    """Whether every source file can be restored byte for byte from an `.apr` with this metadata."""
    if not _is_whole(metadata.get(SOURCE_KEY)) or c.model.convention == "apr" or c.left_out:
        return False
    if c.model.native_as(SafetensorsNative) is not None or (c.extras and not c.tensors):
        return True  # an adapter's config does not describe a network
    # What the user or the tensors state about the network is written into the keys or the config on the way back.
    tells = c.model.native_as(HfNative) is None or c.model.hparams.hidden_size is not None
    return tells and (bool(c.part) or find_row(c.model) is c.arch)


def _is_whole(record: object) -> bool:
    return isinstance(record, Mapping) and not record.get("partial")


def _files(c: Canonical) -> list[OutTensor]:
    """The files of the source's folder that the `.apr` carries."""
    return [file.out(file.name) for file in c.files.values()]


def copy(model: Model, name: str) -> Output | None:
    """The same `.apr`, byte for byte, of any generation; shards are joined.

    None for another source.
    """
    if model.convention != "apr":
        return None
    check_readable(model)
    tensors = [OutTensor(t.name, t.dtype, t.shape, t.n_bytes, lambda: ()) for t in model.tensors.entries]
    joined = model.native_as(JoinedNative)
    if joined is not None:
        layout = FileLayout(name, apr2_write.layout_from_model(model), crc_footer=True)
        return Output([layout], tensors, True, ready=joined.verify)
    source = model.sources[0]
    segment = Stream(source.size, lambda: source_jobs(source, 0, source.size), name)
    return Output([FileLayout(name, [segment])], tensors, True)


def apr_contents(
    c: Canonical,
    dtype: str,
    losses: Losses,
    targets: Mapping[str, Recoding] | None = None,
    *,
    with_source: bool = True,
    kind: str = CRC32,
) -> tuple[dict[str, object], list[OutTensor], int]:
    """Metadata, tensors and header flags of the `.apr` for `c`; `targets` take precedence over `dtype`.

    The source manifest has the weight files only if every tensor is kept, and the tokenizer files only `with_source`:
    it must be exact. Each has a digest of the `kind`.
    """
    narrow = _narrow_dtypes(c) if dtype == "keep" else {}
    tensors = []
    for t in c.tensors.values():
        name = narrow.get(t.name) or matrix_dtype(t, dtype, _gguf_name(c, t.name))
        target = (targets or {}).get(t.name, Recoding(name))
        out = t.out(t.name, target.dtype, losses.overflow, target.weights, padded=True, rounded=losses.round_blocks)
        tensors += [out, *t.scale_outs(out, gguf=False)]
    for t in c.extras.values():
        name = narrow.get(t.name) or extra_dtype(t, dtype)
        tensors.append(t.out(t.name, name, losses.overflow, padded=True))
    _check_lengths(c, tensors)
    own = c.all_tensors
    kept = not c.packs.decoded and all(
        out.dtype in (own[out.name].dtype, narrow.get(out.name)) for out in tensors if out.name in own
    )
    metadata = _further_metadata(c, with_tokenizer=with_source) | apr_metadata_of(c, tensors)
    if kept and with_source and c.sidecar is not None:
        metadata = _with_sidecar(c, metadata, c.sidecar.metadata, losses)
    record = manifest_of_source(c, narrow, kind=kind, tensors_kept=kept, tokenizer_kept=with_source)
    if record is not None:
        metadata[SOURCE_KEY] = record
    metadata[FOOTER_KEY] = FOOTER
    if true_dtypes := apr2_write.true_dtypes(tensors):
        metadata["aprfmt.tensors"] = true_dtypes
    return metadata, tensors, _flags(c, tensors)


def _check_lengths(c: Canonical, tensors: Sequence[OutTensor]) -> None:
    """Raises RefusedError for a tensor name that the container would truncate."""
    most = apr2_write.MAX_WRITTEN_NAME_BYTES
    long = next((t.name for t in tensors if len(t.name.encode("utf-8", "surrogateescape")) > most), None)
    if long is not None:
        raise RefusedError(f"tensor name too long: an .apr holds up to {most} bytes", path=c.model.path, tensor=long)


def _gguf_name(c: Canonical, name: str) -> str:
    return (names.gguf_name(c.arch, name, c.hparams) if c.arch is not None else None) or name


def _with_sidecar(
    c: Canonical, metadata: dict[str, object], facts: Mapping[str, object], losses: Losses
) -> dict[str, object]:
    """`metadata` with the sidecar metadata, which is ignored if it contradicts the tensors or the tokenizer."""
    merged = {key: value for key, value in {**metadata, **facts, **c.stated}.items() if value is not None}
    try:
        tokenizer = tokenizer_apr.from_metadata(merged)
        if c.arch is not None:
            shapes = {t.name: t.shape for t in c.tensors.values()}
            names.check_shapes(c.arch, hp.from_apr(merged), shapes)
        if (tokenizer and tokenizer.tokens) == (c.tokenizer and c.tokenizer.tokens):
            return merged
    except AprError:
        pass
    losses.warnings.append("the sidecar metadata of the original .apr contradicts the tensors and is ignored")
    return metadata | {LEFT_ASIDE: True}


def _narrow_dtypes(c: Canonical) -> dict[str, str]:
    """Tensors of a GGUF that an `.apr` stored in fewer bytes and that still match: {name: dtype}."""
    wanted = c.sidecar.dtypes if c.sidecar is not None else {}
    own = c.all_tensors
    return {name: dtype for name, dtype in wanted.items() if name in own and _fits(own[name], dtype)}


def _fits(tensor: CanonicalTensor, dtype: str) -> bool:
    if tensor.n_bytes > _LARGEST_NARROWED or not is_exact(dtype, tensor.dtype):
        return False
    values = tensor.produced.values()
    return bool((decode(dtype, encode(dtype, values), tensor.shape) == values).all())


def _further_metadata(c: Canonical, *, with_tokenizer: bool) -> dict[str, object]:
    """The metadata keys of a converted `.apr` that are not modelled here."""
    if c.model.native_as(Apr2Native) is None:
        return {}
    own = {SOURCE_KEY, TRUE_DTYPES_KEY, FOOTER_KEY}
    return {
        key: value
        for key, value in apr_metadata.canonicalize_aliases(c.model.metadata).items()
        if key not in own and (with_tokenizer or not key.startswith(("tokenizer.", "aprfmt.tokenizer")))
    }


def _flags(c: Canonical, tensors: list[OutTensor]) -> int:
    flags = HAS_VOCAB if c.tokenizer is not None and c.tokenizer.tokens else 0
    if any(DTYPES[t.dtype].is_quantized for t in tensors):
        flags |= QUANTIZED
    if (folder := c.model.native_as(HfNative)) and any(p.name == CARD for p in folder.other_files):
        flags |= HAS_MODEL_CARD
    if (apr := c.model.native_as(Apr2Native)) is not None:
        flags |= apr.header.flags & HAS_MODEL_CARD
    return flags


# --- shards ---

Shard = tuple[FileLayout, list[OutTensor]]
"""One shard and its tensors."""

# Shards of an older run that must not remain with new ones.
_STALE = ("model-*-of-*.apr", MANIFEST_NAME)


def shard_layouts(c: Canonical, work: Work) -> Output:
    """The shards of the `.apr` that `c` becomes."""
    metadata, tensors, flags = apr_contents(c, "keep", work.losses, kind=_digest_kind(c, work.options))
    check_metadata(metadata)
    in_order = sorted((*tensors, *_files(c)), key=lambda tensor: sort_key(tensor.name))
    shards = cut_shards(metadata, in_order, flags=flags, max_bytes=work.options.shard_bytes or DEFAULT_SHARD_BYTES)
    (first, group), *others = shards
    return _shard_output([(_with_digests(c, first), group), *others], tensors, is_lossless(c, metadata))


def copy_shards(model: Model, options: Options) -> Output | None:
    """The shards of an unchanged `.apr` v2; None for another source.

    Raises RefusedError for a shard, and as cut_shards.
    """
    native = apr2.native_of(model)
    if native is None:
        return None
    if model.flags["sharded"] and not isinstance(native, JoinedNative):
        raise RefusedError(
            "the file is one shard of a larger model", path=model.path, hint="put its manifest in the same folder"
        )
    check_readable(model)
    metadata = native.metadata
    tensors = [_stored(native.index.tensors[i]) for i in native.index.blob_order()]
    shards = cut_shards(
        metadata,
        tensors,
        flags=native.header.flags,
        max_bytes=options.shard_bytes or DEFAULT_SHARD_BYTES,
        generation=metadata.generation,
    )
    # Whether joining them yields this very file again.
    lossless = isinstance(native, JoinedNative) or _is_default(native, tensors)
    return _shard_output(shards, [_stored(tensor) for tensor in model.tensors.entries], lossless)


def _shard_output(shards: Sequence[Shard], tensors: list[OutTensor], lossless: bool) -> Output:
    return Output([layout for layout, _ in shards], tensors, lossless, write=partial(write_shards, shards=shards))


def _stored(tensor: Tensor) -> OutTensor:
    source, offset, n_bytes = tensor.source, tensor.offset, tensor.n_bytes
    return OutTensor(tensor.name, tensor.dtype, tensor.shape, n_bytes, lambda: source_jobs(source, offset, n_bytes))


def _is_default(native: Apr2Native, tensors: Sequence[OutTensor]) -> bool:
    """Whether our writer would lay out this file identically: header, metadata, index, position of every blob."""
    metadata = native.metadata
    text = apr_metadata.dump(dict(metadata), metadata.generation)
    if text != metadata.raw or native.header.data_offset < HEADER_BYTES:
        return False
    layout = FileLayout("", apr2_write.layout(text, tensors, flags=native.header.flags, streaming=True), True)
    head = layout.segments[0]
    assert isinstance(head, Literal)
    return layout.n_bytes == native.source.size and native.source.read(0, head.n_bytes) == head.data


class _HashedFile(AtomicFile):
    """An atomic file that computes the SHA-256 of its content."""

    def __enter__(self) -> _HashedFile:
        self.digest = hashlib.sha256()
        self._is_patched = False
        super().__enter__()
        return self

    def write(self, data: Buffer) -> None:
        """Appends all of `data`. Raises StorageError."""
        self.digest.update(data)
        super().write(data)

    def hexdigest(self, path: Path) -> str:
        """The digest, in hex; the file is at `path` now."""
        if not self._is_patched:
            return self.digest.hexdigest()
        with Source.open(path) as source:
            return sha256_of_range(source, 0, source.size)

    def patch(self, offset: int, data: bytes) -> None:
        """Replaces bytes that were written before. Raises StorageError."""
        self._is_patched = True
        super().patch(offset, data)


def write_shards(target: str, way: WriteOptions, shards: Sequence[Shard]) -> None:
    """Writes the shards and then their manifest as the folder `target`. Raises ExistsError, StorageError."""
    n_bytes = sum(layout.n_bytes for layout, _ in shards)
    advance = way.progress(n_bytes) if way.progress else None
    infos = []
    with AtomicFolder(target, force=way.force, n_bytes=n_bytes, stale=_STALE, last=MANIFEST_NAME) as folder:
        # The first comes last: it has the digests of the sources, which are known when all of them are streamed.
        for i, (layout, tensors) in sorted(enumerate(shards), key=lambda item: -item[0]):
            with _HashedFile(folder / layout.name, force=True, n_bytes=layout.n_bytes, fsync=way.fsync) as sink:
                crc = write_layout(layout, sink, advance, way.flow)
            names = tuple(sorted(tensor.name for tensor in tensors))
            infos.append(ShardInfo(layout.name, i, layout.n_bytes, names, sink.hexdigest(folder / layout.name), crc))
        text = manifest_text(infos[::-1], sum(tensor.n_bytes for _, group in shards for tensor in group))
        with AtomicFile(folder / MANIFEST_NAME, force=True, n_bytes=len(text)) as manifest:
            manifest.write(text)
        way.confirm(str(folder))


# --- cutting ---

SHARD_PATTERN = "model-{:05d}-of-{:05d}.apr"
"""Names of shards, counted from 0."""

_ONLY_FIRST = FLAGS["has_vocab"] | FLAGS["has_model_card"]
# What every shard states about the model; the rest is in shard 0.
_IDENTITY = (
    *("model_type", "name", "license", "data_source", "data_license", "version", "total_size", "param_count"),
    *("architecture", "hf_architecture", "hf_model_type", FOOTER_KEY),
)


def cut_shards(
    metadata: Mapping[str, object],
    tensors: Sequence[OutTensor],
    *,
    flags: int,
    max_bytes: int,
    generation: str = "Current",
) -> list[Shard]:
    """Divides a model into shards with the tensors of each, its blobs in the order of `tensors`.

    No file exceeds `max_bytes` except for a single larger tensor, or the metadata and one tensor. Raises RefusedError
    for tensors that a manifest cannot name, UsageError and LimitError as apr2_write.layout.
    """
    _check_names(tensors)
    whole = {key: value for key, value in metadata.items() if key != TRUE_DTYPES_KEY}
    identity = {key: whole[key] for key in _IDENTITY if key in whole}
    total = sum(tensor.n_bytes for tensor in tensors)
    room = 3 * ALIGNMENT + HEADER_BYTES + len(json.dumps(_sharding(MAX_SPLITS, MAX_SPLITS, total)))
    first, other = (len(apr_metadata.dump(values, generation)) + room for values in (whole, identity))
    groups = group_by_size(tensors, max_bytes, _cost, first, other)
    if len(groups) > MAX_SPLITS:
        raise RefusedError(
            f"too many shards: {len(groups)}, the limit is {MAX_SPLITS}", hint="choose a larger --shard-size"
        )
    shards = []
    for i, group in enumerate(groups):
        values = {**(identity if i else whole), "sharding": _sharding(len(groups), i, total)}
        if found := apr2_write.true_dtypes(group):
            values[TRUE_DTYPES_KEY] = found
        bits = (flags & ~_ONLY_FIRST if i else flags) | FLAGS["sharded"]
        segments = apr2_write.layout(apr_metadata.dump(values, generation), group, flags=bits, streaming=True)
        shards.append((FileLayout(SHARD_PATTERN.format(i, len(groups)), segments, crc_footer=True), group))
    return shards


def _sharding(count: int, index: int, total_size: int) -> dict[str, object]:
    return {"shard_count": count, "shard_index": index, "total_size": total_size, "pattern": SHARD_PATTERN}


def _cost(tensor: OutTensor) -> int:
    """Maximum bytes that a tensor adds to a shard: index entry, padded blob, its true dtype in the metadata."""
    entry = 20 + len(sort_key(tensor.name)) + 8 * max(2, len(tensor.shape))
    if DTYPES[tensor.dtype].apr_id is None:
        entry += len(json.dumps([tensor.name, tensor.dtype, tensor.shape])) + 32
    return entry + tensor.n_bytes + padding(tensor.n_bytes, ALIGNMENT)


def _check_names(tensors: Sequence[OutTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        name = tensor.name
        if name in seen:
            raise RefusedError("duplicate tensor name: a manifest needs unique names", tensor=name)
        seen.add(name)
        if len(sort_key(name)) > apr2_write.MAX_WRITTEN_NAME_BYTES or not is_unicode(name):
            raise RefusedError("a manifest cannot hold this tensor name: too long, or not UTF-8", tensor=ascii(name))
