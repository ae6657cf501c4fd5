"""Single bits turned over in `.apr` files, and the commands that must not let them through."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plain_models
from flips import flip

import aprfmt
from aprfmt.errors import AprError
from aprfmt.formats import apr1, apr2
from aprfmt.inspection.validate import validate


@dataclass(frozen=True)
class Subject:
    """A model in one file or in shards.

    Attributes:
        path: what the commands get.
        file: the file that bits are turned over in.
        regions: byte ranges of the file by what they hold.
        commands: by name, each called with the path and an output in an empty folder.
    """

    path: Path
    file: Path
    regions: dict[str, list[range]]
    commands: dict[str, Callable[[Path, Path], object]]


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "copy": lambda path, out: aprfmt.convert_model(path, out / "m.apr"),
    "export gguf": lambda path, out: aprfmt.export_model(path, out / "m.gguf"),
    "export hf": lambda path, out: aprfmt.export_model(path, out / "hf"),
    "export safetensors": lambda path, out: aprfmt.export_model(path, out / "m.safetensors"),
    "stamp": lambda path, out: aprfmt.stamp(path, out / "m.apr", license="MIT"),
    "shard": lambda path, out: aprfmt.convert_model(path, out / "s", format="apr-shards", shard_size=60_000),
    "quantize": lambda path, out: aprfmt.quantize_model(path, out / "m.gguf", "q8_0"),
    "convert": lambda path, out: aprfmt.convert_model(path, out / "m.apr", dtype="f16"),
}


def subjects(folder: Path) -> dict[str, Subject]:
    """An `.apr` v2 from a folder and one from a GGUF, shards, and two v1 files."""
    hf = plain_models.write_folder(folder / "hf")
    aprfmt.import_model(hf, folder / "hf.apr")
    aprfmt.export_model(folder / "hf.apr", folder / "m.gguf")
    aprfmt.import_model(folder / "m.gguf", folder / "gguf.apr")
    aprfmt.convert_model(folder / "hf.apr", folder / "shards", format="apr-shards", shard_size=60_000)
    found = {
        "folder": Subject(folder / "hf.apr", folder / "hf.apr", _v2_regions(folder / "hf.apr"), COMMANDS),
        "gguf": Subject(folder / "gguf.apr", folder / "gguf.apr", _v2_regions(folder / "gguf.apr"), COMMANDS),
    }
    for shard in sorted((folder / "shards").glob("*.apr"))[:2]:
        found[f"shard {shard.stem[6:11]}"] = Subject(folder / "shards", shard, _v2_regions(shard), COMMANDS)
    payload = np.random.default_rng(1).bytes(3000)
    for name, compression in (("v1", 0), ("v1 lz4", 3)):
        path = folder / f"{name.replace(' ', '-')}.apr"
        aprfmt.write_v1(path, payload, model_type=1, metadata={"model_name": "a"}, compression=compression)
        found[name] = Subject(path, path, _v1_regions(path), {"copy": COMMANDS["copy"]})
    return found


def _v2_regions(path: Path) -> dict[str, list[range]]:
    with apr2.open_model(path) as model:
        native = apr2.native_of(model)
        assert native is not None
        header, index, size = native.header, native.index, native.source.size
    metadata_end = header.metadata_offset + header.metadata_size
    blobs = [range(t.offset, t.offset + t.n_bytes) for t in model.tensors.entries]
    ends = sorted(blob.stop for blob in blobs)
    starts = [*sorted(blob.start for blob in blobs)[1:], size - 4]
    regions = {
        "header": [range(64)],
        "metadata": [range(header.metadata_offset, metadata_end)],
        "index": [range(header.tensor_index_offset, index.end)],
        "padding": [
            range(metadata_end, header.tensor_index_offset),
            range(index.end, header.data_offset),
            *map(range, ends, starts),
        ],
        "tensors": blobs,
        "footer": [range(size - 4, size)],
    }
    return {name: [part for part in parts if part] for name, parts in regions.items() if any(parts)}


def _v1_regions(path: Path) -> dict[str, list[range]]:
    file, size = apr1.read_v1(path), path.stat().st_size
    start = file.payload_offset
    return {
        "header": [range(32)],
        "metadata": [range(32, start)],
        "payload": [range(start, size - 4)],
        "footer": [range(size - 4, size)],
    }


def bits(subject: Subject, dice: random.Random, count: int) -> Iterator[tuple[str, int]]:
    """`count` places (region, number of the bit in the file), every region as often as the others."""
    for n in range(count):
        region = list(subject.regions)[n % len(subject.regions)]
        byte = dice.choice(dice.choice(subject.regions[region]))
        yield region, 8 * byte + dice.randrange(8)


def passed(subject: Subject, bit: int, names: list[str], out: Path) -> list[str]:
    """The commands of `names`, and "validate", that let the file pass with this bit turned over, or left something.

    The file is as before afterwards.
    """
    flip(subject.file, bit)
    found = []
    try:
        for name in names:
            out.mkdir()
            try:
                subject.commands[name](subject.path, out)
                found.append(name)
            except AprError as error:
                found += [name] if list(out.iterdir()) or not error.exit_code else []
            shutil.rmtree(out)
        try:
            if validate(subject.path).passed:
                found.append("validate")
        except AprError:
            pass
    finally:
        flip(subject.file, bit)
    return found
