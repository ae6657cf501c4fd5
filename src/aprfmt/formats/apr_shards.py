"""Opens any `.apr` v2: one file, or shards as one model.

The manifest is the reference's ShardManifest, with `sha256` and `crc32` added to each shard:

{"version": "2.0", "shard_count", "total_size" (bytes of all tensors), "tensor_count",
 "shards": [{"filename", "index", "size" (bytes of the file), "tensors": [...],
             "sha256" (of the file, hex), "crc32" (its footer)}, ...],
 "weight_map": {tensor name: shard index}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

from aprfmt.errors import ChecksumError, CorruptError, LimitError, NotFoundError, RefusedError, storage_errors
from aprfmt.formats import APR_MANIFEST_SUFFIX, apr2, apr_metadata
from aprfmt.formats.apr2 import FLAGS, Apr2Native, Index
from aprfmt.formats.apr_metadata import TRUE_DTYPES_KEY, AprMetadata
from aprfmt.formats.hf_files import check_file_name, list_names, parse_object, read_text_file
from aprfmt.io.source import is_folder
from aprfmt.light_dataclass import light_dataclass
from aprfmt.limits import MAX_SPLITS
from aprfmt.model import Model
from aprfmt.text import plural

_SHA256 = re.compile(r"[0-9a-f]{64}")
MANIFEST_NAME = f"model{APR_MANIFEST_SUFFIX}"
_FETCH_AGAIN = "download the manifest and its shards again, all from one revision"


def open_model(path: Path) -> Model:
    """Opens an `.apr` v2 file, or all shards of a model: by its manifest, its folder or any shard.

    Raises RefusedError (a shard is missing, or does not match the manifest), CorruptError and its kinds,
    UnsupportedError, NotFoundError, StorageError.
    """
    if is_folder(path):
        return _open_all(_manifest_of(path), path)
    if path.name.endswith(APR_MANIFEST_SUFFIX):
        return _open_all(path, path)
    model = apr2.open_model(path)
    if not model.flags["sharded"]:
        return model
    try:
        manifest = _manifest_naming(path)
        if manifest is not None:
            model.close()
            return _open_all(manifest, path)
    except BaseException:
        model.close()
        raise
    model.warnings.append("one shard of a larger model, but no manifest in its folder lists it")
    return model


def _manifest_of(folder: Path) -> Path:
    found = [name for name in list_names(folder) if name.endswith(APR_MANIFEST_SUFFIX)]
    if not found:
        raise RefusedError("no manifest of `.apr` shards found in the folder", path=folder)
    if len(found) > 1 and MANIFEST_NAME not in found:
        hint = f"choose one: {folder / found[0]}"
        raise RefusedError("the folder contains several sharded models", path=folder, hint=hint)
    return folder / (MANIFEST_NAME if MANIFEST_NAME in found else found[0])


def _manifest_naming(path: Path) -> Path | None:
    for name in list_names(path.parent):
        if name.endswith(APR_MANIFEST_SUFFIX):
            manifest = path.with_name(name)
            if any(shard.filename == path.name for shard in read_manifest(manifest)):
                return manifest
    return None


def _open_all(manifest: Path, path: Path) -> Model:
    infos = read_manifest(manifest)
    with ExitStack() as stack:
        shards = [stack.enter_context(_open_shard(manifest, info, len(infos))) for info in infos]
        model = _join(shards, infos, manifest, path)
        stack.pop_all()
    return model


def _open_shard(manifest: Path, info: ShardInfo, count: int) -> Model:
    path = manifest.with_name(info.filename)
    try:
        with storage_errors(path):
            size = path.stat().st_size
        if size != info.size:
            raise _altered(path, f"it has {size} bytes instead of {info.size}")
        model = apr2.open_model(path)
    except NotFoundError as error:
        raise RefusedError(
            f"shard {info.filename} is listed in the manifest, but missing",
            path=manifest,
            hint="put it next to the manifest, or download it again",
        ) from error
    problem = _mismatch(model, info, count)
    if problem is not None:
        model.close()
        raise _altered(path, problem)
    return model


def _altered(path: Path, problem: str) -> RefusedError:
    return RefusedError(f"shard {path.name} does not match the manifest: {problem}", path=path, hint=_FETCH_AGAIN)


def _mismatch(model: Model, info: ShardInfo, count: int) -> str | None:
    """How an opened shard contradicts the manifest; the blobs are not read."""
    native = _native(model)
    names = [tensor.name for tensor in native.index.tensors]
    if len(names) != len(info.tensors) or set(names) != set(info.tensors):
        return "it contains other tensors"
    if info.crc32 is not None and int.from_bytes(native.source.read(info.size - 4, 4), "little") != info.crc32:
        return "its checksum differs"
    if info.index == 0:  # its metadata may be large, and is not needed to tell shards apart
        return None
    stated = native.metadata.get("sharding")
    place = [stated.get(key) for key in ("shard_count", "shard_index")] if isinstance(stated, Mapping) else []
    if place != [count, info.index]:
        return f"its metadata does not identify it as shard {info.index} of {count}"
    return None


def _native(shard: Model) -> Apr2Native:
    native = apr2.native_of(shard)
    assert native is not None
    return native


@light_dataclass
class JoinedNative(Apr2Native):
    """The single file that the shards were cut from: its header flags, index and metadata, for writers of APR.

    Attributes:
        manifest: path of the manifest.
        shards: each shard's manifest entry and opened file.
    """

    manifest: Path = Path()
    shards: Sequence[tuple[ShardInfo, Apr2Native]] = ()

    @cached_property
    def metadata(self) -> AprMetadata:
        """Shard 0's metadata without `sharding`, with the true dtypes of all shards."""
        first = self.shards[0][1].metadata
        values = {key: value for key, value in first.items() if key != "sharding"}
        true_dtypes: dict[str, object] = {}
        for _, shard in self.shards:
            own = shard.metadata.get(TRUE_DTYPES_KEY)
            true_dtypes |= own if isinstance(own, dict) else {}
        if true_dtypes:
            values[TRUE_DTYPES_KEY] = true_dtypes
        return AprMetadata(apr_metadata.dump(values, first.generation), values)

    def metadata_bytes(self) -> bytes:
        """The metadata section of the single file."""
        return self.metadata.raw

    @cached_property
    def problems(self) -> list[str]:
        """A sentence per shard whose bytes do not match the manifest; reads every shard."""
        return [text for info, shard in self.shards if (text := _verify(info, shard)) is not None]

    def checksum(self) -> dict[str, str]:
        """Header and footer state over all shards."""
        states = [_state(info, shard) for info, shard in self.shards]
        worst = next((state for state in ("bad", "absent") if state in states), "ok")
        return {"header": "ok", "footer": worst}

    def verify(self) -> None:
        """Raises ChecksumError for the first altered shard."""
        if self.problems:
            raise ChecksumError(self.problems[0], path=self.manifest, hint=_FETCH_AGAIN)


def _state(info: ShardInfo, shard: Apr2Native) -> str:
    """State of a shard's footer, which the manifest states too; without one, whether the sha256 matches."""
    if info.crc32 is None and info.sha256 is not None and _verify(info, shard) is not None:
        return "bad"
    return shard.checksum()["footer"]


def _verify(info: ShardInfo, shard: Apr2Native) -> str | None:
    if info.sha256 is None:
        state = shard.checksum()["footer"]
        return None if state == "ok" else f"shard {info.filename}: the checksum at its end is {state}"
    from aprfmt.io.pipe import sha256_of_range

    if sha256_of_range(shard.source, 0, shard.source.size) == info.sha256:
        return None
    return f"shard {info.filename} was modified: its sha256 differs from the manifest"


def _join(models: Sequence[Model], infos: Sequence[ShardInfo], manifest: Path, path: Path) -> Model:
    natives = [_native(model) for model in models]
    header = natives[0].header
    native = JoinedNative(
        source=natives[0].source,
        header=replace(
            header, flags=header.flags & ~FLAGS["sharded"], tensor_count=sum(len(n.index.tensors) for n in natives)
        ),
        index=_join_index([native.index for native in natives]),
        manifest=manifest,
        shards=list(zip(infos, natives, strict=True)),
    )
    return Model(
        path=path, format="apr-v2", convention="apr", label=f"APR v2, {plural(len(models), 'shard')}",
        version=models[0].version, sources=[native.source for native in natives], tensors=native.index.model_tensors(),
        files=native.index.files(), load_metadata=lambda: native.metadata, load_tokenizer=apr2.load_tokenizer,
        load_hparams=apr2.load_hparams, checksum=native.checksum, flags=models[0].flags,
        warnings=[
            f"{info.filename}: {text}" for info, model in zip(infos, models, strict=True) for text in model.warnings
        ],
        native=native,
    )  # fmt: skip


def _join_index(parts: Sequence[Index]) -> Index:
    """The index of the single file."""
    entries = [(shard, i) for shard, part in enumerate(parts) for i in range(len(part.tensors))]
    entries.sort(key=lambda entry: sort_key(parts[entry[0]].tensors[entry[1]].name))
    position = {entry: place for place, entry in enumerate(entries)}
    return Index(
        tensors=[parts[shard].tensors[i] for shard, i in entries],
        dtype_ids=[parts[shard].dtype_ids[i] for shard, i in entries],
        end=parts[0].end,
        blobs_end=parts[0].blobs_end,
        data_end=parts[0].data_end,
        is_aligned=all(part.is_aligned for part in parts),
        stored_shapes={
            position[shard, i]: shape for shard, part in enumerate(parts) for i, shape in part.stored_shapes.items()
        },
        joined_order=[position[shard, i] for shard, part in enumerate(parts) for i in part.blob_order()],
    )


def sort_key(name: str) -> bytes:
    """Sort key of the single file's index."""
    return name.encode("utf-8", "surrogateescape")


# --- the manifest ---


@light_dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard's manifest entry; `sha256` (hex) and `crc32` are None in manifests of other tools."""

    filename: str
    index: int
    size: int
    tensors: tuple[str, ...]
    sha256: str | None = None
    crc32: int | None = None


def manifest_text(shards: Sequence[ShardInfo], total_size: int) -> bytes:
    """Serializes the manifest of `shards`, whose tensors have `total_size` bytes."""
    value = {
        "version": "2.0",
        "shard_count": len(shards),
        "total_size": total_size,
        "tensor_count": sum(len(shard.tensors) for shard in shards),
        "shards": [{name: item for name, item in asdict(shard).items() if item is not None} for shard in shards],
        "weight_map": {name: shard.index for shard in shards for name in shard.tensors},
    }
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


def read_manifest(path: Path) -> list[ShardInfo]:
    """The shards of a manifest, in order. Raises CorruptError, LimitError, NotFoundError, StorageError."""
    value = parse_object(read_text_file(path), str(path), "the manifest")
    rows = value.get("shards")
    if not isinstance(rows, list) or not rows:
        raise CorruptError("the manifest lacks the list 'shards'", path=path)
    if len(rows) > MAX_SPLITS:
        raise LimitError(f"the manifest lists {len(rows)} shards; the limit is {MAX_SPLITS}", path=path)
    shards = sorted((_shard_info(row, path) for row in rows), key=lambda shard: shard.index)
    if [shard.index for shard in shards] != list(range(len(shards))) or value.get("shard_count") != len(rows):
        raise CorruptError(f"the indices of the {len(rows)} shards do not match 'shard_count'", path=path)
    names = [name for shard in shards for name in shard.tensors]
    placed = {name: shard.index for shard in shards for name in shard.tensors}
    if len(placed) != len(names) or value.get("weight_map", placed) != placed:
        raise CorruptError("'weight_map' and the shards' lists of tensors disagree", path=path)
    return shards


def _shard_info(row: object, path: Path) -> ShardInfo:
    known = row if isinstance(row, dict) else {}
    name, index, size, tensors = (known.get(key) for key in ("filename", "index", "size", "tensors"))
    if (
        not isinstance(name, str)
        or not all(type(n) is int and n >= 0 for n in (index, size))
        or not isinstance(tensors, list)
        or not all(isinstance(tensor, str) for tensor in tensors)
    ):
        raise CorruptError("a shard of the manifest lacks filename, index, size or tensors", path=path)
    check_file_name(name, "the manifest", path)
    sha256, crc32 = known.get("sha256"), known.get("crc32")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise CorruptError(f"the sha256 of {name} is not 64 hexadecimal digits", path=path)
    if crc32 is not None and type(crc32) is not int:
        raise CorruptError(f"the crc32 of {name} is not an integer", path=path)
    return ShardInfo(name, int(index or 0), int(size or 0), tuple(tensors), sha256, crc32)
