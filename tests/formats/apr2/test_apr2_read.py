from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import apr2_native
from turns import examples

import aprfmt
from aprfmt.errors import (
    AprError,
    ChecksumError,
    CorruptError,
    LimitError,
    NotFoundError,
    TruncatedError,
    UnknownFormatError,
    UnsupportedError,
)
from aprfmt.formats import apr2, apr_metadata
from aprfmt.io.source import Source

Write = Callable[..., Path]
F32, U8, Q4K, Q8, Q4 = 0, 7, 12, 129, 128
VECTORS = Path(__file__).resolve().parents[3] / "fixtures" / "vectors"


def one(size: int = 4, dims: tuple[int, ...] = (1,), dtype: int = F32, offset: int = 0) -> dict[str, object]:
    return {"entries": [(b"t", dtype, dims, offset, size)], "blobs": bytes(max(size, 64) if size < 4096 else 64)}


def test_fields_of_an_opened_model(write_image: Write) -> None:
    path = write_image(entries=[(b"a", F32, (2, 3), 0, 24)], blobs=struct.pack("<6f", *range(6)), flags=0xF620)
    with apr2.open_model(path) as model:
        tensor = model.tensors["a"]
        assert (tensor.dtype, tensor.shape, tensor.n_bytes) == ("F32", (2, 3), 24)
        assert (model.format, model.label, model.version, model.warnings) == ("apr-v2", "APR v2", "2.0", [])
        assert {name for name, is_set in model.flags.items() if is_set} == {
            "quantized",
            "has_vocab",
            "layout_row_major",
        }
        assert apr2_native(model).header.flags == 0xF620
        assert model.metadata["model_type"] == ""
        assert model.checksum() == {"header": "ok", "footer": "ok"}
        raw = tensor.raw()
    assert raw.readonly
    assert struct.unpack("<6f", raw) == tuple(range(6))


def test_every_legal_size_rule(write_image: Write) -> None:
    legal = [
        (F32, (), 4), (F32, (0,), 0), (F32, (3, 0, 1 << 60), 0), (Q8, (0,), 0), (Q8, (5,), 9), (Q4,
        (33,), 36), (Q4, (0,), 0),
        (Q4K, (2, 512), 576), (Q4K, (2, 300), 576), (Q4K, (2, 300), 432), (F32, (1,) * 7 + (2,), 16), (Q8,
        (1,) * 7 + (3,), 10),
        (Q4K, (1,) * 7 + (256,), 288), (Q4, (1,) * 8, 36),
    ]  # fmt: skip
    for dtype, dims, size in legal:
        apr2.open_model(write_image(**one(size, dims, dtype))).close()


ILLEGAL = [
    (F32, (1,), 3), (F32, (1,), 8), (F32, (0,), 4), (F32, (1,), 0), (Q8, (5,), 5), (Q8, (0,), 4), (Q4,
    (33,), 18),
    (Q4K, (2, 512), 144), (Q4K, (256,), 143), (Q4K, (), 5), (F32, (1,) * 7 + (2,), 12),
    (F32, (1 << 40, 1 << 40), 0), (F32, (1 << 63, 2), 0),
    (Q8, (1,) * 7 + (3,), 9),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "dims", "size"), ILLEGAL)
def test_sizes_that_do_not_fit_the_shape(write_image: Write, dtype: int, dims: tuple[int, ...], size: int) -> None:
    with pytest.raises(CorruptError, match="do not match"):
        apr2.open_model(write_image(**one(size, dims, dtype)))


@pytest.mark.parametrize(("fields", "error"), [
    ({"magic": b"APR2"}, UnknownFormatError),
    ({"flags": 0x0C00}, UnsupportedError),
    ({"flags": 0x0404}, UnsupportedError),
    ({**one(), "header": {"count": 0xFFFFFFFF}}, LimitError),
    ({**one(), "header": {"count": 2}}, CorruptError),
    ({**one(), "header": {"metadata_offset": 0}}, CorruptError),
    ({**one(), "header": {"metadata_offset": 1 << 63}}, TruncatedError),
    ({**one(), "header": {"metadata_size": 1 << 31}}, TruncatedError),
    ({**one(), "header": {"index_offset": 64}}, CorruptError),
    ({**one(), "header": {"index_offset": 0}}, CorruptError),
    ({**one(), "header": {"index_offset": 1 << 62}}, CorruptError),
    ({**one(), "header": {"data_offset": (1 << 64) - 1}}, TruncatedError),
    ({**one(), "header": {"data_offset": 64}}, CorruptError),
    (one(dtype=2), CorruptError),
    (one(dtype=255), CorruptError),
    (one(dims=(1,) * 9), LimitError),
    (one(offset=1 << 63), TruncatedError),
    (one(offset=(1 << 64) - 64), TruncatedError),
    (one(offset=65), TruncatedError),
    ({"metadata": b"[]"}, CorruptError),
    ({"metadata": b""}, CorruptError),
    ({"metadata": b'{"a":' * 128 + b"1" + b"}" * 128}, LimitError),
    ({"entries": [(b"b", F32, (), 0, 4), (b"a", F32, (), 64, 4)], "blobs": bytes(128)}, CorruptError),
    ({"entries": [(b"a", U8, (8,), 0, 8), (b"b", U8, (8,), 4, 8)], "blobs": bytes(64)}, CorruptError),
    ({"entries": [(b"a", U8, (8,), 64, 8), (b"b", U8, (80,), 0, 80)], "blobs": bytes(128)}, CorruptError),
    ({"entries": [(b"a", U8, (8,), 0, 8), (b"b", U8, (8,), 0, 8), (b"c", U8, (9,), 0, 9)],
    "blobs": bytes(64)}, CorruptError),
])  # fmt: skip
def test_broken_images(write_image: Write, fields: dict[str, object], error: type[AprError]) -> None:
    path = write_image(**fields)
    with pytest.raises(error) as caught:
        apr2.open_model(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("section", ["index", "data"])
def test_metadata_that_lie_over_another_section(write_image: Write, section: str) -> None:
    """Each section is sound alone: the bytes are JSON and a tensor, or JSON and the name of one."""
    whole = write_image(entries=[(b"{}", U8, (2,), 0, 2)], blobs=b"{}".ljust(64, b"\0"))
    apr2.open_model(whole).close()
    start = whole.read_bytes().index(b"{}", 64 + 2 if section == "index" else whole.read_bytes().rindex(b"{}"))
    path = write_image(
        entries=[(b"{}", U8, (2,), 0, 2)],
        blobs=b"{}".ljust(64, b"\0"),
        header={"metadata_offset": start, "metadata_size": 2},
    )
    with pytest.raises(CorruptError, match="metadata overlaps"):
        apr2.open_model(path)


def test_a_name_that_swallows_the_data(write_image: Write) -> None:
    data = bytearray(write_image(**one()).read_bytes())
    at = 64 + 128
    data[at : at + 2] = struct.pack("<H", 60)
    path = write_image()
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="extends past"):
        apr2.open_model(path)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        apr2.open_model(tmp_path / "none.apr")
    (tmp_path / "empty.apr").write_bytes(b"")
    with pytest.raises(TruncatedError):
        apr2.open_model(tmp_path / "empty.apr")


def test_metadata_limit(write_image: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apr2, "MAX_METADATA_BYTES", 101)
    with pytest.raises(LimitError):
        apr2.open_model(write_image())


@pytest.mark.parametrize("name", ["MAX_TENSORS", "MAX_HEADER_BYTES"])
def test_index_limits(name: str, write_image: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_image(**one())
    apr2.open_model(path).close()
    monkeypatch.setattr(apr2, name, 0)
    with pytest.raises(LimitError, match="an index of 1 tensors"):
        apr2.open_model(path)


def test_large_metadata_is_parsed_when_it_is_asked_for(write_image: Write) -> None:
    path = write_image(metadata=b'{"a":"' + b"x" * (64 << 10) + b'",}')
    with apr2.open_model(path) as model:
        with pytest.raises(CorruptError) as caught:
            _ = model.metadata
        assert caught.value.path == str(path)
        assert caught.value.offset is not None
        assert caught.value.offset > 64 << 10


def test_names_that_are_not_utf8_stay_apart(write_image: Write) -> None:
    entries = [(b"\xfe", U8, (1,), 0, 1), (b"\xff", U8, (1,), 64, 1)]
    with apr2.open_model(write_image(entries=entries, blobs=b"a" + bytes(63) + b"b")) as model:
        assert [bytes(model.tensors[name].raw()) for name in ("\udcfe", "\udcff")] == [b"a", b"b"]


def test_zero_entries_are_no_entries(write_image: Write) -> None:
    with pytest.raises(CorruptError):
        apr2.open_model(write_image(**one(), header={"count": 1 + 1}, index_tail=bytes(40)))


def test_identical_extents_and_empty_tensors_may_share(write_image: Write) -> None:
    entries = [(b"a", U8, (8,), 0, 8), (b"b", U8, (8,), 0, 8), (b"c", U8, (0,), 4, 0), (b"d", U8, (8,), 64, 8)]
    with apr2.open_model(write_image(entries=entries, blobs=bytes(128))) as model:
        assert len(model.tensors) == 4


def test_misaligned_data_is_told(write_image: Write) -> None:
    with apr2.open_model(write_image(**one(offset=4))) as model:
        assert "not aligned to 64" in model.warnings[0]


@pytest.mark.parametrize(("change", "footer", "warns"), [
    (lambda d: d, "ok", False),
    (lambda d: d[:-4], "absent", True),
    (lambda d: d[:-2], "bad", True),
    (lambda d: d[:-4] + b"\0\0\0\0", "bad", False),
    (lambda d: d + b"junk junk", "ok", True),
    (lambda d: d[:-40], "bad", True),
    (lambda d: d[:70] + b" " + d[71:], "bad", False),
])  # fmt: skip
def test_footer(write_image: Write, change: Callable[[bytes], bytes], footer: str, warns: bool) -> None:
    path = write_image(**one())
    path.write_bytes(change(path.read_bytes()))
    try:
        model = apr2.open_model(path)
    except CorruptError:  # the damaged byte may make the metadata unreadable
        assert footer == "bad"
        return
    with model:
        assert model.checksum()["footer"] == footer
        assert bool(model.warnings) is warns


def test_first_edition_has_its_own_bf16_id(write_image: Write) -> None:
    path = write_image(**one(2, (1,), 2), magic=b"APR2", flags=0)
    with Source.open(path) as source:
        model = apr2.open_source(source, path, format="apr-legacy", label="APR2")
        assert model.tensors["t"].dtype == "BF16"


def true_dtypes(metadata: dict[str, object], **fields: object) -> dict[str, object]:
    return {**one(20, (1, 20), U8), "metadata": apr_metadata.dump(metadata), **fields}


@pytest.mark.parametrize("filler", [0, 70_000])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_true_dtypes(write_image: Write, filler: int, elsewhere: bool) -> None:
    values: dict[str, object] = {"model_type": "m", "x": '","aprfmt.tensors":{' + "x" * filler}
    values |= {"aprfmt.tensors": {"t": {"dtype": "Q4_1", "shape": [32]}, "gone": {"dtype": "Q4_1", "shape": [32]}}}
    fields = true_dtypes(values)
    if elsewhere:  # not the last key, as another tool may write it
        fields["metadata"] = json.dumps(dict(reversed(values.items()))).encode()
    with apr2.open_model(write_image(**fields)) as model:
        assert (model.tensors["t"].dtype, model.tensors["t"].shape) == ("Q4_1", (32,))
        assert ["gone" in warning for warning in model.warnings] == [True]


def test_a_nested_key_of_that_name_is_no_true_dtype(write_image: Write) -> None:
    metadata = b'{"x":"' + b"x" * 70_000 + b'","y":{"a":1,"aprfmt.tensors":{"t":{"dtype":"Q4_1","shape":[32]}}}}'
    with apr2.open_model(write_image(**{**true_dtypes({}), "metadata": metadata})) as model:
        assert model.tensors["t"].dtype == "U8"


@pytest.mark.parametrize(("value", "error"), [
    ({"t": {"dtype": "Q4_1", "shape": [64]}}, CorruptError),
    ({"t": {"dtype": "Q4_1", "shape": [31]}}, CorruptError),
    ({"t": {"dtype": "Q4_1", "shape": [1 << 40, 1 << 40, 32]}}, CorruptError),
    ({"t": {"dtype": "Q4_1", "shape": [-32]}}, CorruptError),
    ({"t": {"dtype": "Q4_1"}}, CorruptError),
    ({"t": 5}, CorruptError),
    ([], None),
    (5, CorruptError),
    ({"t": {"dtype": "Q9_9", "shape": [32]}}, UnsupportedError),
])  # fmt: skip
def test_broken_true_dtypes(write_image: Write, value: object, error: type[AprError] | None) -> None:
    path = write_image(**true_dtypes({"aprfmt.tensors": value}))
    if error is None:
        error = CorruptError
    with pytest.raises(error):
        apr2.open_model(path)


SEEDS = [p.read_bytes() for p in sorted((VECTORS / "golden").glob("v2_*.apr")) if p.stat().st_size < 2000]


@settings(max_examples=examples(400), deadline=None)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 1999), st.integers(0, 255)), max_size=6),
    st.integers(0, 40),
)
def test_damaged_files_raise_nothing_but_apr_errors(seed: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(seed)
    for at, value in edits:
        data[at % len(data)] = value
    data[40:44] = struct.pack("<I", zlib.crc32(data[:40] + data[44:64]))
    data = data[: len(data) - cut]
    source = Source.from_bytes(bytes(data), "fuzz.apr")
    with contextlib.suppress(CorruptError, UnsupportedError, UnknownFormatError):
        model = apr2.open_source(source, Path("fuzz.apr"))
        dict(model.metadata)
        model.checksum()
        for tensor in model.tensors.entries:
            hashlib.sha256(tensor.raw())


def test_wrong_header_checksum(write_image: Write) -> None:
    path = write_image()
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError):
        apr2.open_model(path)


def test_opening_many_tensors_is_quick(write_image: Write) -> None:
    entries = [(f"model.layers.{i:05}.weight".encode(), F32, (4, 4), 64 * i, 64) for i in range(300)]
    path = write_image(entries=entries, blobs=bytes(64 * 300))
    best = 1e9
    for _ in range(9):
        start = time.perf_counter()
        with apr2.open_model(path) as model:
            assert sum(t.n_bytes for t in model.tensors.values()) == 64 * 300
        best = min(best, time.perf_counter() - start)
    assert best < 0.010, f"{best * 1e3:.2f} ms"


def test_opening_loads_no_heavy_module() -> None:
    code = (
        "import sys, aprfmt.formats.apr2 as a; from pathlib import Path; a.open_model(Path(sys.argv[1]))\n"
        "print(*{'numpy', 'torch', 'gguf', 'tokenizers'} & set(sys.modules))"
    )
    path = VECTORS / "golden" / "v2_ref_golden_current.apr"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_public_open_finds_it(write_image: Write) -> None:
    path = write_image(**one())
    assert aprfmt.detect(path) == "apr-v2"
    with aprfmt.open(path) as model:
        assert list(model.tensors) == ["t"]
