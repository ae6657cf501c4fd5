"""Documents come out of files in a fixed order; what is not a text is left out and counted, or refused by name."""

from __future__ import annotations

import datetime
import gzip
import json
import lzma
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_corpora import byte_tokenizer, functions, write_jsonl

import aprfmt
from aprfmt.errors import CorruptError, MissingDependencyError, NotFoundError, RefusedError, StorageError, UsageError
from aprfmt.io import child
from aprfmt.texts import parquet, records, sources
from aprfmt.texts.corpus import prepare
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.parquet import ParquetRows
from aprfmt.texts.records import RecordReader, as_text
from aprfmt.texts.shards import Corpus
from aprfmt.texts.sources import list_files
from aprfmt.texts.summary import summarise

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.special["eos"]


def make(tmp_path: Path, *paths: Path, **options: Any) -> Corpus:
    return prepare(list(paths), TOKENIZER, tmp_path / "data", **options)


def read_all(path: Path, skipped: Counter[str] | None = None, **options: Any) -> list[Any]:
    counter: Counter[str] = Counter() if skipped is None else skipped
    reader = RecordReader(separator=EOS, render=as_text, skipped=counter, **options)
    return [d for file in list_files([path], counter) for d in reader.documents(file)]


def source_tree(root: Path) -> Path:
    files = {
        "b/two.py": b"two = 2\n",
        "a/one.py": b"\xef\xbb\xbfone = 1\r\n",
        "zero.md": "Größe\n".encode(),
        "a/data.py": b"binary = '\0'\n",
        "a/latin.py": "größe".encode("latin-1"),
        "a/long.py": b"#" * (sources.MAX_SOURCE_BYTES + 1),
        "a/full.py": b"#" * sources.MAX_SOURCE_BYTES,
        "a/module.so": b"\x7fELF",
        ".git/config.py": b"hidden = 1\n",
        "b/.hidden.py": b"hidden = 2\n",
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "b/link.py").symlink_to(root / "b/two.py")
    (root / "b/round").symlink_to(root)
    return root


def test_the_folder_of_a_run_is_no_text(tmp_path: Path) -> None:
    """Its metrics.jsonl would be taken for documents."""
    (tmp_path / "d.txt").write_text("one\n")
    (tmp_path / "e.txt").write_text("two\n")
    (tmp_path / "run").mkdir()
    prepare([tmp_path / "d.txt", tmp_path / "e.txt"], TOKENIZER, tmp_path / "run/tokens")
    with pytest.raises(UsageError) as caught:
        read_all(tmp_path / "run")
    assert caught.value.hint == f"use its token shards: {tmp_path}/run/tokens"


def test_a_source_tree_is_read_in_order_without_what_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped: Counter[str] = Counter()
    root = source_tree(tmp_path / "tree")
    found = read_all(root, skipped)
    assert found == ["Größe\n", "#" * sources.MAX_SOURCE_BYTES, "one = 1\r\n", "two = 2\n"]
    assert skipped == {
        "files that are not UTF-8 text": 2,
        "files over 1 MiB": 1,
        "files that are not source code": 1,
        "hidden folders": 1,
        "hidden files": 1,
        "symlinks and devices": 2,
    }
    walk = os.walk

    def reversed_walk(folder: Path, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, folders, names in walk(folder, **options):
            folders.sort(reverse=True)
            yield place, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)
    assert read_all(root) == found


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = source_tree(tmp_path / "tree")
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if os.fspath(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError) as caught:
        read_all(root)
    assert str(caught.value.path).endswith("/a")


def test_long_text_in_a_folder_is_read_in_pieces(tmp_path: Path) -> None:
    text = "a line of text\n" * 100_000
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_bytes(text.encode() + b"\xe9t\xe9")
    (tmp_path / "c.md").write_text(text)
    skipped: Counter[str] = Counter()
    pieces = read_all(tmp_path, skipped)
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert +skipped == {"files that are not UTF-8 text": 1, "files over 1 MiB": 1}


def test_a_file_named_by_itself_is_read_whatever_its_size(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("a line of text\n" * 200_000)
    pieces = read_all(path)
    assert "".join(pieces) == path.read_text()
    assert len(pieces) > 5
    assert max(map(len, pieces)) < 5 * records._PIECE


def test_long_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    paragraph = "words of one paragraph\n" * 300 + "\n"
    path.write_text(paragraph * 40)
    pieces = read_all(path)
    assert "".join(pieces) == paragraph * 40
    assert len(pieces) == 4
    assert all(piece.endswith("\n\n") for piece in pieces)


def test_a_data_folder_is_read_file_by_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ["b"])
    write_jsonl(tmp_path / "a.ndjson", ["a"])
    np.array([7, 8, EOS, 9], "<u4").tofile(tmp_path / "c.bin")
    (tmp_path / "README.md").write_text("about these data")
    (tmp_path / "more").mkdir()
    skipped: Counter[str] = Counter()
    found = read_all(tmp_path, skipped)
    assert skipped == {"files next to the data files": 1}
    assert found[:2] == ["a", "b"]
    assert [ids.tolist() for ids in found[2:]] == [[7, 8], [9]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not JSON"),
        ('{"body": "x"}', "line 3 lacks the field 'text'"),
        ('{"text": 5}', "line 3 has a field 'text' that is neither a text nor a list of messages"),
        ('{"messages": "x"}', "line 3 has a field 'messages' that is neither"),
        ('["text"]', "line 3 lacks the field 'text'"),
        ("[" * 100_000, "line 3 is not JSON"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n')
    with pytest.raises(CorruptError, match=message) as caught:
        make(tmp_path, path, strict=True)
    assert caught.value.path == str(path)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("line", ["{", '{"text": null}', "null", '{"body": "x"}'])
def test_a_bad_line_is_left_out_shown_once_and_counted(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n{{"text": "better"}}\n{line}\n')
    skipped: Counter[str] = Counter()
    lines: list[str] = []
    assert read_all(path, skipped, log=lines.append) == ["good", "better"]
    assert list(skipped.values()) == [2]
    (told,) = lines
    assert told.startswith("a.jsonl: line 2 ")
    corpus = make(tmp_path, path)
    assert list(corpus.header["files"]["skipped"].values()) == [2]


def test_half_of_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "cut \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    assert read_all(path) == ["cut \ufffd", "whole \U0001f600"]
    assert len(make(tmp_path, path).train.ends) == 1


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_that_is_too_long_is_left_out(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(records, "_STEP_BYTES", 64)
    path = tmp_path / "a.jsonl"
    long = json.dumps({"text": "x" * 200})
    path.write_text("\n".join([json.dumps({"text": "short"}), long, json.dumps({"text": "after"}), long]) + end)
    skipped: Counter[str] = Counter()
    assert read_all(path, skipped=skipped) == ["short", "after"]
    assert skipped == {"records that are too long": 2}
    with pytest.raises(CorruptError, match="line 2 is longer than 100 bytes"):
        read_all(path, strict=True)


@pytest.mark.parametrize("data", [b"text\xff\xfe", b"zero\0byte", "größe".encode("latin-1")])
def test_a_file_that_is_no_text_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        make(tmp_path, path)
    assert caught.value.exit_code == 4
    assert caught.value.path == str(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_reported(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", functions(3))
    path.chmod(0)
    with pytest.raises(StorageError):
        make(tmp_path, path)


def test_parquet_without_pyarrow_is_a_missing_dependency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "search_path", lambda: [str(Path(aprfmt.__file__).parents[1])])
    monkeypatch.setattr(parquet, "_idle", [])
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingDependencyError, match="pyarrow") as caught:
        make(tmp_path, tmp_path / "a.parquet")
    assert caught.value.exit_code == 6


Write = Callable[..., Path]


@pytest.fixture
def table(tmp_path: Path) -> Write:
    """Writes columns as a.parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")

    def write(**columns: Any) -> Path:
        writer.write_table(pyarrow.table(columns), tmp_path / "a.parquet", compression="snappy")
        return tmp_path / "a.parquet"

    return write


def test_parquet_gives_its_text_column(table: Write) -> None:
    texts = functions(600)
    assert read_all(table(id=list(range(600)), text=texts)) == texts
    skipped: Counter[str] = Counter()
    assert read_all(table(text=["a", None, "\0\u2028\U0001f600"]), skipped) == ["a", "\0\u2028\U0001f600"]
    assert skipped == {"records without 'text'": 1}
    assert read_all(table(text=[b"a", b"b"]), skipped) == []
    assert skipped == {"records without 'text'": 3}
    with pytest.raises(RefusedError, match="no column 'text'; the columns are id"):
        read_all(table(id=[1]))


def test_parquet_gives_conversations(table: Write) -> None:
    told = {"role": "user", "content": "a", "at": datetime.date(2024, 1, 2)}
    found = read_all(table(messages=[[told, {**told, "role": "assistant", "content": "b"}]]))
    assert [document.text for document in found] == ["a\n\nb"]


def test_damaged_parquet_is_told(table: Write, tmp_path: Path) -> None:
    path = table(text=["a" * 1000, "b" * 1000])
    raw = path.read_bytes()
    for damaged in (b"PAR0", raw[:-9], raw[:4] + bytes(40) + raw[44:]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match="not a complete Parquet file"):
            read_all(path)
    path.write_bytes(raw)
    assert len(read_all(path)) == 2, "the process reads on"
    path.unlink()
    with pytest.raises(NotFoundError):
        read_all(path)


def test_two_parquet_files_are_read_in_turn(table: Write, tmp_path: Path) -> None:
    one = table(text=[f"a{i}" for i in range(700)]).rename(tmp_path / "b.parquet")
    other = table(text=[f"b{i}" for i in range(700)])
    pairs = zip(*(ParquetRows(path, list) for path in (one, other)), strict=True)
    assert [tuple(json.loads(str(row))["text"] for row in pair) for pair in pairs] == [
        (f"a{i}", f"b{i}") for i in range(700)
    ]


def test_a_long_row_is_left_out_and_the_others_are_read(table: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: Counter[str] = Counter()
    texts = ["x" * (17 << 20), *("y" * (1 << 20) for _ in range(8)), "z"]
    assert read_all(table(text=texts), skipped) == texts[1:]
    assert skipped == {"records that are too long": 1}


# --- folders, compression, tables ---


def test_a_folder_of_the_hub_is_searched_through(tmp_path: Path) -> None:
    for name, text in {"README.md": "---\nlicense: mit\n---\n", "LICENSE.txt": "MIT", "load.py": "x = 1"}.items():
        (tmp_path / name).write_text(text)
    for name in ("train/b", "train/a", "more/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / f"{name}.jsonl", [name])
    skipped: Counter[str] = Counter()
    assert read_all(tmp_path, skipped) == ["more/c", "train/a", "train/b"]
    assert skipped == {"files next to the data files": 3}
    for i in range(4):  # a tree of source code that has some data in it
        (tmp_path / f"m{i}.py").write_text(f"x = {i}")
    skipped.clear()
    assert len(read_all(tmp_path, skipped)) == 7
    assert skipped["data files in a tree of source code"] == 3


def test_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots/1/data").mkdir(parents=True)
    write_jsonl(tmp_path / "blobs/0a", ["text"])
    (tmp_path / "snapshots/1/data/a.jsonl").symlink_to("../../../blobs/0a")
    assert read_all(tmp_path / "snapshots/1") == ["text"]


def compressed(suffix: str, data: bytes) -> bytes:
    import zstandard

    makers: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }
    return makers[suffix](data)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compressed_files_are_read_and_a_cut_one_is_refused(suffix: str, tmp_path: Path) -> None:
    wanted = functions(3000)
    plain = write_jsonl(tmp_path / "plain.jsonl", wanted).read_bytes()
    path = tmp_path / f"a.jsonl{suffix}"
    halves = plain[: len(plain) // 2], plain[len(plain) // 2 :]
    path.write_bytes(b"".join(compressed(suffix, half) for half in halves))  # two streams, one behind the other
    assert read_all(path) == wanted
    (tmp_path / "folder").mkdir()
    assert read_all(path.rename(tmp_path / "folder" / path.name).parent) == wanted
    path.write_bytes(compressed(suffix, plain)[:-20])
    with pytest.raises(CorruptError, match="cannot be decompressed") as caught:
        read_all(path)
    assert caught.value.path == str(path)
    path.write_bytes(compressed(suffix, plain)[:40] + b"nothing" * 20)
    with pytest.raises(CorruptError, match="cannot be decompressed"):
        read_all(path)
    text = tmp_path / f"b.txt{suffix}"
    text.write_bytes(compressed(suffix, "Größe\n".encode()))
    assert read_all(text) == ["Größe\n"]


@pytest.mark.turns
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.csv"])
def test_an_estimate_goes_by_the_bytes_that_were_read(name: str, tmp_path: Path) -> None:
    """Whatever else is in a record, and whether the file is compressed."""
    noise = random.Random(5)
    records = [{"text": text, "other": noise.randbytes(300).hex()} for text in functions(4000)]
    plain = "".join(json.dumps(record) + "\n" for record in records)
    if name == "a.csv":
        plain = "text,other\n" + "".join(f'"{r["text"]}",{r["other"]}\n' for r in records if '"' not in r["text"])
    suffix = Path(name).suffix
    path = tmp_path / name
    path.write_bytes(compressed(suffix, plain.encode()) if name.count(".") > 1 else plain.encode())
    encoder = Encoder(TOKENIZER)
    whole = summarise([path], [], encoder)
    some = summarise([path], [], encoder, sample=whole.learned // 3)
    assert (whole.estimated, some.estimated) == (False, True)
    assert abs(some.tokens / whole.tokens - 1) < 0.1
    assert not summarise([path], [], encoder, sample=1 << 30).estimated


def test_json_is_records_whether_a_list_or_lines(tmp_path: Path) -> None:
    records = [{"text": "one"}, {"text": "two", "more": [1, {}]}, {"text": None}]
    path = tmp_path / "a.json"
    for indent in (None, 1):
        path.write_text(f"\ufeff{json.dumps(records, indent=indent)}\n")
        skipped: Counter[str] = Counter()
        assert read_all(path, skipped) == ["one", "two"]
        assert skipped == {"records without 'text'": 1}
    write_jsonl(path, ["one", "two"])
    assert read_all(path) == ["one", "two"]
    path.write_text('[{"text": "one"},')
    with pytest.raises(CorruptError, match="not JSON") as caught:
        read_all(path)
    assert ".jsonl" in str(caught.value.hint)
    path.write_text("[]")
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    assert read_all(tmp_path) == ["three"]  # most others of a folder configure something


def test_an_archive_makes_no_data_folder(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    for name in ("dist.tar.gz", "page.1.gz", "image.svg.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"\0"))
    skipped: Counter[str] = Counter()
    assert read_all(tmp_path, skipped) == ["x = 1"]
    assert +skipped == {"files that are not source code": 3}
    (tmp_path / "wiki.gz").write_bytes(gzip.compress(b"text"))
    assert read_all(tmp_path) == ["text"]


def test_a_field_of_text_that_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match="--text-field body applies to jsonl, csv and parquet data"):
        prepare([tmp_path / "a.txt"], TOKENIZER, tmp_path / "data", text_field="body")
    with pytest.raises(UsageError, match="--text-field body applies to jsonl, csv and parquet data"):
        summarise([tmp_path / "a.txt"], [], Encoder(TOKENIZER), text_field="body")


def test_tables_of_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,text\n1,"one, two\nthree"\n2\n3,""\n')
    (tmp_path / "b.tsv").write_text("body\tid\nfour\t1\n")
    skipped: Counter[str] = Counter()
    assert read_all(tmp_path / "a.csv", skipped) == ["one, two\nthree", ""]
    assert skipped == {"records without 'text'": 1}
    assert read_all(tmp_path / "b.tsv", text_field="body") == ["four"]
    (tmp_path / "empty.csv").write_text("")
    assert read_all(tmp_path / "empty.csv") == []
    with pytest.raises(RefusedError, match="no column 'text'; the columns are body, id") as caught:
        read_all(tmp_path / "b.tsv")
    assert "--text-field" in str(caught.value.hint)


def test_another_field_makes_other_shards(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": a, "body": a[::-1]}) + "\n" for a in functions(9)))
    first = make(tmp_path, path)
    assert make(tmp_path, path, text_field="body").key != first.key
    with pytest.raises(RefusedError, match=r"skipped 9 records without 'code'") as caught:
        make(tmp_path, path, text_field="code")
    assert "--text-field" in str(caught.value.hint)


# --- token shards as data ---


def test_shards_of_bare_ids_are_cut_at_separators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [list(range(10 + i, 20 + 2 * i)) for i in range(30)]
    stream = [token for ids in wanted for token in (*ids, EOS)] + [EOS, EOS]
    np.array(stream, "<u4").tofile(tmp_path / "a.bin")
    for block in (1 << 20, 7):
        monkeypatch.setattr(records, "_BLOCK", block)
        found = [ids.tolist() for ids in read_all(tmp_path / "a.bin") if len(ids)]
        if block > 100:
            assert found == wanted
        assert [token for ids in found for token in ids] == [token for ids in wanted for token in ids]
    monkeypatch.setattr(records, "_BLOCK", 1 << 20)
    corpus = make(tmp_path, tmp_path / "a.bin")
    parts = (corpus.train, corpus.held_out)
    found_docs = [ids for part in parts for ids in np.split(part.tokens[:], part.ends[:-1])]
    assert sorted(ids.tolist() for ids in found_docs) == sorted([*ids, EOS] for ids in wanted)


def test_broken_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\1\0\0\0\2")
    with pytest.raises(CorruptError, match="5 bytes are not a whole number"):
        make(tmp_path, tmp_path / "a.bin")
    np.array([1, 2, EOS, 320, EOS], "<u4").tofile(tmp_path / "b.bin")
    with pytest.raises(CorruptError, match="token id 320, but the model's tokenizer has 320"):
        make(tmp_path, tmp_path / "b.bin")
