"""Cutting `.apr` models into shards, and writing them with their manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from aprfmt.canonical.dtype_choice import Losses
from aprfmt.canonical.model import Canonical
from aprfmt.convert.targets.apr import apr_contents
from aprfmt.errors import RefusedError
from aprfmt.formats import apr2, apr2_write, apr_metadata
from aprfmt.formats.apr2 import HEADER_BYTES, Apr2Native
from aprfmt.formats.apr_manifest import ShardInfo, manifest_text
from aprfmt.formats.apr_metadata import TRUE_DTYPES_KEY
from aprfmt.formats.apr_shards import MANIFEST_NAME, JoinedNative
from aprfmt.formats.apr_shards_write import shard_layouts
from aprfmt.formats.out import OutTensor
from aprfmt.io.pipe import source_jobs, write_layout
from aprfmt.io.segments import FileLayout, Literal
from aprfmt.io.sink import AtomicFile, AtomicFolder
from aprfmt.io.source import Buffer
from aprfmt.io.write import WriteOptions
from aprfmt.model import Model, Tensor

DEFAULT_SHARD_BYTES = 5_000_000_000

Shard = tuple[FileLayout, list[OutTensor]]
"""One shard and its tensors."""

# Shards of an older run that must not stay beside new ones.
_STALE = ("model-*-of-*.apr", MANIFEST_NAME)


def cut(model: Model, max_bytes: int) -> tuple[list[Shard], bool]:
    """The shards of an `.apr` v2, and whether joining them gives this very file back.

    Raises RefusedError for what is a shard itself, and as shard_layouts.
    """
    native = apr2.native_of(model)
    assert native is not None
    if model.flags["sharded"] and not isinstance(native, JoinedNative):
        raise RefusedError(
            "the file is one shard of a larger model", path=model.path, hint="put its manifest beside it"
        )
    tensors = [_stored(model.tensors.entries[i]) for i in native.index.blob_order()]
    shards = shard_layouts(
        native.metadata,
        tensors,
        flags=native.flags,
        max_bytes=max_bytes,
        generation=native.metadata.generation,
    )
    return shards, isinstance(native, JoinedNative) or _is_default(native, tensors)


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
    layout = FileLayout("", apr2_write.layout(text, tensors, flags=native.flags, streaming=True), True)
    head = layout.segments[0]
    assert isinstance(head, Literal)
    return layout.n_bytes == native.source.size and native.source.read(0, head.n_bytes) == head.data


def cut_canonical(
    c: Canonical, dtype: str, max_bytes: int, losses: Losses
) -> tuple[list[Shard], list[OutTensor]]:
    """The shards of the `.apr` that `c` becomes, and its tensors."""
    metadata, tensors, flags = apr_contents(c, dtype, losses)
    in_order = sorted(tensors, key=lambda tensor: tensor.name.encode("utf-8", "surrogateescape"))
    whole = {key: value for key, value in metadata.items() if key != TRUE_DTYPES_KEY}
    return shard_layouts(whole, in_order, flags=flags, max_bytes=max_bytes), tensors


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


def write_shards(target: str, shards: Sequence[Shard], way: WriteOptions) -> None:
    """Writes the shards and then their manifest as the folder `target`. Raises ExistsError, StorageError."""
    n_bytes = sum(layout.n_bytes for layout, _ in shards)
    advance = way.progress(n_bytes) if way.progress else None
    infos = []
    with AtomicFolder(target, force=way.force, n_bytes=n_bytes, stale=_STALE) as folder:
        for i, (layout, tensors) in enumerate(shards):
            with _HashedFile(folder / layout.name, n_bytes=layout.n_bytes, fsync=way.fsync) as sink:
                crc = write_layout(layout, sink, advance, way.flow)
            names = tuple(sorted(tensor.name for tensor in tensors))
            infos.append(ShardInfo(layout.name, i, layout.n_bytes, names, sink.digest.hexdigest(), crc))
        text = manifest_text(infos, sum(tensor.n_bytes for _, group in shards for tensor in group))
        with AtomicFile(folder / MANIFEST_NAME, n_bytes=len(text)) as manifest:
            manifest.write(text)
