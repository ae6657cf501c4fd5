"""Split GGUF models and real files."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from natives import gguf_parts

import aprfmt
from aprfmt.errors import CorruptError, RefusedError
from aprfmt.formats.gguf_fields import GgufType, KvMapping
from aprfmt.formats.gguf_write import KV, layout
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, write_layout
from aprfmt.io.sink import AtomicFile

PARTS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of six tensors in three parts, written by the gguf package."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "split")
    for n in range(6):
        writer.add_tensor(f"t{n}", np.full((2, 3), n, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path


def name(no: int, count: int = PARTS) -> str:
    return f"m-{no:05d}-of-{count:05d}.gguf"


@pytest.mark.parametrize("no", [1, 2, 3])
def test_any_part_opens_all_of_them(folder: Path, no: int) -> None:
    with aprfmt.open(folder / name(no)) as model:
        assert list(model.tensors) == [f"t{n}" for n in range(6)]
        assert [Path(source.path).name for source in model.sources] == [name(n) for n in (1, 2, 3)]
        assert [part.kv["split.no"] for part in gguf_parts(model)] == [0, 1, 2]
        assert model.metadata["general.name"] == "split"
        assert model.size_bytes == sum((folder / name(n)).stat().st_size for n in (1, 2, 3))
        for n in range(6):
            assert bytes(model.tensors[f"t{n}"].raw()) == np.full(6, n, dtype="<f4").tobytes()


@pytest.mark.parametrize("no", [1, 3])
def test_a_missing_part_is_named(folder: Path, no: int) -> None:
    (folder / name(no)).unlink()
    with pytest.raises(RefusedError, match=name(no)) as caught:
        aprfmt.open(folder / name(2))
    assert caught.value.exit_code == 5
    assert caught.value.hint


def test_a_renamed_part_is_refused(folder: Path) -> None:
    (folder / name(2)).rename(folder / "other.gguf")
    with pytest.raises(RefusedError, match="one of 3 parts"):
        aprfmt.open(folder / "other.gguf")


def test_swapped_parts_are_refused(folder: Path) -> None:
    shutil.copy(folder / name(3), folder / name(2))
    with pytest.raises(RefusedError, match="is part 3 of 3"):
        aprfmt.open(folder / name(1))
    with pytest.raises(RefusedError, match="is part 3 of 3"):
        aprfmt.open(folder / name(2))


def test_a_copy_under_the_name_of_another_part_is_refused(folder: Path) -> None:
    """The part given is taken for the one it says it is, which its name contradicts."""
    (folder / name(1)).rename(folder / "keep")
    shutil.copy(folder / name(2), folder / name(1))
    with pytest.raises(RefusedError, match="but named as part"):
        aprfmt.open(folder / name(1))


def part(path: Path, no: int, count: int, n_tensors: int, tensor: str, kind: GgufType = GgufType.UINT16) -> None:
    kv: list[KV] = [
        ("split.no", GgufType.UINT16, no),
        ("split.count", kind, count if kind is not GgufType.STRING else str(count)),
        ("split.tensors.count", GgufType.INT32, n_tensors),
    ]
    plan = FileLayout("x", layout(kv, [OutTensor(tensor, "F32", (2,), 8, lambda: [bytes(8)])]))
    with AtomicFile(path) as sink:
        write_layout(plan, sink)


def test_a_wrong_tensor_count_is_refused(tmp_path: Path) -> None:
    part(tmp_path / name(1, 2), 0, 2, 5, "a")
    part(tmp_path / name(2, 2), 1, 2, 5, "b")
    with pytest.raises(RefusedError, match="hold 2 tensors, but the first part declares 5"):
        aprfmt.open(tmp_path / name(1, 2))


def test_one_name_in_two_parts_is_refused(tmp_path: Path) -> None:
    part(tmp_path / name(1, 2), 0, 2, 2, "a")
    part(tmp_path / name(2, 2), 1, 2, 2, "a")
    with pytest.raises(CorruptError, match="duplicate tensor name"):
        aprfmt.open(tmp_path / name(2, 2))


def test_a_count_that_is_no_number_is_refused(tmp_path: Path) -> None:
    part(tmp_path / name(1, 2), 0, 2, 1, "a", GgufType.STRING)
    with pytest.raises(CorruptError, match="not an integer"):
        aprfmt.open(tmp_path / name(1, 2))


def test_a_split_of_one_is_a_plain_file(tmp_path: Path) -> None:
    part(tmp_path / "any.gguf", 0, 1, 1, "a")
    with aprfmt.open(tmp_path / "any.gguf") as model:
        assert list(model.tensors) == ["a"]


# --- real files ---


def test_a_real_model(smollm2_gguf: Path) -> None:
    with aprfmt.open(smollm2_gguf) as model:
        assert len(model.tensors) == 272
        assert model.tensors["token_embd.weight"].shape == (49152, 576)
        dtypes = [tensor.dtype for tensor in model.tensors.values()]
        assert {name: dtypes.count(name) for name in set(dtypes)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
        metadata = model.metadata
        assert isinstance(metadata, KvMapping)
        assert metadata.entries["tokenizer.ggml.tokens"].count == 49152
        assert len(metadata["tokenizer.ggml.tokens"]) == 49152
        assert metadata["general.architecture"] == "llama"
        assert model.tensors.entries[-1].offset + model.tensors.entries[-1].n_bytes <= model.size_bytes


def test_a_real_model_is_written_byte_for_byte(smollm2_gguf: Path, tmp_path: Path) -> None:
    with aprfmt.open(smollm2_gguf) as model:
        tensors = [
            OutTensor(t.name, t.dtype, t.shape, t.n_bytes, lambda t=t: [t.raw()])  # type: ignore[misc]
            for t in model.tensors.entries
        ]
        kv = [bytes(model.metadata.raw(key)) for key in model.metadata]  # type: ignore[attr-defined]
        with AtomicFile(tmp_path / "copy.gguf") as sink:
            write_layout(FileLayout("copy", layout(kv, tensors)), sink)
    assert (tmp_path / "copy.gguf").read_bytes() == smollm2_gguf.read_bytes()


def test_opening_stays_cheap(smollm2_gguf: Path) -> None:
    """Far above what it takes (6 ms), far below what numpy views of each string take (seconds)."""
    times = []
    for _ in range(9):
        started = time.perf_counter()
        aprfmt.open(smollm2_gguf).close()
        times.append(time.perf_counter() - started)
    assert min(times) < 0.1


def test_vocabulary_files(llama_cpp_models: Path) -> None:
    paths = sorted(llama_cpp_models.glob("*.gguf"))
    assert paths
    for path in paths:
        with aprfmt.open(path) as model:
            assert len(model.metadata["tokenizer.ggml.tokens"]) > 1000
            assert len(dict(model.metadata)) == len(model.metadata)
