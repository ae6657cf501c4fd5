"""docs/repositories.md: what its tables say of files, pooling, layers and heads is what happens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository_models import REPOSITORIES, write

import aprfmt
from aprfmt.arch.converters.heads import pooling
from aprfmt.arch.heads import HEADS, MODULE
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.convert.report import Report

pytest.importorskip("torch")

_PAGE = Path(__file__).parents[2] / "docs" / "repositories.md"
_FURTHER = {
    "README.md": "---\nlicense: mit\n---\n# A card\n",
    "config_sentence_transformers.json": '{"prompts": {"query": "task: "}}\n',
    "sentence_bert_config.json": '{"max_seq_length": 128}\n',
    "preprocessor_config.json": '{"size": 224}\n',
    "onnx/model.onnx": "bytes",
}
"""What the repository has beside what transformers and sentence-transformers write."""


def _table(first: str) -> list[list[str]]:
    """The rows of the table whose head begins with `first`."""
    lines = iter(_PAGE.read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {first} |"))
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A folder with a repository `m`, its `.apr`, the GGUF of that, and `made`, the folder of the GGUF; the report."""
    root = tmp_path_factory.mktemp("repository")
    write(next(r for r in REPOSITORIES if r.case == "gemma_embedding" and not r.left), root / "m")
    for name, text in _FURTHER.items():
        (root / "m" / name).parent.mkdir(exist_ok=True)
        (root / "m" / name).write_text(text)
    aprfmt.import_model(root / "m", root / "m.apr")
    aprfmt.export_model(root / "m.apr", root / "back", format="hf")
    report = aprfmt.export_model(root / "m.apr", root / "m.gguf")
    aprfmt.export_model(root / "m.gguf", root / "made", format="hf")
    return root, report


@pytest.mark.parametrize("row", _table("part"), ids=lambda row: _quoted(row[1])[0])
def test_each_file_goes_where_the_page_says(row: list[str], repository: tuple[Path, Report]) -> None:
    (root, report), (_, file, in_apr, in_gguf, made) = repository, row
    (name,) = _quoted(file)
    assert (root / "back" / name).read_bytes() == (root / "m" / name).read_bytes()
    with aprfmt.open(root / "m.apr") as apr, aprfmt.open(root / "m.gguf") as gguf:
        carried = {f.name for f in apr.files}
        assert set(_quoted(in_apr)) <= {*apr.metadata, *apr.tensors, *carried}
        assert bool(_quoted(in_apr)) != (in_apr == "as a file")
        assert set(_quoted(in_gguf)) <= {*gguf.metadata, *gguf.tensors}
    assert (root / "made" / name).exists() == (made == "yes")
    assert (in_gguf == "–") == any(re.search(rf"[ (]{re.escape(name)}", loss) for loss in report.losses)


def test_every_file_of_the_repository_is_on_the_page(repository: tuple[Path, Report]) -> None:
    root, _ = repository
    told = {name for row in _table("part") for name in _quoted(row[1])}
    there = {path.relative_to(root / "m").as_posix() for path in (root / "m").rglob("*") if path.is_file()}
    assert there - told <= {"special_tokens_map.json", "3_Dense/config.json"}
    assert told <= there


def test_pooling_has_these_numbers() -> None:
    found = {_quoted(mode)[0]: int(number) for mode, number in _table("mode")}
    assert all(pooling.from_gguf(number, None) == mode for mode, number in found.items())  # type: ignore[arg-type]
    assert sorted(found.values()) == [0, 1, 2, 3, 4]


def _layers() -> Iterator[tuple[str, str, str]]:
    for row in ARCHITECTURES.values():
        for tensor in row.tensors:
            if MODULE.match(tensor.hf[0]) and tensor.hf[0].endswith(".weight"):
                yield row.id, tensor.hf[0].partition(".")[0], tensor.gguf[0].partition(".")[0]


def test_these_rows_have_layers_behind_the_pooling() -> None:
    assert [tuple(_quoted(cell)[0] for cell in row) for row in _table("row")] == list(_layers())


def test_these_rows_have_heads() -> None:
    lines = iter(_PAGE.read_text().splitlines())
    next(line for line in lines if line.startswith("| row | head in a checkpoint |"))
    next(lines)
    told = {}
    for line in lines:
        if not line.startswith("|"):
            break
        row, ours, theirs = (_quoted(cell) for cell in line.strip("|").split("|"))
        told[row[0]] = list(zip(ours, theirs, strict=True))
    heads = {
        row.id: [
            (t.hf[0].removesuffix(".weight"), t.gguf[0].removesuffix(".weight"))
            for t in row.tensors
            if t.gguf and t.gguf[0].startswith("cls") and t.hf[0].endswith(".weight")
        ]
        for row in ARCHITECTURES.values()
        if row.id.endswith("_classifier")
    }
    assert told == heads


def test_these_tasks_have_these_classes() -> None:
    assert [(task, tuple(_quoted(ends))) for task, ends in _table("task")] == [(h.task, h.classes) for h in HEADS]
