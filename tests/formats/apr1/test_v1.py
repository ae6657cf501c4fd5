"""The v1 container: every vector, writing, checks in order."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apr1_images import v1_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from turns import examples

import aprfmt
from aprfmt.errors import (
    AprError,
    ChecksumError,
    CorruptError,
    ExistsError,
    LimitError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from aprfmt.formats import apr1
from aprfmt.io import compress
from aprfmt.io.compress import packed

GOLDEN = ["v1_golden_none", "v1_zstd3", "v1_lz4", "v1_zstd3_vec", "v1_metadata_full_license"]
KEYED = ["v1_signed_ed25519", "v1_encrypted_password"]
META = {"created_at": "1700000000", "aprender_version": "0.0.0-golden", "model_name": "golden-v1"}
Put = Callable[[bytes], Path]
Vector = Callable[[str], Path]


def bincode(model: dict[str, Any]) -> bytes:
    """The two structs of the vectors, as bincode 1.3 lays them out."""
    if "vec" in model:
        return struct.pack(f"<Q{len(model['vec'])}f", len(model["vec"]), *model["vec"])
    name = str(model["name"]).encode()
    head = struct.pack("<Q", len(name)) + name
    weights = model["weights"]
    return head + struct.pack(f"<Q{len(weights)}f", len(weights), *weights) + struct.pack("<f", model["bias"])


@pytest.mark.parametrize("name", GOLDEN + KEYED)
def test_reads_the_vectors(records: dict[str, Any], vector: Vector, name: str) -> None:
    record = records[name]
    file = aprfmt.read_v1(vector(name), password=record.get("password"))
    header = dict(file.header)
    assert header.pop("magic") == b"APRN"
    assert header == {key: value for key, value in record["v1_header"].items() if key != "magic"}
    assert file.metadata_bytes.hex() == record["v1_metadata_msgpack_hex"]
    assert file.metadata == record["v1_metadata"]
    assert hashlib.sha256(file.stored_payload).hexdigest() == record["v1_payload_sha256"]
    expected = record.get("plaintext_sha256") or record["reference_verdict"]["v1_load"]["ok"]["payload_sha256"]
    assert hashlib.sha256(file.payload).hexdigest() == expected
    assert len(file.warnings) == file.is_encrypted  # whose header and metadata are not authenticated


@pytest.mark.parametrize("name", GOLDEN)
def test_writes_the_vectors(records: dict[str, Any], vector: Vector, tmp_path: Path, name: str) -> None:
    spec = records[name]["input"]
    payload, path = bincode(spec["model"]), tmp_path / "out.apr"
    options = {key: spec[key] for key in ("model_type", "compression", "metadata", "quality")}
    aprfmt.write_v1(path, payload, **options)
    if spec["compression"] == 0:
        assert path.read_bytes() == vector(name).read_bytes()
    assert aprfmt.read_v1(path).payload == payload == aprfmt.read_v1(vector(name)).payload


@pytest.mark.parametrize("name", GOLDEN)
def test_the_stored_metadata_can_be_written_again(vector: Vector, tmp_path: Path, name: str) -> None:
    file, path = aprfmt.read_v1(vector(name)), tmp_path / "out.apr"
    head = file.header
    options = {key: head[key] for key in ("model_type", "compression", "flags")}
    aprfmt.write_v1(path, file.payload, metadata=file.metadata_bytes, quality=head["quality"] or None, **options)
    again = aprfmt.read_v1(path)
    assert (again.metadata_bytes, again.payload) == (file.metadata_bytes, file.payload)
    if head["compression"] == 0:
        assert path.read_bytes() == vector(name).read_bytes()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("v1_trunc_35", TruncatedError),
        ("v1_trunc_payload", TruncatedError),
        ("v1_payload_size_too_big", TruncatedError),
        ("v1_bad_crc", ChecksumError),
        ("v1_version_2", UnsupportedError),
        ("v1_unknown_model_type", UnsupportedError),
        ("v1_compression_9", UnsupportedError),
        ("v1_zstd_garbage", CorruptError),
    ],
)
def test_refuses_the_malformed_vectors(vector: Vector, name: str, kind: type[AprError]) -> None:
    with pytest.raises(kind) as caught:
        aprfmt.open(vector(name))
    assert caught.value.path == str(vector(name))
    with pytest.raises(kind):
        _ = aprfmt.read_v1(vector(name)).payload


def test_a_wrong_uncompressed_size_is_told(vector: Vector) -> None:
    with aprfmt.open(vector("v1_uncompressed_size_lies")) as model:
        assert any("declares 1 payload bytes" in text for text in model.warnings)
        assert model.tensors["payload"].n_bytes == 61
    file = aprfmt.read_v1(vector("v1_uncompressed_size_lies"))
    assert len(file.payload) == 61
    assert file.warnings == ["the header declares 1 payload bytes, but the file has 61"]


@pytest.mark.parametrize("name", GOLDEN)
def test_opens_as_a_model(records: dict[str, Any], vector: Vector, name: str) -> None:
    record = records[name]
    with aprfmt.open(vector(name)) as model:
        assert (model.format, model.label, model.version) == ("apr-v1", "APR v1", "1.0")
        tensor = model.tensors["payload"]
        assert (tensor.dtype, tensor.shape) == ("U8", (tensor.n_bytes,))
        raw = tensor.raw()
        assert model.checksum() == {"header": "none", "footer": "ok"}
        assert model.flags["licensed"] is (name == "v1_metadata_full_license")
        assert model.metadata["model_type"] == record["reference_verdict"]["v1_load"]["ok"]["model_type_name"]
        assert model.metadata["model_name"] == record["v1_metadata"]["model_name"]
        assert model.tokenizer is None
        assert model.hparams.hidden_size is None
        assert model.size_bytes == record["size"]
        assert isinstance(model.native, apr1.V1File)
    assert bytes(raw) == bincode(record["input"]["model"])  # also after closing


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ({"metadata_size": 10_000}, TruncatedError),
        ({"metadata_size": 0xFFFFFFFF, "payload_size": 0xFFFFFFFF}, TruncatedError),
        ({"uncompressed_size": (1 << 30) + 1}, LimitError),
        ({"major": 2}, UnsupportedError),
        ({"magic": b"APRX"}, CorruptError),
        ({"flags": apr1.SIGNED}, TruncatedError),
        ({"metadata_size": 3}, TruncatedError),  # MessagePack cut
        ({"compression": 1}, CorruptError),
        ({"compression": 3}, CorruptError),
    ],
)
def test_refuses_damaged_headers(put: Put, header: dict[str, Any], kind: type[AprError]) -> None:
    with pytest.raises(kind):
        _ = aprfmt.read_v1(put(v1_bytes(payload=b"\x01\x00\x00\x00", **header))).payload


def test_tolerates_what_the_reference_tolerates(put: Put) -> None:
    file = aprfmt.read_v1(put(v1_bytes(payload=b"abc", major=0, minor=7, flags=0x80, tail=b"gap")))
    assert file.payload == b"abc"
    assert file.header["flags"] == 0
    assert file.warnings == ["3 bytes between the payload and the checksum are ignored"]


@pytest.mark.parametrize("compression", sorted(apr1.COMPRESSIONS))
@pytest.mark.parametrize("payload", [b"", b"x", bytes(300_000), bytes(range(256)) * 20])
def test_every_compression_round_trips(tmp_path: Path, compression: int, payload: bytes) -> None:
    path = tmp_path / "m.apr"
    aprfmt.write_v1(path, payload, model_type=255, compression=compression, metadata=META)
    file = aprfmt.read_v1(path)
    assert file.payload == payload
    assert file.header["uncompressed_size"] == len(payload)
    with aprfmt.open(path) as model:
        assert bytes(model.tensors["payload"].raw()) == payload


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": 0x50},
        {"compression": 9},
        {"quality": 0},
        {"quality": 101},
        {"password": "x", "recipient_public_key": bytes(32)},
        {"signing_key": b"short"},
        {"recipient_public_key": b"short"},
        {"recipient_public_key": bytes(32)},  # of small order
    ],
)
def test_refuses_bad_arguments_and_leaves_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"model_type": 1, "metadata": META} | options
    with pytest.raises(UsageError):
        aprfmt.write_v1(tmp_path / "m.apr", b"x", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_replaces_only_when_told(put: Put) -> None:
    path = put(b"old")
    with pytest.raises(ExistsError):
        aprfmt.write_v1(path, b"x", model_type=1, metadata=META, force=False)
    assert path.read_bytes() == b"old"
    aprfmt.write_v1(path, b"x", model_type=1, metadata=META)
    assert aprfmt.read_v1(path).payload == b"x"


def test_flags_and_quality(tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    licensed = META | {"license": {"uuid": "u", "hash": "h", "tier": "Team"}}
    aprfmt.write_v1(path, b"x", model_type=1, metadata=licensed, quality=85)
    assert (aprfmt.read_v1(path).header["flags"], aprfmt.read_v1(path).header["quality"]) == (8, 85)
    aprfmt.write_v1(path, b"x", model_type=1, metadata=licensed, signing_key=bytes(32))
    assert aprfmt.read_v1(path).header["flags"] == 2
    aprfmt.write_v1(path, b"x", model_type=1, metadata=META, flags=0x23)  # key bits need keys
    assert aprfmt.read_v1(path).header["flags"] == 0x20


def test_a_small_file_cannot_unpack_to_more_than_the_limit(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    import lz4.block
    import zstandard

    plain = bytes(40 << 20)
    for unpack, data in ((compress.unzstd, zstandard.compress(plain)), (compress.unlz4, lz4.block.compress(plain))):
        assert unpack(packed(data, "x"), 40 << 20).size == 40 << 20
        with pytest.raises(LimitError):
            unpack(packed(data, "x"), (40 << 20) - 1)
    with pytest.raises(CorruptError):  # says 512 MiB, cannot hold it
        compress.unlz4(packed(struct.pack("<I", 512 << 20) + b"\x10a", "x"))
    with pytest.raises(CorruptError, match="cannot decompress to 5"):  # more than incompressible data take
        compress.unlz4(packed(struct.pack("<I", 5) + bytes(22), "x"))
    monkeypatch.setattr(compress, "MAX_LZ4_BYTES", 40 << 20)
    with pytest.raises(LimitError, match="bytes of memory; the limit"):
        compress.unlz4(packed(lz4.block.compress(plain), "x"))


def test_a_payload_far_beyond_its_announced_size_is_refused(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    import zstandard

    monkeypatch.setattr(apr1, "_UNANNOUNCED_BYTES", 1 << 20)
    data = v1_bytes(payload=zstandard.compress(bytes(2 << 20)), compression=1, uncompressed_size=1)
    with pytest.raises(LimitError):
        aprfmt.open(put(data))


def test_zstd_frames_are_read_to_their_end() -> None:
    import zstandard

    def unzstd(data: bytes) -> bytes:
        return bytes(compress.unzstd(packed(data, "x")).view())

    one = zstandard.compress(b"one" * 1000)
    assert unzstd(one + zstandard.compress(b"two")) == b"one" * 1000 + b"two"
    with pytest.raises(TruncatedError):
        unzstd(one[:-1])
    with pytest.raises(CorruptError):
        unzstd(one + b"rubbish")
    empty = zstandard.compress(b"")
    assert unzstd(empty * 1000 + one) == b"one" * 1000
    with pytest.raises(LimitError, match="frames"):
        unzstd(empty * 70_000)


@pytest.mark.parametrize("data", [b"", b"\0", b"\5\0\0\0", b"\5\0\0\0\x30abc", b"\5\0\0\0\xf0", b"\1\0\0\0\x20ab"])
def test_damaged_lz4_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        compress.unlz4(packed(data, "x"))


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bit_flip_goes_unnoticed(vector: Vector, put: Put, data: st.DataObject) -> None:
    raw = bytearray(vector(data.draw(st.sampled_from(GOLDEN))).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(AprError):
        aprfmt.open(put(bytes(raw)))


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    metadata=st.binary(max_size=60),
    payload=st.binary(max_size=60),
    compression=st.integers(0, 4),
    flags=st.integers(0, 255),
    sizes=st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, (1 << 32) - 1)),
)
def test_hostile_files_give_apr_errors_only(
    put: Put, metadata: bytes, payload: bytes, compression: int, flags: int, sizes: tuple[int, int, int]
) -> None:
    names = ("metadata_size", "payload_size", "uncompressed_size")
    header = {"compression": compression, "flags": flags, **dict(zip(names, sizes, strict=True))}
    for raw in (v1_bytes(payload=payload, compression=compression, flags=flags), v1_bytes(metadata, payload, **header)):
        with contextlib.suppress(AprError):
            _ = aprfmt.read_v1(put(raw), password="p").payload
