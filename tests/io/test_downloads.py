"""What a failed download leaves under a model's name is named, with what to type, wherever a path is read."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import aprfmt
from aprfmt.cli.look import _validation
from aprfmt.cli.main import run
from aprfmt.errors import AprError, TruncatedError, UnknownFormatError, UsageError
from aprfmt.io.downloads import check_complete
from aprfmt.texts.records import Chat, Marked, RecordReader
from aprfmt.texts.sources import SourceFile

DEMO = Path(aprfmt.__file__).parent / "cli" / "demo-tiny.gguf"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4683074016\n"
PAGE = b"<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>nothing</body></html>"


def _zipped() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("model.gguf", b"GGUF")
    return data.getvalue()


def _tarred() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.gguf"))
    return data.getvalue()


# File name, content, what the message says, what the hint says.
BAD = {
    "git lfs pointer": ("m.gguf", LFS, "a Git LFS pointer, not the file itself: 4.36 GiB are missing", "lfs pull"),
    "xet pointer": ("m.gguf", b"# xet version 0\nfilesize = 1048576\nhash = 'ab'\n", "a Xet pointer: 1.00 MiB",
                    "hf download"),
    "html page": ("m.gguf", PAGE, "an HTML page that a server sent instead of the file: '404 Not Found'", "curl -fL"),
    "html page as safetensors": ("m.safetensors", b"\n" + PAGE, "an HTML page", "curl -fL"),
    "s3 answer": ("m.gguf", b'<?xml version="1.0"?><Error><Message>Access Denied</Message></Error>',
                  "an XML answer that a server sent instead of the file: 'Access Denied'", "hf auth login"),
    "json answer": ("m.safetensors", b'{"error": "Repository not found"}', "a JSON answer .*'Repository not found'",
                    "curl -fL"),
    "nested json answer": ("m.apr", b'{"error": {"message": "Sign in to read it"}}', "JSON answer .*Sign in",
                           "hf auth login"),
    "line of text": ("m.gguf", b"Access to model a/b is restricted.", "a line of text .*'Access to model",
                     "hf auth login"),
    "zip": ("m.gguf", _zipped(), "a zip archive, not a model", "unzip "),
    "tar": ("m.gguf", _tarred(), "a tar archive, not a model", "tar -xf "),
    "gzip": ("m.gguf", gzip.compress(b"GGUF" * 99), "the file is gzip-compressed, not a model", "m.unpacked.gguf"),
    "zstd": ("m.safetensors", b"\x28\xb5\x2f\xfd" + bytes(range(60)), "zstd-compressed", "m.unpacked.safetensors"),
    "hf download's partial": ("m.gguf.incomplete", DEMO.read_bytes()[:5000], r"unfinished \(.incomplete, 4.88 KiB",
                              "hf download"),
    "curl's partial": ("m.gguf.part", DEMO.read_bytes()[:5000], "unfinished", "curl -C -"),
    "gguf cut in its data": ("m.gguf", DEMO.read_bytes()[:-1000], "cut short: 1,000 of its [0-9,]+ bytes are missing",
                             "again"),
    "safetensors cut in its header": ("m.safetensors", (400).to_bytes(8, "little") + b'{"a":' + b" " * 100,
                                      "cut short: at least 295 of its 408 bytes are missing", "again"),
    "zeros": ("m.gguf", bytes(4096), "contains only zeros: its space was reserved", "again"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_download_is_named(name: str, tmp_path: Path) -> None:
    file, data, message, hint = BAD[name]
    path = tmp_path / file
    path.write_bytes(data)
    with pytest.raises((UnknownFormatError, aprfmt.errors.CorruptError), match=message) as caught:
        aprfmt.open(path)
    assert hint in (caught.value.hint or "")
    assert caught.value.path == str(path)


@pytest.mark.parametrize("command", ["inspect", "tree", "convert", "quantize", "diff", "report", "lint", "validate"])
def test_every_command_names_it(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").write_bytes(LFS)
    rest = {
        "convert": ["-o", str(tmp_path / "x.apr")],
        "quantize": ["q8_0", "-o", str(tmp_path / "x.gguf")],
        "diff": [str(DEMO)],
        "report": ["-o", str(tmp_path / "x.html")],
    }
    assert run([command, str(tmp_path / "m.gguf"), *rest.get(command, [])]) in (2, 3)
    assert "a Git LFS pointer" in capsys.readouterr().err


def test_a_folder_of_pointers_says_how_much_is_missing(tmp_path: Path) -> None:
    for no in (1, 2):
        (tmp_path / f"model-0000{no}-of-00002.safetensors").write_bytes(LFS)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownFormatError, match=r"2 pointers in the folder, 8\.72 GiB") as caught:
        aprfmt.open(tmp_path)
    assert caught.value.hint == f"git -C {tmp_path} lfs pull"


def test_texts_of_a_folder_are_looked_at_too(tmp_path: Path) -> None:
    aprfmt.export_model(DEMO, tmp_path / "hf")
    whole = (tmp_path / "hf" / "tokenizer.json").read_bytes()
    (tmp_path / "hf" / "tokenizer.json").write_bytes(LFS)
    with aprfmt.open(tmp_path / "hf") as model, pytest.raises(UnknownFormatError, match="a Git LFS pointer"):
        _ = model.tokenizer
    (tmp_path / "hf" / "tokenizer.json").write_bytes(whole)
    (tmp_path / "hf" / "config.json").write_bytes(PAGE)
    with aprfmt.open(tmp_path / "hf") as model, pytest.raises(UnknownFormatError, match="an HTML page"):
        _ = model.hparams


def _unused(chat: Chat) -> Marked:
    raise AssertionError(chat)


def test_pointers_are_no_training_text_and_no_importance_matrix(tmp_path: Path) -> None:
    for name, kind in (("d.txt", "text"), ("d.jsonl", "jsonl"), ("d.parquet", "parquet")):
        (tmp_path / name).write_bytes(LFS)
        with pytest.raises(UnknownFormatError, match="a Git LFS pointer"):
            list(RecordReader(separator=0, render=_unused).documents(SourceFile(tmp_path / name, name, kind)))
    with pytest.raises(UnknownFormatError, match="a Git LFS pointer"):
        aprfmt.quantize_model(DEMO, tmp_path / "q.gguf", "q4_0", imatrix=tmp_path / "d.txt")


def test_a_file_that_aria2c_has_not_finished_is_refused_though_it_opens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(DEMO, path)
    check_complete(str(path))
    (tmp_path / "m.gguf.aria2").write_bytes(b"\0\1")
    with pytest.raises(TruncatedError, match=r"m\.gguf\.aria2 is next to it") as caught:
        aprfmt.open(path)
    assert "aria2c -c" in (caught.value.hint or "")


def test_a_whole_file_with_the_name_of_a_partial_one_opens(tmp_path: Path) -> None:
    shutil.copy(DEMO, tmp_path / "m.gguf.part")
    with aprfmt.open(tmp_path / "m.gguf.part") as model:
        assert model.format == "gguf"


# --- validate ---


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, str]:
    """A model and its SHA-256."""
    path = tmp_path / "m.gguf"
    shutil.copy(DEMO, path)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


WAYS: dict[str, Callable[[str, Path], dict[str, object]]] = {
    "hex": lambda digest, folder: {"sha256": digest},
    "etag": lambda digest, folder: {"sha256": f'"{digest.upper()}"'},
    "file with hex": lambda digest, folder: {"sha256": _write(folder / "d", digest + "\n")},
    "sha256sum": lambda digest, folder: {"sha256": _write(folder / "d", f"{'0' * 64}  other.gguf\n{digest} *m.gguf\n")},
    "bsd": lambda digest, folder: {"manifest": _write(folder / "d", f"SHA256 (m.gguf) = {digest}\n")},
    "manifest": lambda digest, folder: {"manifest": _write(folder / "d", f"# by us\n{digest}  m.gguf\n")},
}


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_a_digest_from_outside_finds_a_flipped_bit(way: str, published: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = published
    options = WAYS[way](digest, tmp_path)
    found = aprfmt.validate(path, **options)  # type: ignore[arg-type]
    assert found.passed
    assert found.protected
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert aprfmt.validate(path).passed
    damaged = aprfmt.validate(path, **options)  # type: ignore[arg-type]
    assert not damaged.passed
    assert [check.id for check in damaged.checks if check.status == "fail"] == ["file.sha256"]
    assert damaged.score == 0
    assert [*_validation(damaged, 0)][-1] == "FAILED, no score: not the published file"


def test_a_list_must_name_the_model_and_its_files_must_exist(published: tuple[Path, str], tmp_path: Path) -> None:
    path, digest = published
    with pytest.raises(UsageError, match=r"does not contain m\.gguf"):
        aprfmt.validate(path, sha256=_write(tmp_path / "d", f"{digest}  other.gguf\n"))
    missing = aprfmt.validate(path, manifest=_write(tmp_path / "d", f"{digest}  m.gguf\n{digest}  n.gguf\n"))
    assert [c.message for c in missing.checks if c.status == "fail"] == ["n.gguf is listed, but missing"]
    for text, message in (("nothing here\n", "line 1 is not a digest"), (f"{digest}\n{digest}\n", "line 1")):
        with pytest.raises(UsageError, match=message):
            aprfmt.validate(path, manifest=_write(tmp_path / "d", text))
    with pytest.raises(UsageError, match="63 characters instead of 64"):
        aprfmt.validate(path, sha256=digest[1:])
    with pytest.raises(UsageError, match="mutually exclusive"):
        aprfmt.validate(path, sha256=digest, manifest=tmp_path / "d")
    with pytest.raises(UsageError, match="cannot describe a folder"):
        aprfmt.validate(tmp_path, sha256=digest)


def test_a_folder_is_compared_with_the_list_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    aprfmt.export_model(DEMO, folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    text = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    assert aprfmt.validate(folder, manifest=_write(tmp_path / "sums", text)).passed
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    found = aprfmt.validate(folder, manifest=tmp_path / "sums")
    assert [c.message[:11] for c in found.checks if c.status == "fail"] == ["config.json"]
    only = "".join(line for line in text.splitlines(keepends=True) if "safetensors" not in line)
    found = aprfmt.validate(folder, manifest=_write(tmp_path / "sums", only))
    assert any(c.status == "warn" and c.id == "file.sha256" and "safetensors" in c.message for c in found.checks)


def test_the_last_line_says_what_is_not_seen(
    published: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, digest = published
    assert run(["validate", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no checksum covers the weights")
    assert "--sha256" in last
    assert run(["validate", str(path), "--sha256", digest]) == 0
    assert "no checksum covers" not in capsys.readouterr().out
    aprfmt.convert_model(path, tmp_path / "m.apr")
    assert run(["validate", str(tmp_path / "m.apr")]) == 0
    assert "no checksum covers" not in capsys.readouterr().out


def test_what_cannot_be_read_again_keeps_its_first_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(AprError, match="needs 4 bytes"):
        aprfmt.open(tmp_path / "m.gguf")
