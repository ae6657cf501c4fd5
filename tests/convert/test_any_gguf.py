"""Whatever GGUF can be read comes back as the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.codecs.dtypes import DTYPES

VOCABULARIES = (
    *("aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4"),
    *("gpt-2", "gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3", "qwen2", "qwen35"),
    *("refact", "starcoder"),
)


def comes_back(source: Path, folder: Path, **options: Any) -> None:
    report = aprfmt.import_model(source, folder / "m.apr", **options)
    assert report.lossless
    aprfmt.export_model(folder / "m.apr", folder / "back.gguf")
    assert (folder / "back.gguf").read_bytes() == source.read_bytes()


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabulary_only_files(name: str, llama_cpp_models: Path, tmp_path: Path) -> None:
    comes_back(llama_cpp_models / f"ggml-vocab-{name}.gguf", tmp_path)


@pytest.mark.parametrize("alignment", [8, 32, 64, 256])
def test_every_tensor_type_and_value_type_at_odd_alignments(alignment: int, tmp_path: Path) -> None:
    """Every block type that GGML numbers, nested arrays, all scalar types, keys in no particular order."""
    import gguf

    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "zoo")
    writer.add_custom_alignment(alignment)
    rng = np.random.default_rng(0)
    writer.add_array("z.nested", [[1, 2], [3]])
    writer.add_array("z.strings", ["", "é", "\n"])
    writer.add_array("z.floats", [1.5, float("-inf")])
    for kind, value in (("UINT8", 7), ("INT8", -7), ("UINT64", 1 << 63), ("FLOAT64", 0.1), ("BOOL", True)):
        writer.add_key_value(f"a.{kind.lower()}", value, gguf.GGUFValueType[kind])
    known = {kind.value for kind in gguf.GGMLQuantizationType}
    rows = [row for row in DTYPES.values() if row.ggml_id in known]
    for row in rows:
        kind = gguf.GGMLQuantizationType(row.ggml_id)
        n_bytes = row.n_bytes((3, 2 * row.block))
        data = rng.integers(0, 256, (3, n_bytes // 3), dtype=np.uint8)
        writer.add_tensor(f"tensor.{row.name}", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with aprfmt.open(path) as model:
        assert {t.dtype for t in model.tensors.values()} == {row.name for row in rows}
    comes_back(path, tmp_path, allow_unmapped=True)


def test_gaps_and_bytes_behind_the_data(tiny_gguf: Path, tmp_path: Path) -> None:
    data = tiny_gguf.read_bytes()
    (tmp_path / "longer.gguf").write_bytes(data + bytes(100) + b"tail")
    comes_back(tmp_path / "longer.gguf", tmp_path)
