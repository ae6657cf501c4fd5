"""Writing APR v2 in several files: `.apr` shards for a manifest.

Each shard is an `.apr` of its own with the flag SHARDED and the typed object `sharding`. Shard 0 carries the whole
metadata, the others only what identifies the model; each names the true dtypes of its own tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import RefusedError
from aprfmt.formats import apr2_write, apr_metadata
from aprfmt.formats.apr2 import FLAGS, HEADER_BYTES
from aprfmt.formats.apr_index import ALIGNMENT
from aprfmt.formats.apr_metadata import TRUE_DTYPES_KEY
from aprfmt.formats.apr_shards import sort_key
from aprfmt.formats.out import OutTensor, grouped
from aprfmt.io.segments import FileLayout, padding
from aprfmt.limits import MAX_SPLITS

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
    metadata: Mapping[str, Any],
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
    groups = grouped(tensors, max_bytes, _cost, first, other)
    if len(groups) > MAX_SPLITS:
        raise RefusedError(
            f"{len(groups)} shards are more than {MAX_SPLITS}", hint="choose a larger --shard-size"
        )
    return list(_lay_out(groups, whole, identity, total, flags, generation))


def _lay_out(
    groups: Sequence[list[OutTensor]],
    whole: Mapping[str, Any],
    identity: Mapping[str, Any],
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


def _sharding(count: int, index: int, total_size: int) -> dict[str, Any]:
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
