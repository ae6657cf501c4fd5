"""The table of writers and readers: every command that opens or publishes files, over small models in every form."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock
from zlib import crc32

import numpy as np
import plain_models
from imatrix_files import new_imatrix, old_imatrix

import aprfmt
from aprfmt.cli.main import run
from aprfmt.formats.apr1_edit import encrypt_file
from aprfmt.formats.teacher_files import Answer, TeacherHeader, write_shard
from aprfmt.io.pipe import FileLayout, Literal, WriteOptions, write_folder
from aprfmt.running import canary as canaries
from aprfmt.running.canary import Canary, GoldenPrompt
from aprfmt.trust.keys import generate, read_public

_PART = 200_000  # bytes of a shard: three of them


@dataclass(frozen=True)
class Place:
    """Folders of a run: `inputs` stay, `out` holds outputs from an earlier run."""

    inputs: Path
    out: Path


_OLD_TREE = [
    "config.json",
    "a/b/weights",
    "a/b/notes",
    "a/c/notes",
    "notes",
    "model-1.safetensors",
    "merges.txt",
    "additional_chat_templates/x.jinja",
]
_WRITING = (
    *("save", "import", "export", "quantize", "merge", "prune", "transplant", "stamp", "report", "write"),
    *("keygen", "sign", "sbom", "encrypt", "decrypt", "canary"),
)

Operation = Callable[[Place], object]


def read(name: str) -> Operation:
    """Everything that can be asked of an opened model."""

    def operation(at: Place) -> object:
        with aprfmt.open(at.inputs / name) as model:
            tensors = list(model.tensors.values())[:3]
            return (
                dict(model.metadata).keys(),
                model.tokenizer and len(model.tokenizer.tokens),
                model.hparams.num_layers if model.format != "apr-v1" else None,
                model.checksum(),
                [hashlib.sha256(tensor.raw()).digest() for tensor in tensors],
                [tensor.numpy().sum() for tensor in tensors],
            )

    return operation


def convert(
    source: str,
    target: str,
    format: str | None = None,
    shard_size: int | None = None,
    dtype: str = "keep",
    bits: int | None = None,
) -> Operation:
    def operation(at: Place) -> object:
        paths = at.inputs / source, at.out / target
        report = aprfmt.convert_model(
            *paths, format=format, shard_size=shard_size, dtype=dtype, bits=bits, group_size=bits and 32, force=True
        )
        return report.lossless, report.losses

    return operation


def merge(base: str, adapter: str, target: str) -> Operation:
    """An adapter added to a model."""
    return lambda at: aprfmt.merge_adapter(at.inputs / base, at.inputs / adapter, at.out / target, force=True).losses


def merge_models(a: str, b: str, target: str) -> Operation:
    """Two models into one."""
    return lambda at: (
        aprfmt.merge_models([at.inputs / a, at.inputs / b], at.out / target, method="slerp", force=True).losses
    )


def prune(source: str, target: str) -> Operation:
    """A model without its last layer."""
    return lambda at: aprfmt.prune_model(at.inputs / source, at.out / target, keep_layers=[0], force=True).losses


def transplant(source: str, donor: str, target: str) -> Operation:
    """A model with the tokenizer of another one."""
    return lambda at: (
        aprfmt.transplant_model(at.inputs / source, at.out / target, donor=at.inputs / donor, k=2, force=True).losses
    )


def save(name: str, *, force: bool) -> Operation:
    def operation(at: Place) -> None:
        aprfmt.save_file({"a": np.arange(4000, dtype=np.float32)}, at.out / name, force=force)

    return operation


def folder(name: str) -> Operation:
    """A folder with subfolders; of what is in it already, old weights and tokenizers go."""
    layouts = [
        FileLayout(path, [Literal(b"new")]) for path in ("config.json", "tokenizer.json", "a/b/weights", "new/one/x")
    ]
    return lambda at: write_folder(str(at.out / name), layouts, WriteOptions(force=True))


def teacher(name: str) -> Operation:
    """A file of a teacher that knows two ids at each of three positions."""

    def operation(at: Place) -> None:
        facts = TeacherHeader("t", "0" * 64, "llama", 1, "torch", "0" * 64, 8, 300, 2, (1.0,))
        column, pairs = np.arange(3), np.full((3, 2), -1.0)
        write_shard(at.out / name, facts, [bytes(32)], [Answer(column, pairs, pairs, column[:, None], column)])

    return operation


def command(*words: str) -> Operation:
    """A command line; words with a suffix or in capitals stand for inputs and outputs."""

    def operation(at: Place) -> int:
        places = {"IN": at.inputs, "OUT": at.out}
        return run([str(places[w.split("/")[0]] / w.split("/")[1]) if "/" in w else w for w in words])

    return operation


def canary(source: str, target: str | None) -> Operation:
    """Golden outputs that nobody computed, beside a model, or without a target in it."""
    prompt = GoldenPrompt("a", [1], [2], [[(1, -0.5)]], {"0": {"digest": "0", "probes": [[0.5]]}})
    found = Canary("m", "none", 32.0, None, [prompt])

    def operation(at: Place) -> int:
        with mock.patch.object(canaries, "_compute", return_value=found):
            if target is None:
                return len(aprfmt.make_canary(at.out / source, in_place=True, force=True).prompts)
            return len(aprfmt.make_canary(at.inputs / source, at.out / target, force=True).prompts)

    return operation


OPERATIONS: dict[str, Operation] = {
    **{
        f"read {name}": read(name)
        for name in (
            "m.apr", "m.gguf", "part-00001-of-00003.gguf", "m.safetensors", "m.v1.apr", "hf", "hf-parts", "apr-parts",
        )
    },
    "load": lambda at: sorted(aprfmt.load_file(at.inputs / "m.apr")),
    "save over": save("m.apr", force=True),
    "save new": save("new.apr", force=False),
    "write folder over": folder("tree"),
    "write folder new": folder("tree-new"),
    "write a teacher's file over": teacher("m.safetensors"),
    "write a teacher's file": teacher("train-00001-of-00001.safetensors"),
    "import folder": convert("hf", "m.apr"),
    "import gguf": convert("m.gguf", "new.apr"),
    "export gguf": convert("m.apr", "m.gguf"),
    "export parts over": convert("m.apr", "part.gguf", shard_size=_PART),
    "export parts new": convert("m.apr", "new.gguf", shard_size=_PART),
    "export folder over": convert("m.apr", "hf"),
    "export folder new": convert("m.apr", "hf-new"),
    "export mlx": convert("hf", "mlx", format="mlx"),
    "export mlx quantized": convert("hf", "mlx-4", format="mlx", bits=4),
    "export safetensors": convert("m.gguf", "m.safetensors"),
    "export shards over": convert("m.apr", "apr-parts", format="apr-shards", shard_size=_PART),
    "quantize": convert("hf", "q8.gguf", dtype="q8_0"),
    "export towers": command(
        "export", "IN/seeing", "-o", "OUT/towers.gguf", "--mmproj", "--dtype", "f16", "--force", "--quiet"
    ),
    "import towers": command(
        "import", "IN/text.gguf", "--mmproj", "IN/towers.gguf", "-o", "OUT/seeing.apr", "--force", "--quiet"
    ),
    "export a folder of two GGUFs": command(
        "export", "IN/seeing.apr", "-o", "OUT/seeing", "--format", "hf", "--force", "--quiet"
    ),
    "import adapter": convert("lora", "lora.apr"),
    "merge adapter": merge("m.gguf", "lora", "m.gguf"),
    "merge models": merge_models("m.gguf", "hf", "m.gguf"),
    "prune": prune("m.gguf", "m.gguf"),
    "transplant": transplant("hf", "m.gguf", "hf"),
    "export modelfile": command("export", "IN/m.apr", "-o", "OUT/m.gguf", "--modelfile", "--force", "--quiet"),
    "merge importance": command(
        "imatrix", "IN/a.imatrix.gguf", "IN/b.imatrix.dat", "--merge", "-o", "OUT/c.imatrix.gguf", "--force", "--quiet"
    ),
    "stamp in place": command("stamp", "OUT/m.apr", "--in-place", "--license", "MIT", "--quiet"),
    "stamp a gguf in place": command("stamp", "OUT/m.gguf", "--in-place", "--set", "general.name=another", "--quiet"),
    "stamp a folder in place": command(
        "stamp", "OUT/hf-parts", "--in-place", "--license", "MIT", "--set", "rope_theta=7", "--quiet"
    ),
    "stamp a safetensors file in place": command("stamp", "OUT/m.safetensors", "--in-place", "--set", "a=b", "--quiet"),
    "keygen": command("keygen", "-o", "OUT/release", "--force", "--quiet"),
    "sign a gguf": command(
        *("sign", "IN/signed.gguf", "--key", "IN/release.key", "--output", "OUT/signed.gguf.sig", "--hash", "sha256"),
        *("--force", "--quiet"),
    ),
    "sign a folder": command("sign", "OUT/hf", "--key", "IN/release.key", "--hash", "sha256", "--force", "--quiet"),
    "sign an apr v1": command(
        "sign", "IN/m.v1.apr", "--key", "IN/ed.key", "--output", "OUT/m.v1.apr", "--force", "--quiet"
    ),
    "sbom": command("sbom", "IN/hf", "-o", "OUT/m.cdx.json", "--force", "--quiet"),
    "encrypt": command(
        "encrypt", "IN/a.imatrix.gguf", "-o", "OUT/a.apr", "--recipient", "IN/inbox.pub", "--force", "-q"
    ),
    "encrypt an apr v1": command(
        "encrypt", "IN/m.v1.apr", "-o", "OUT/m.v1.apr", "--recipient", "IN/inbox.pub", "--force", "-q"
    ),
    "decrypt": command("decrypt", "IN/secret.apr", "-o", "OUT/b.imatrix.dat", "--key", "IN/inbox.key", "--force", "-q"),
    "canary": canary("m.gguf", "m.canary.json"),
    "canary in place": canary("m.apr", None),
    "inspect folder": command("inspect", "IN/hf", "--json"),
    "inspect apr": command("inspect", "IN/m.apr", "--json", "--quality"),
    "tensors": command("tensors", "IN/m.gguf", "--json", "--hash", "--stats"),
    "validate folder": command("validate", "IN/hf-parts", "--json"),
    "validate apr": command("validate", "IN/m.apr", "--json"),
    "diff": command("diff", "IN/hf", "IN/hf-parts", "--json"),
    "report of a diff": command(
        "diff", "IN/m.apr", "IN/m.gguf", "--values", "--threads", "1", "-o", "OUT/page.html", "--force", "--quiet"
    ),
    "report": command("report", "IN/m.apr", "-o", "OUT/page.html", "--force", "--quiet"),
}  # fmt: skip


def prepare(root: Path) -> None:
    """Models in every form below `in`, outputs from an earlier run below `old`."""
    source, old = root / "in", root / "old"
    source.mkdir()
    folder = plain_models.write_folder(source / "hf")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    for name in ("m.apr", "m.gguf", "m.safetensors"):
        aprfmt.convert_model(folder, source / name)
    aprfmt.convert_model(folder, source / "hf-parts", format="hf", shard_size=_PART)
    aprfmt.convert_model(folder, source / "part.gguf", shard_size=_PART)
    aprfmt.convert_model(source / "m.apr", source / "apr-parts", format="apr-shards", shard_size=_PART)
    plain_models.write_adapter(source / "lora")
    seeing = plain_models.write_seeing_folder(source / "seeing")
    aprfmt.convert_model(seeing, source / "text.gguf")
    aprfmt.convert_model(seeing, source / "towers.gguf", mmproj=True)
    aprfmt.import_model(source / "text.gguf", source / "seeing.apr", mmproj=source / "towers.gguf")
    new_imatrix(source / "a.imatrix.gguf", {"w": [1.0, 2.0]}, {"w": [3.0]})
    (source / "b.imatrix.dat").write_bytes(old_imatrix({"w": [4.0, 5.0]}))
    shutil.copy(source / "a.imatrix.gguf", source / "c.imatrix.gguf")
    aprfmt.write_v1(source / "m.v1.apr", b"x" * 5000, model_type=1, metadata={})
    for name, kind in (("release", "p256"), ("ed", "ed25519"), ("inbox", "x25519")):
        generate(source / name, kind)
    encrypt_file(source / "b.imatrix.dat", source / "secret.apr", recipient=read_public(source / "inbox.pub").raw())
    shutil.copy(source / "m.gguf", source / "signed.gguf")
    aprfmt.sign(source / "signed.gguf", key=source / "release.key", hash="sha256")  # BLAKE3's threads die in a fork
    (source / "m.cdx.json").write_text("{}")
    (source / "m.canary.json").write_text("{}")
    shutil.copytree(source, old)
    (old / "hf" / "config.json").write_text("{}")
    (old / "hf" / "model-00009-of-00009.safetensors").write_bytes(b"an old shard")
    for name in ("m.apr", "m.gguf", "part-00001-of-00003.gguf", "part-00002-of-00003.gguf", "part-00003-of-00003.gguf"):
        with (old / name).open("ab") as file:
            file.write(b"old")
    (old / "part-00001-of-00002.gguf").write_bytes(b"of an older set")
    (old / "part-00002-of-00002.gguf").write_bytes(b"of an older set")
    for name in _OLD_TREE:
        path = old / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old")
    for path in (old / "apr-parts").iterdir():
        path.write_bytes(path.read_bytes() + b"old")


WRITERS = {name: operation for name, operation in OPERATIONS.items() if name.split()[0] in _WRITING}
"""Those that publish something."""


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder; of one with random bytes (keys, signatures, encrypted files) whether it is whole."""
    return {str(p.relative_to(folder)): _settled(p.name, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def _settled(name: str, data: bytes) -> bytes:
    suffix = Path(name).suffix
    if suffix == ".sig":
        is_whole = data.endswith(b"}") and isinstance(json.loads(data), dict)
    elif suffix in (".key", ".pub"):
        is_whole = data.endswith((b"-----END PRIVATE KEY-----\n", b"-----END PUBLIC KEY-----\n"))
    else:
        is_whole = data[:4] == b"APRN" and int.from_bytes(data[-4:], "little") == crc32(data[:-4])
    return b"whole" if is_whole else data


def restore(kept: Mapping[str, bytes], old: Path, out: Path) -> None:
    """Makes `out` a copy of the folder `old`, which holds the files `kept`; writes those that differ."""
    found = contents(out)
    for name in found.keys() - kept.keys():
        (out / name).unlink()
    for path in list(out.rglob("*")):
        if path.is_dir() and not (old / path.relative_to(out)).is_dir():
            shutil.rmtree(path)
    for path in (old, *(path for path in old.rglob("*") if path.is_dir())):
        (out / path.relative_to(old)).mkdir(parents=True, exist_ok=True)
        shutil.copystat(path, out / path.relative_to(old))
    for name, data in kept.items():
        if found.get(name) != data:
            (out / name).unlink(missing_ok=True)
            shutil.copy2(old / name, out / name)
