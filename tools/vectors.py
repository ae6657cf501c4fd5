"""Holds aprfmt against reference `.apr` files, or writes one from its description; uses the public API alone.

    python tools/vectors.py check [MANIFEST.json]     every golden and malformed file of a manifest
    python tools/vectors.py write SPEC.json OUT.apr   one file from an `input` description

`check` prints a line for each file that falls short and ends with `N passed, M failed`;
exit 0 only when M = 0.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aprfmt


def native_of(model: aprfmt.Model) -> Any:
    """The format module's view, of whatever container the manifest says that it is."""
    return model.native


Record = dict[str, Any]
DEFAULT_MANIFEST = Path(__file__).resolve().parent.parent / "fixtures" / "vectors" / "manifest.json"

# Field of a stamp -> metadata key, where they differ.
_STAMPS = {
    "tokenizer_vocab": "tokenizer.vocabulary",
    "tokenizer_merges": "tokenizer.merges",
    "tokenizer_model_type": "tokenizer.model_type",
}

# Spelling of the manifest's index -> ours, where they differ by more than case.
_DTYPES = {"q4": "AprQ4", "q8": "AprQ8"}


def sha256(data: Any) -> str:
    """Hex digest of a buffer."""
    return hashlib.sha256(data).hexdigest()


def load_json(path: Path) -> Any:
    """A JSON file, its numbers as the reference reads them: beyond 64 bits and for -0 as floats."""

    def integer(text: str) -> int | float:
        value = int(text)
        return value if -(1 << 63) <= value < 1 << 64 and text != "-0" else float(text)

    return json.loads(path.read_text(encoding="utf-8"), parse_int=integer)


def write_spec(spec: Record, out: Path) -> None:
    """Builds the file that an `input` description asks for (v1 where it has a `model`, else v2)."""
    if "model" in spec:
        aprfmt.write_v1(
            out,
            bincode(spec["model"]),
            model_type=spec["model_type"],
            metadata=spec["metadata"],
            compression=spec.get("compression", 0),
            quality=spec.get("quality"),
        )
        return
    metadata = dict(spec.get("metadata", {}))
    flags = spec.get("flags", 0)
    if spec.get("canonicalize"):
        metadata = aprfmt.canonicalize_aliases(metadata)
    if spec.get("lz4_flag"):
        flags |= aprfmt.APR_FLAGS["lz4_compressed"]
    if "with_sharding" in spec:
        count, index = spec["with_sharding"]
        flags |= aprfmt.APR_FLAGS["sharded"]
        metadata["sharding"] = {"shard_count": count, "shard_index": index, "total_size": 0, "pattern": None}
    aprfmt.save_file(
        [(tensor["name"], encode_tensor(tensor)) for tensor in spec.get("tensors", [])],
        out,
        metadata,
        flags,
        streaming=bool(spec.get("streaming")),
        generation=spec.get("gen", "Current"),
        force=True,
    )


def encode_tensor(tensor: Record) -> aprfmt.RawTensor:
    """The tensor of a description: `hex` as it is, `f32` values encoded as its dtype."""
    if "hex" in tensor:
        data = bytes.fromhex(tensor["hex"])
    else:
        import numpy as np

        data = aprfmt.encode(tensor["dtype"], np.array(tensor["f32"], dtype=np.float32))
    return aprfmt.RawTensor(tensor["dtype"], tuple(tensor["shape"]), data)


def bincode(value: Any) -> bytes:
    """bincode 1.3 of a struct of strings, f32 values and lists of them: u64 lengths, no field names."""
    if isinstance(value, dict):
        return b"".join(map(bincode, value.values()))
    if isinstance(value, str):
        return struct.pack("<Q", len(value.encode())) + value.encode()
    if isinstance(value, list):
        return struct.pack("<Q", len(value)) + b"".join(map(bincode, value))
    return struct.pack("<f", value)


def write_stamped(record: Record, base: Path, out: Path) -> None:
    """The reference's stamp: current metadata with the patch, tensors in sorted order, flags kept."""
    patch = {name: value for name, value in record["stamp_patch"].items() if value not in (None, [])}
    with aprfmt.open(base / record["stamp_input"]) as model:
        metadata = {**model.metadata, **{_STAMPS.get(name, name): value for name, value in patch.items()}}
        if "tokenizer_vocab" in patch:
            metadata["tokenizer.vocab_size"] = len(patch["tokenizer_vocab"])
        has_vocab = aprfmt.APR_FLAGS["has_vocab"] if patch.get("tokenizer_vocab") else 0
        tensors = [(t.name, aprfmt.RawTensor(t.dtype, t.shape, t.raw())) for t in model.tensors.entries]
        aprfmt.save_file(tensors, out, metadata, native_of(model).header.flags | has_vocab, force=True)


def compare(what: str, got: Any, want: Any) -> Iterator[str]:
    """One line when the two differ."""
    if got != want:
        yield f"{what}: got {str(got)[:200]}, want {str(want)[:200]}"


def check_golden(record: Record, base: Path, scratch: Path) -> Iterator[str]:
    """What falls short for a file that must be read, one line each."""
    path = base / record["file"]
    data = path.read_bytes()
    yield from compare("sha-256 of the file", sha256(data), record["sha256"])
    with aprfmt.open(path) as model:
        for tensor in model.tensors.entries:
            yield from compare(f"length of {tensor.name!r}", len(tensor.raw()), tensor.n_bytes)
        for field, check in _FIELD_CHECKS.items():
            if field in record:
                yield from check(model, record)
        if "header" in record and model.format == "apr-v2":
            yield from check_unchanged(model, record, data, scratch)
    if "v1_header" in record:
        yield from check_v1(record, path, data, scratch)
    elif "stamp_patch" in record:
        write_stamped(record, base, scratch)
        yield from compare("bytes of the stamped file", sha256(scratch.read_bytes()), record["sha256"])
    elif "input" in record:
        yield from check_written(record, data, scratch)


def check_header(model: aprfmt.Model, record: Record) -> Iterator[str]:
    """The stored header fields, and that its checksum was verified."""
    header = native_of(model).header
    for name, want in record["header"].items():
        if name == "checksum_ok":
            yield from compare("header checksum", model.checksum()["header"] == "ok", want)
        else:
            got = getattr(header, name)
            yield from compare(f"header.{name}", list(got) if isinstance(got, tuple) else got, want)


def check_metadata(model: aprfmt.Model, record: Record) -> Iterator[str]:
    """The stored text, and that nothing is lost by parsing it."""
    raw = native_of(model).metadata_bytes()
    yield from compare("metadata text", raw.decode(), record["metadata_json"])
    yield from compare("metadata sha-256", sha256(raw), record.get("metadata_sha256", sha256(raw)))
    yield from compare("metadata values", dict(model.metadata), json.loads(record["metadata_json"]))


def check_reserialised(model: aprfmt.Model, record: Record) -> Iterator[str]:
    """What the core reader makes of the metadata, compared as values."""
    got = json.loads(aprfmt.dump_metadata(dict(model.metadata)))
    for name in ("rope_theta", "rms_norm_eps"):  # the reference's value shows them widened from f32
        if got.get(name) is not None:
            got[name] = struct.unpack("<f", struct.pack("<f", got[name]))[0]
    yield from compare("metadata written anew", got, record["metadata_as_core_reader_reserialises_it"])


def check_index(model: aprfmt.Model, record: Record) -> Iterator[str]:
    """Every index entry, in order, and the stored bytes."""
    entries, native = model.tensors.entries, native_of(model)
    yield from compare("number of tensors", len(entries), len(record["tensors"]))
    for i, (tensor, want) in enumerate(zip(entries, record["tensors"], strict=False)):
        dtype = want["dtype"].lower()
        got = {
            "name_hex": tensor.name.encode("utf-8", "surrogateescape").hex(),
            "dtype_id": native.index.dtype_ids[i],
            "dtype": dtype if tensor.dtype == _DTYPES.get(dtype, dtype.upper()) else tensor.dtype,
            "shape": list(tensor.shape),
            "offset": tensor.offset - native.header.data_offset,
            "size": tensor.n_bytes,
            "sha256": sha256(tensor.raw()),
        }
        for name in got.keys() & want.keys():
            wanted = dtype if name == "dtype" else want[name]
            yield from compare(f"tensor {tensor.name!r} {name}", got[name], wanted)


def check_lookup(model: aprfmt.Model, record: Record) -> Iterator[str]:
    """A name gives its first entry; the reference spells undecodable bytes as U+FFFD."""
    by_name: dict[str, str] = {}
    for name, tensor in model.tensors.items():
        lossy = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        by_name.setdefault(lossy, sha256(tensor.raw()))
    yield from compare("lookup by name", by_name, record["lookup_by_name_sha256"])


def check_footer(model: aprfmt.Model, record: Record) -> Iterator[str]:
    """A right footer is seen as such; a wrong or absent one, or trailing bytes, are told."""
    footer = record["footer"]
    told = model.checksum()["footer"]
    if footer["stored"] == footer["computed"]:
        yield from compare("footer", told, "ok")
    elif told == "ok" and not model.warnings:
        yield "the wrong footer went unnoticed"


def check_image(model: aprfmt.Model, record: Record) -> Iterator[str]:
    """The v2 image that was unpacked."""
    yield from compare("unpacked image", sha256(native_of(model).source.view()), record["decompressed_image_sha256"])


_FIELD_CHECKS: dict[str, Callable[[aprfmt.Model, Record], Iterator[str]]] = {
    "header": check_header,
    "metadata_json": check_metadata,
    "metadata_as_core_reader_reserialises_it": check_reserialised,
    "tensors": check_index,
    "lookup_by_name_sha256": check_lookup,
    "footer": check_footer,
    "decompressed_image_sha256": check_image,
}


def check_unchanged(model: aprfmt.Model, record: Record, data: bytes, scratch: Path) -> Iterator[str]:
    """Read and written again unchanged: the same bytes, up to a footer that was wrong or missing."""
    aprfmt.rewrite_file(model, scratch, force=True, accept_damage=True)
    got, end = scratch.read_bytes(), native_of(model).index.data_end
    yield from compare("bytes when written again unchanged", sha256(got[:end]), sha256(data[:end]))
    if record.get("footer", {}).get("stored") == record.get("footer", {}).get("computed"):
        yield from compare("footer when written again", got[end:], data[end:])


def check_written(record: Record, data: bytes, scratch: Path) -> Iterator[str]:
    """Written from its description: the same bytes where that is promised, else the same contents."""
    write_spec(record["input"], scratch)
    got = scratch.read_bytes()
    if record.get("byte_reproducible"):
        yield from compare("size when written from its description", len(got), len(data))
        yield from compare("bytes when written from its description", sha256(got), record["sha256"])
        return
    with aprfmt.open(scratch) as model:
        yield from compare("metadata written", dict(model.metadata), json.loads(record["metadata_json"]))
        names = {t["name"]: t["sha256"] for t in record["tensors"]}
        yield from compare("tensors written", {t.name: sha256(t.raw()) for t in model.tensors.entries}, names)


def _key(record: Record, *words: str, without: tuple[str, ...] = ()) -> bytes | None:
    """The key that stands in a record under a name with one of `words` and none of `without`."""
    for name, value in record.items():
        if name.endswith("_hex") and any(w in name for w in words) and not any(w in name for w in without):
            return bytes.fromhex(value)
    return None


def check_v1(record: Record, path: Path, data: bytes, scratch: Path) -> Iterator[str]:
    """Header, metadata, payload and keys of a v1 file, then the file written again."""
    foreign = ("ed25519", "metadata", "derived", "ephemeral", "shared")
    file = aprfmt.read_v1(
        path,
        password=record.get("password"),
        private_key=_key(record, "private", "secret", "seed", "_sk_", without=foreign),
        public_key=_key(record, "ed25519_public"),
    )
    header = {**file.header, "magic": file.header["magic"].decode()}
    yield from compare("v1 header", {key: header[key] for key in record["v1_header"]}, record["v1_header"])
    raw_hex = record.get("v1_metadata_msgpack_hex", file.metadata_bytes.hex())
    yield from compare("v1 metadata bytes", file.metadata_bytes.hex(), raw_hex)
    yield from compare("v1 metadata", file.metadata, record.get("v1_metadata", file.metadata))
    stored = sha256(file.stored_payload)
    yield from compare("stored payload", stored, record.get("v1_payload_sha256", stored))
    plain = record.get("plaintext_sha256")
    if not file.is_encrypted:
        plain = record["reference_verdict"].get("v1_load", {}).get("ok", {}).get("payload_sha256")
    if plain:
        yield from compare("payload", sha256(file.payload), plain)
    if "ed25519_public_hex" in record:
        yield from compare("signature", file.signature_ok, True)
    if not file.is_encrypted or plain:
        yield from check_v1_written(record, file, data, scratch)


def check_v1_written(record: Record, file: Any, data: bytes, scratch: Path) -> Iterator[str]:
    """Written again: equal bytes, but for compressors (whose output is free) and unknown ephemeral keys."""
    header, spec = file.header, record.get("input", {})
    prefix = iter((file.stored_payload[:16], file.stored_payload[16:28]))
    password = record.get("password")
    aprfmt.write_v1(
        scratch,
        bincode(spec["model"]) if "model" in spec else file.payload,
        model_type=header["model_type"],
        metadata=spec.get("metadata", file.metadata_bytes),
        compression=header["compression"],
        quality=spec.get("quality", header["quality"] or None),
        password=password,
        recipient_public_key=_key(record, "recipient_public", "x25519_public", without=("ephemeral",)),
        signing_key=_key(record, "ed25519_seed", "ed25519_private", "ed25519_secret"),
        entropy=(lambda _: next(prefix)) if password else os.urandom,
    )
    if header["compression"] == 0 and (password or not file.is_encrypted):
        yield from compare("bytes when written again", sha256(scratch.read_bytes()), sha256(data))
    elif not file.is_encrypted:
        again = aprfmt.read_v1(scratch)
        yield from compare("payload when written again", sha256(again.payload), sha256(file.payload))
        yield from compare("metadata when written again", again.metadata_bytes, file.metadata_bytes)


def check_malformed(record: Record, base: Path, _: Path) -> Iterator[str]:
    """What falls short for a file that a hardened reader should refuse, or accept."""
    verdict: str = record["hardened_reader_should"]
    if verdict.startswith("see verdict"):
        verdict = "accept" if record["reference_verdict"]["core_reader"] == "ok" else "reject"
    path = base / record["file"]
    yield from compare("sha-256 of the file", sha256(path.read_bytes()), record["sha256"])
    try:
        warnings = read_all(path)
    except aprfmt.AprError as error:
        if verdict.startswith("accept"):
            yield f"should be read, but: {error}"
        return
    if verdict.startswith("warn or reject"):
        if not warnings:
            yield "read without a warning"
    elif "reject" in verdict and not verdict.startswith("reject or") and not verdict.startswith("accept"):
        yield f"should be refused: {record['description']}"


def read_all(path: Path) -> list[str]:
    """Reads everything a file holds; returns the warnings."""
    with aprfmt.open(path) as model:
        dict(model.metadata)
        model.checksum()
        for tensor in model.tensors.entries:
            tensor.raw()
        if model.format == "apr-v1" and not native_of(model).is_encrypted:
            _ = native_of(model).payload
            return [*model.warnings, *native_of(model).warnings]
        return model.warnings


def check_manifest(manifest: Path, verbose: bool = False) -> tuple[int, int]:
    """Checks every record; prints what falls short; returns (passed, failed)."""
    records = load_json(manifest)
    kinds = (("golden", check_golden), ("malformed", check_malformed))
    jobs = itertools.chain.from_iterable([(r, check) for r in records.get(kind, [])] for kind, check in kinds)
    counts = [0, 0]
    with tempfile.TemporaryDirectory() as folder:
        for record, check in jobs:
            try:
                problems = list(check(record, manifest.parent, Path(folder) / "out.apr"))
            except Exception as error:  # anything at all that escapes is a failure of that file
                problems = [f"{type(error).__name__}: {error}"]
            counts[bool(problems)] += 1
            for problem in problems:
                print(f"FAILED {record['file']}: {problem}")
            if verbose and not problems:
                print(f"passed {record['file']}")
    return counts[0], counts[1]


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="hold the package against the files of a manifest")
    check.add_argument("manifest", type=Path, nargs="?", default=DEFAULT_MANIFEST)
    check.add_argument("-v", "--verbose", action="store_true", help="name the files that pass, too")
    write = commands.add_parser("write", help="build one file from an `input` description")
    write.add_argument("spec", type=Path)
    write.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    try:
        if options.command == "write":
            spec = load_json(options.spec)
            write_spec(spec.get("input", spec), options.out)
            return 0
        passed, failed = check_manifest(options.manifest, options.verbose)
    except aprfmt.AprError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"error: not a file of this form: {error!r}", file=sys.stderr)
        return 2
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
