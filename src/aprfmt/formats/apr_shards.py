"""APR v2 in several files, opened as one model; the module that opens any `.apr` v2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from aprfmt.errors import NotFoundError, RefusedError, storage_errors
from aprfmt.formats import APR_MANIFEST_SUFFIX, apr2, apr_metadata
from aprfmt.formats.apr2 import FLAGS, Apr2Native
from aprfmt.formats.apr_index import Index
from aprfmt.formats.apr_manifest import ShardInfo, read_manifest
from aprfmt.formats.apr_metadata import TRUE_DTYPES_KEY, AprMetadata
from aprfmt.formats.hf_files import list_names
from aprfmt.io.files import is_folder
from aprfmt.model import Model
from aprfmt.text import plural

MANIFEST_NAME = f"model{APR_MANIFEST_SUFFIX}"
_FETCH_AGAIN = "fetch the manifest and its shards again, all of one revision"


def open_model(path: Path) -> Model:
    """Opens an `.apr` v2 file, or all shards of a model: by its manifest, its folder or any shard beside it.

    Raises RefusedError (a shard is missing, or not the one of the manifest), CorruptError and its kinds,
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
    model.warnings.append("one shard of a larger model, opened alone: no manifest beside it names it")
    return model


def _manifest_of(folder: Path) -> Path:
    found = [name for name in list_names(folder) if name.endswith(APR_MANIFEST_SUFFIX)]
    if not found:
        raise RefusedError("the folder holds no manifest of `.apr` shards", path=folder)
    if len(found) > 1 and MANIFEST_NAME not in found:
        hint = f"name one: {folder / found[0]}"
        raise RefusedError("the folder holds several sharded models", path=folder, hint=hint)
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
            f"shard {info.filename} is named by the manifest, but is missing",
            path=manifest,
            hint="put it beside the manifest, or fetch it again",
        ) from error
    problem = _mismatch(model, info, count)
    if problem is not None:
        model.close()
        raise _altered(path, problem)
    return model


def _altered(path: Path, problem: str) -> RefusedError:
    return RefusedError(
        f"shard {path.name} is not the one that the manifest names: {problem}", path=path, hint=_FETCH_AGAIN
    )


def _mismatch(model: Model, info: ShardInfo, count: int) -> str | None:
    """What an opened shard and the manifest disagree in; the blobs are not read."""
    native = _native(model)
    names = [tensor.name for tensor in model.tensors.entries]
    if len(names) != len(info.tensors) or set(names) != set(info.tensors):
        return "it holds other tensors"
    if (
        info.crc32 is not None
        and int.from_bytes(native.source.read(info.size - 4, 4), "little") != info.crc32
    ):
        return "its checksum differs"
    if info.index == 0:  # its metadata may be large, and what it says is not needed to tell the shards apart
        return None
    stated = native.metadata.get("sharding")
    place = [stated.get(key) for key in ("shard_count", "shard_index")] if isinstance(stated, Mapping) else []
    if place != [count, info.index]:
        return f"it does not say that it is shard {info.index} of {count}"
    return None


def _native(shard: Model) -> Apr2Native:
    native = apr2.native_of(shard)
    assert native is not None
    return native


@dataclass
class JoinedIndex(Index):
    """The index that the one file would have; `order` are its positions in the order of the blobs."""

    order: list[int] = field(default_factory=list)

    def blob_order(self) -> list[int]:
        """Index positions, shard after shard."""
        return self.order


@dataclass
class JoinedNative(Apr2Native):
    """The one file that the shards were cut from: its header flags, index and metadata, for writers of APR.

    Attributes:
        manifest: path of the manifest.
        shards: each shard as the manifest has it, and as it was opened.
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
        """The metadata section of the one file."""
        return self.metadata.raw

    @cached_property
    def problems(self) -> list[str]:
        """A sentence for each shard whose bytes are not those of the manifest; reads every shard."""
        return [text for info, shard in self.shards if (text := _verify(info, shard)) is not None]

    def checksum(self) -> dict[str, str]:
        """Header and footer state over all shards."""
        return {"header": "ok", "footer": "bad" if self.problems else "ok"}

    def verify(self) -> None:
        """Raises RefusedError for the first altered shard."""
        if self.problems:
            raise RefusedError(self.problems[0], path=self.manifest, hint=_FETCH_AGAIN)


def _verify(info: ShardInfo, shard: Apr2Native) -> str | None:
    if info.sha256 is None:
        state = shard.checksum()["footer"]
        return None if state == "ok" else f"shard {info.filename}: the checksum at its end is {state}"
    import hashlib

    from aprfmt.io.pipe import source_chunks

    digest = hashlib.sha256()
    for chunk in source_chunks(shard.source, 0, shard.source.size):
        digest.update(chunk)
    if digest.hexdigest() == info.sha256:
        return None
    return f"shard {info.filename} is altered: its sha256 is not the one of the manifest"


def _join(models: Sequence[Model], infos: Sequence[ShardInfo], manifest: Path, path: Path) -> Model:
    natives = [_native(model) for model in models]
    header = natives[0].header
    native = JoinedNative(
        source=natives[0].source,
        header=replace(
            header, flags=header.flags & ~FLAGS["sharded"], tensor_count=sum(len(m.tensors) for m in models)
        ),
        index=_join_index([native.index for native in natives]),
        manifest=manifest,
        shards=list(zip(infos, natives, strict=True)),
    )
    return Model(
        path=path,
        format="apr-v2",
        convention="apr",
        label=f"APR v2, {plural(len(models), 'shard')}",
        version=models[0].version,
        sources=[native.source for native in natives],
        tensors=native.index.tensors,
        load_metadata=lambda: native.metadata,
        load_tokenizer=apr2.load_tokenizer,
        load_hparams=apr2.load_hparams,
        checksum=native.checksum,
        flags=models[0].flags,
        warnings=[
            f"{info.filename}: {text}"
            for info, model in zip(infos, models, strict=True)
            for text in model.warnings
        ],
        native=native,
    )


def _join_index(parts: Sequence[Index]) -> JoinedIndex:
    entries = [(shard, i) for shard, part in enumerate(parts) for i in range(len(part.tensors))]
    entries.sort(key=lambda entry: sort_key(parts[entry[0]].tensors[entry[1]].name))
    position = {entry: place for place, entry in enumerate(entries)}
    return JoinedIndex(
        tensors=[parts[shard].tensors[i] for shard, i in entries],
        dtype_ids=[parts[shard].dtype_ids[i] for shard, i in entries],
        end=parts[0].end,
        blobs_end=parts[0].blobs_end,
        data_end=parts[0].data_end,
        is_aligned=all(part.is_aligned for part in parts),
        stored_shapes={
            position[shard, i]: shape
            for shard, part in enumerate(parts)
            for i, shape in part.stored_shapes.items()
        },
        order=[position[shard, i] for shard, part in enumerate(parts) for i in part.blob_order()],
    )


def sort_key(name: str) -> bytes:
    """What the index of the one file sorts by."""
    return name.encode("utf-8", "surrogateescape")
