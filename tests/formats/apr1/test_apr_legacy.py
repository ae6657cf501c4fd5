"""The forms nobody writes any more, read from the vectors and from built files."""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import json
import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import pytest
import zstandard
from apr1_images import apr1_bytes, v1_bytes, v2_head, with_footer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from natives import apr2_native
from turns import examples

import aprfmt
from aprfmt.errors import AprError, CorruptError, LimitError, StorageError, TruncatedError, UnsupportedError
from aprfmt.io import compress

Put = Callable[[bytes], Path]
Vector = Callable[[str], Path]
ENTRY = {"name": "w", "dtype": "F32", "shape": [2, 4], "offset": 0, "size": 32}
WRAPPED = ["legacy_wrapper_apr2_none", "legacy_wrapper_apr2_zstd", "legacy_wrapper_apr0_zstd"]


def f32(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@pytest.mark.parametrize("name", ["legacy_apr1_json_index", *WRAPPED])
def test_apr1_and_its_wrappers(vector: Vector, records: dict[str, Any], name: str) -> None:
    with aprfmt.open(vector(name)) as model:
        assert model.format == "apr-legacy"
        assert model.label.startswith("APR1")
        assert list(model.tensors) == ["encoder.w", "decoder.b"]
        assert model.tensors["encoder.w"].shape == (2, 3)
        assert bytes(model.tensors["encoder.w"].raw()) == f32([1, 2, 3, 4, 5, 6])
        assert bytes(model.tensors["decoder.b"].raw()) == f32([0.5, -0.5])
        assert dict(model.metadata) == {"model_type": "whisper-tiny", "n_vocab": 51865, "ключ": "значение"}
        assert model.checksum() == {"header": "none", "footer": "ok"}
        assert model.size_bytes == records[name]["size"]


def test_first_edition(vector: Vector, records: dict[str, Any]) -> None:
    record = records["legacy_apr2_magic_v2_header"]
    with aprfmt.open(vector("legacy_apr2_magic_v2_header")) as model:
        assert (model.format, model.label) == ("apr-legacy", "APR2 (v2 layout)")
        assert dict(model.metadata) == json.loads(record["metadata_json"])
        for expected in record["tensors"]:
            tensor = model.tensors[expected["name"]]
            assert hashlib.sha256(tensor.raw()).hexdigest() == expected["sha256"]
        assert model.checksum() == {"header": "ok", "footer": "ok"}


def test_first_edition_under_the_v1_magic_with_its_bf16(put: Put) -> None:
    name = b"\1\0w" + bytes([2, 1]) + struct.pack("<QQQ", 2, 0, 4)
    head = v2_head(b"APRN", count=1, size=18, data=192)
    body = b'{"model_type":"m"}'.ljust(64, b"\0") + name.ljust(64, b"\0") + b"\x80\x3f\x00\x40".ljust(64, b"\0")
    with aprfmt.open(put(with_footer(head + body))) as model:
        assert model.label == "APRN (v2 layout)"
        tensor = model.tensors["w"]
        assert (tensor.dtype, bytes(tensor.raw())) == ("BF16", b"\x80\x3f\x00\x40")


@pytest.mark.parametrize("method", ["lz4", "zstd"])
def test_compressed_bodies(vector: Vector, records: dict[str, Any], method: str) -> None:
    name = f"realizar_v2_{method}_payload"
    with aprfmt.open(vector(name)) as model, aprfmt.open(vector("v2_ref_golden_current")) as plain:
        assert model.label == f"APR v2 ({method} body)"
        image = apr2_native(model).source.view()
        assert hashlib.sha256(image).hexdigest() == records[name]["decompressed_image_sha256"]
        assert dict(model.metadata) == dict(plain.metadata)
        for key, tensor in plain.tensors.items():
            assert bytes(model.tensors[key].raw()) == bytes(tensor.raw())
        assert model.checksum() == {"header": "ok", "footer": "ok"}
        assert model.size_bytes == records[name]["size"]


def test_damage_in_a_compressed_body_shows_in_the_footer(vector: Vector, put: Put) -> None:
    raw = bytearray(vector("realizar_v2_lz4_payload").read_bytes())
    at = raw.index(b"golden-v2")
    raw[at] ^= 1  # a literal of the LZ4 block
    with aprfmt.open(put(bytes(raw))) as model:
        assert model.checksum()["footer"] == "bad"


@pytest.mark.parametrize("method", ["lz4", "zstd"])
def test_damaged_compressed_bodies_are_refused(vector: Vector, put: Put, method: str) -> None:
    raw = vector(f"realizar_v2_{method}_payload").read_bytes()
    for data in (raw[:-9], raw[:66], raw[:64]):
        with pytest.raises(CorruptError):
            aprfmt.open(put(data))


def test_a_wrong_apr1_footer_is_told_and_not_refused(vector: Vector, put: Put) -> None:
    raw = vector("legacy_apr1_json_index").read_bytes()
    with aprfmt.open(put(raw[:-1] + b"\0")) as model:
        assert model.checksum()["footer"] == "bad"
        assert len(model.tensors) == 2


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"name": None}, CorruptError),
        ({"name": 5}, CorruptError),
        ({"shape": None}, CorruptError),
        ({"shape": [2, -4]}, CorruptError),
        ({"shape": [2, 4.0]}, CorruptError),
        ({"shape": [True, 8]}, CorruptError),
        ({"shape": [1] * 9}, LimitError),
        ({"shape": [1 << 62, 1 << 62]}, CorruptError),
        ({"shape": [3, 4]}, CorruptError),
        ({"offset": -1}, CorruptError),
        ({"offset": 1}, TruncatedError),
        ({"offset": 1 << 63}, TruncatedError),
        ({"size": 1 << 63}, TruncatedError),
        ({"size": 28}, CorruptError),
        ({"dtype": "F33"}, UnsupportedError),
        ({"dtype": None}, UnsupportedError),
        ({"dtype": "Q4_K"}, CorruptError),
    ],
)
def test_bad_apr1_entries(put: Put, change: dict[str, Any], kind: type[AprError]) -> None:
    with pytest.raises(kind) as caught:
        aprfmt.open(put(apr1_bytes([ENTRY | change])))
    assert caught.value.path is not None


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (apr1_bytes([ENTRY], count=2), CorruptError),
        (apr1_bytes([ENTRY], count=0xFFFFFFFF), CorruptError),
        (apr1_bytes({"w": ENTRY}), CorruptError),
        (apr1_bytes([5]), CorruptError),
        (apr1_bytes([], raw_index=b"[1,"), CorruptError),
        (apr1_bytes([], raw_index=b"[" * 100_000), CorruptError),
        (apr1_bytes([ENTRY], metadata=b"{"), CorruptError),
        (apr1_bytes([ENTRY], metadata=b'{"a":NaN}'), CorruptError),
        (apr1_bytes([ENTRY], metadata=b'{"\xff":1}'), CorruptError),
        (apr1_bytes([ENTRY, ENTRY | {"name": "v", "offset": 16}], bytes(48)), CorruptError),  # they overlap
        (apr1_bytes([ENTRY])[:20], TruncatedError),
        (apr1_bytes([ENTRY])[:12], AprError),
    ],
)
def test_bad_apr1_containers(put: Put, data: bytes, kind: type[AprError]) -> None:
    with pytest.raises(kind):
        aprfmt.open(put(data))


def test_a_section_beyond_its_limit_is_refused_before_it_is_read(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.formats import apr_legacy

    monkeypatch.setattr(apr_legacy, "MAX_METADATA_BYTES", 4)
    with pytest.raises(LimitError):
        aprfmt.open(put(apr1_bytes([ENTRY], metadata=b'{"a":1}')))


def test_tensors_may_share_all_their_bytes(put: Put) -> None:
    shared = [ENTRY, ENTRY | {"name": "tied"}, {"name": "e", "dtype": "F32", "shape": [0], "offset": 8, "size": 0}]
    with aprfmt.open(put(apr1_bytes(shared, f32(list(range(8)))))) as model:
        assert bytes(model.tensors["tied"].raw()) == bytes(model.tensors["w"].raw())
        assert model.tensors["w"].shape == (2, 4)


@pytest.mark.parametrize("magic", [b"APR2", b"APR\0"])
@pytest.mark.parametrize("algorithm", [0, 1, 2])
def test_wrappers(put: Put, magic: bytes, algorithm: int) -> None:
    inner = apr1_bytes([ENTRY], np.arange(8, dtype="<f4").tobytes())
    packed = {0: inner, 1: lz4.block.compress(inner), 2: zstandard.compress(inner)}[algorithm]
    head = magic + bytes([algorithm])
    with aprfmt.open(put(head + struct.pack("<I", len(inner)) + packed)) as model:
        assert bytes(model.tensors["w"].raw()) == np.arange(8, dtype="<f4").tobytes()
        assert model.checksum()["footer"] == "ok"
    if algorithm == 2:
        with pytest.raises(CorruptError, match="declares"):
            aprfmt.open(put(head + struct.pack("<I", len(inner) + 1) + packed))
        with pytest.raises(CorruptError):
            aprfmt.open(put(head + struct.pack("<I", 3) + zstandard.compress(b"xyz")))
        with pytest.raises(LimitError):  # no more memory than the wrapper announces
            aprfmt.open(put(head + struct.pack("<I", 1000) + zstandard.compress(bytes(1 << 20))))


def images(vector: Vector) -> dict[str, bytes]:
    """Compressed files of each form, by the tensor that they all end with."""
    inner = apr1_bytes([ENTRY], np.arange(8, dtype="<f4").tobytes())
    size = struct.pack("<I", len(inner))
    payload = zstandard.compress(b"payload" * 20)
    return {
        "v2 lz4": vector("realizar_v2_lz4_payload").read_bytes(),
        "v2 zstd": vector("realizar_v2_zstd_payload").read_bytes(),
        "wrapper lz4": b"APR2\1" + size + lz4.block.compress(inner),
        "wrapper zstd": b"APR2\2" + size + zstandard.compress(inner),
        "v1": v1_bytes(payload=payload, compression=1, uncompressed_size=140),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="looks at open files as Linux does")
@pytest.mark.parametrize("form", ["v2 lz4", "v2 zstd", "wrapper lz4", "wrapper zstd", "v1"])
def test_large_images_are_unpacked_to_a_file_without_a_name(
    form: str, vector: Vector, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    data = images(vector)[form]
    path = put(data)
    with aprfmt.open(path) as model:
        wanted = {name: bytes(tensor.raw()) for name, tensor in model.tensors.items()}
        checksum = model.checksum()
    monkeypatch.setattr(compress, "MAX_IMAGE_IN_MEMORY", 16)
    before = os.listdir("/proc/self/fd")
    with aprfmt.open(path) as model:
        assert len(os.listdir("/proc/self/fd")) == len(before) + 2
        assert model.size_bytes == len(data)
        assert model.checksum() == checksum
        read = {}
        for name, tensor in model.tensors.items():
            read[name] = bytearray(tensor.n_bytes)
            tensor.read_into(0, memoryview(read[name]))
        assert read == wanted
        kept = {name: tensor.raw() for name, tensor in model.tensors.items()}
    assert {name: bytes(view) for name, view in kept.items()} == wanted
    assert os.listdir(scratch) == []
    cut = data[:-9]
    if form == "v1":
        cut = v1_bytes(payload=zstandard.compress(b"payload" * 20)[:-1], compression=1, uncompressed_size=140)
    with pytest.raises(CorruptError):
        aprfmt.open(put(cut))
    del model, kept, tensor
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert os.listdir(scratch) == []


def test_a_full_disk_while_an_image_is_unpacked(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compress, "MAX_IMAGE_IN_MEMORY", 16)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    inner = apr1_bytes([ENTRY], bytes(32))
    with pytest.raises(StorageError, match="No space left") as caught:
        aprfmt.open(put(b"APR2\2" + struct.pack("<I", len(inner)) + zstandard.compress(inner)))
    assert caught.value.path == tempfile.gettempdir()
    assert "TMPDIR" in str(caught.value.hint)

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(StorageError, match="no writable folder for temporary files"):
        aprfmt.open(put(b"APR2\2" + struct.pack("<I", len(inner)) + zstandard.compress(inner)))


@pytest.mark.parametrize("crc", ["good", "zero"])
def test_output_of_the_gguf_converter(put: Put, crc: str) -> None:
    payload = b'{"layers":[1,2]}'
    index = json.dumps([{"name": "weights", "dtype": "json", "shape": [16], "offset": 0, "size": 16}]).encode()
    meta = b'{"architecture":"llama","hidden_size":64}'
    head = v2_head(b"APR\0", count=1, size=len(meta), data=128 + len(index))
    if crc == "zero":
        head = head[:40] + bytes(4) + head[44:]
    with aprfmt.open(put(head + meta.ljust(64, b"\0") + index + payload)) as model:
        assert model.metadata["hidden_size"] == 64
        assert bytes(model.tensors["weights"].raw()) == payload
        assert model.checksum() == {"header": "ok" if crc == "good" else "bad", "footer": "absent"}
        assert model.warnings
    with pytest.raises(TruncatedError):
        aprfmt.open(put(head + meta.ljust(64, b"\0") + index + payload[:-1]))


def test_hyperparameters_of_a_legacy_file(put: Put) -> None:
    with aprfmt.open(put(apr1_bytes([ENTRY], metadata=b'{"hidden_size":64,"num_layers":2}'))) as model:
        assert (model.hparams.hidden_size, model.hparams.num_layers) == (64, 2)
        assert model.tokenizer is None


SAMPLES = ["legacy_apr1_json_index", *WRAPPED, "realizar_v2_lz4_payload", "realizar_v2_zstd_payload"]


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_open_or_raise_apr_errors(vector: Vector, put: Put, data: st.DataObject) -> None:
    raw = bytearray(vector(data.draw(st.sampled_from(SAMPLES))).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    if data.draw(st.booleans()) and len(raw) > 64:
        raw[40:44] = struct.pack("<I", zlib.crc32(bytes(raw[:40] + raw[44:64])))
    try:
        with aprfmt.open(put(bytes(raw))) as model:
            model.checksum()
            for tensor in model.tensors.entries:
                assert len(tensor.raw()) == tensor.n_bytes
    except AprError:
        pass
