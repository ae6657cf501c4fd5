"""`.apr` models in several files, with a manifest.

Each shard is an `.apr` of its own with the flag SHARDED and the typed object `sharding`. Shard 0 carries the whole
metadata, the others only what identifies the model; each names the true dtypes of its own tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from aprfmt.canonical.model import Canonical
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.options import Options
from aprfmt.convert.targets.apr import apr_contents, is_lossless
from aprfmt.convert.targets.base import Output, Work
from aprfmt.errors import RefusedError
from aprfmt.formats import apr2, apr2_write, apr_metadata
from aprfmt.formats.apr2 import ALIGNMENT, FLAGS, HEADER_BYTES, Apr2Native
from aprfmt.formats.apr_metadata import TRUE_DTYPES_KEY
from aprfmt.formats.apr_shards import MANIFEST_NAME, JoinedNative, ShardInfo, manifest_text, sort_key
from aprfmt.formats.out import OutTensor, group_by_size
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, padding, source_jobs, write_layout
from aprfmt.io.sink import AtomicFile, AtomicFolder
from aprfmt.io.source import Buffer
from aprfmt.limits import MAX_SPLITS
from aprfmt.model import Model, Tensor

DEFAULT_SHARD_BYTES = 5_000_000_000

Shard = tuple[FileLayout, list[OutTensor]]
"""One shard and its tensors."""

# Shards of an older run that must not stay beside new ones.
_STALE = ("model-*-of-*.apr", MANIFEST_NAME)


def layouts(c: Canonical, work: Work) -> Output:
    """The shards of the `.apr` that `c` becomes."""
    metadata, tensors, flags = apr_contents(c, "keep", work.losses)
    in_order = sorted(tensors, key=lambda tensor: sort_key(tensor.name))
    shards = shard_layouts(metadata, in_order, flags=flags, max_bytes=_max_bytes(work.options))
    return _output(shards, tensors, is_lossless(c, metadata))


def copy(model: Model, options: Options) -> Output | None:
    """The shards of an `.apr` v2 as it is; None where the source is something else.

    Raises RefusedError for what is a shard itself, and as shard_layouts.
    """
    native = apr2.native_of(model)
    if native is None:
        return None
    if model.flags["sharded"] and not isinstance(native, JoinedNative):
        raise RefusedError(
            "the file is one shard of a larger model", path=model.path, hint="put its manifest beside it"
        )
    metadata = native.metadata
    tensors = [_stored(model.tensors.entries[i]) for i in native.index.blob_order()]
    shards = shard_layouts(
        metadata,
        tensors,
        flags=native.header.flags,
        max_bytes=_max_bytes(options),
        generation=metadata.generation,
    )
    # Whether joining them gives this very file back.
    lossless = isinstance(native, JoinedNative) or _is_default(native, tensors)
    return _output(shards, [_stored(tensor) for tensor in model.tensors.entries], lossless)


def _max_bytes(options: Options) -> int:
    return options.shard_size or DEFAULT_SHARD_BYTES


def _output(shards: Sequence[Shard], tensors: list[OutTensor], lossless: bool) -> Output:
    return Output(
        [layout for layout, _ in shards], tensors, lossless, write=partial(write_shards, shards=shards)
    )


def _stored(tensor: Tensor) -> OutTensor:
    source, offset, n_bytes = tensor.source, tensor.offset, tensor.n_bytes
    return OutTensor(
        tensor.name, tensor.dtype, tensor.shape, n_bytes, lambda: source_jobs(source, offset, n_bytes)
    )


def _is_default(native: Apr2Native, tensors: Sequence[OutTensor]) -> bool:
    """Whether our writer lays out this file as it is: header, metadata, index, place of every blob."""
    metadata = native.metadata
    text = apr_metadata.dump(dict(metadata), metadata.generation)
    if text != metadata.raw or native.header.data_offset < HEADER_BYTES:
        return False
    layout = FileLayout("", apr2_write.layout(text, tensors, flags=native.header.flags, streaming=True), True)
    head = layout.segments[0]
    assert isinstance(head, Literal)
    return layout.n_bytes == native.source.size and native.source.read(0, head.n_bytes) == head.data


class _HashedFile(AtomicFile):
    """An atomic file that knows the SHA-256 of what was written."""

    def __enter__(self) -> _HashedFile:
        self.digest = hashlib.sha256()
        super().__enter__()
        return self

    def write(self, data: Buffer) -> None:
        """Appends all of `data`. Raises StorageError."""
        self.digest.update(data)
        super().write(data)


def write_shards(target: str, way: WriteOptions, shards: Sequence[Shard]) -> None:
    """Writes the shards and then their manifest as the folder `target`. Raises ExistsError, StorageError."""
    n_bytes = sum(layout.n_bytes for layout, _ in shards)
    advance = way.progress(n_bytes) if way.progress else None
    infos = []
    with AtomicFolder(target, force=way.force, n_bytes=n_bytes, stale=_STALE) as folder:
        for i, (layout, tensors) in enumerate(shards):
            with _HashedFile(
                folder / layout.name, force=True, n_bytes=layout.n_bytes, fsync=way.fsync
            ) as sink:
                crc = write_layout(layout, sink, advance, way.flow)
            names = tuple(sorted(tensor.name for tensor in tensors))
            infos.append(ShardInfo(layout.name, i, layout.n_bytes, names, sink.digest.hexdigest(), crc))
        text = manifest_text(infos, sum(tensor.n_bytes for _, group in shards for tensor in group))
        with AtomicFile(folder / MANIFEST_NAME, force=True, n_bytes=len(text)) as manifest:
            manifest.write(text)


# --- cutting ---

SHARD_PATTERN = "model-{:05d}-of-{:05d}.apr"
"""Names of shards, counted from 0."""

_SHARDED = FLAGS["sharded"]
_ONLY_FIRST = FLAGS["has_vocab"] | FLAGS["has_model_card"]
# What every shard says of the model; the rest stands in shard 0.
_IDENTITY = (
    *("model_type", "name", "license", "data_source", "data_license", "version", "total_size", "param_count"),
    *("architecture", "hf_architecture", "hf_model_type"),
)


def shard_layouts(
    metadata: Mapping[str, object],
    tensors: Sequence[OutTensor],
    *,
    flags: int,
    max_bytes: int,
    generation: str = "Current",
) -> list[tuple[FileLayout, list[OutTensor]]]:
    """The shards of a model with the tensors of each, its blobs in the order of `tensors`.

    No file exceeds `max_bytes` but for a single larger tensor, or the metadata and one tensor. Raises RefusedError
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
            f"{len(groups)} shards are more than {MAX_SPLITS}", hint="choose a larger --shard-size"
        )
    return list(_lay_out(groups, whole, identity, total, flags, generation))


def _lay_out(
    groups: Sequence[list[OutTensor]],
    whole: Mapping[str, object],
    identity: Mapping[str, object],
    total: int,
    flags: int,
    generation: str,
) -> Iterator[tuple[FileLayout, list[OutTensor]]]:
    for i, group in enumerate(groups):
        values = {**(identity if i else whole), "sharding": _sharding(len(groups), i, total)}
        if found := apr2_write.true_dtypes(group):
            values[TRUE_DTYPES_KEY] = found
        bits = (flags & ~_ONLY_FIRST if i else flags) | _SHARDED
        text = apr_metadata.dump(values, generation)
        segments = apr2_write.layout(text, group, flags=bits, streaming=True)
        yield FileLayout(SHARD_PATTERN.format(i, len(groups)), segments, crc_footer=True), group


def _sharding(count: int, index: int, total_size: int) -> dict[str, object]:
    return {"shard_count": count, "shard_index": index, "total_size": total_size, "pattern": SHARD_PATTERN}


def _cost(tensor: OutTensor) -> int:
    """Most bytes that a tensor adds to a shard: index entry, padded blob, its true dtype in the metadata."""
    entry = 20 + len(sort_key(tensor.name)) + 8 * max(2, len(tensor.shape))
    if DTYPES[tensor.dtype].apr_id is None:
        entry += len(json.dumps([tensor.name, tensor.dtype, tensor.shape])) + 32
    return entry + tensor.n_bytes + padding(tensor.n_bytes, ALIGNMENT)


def _check_names(tensors: Sequence[OutTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        name = tensor.name
        if name in seen:
            raise RefusedError("two tensors have one name, which a manifest cannot tell apart", tensor=name)
        seen.add(name)
        if len(sort_key(name)) > apr2_write.MAX_WRITTEN_NAME_BYTES or not _is_text(name):
            raise RefusedError(
                "a manifest cannot name this tensor: too long, or no UTF-8", tensor=ascii(name)
            )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
