"""Folders whose files are not there, may not be read, or are none: said by name, not passed over, not waited for."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import plain_models
import pytest

import aprfmt
from aprfmt.errors import AprError, NotFoundError, RefusedError, StorageError, UnknownFormatError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="makes links, pipes and modes")

SHARD, INDEX = "model-00002-of-00003.safetensors", "model.safetensors.index.json"
FILES = ("model.safetensors", "config.json", "tokenizer.json", SHARD, INDEX)
_NOBODY = 65534


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in one file and one in shards."""
    root = tmp_path_factory.mktemp("odd")
    whole = plain_models.write_folder(root / "whole")
    aprfmt.convert_model(whole, root / "parts", format="hf", shard_size=200_000)
    return root


def copy(models: Path, name: str, place: Path) -> Path:
    """The folder that has a file of that name."""
    source = next(folder for folder in (models / "whole", models / "parts") if (folder / name).exists())
    return Path(shutil.copytree(source, place / "model"))


def be_absent(path: Path) -> None:
    path.symlink_to("nowhere")


def be_a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def be_a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(path.parent)  # the address has to be short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(here)


ODD: dict[str, Callable[[Path], None]] = {
    "dangling": be_absent,
    "loop": be_a_loop,
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": be_a_socket,
}


@pytest.mark.parametrize("make", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("name", FILES)
def test_no_file_is_refused_by_name(name: str, make: Callable[[Path], None], models: Path, tmp_path: Path) -> None:
    folder = copy(models, name, tmp_path)
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(RefusedError) as caught:
        aprfmt.open(folder)
    assert caught.value.path == str(folder / name)
    with pytest.raises(AprError) as direct:
        aprfmt.open(folder / name)
    assert isinstance(direct.value, NotFoundError | UnknownFormatError | StorageError | RefusedError)


def test_folders_and_links_that_belong_there(models: Path, tmp_path: Path) -> None:
    folder = copy(models, "model.safetensors", tmp_path)
    (folder / "tokenizer").mkdir()
    (folder / "notes").symlink_to("nowhere")
    (tmp_path / "README.md").symlink_to("nowhere")  # beside a single file, which needs no card
    (tmp_path / "blob").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blob")
    with aprfmt.open(folder) as model:
        assert model.tokenizer is not None
        assert model.hparams.num_layers == plain_models.LAYERS
    single = tmp_path / "single.safetensors"
    single.write_bytes((tmp_path / "blob").read_bytes())
    with aprfmt.open(single) as model:
        assert model.tokenizer is None


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/full", "/proc/self/status", "/proc/self/fd"])
def test_files_of_the_system_are_no_models(path: str) -> None:
    if not os.path.exists(path):
        pytest.skip("the system has none")
    with pytest.raises(UnknownFormatError):
        aprfmt.open(path)


@contextmanager
def as_nobody() -> Iterator[None]:
    """As a user whom modes concern."""
    if os.geteuid():
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public(models: Path) -> Iterator[Path]:
    """A copy of the shards that everybody may read."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = Path(shutil.copytree(models / "parts", place / "model"))
        for path in (place, folder, *folder.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder
        folder.chmod(0o755)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARD, INDEX])
def test_a_file_that_may_not_be_read(name: str, public: Path) -> None:
    (public / name).chmod(0)
    with as_nobody(), pytest.raises(StorageError) as caught, aprfmt.open(public) as model:
        _ = model.hparams, model.tokenizer
    error = caught.value
    assert (error.exit_code, error.path) == (7, str(public / name))
    assert "permissions" in (error.hint or "")


@pytest.mark.parametrize("mode", [0, 0o311, 0o644], ids=oct)
def test_a_folder_that_may_not_be_read(mode: int, public: Path) -> None:
    public.chmod(mode)
    with as_nobody():
        for path in (public, public / INDEX):
            if mode == 0o311 and path != public:
                continue  # who knows the name may read the file, and then the folder refuses to be listed
            with pytest.raises(StorageError) as caught:
                aprfmt.open(path)
            assert caught.value.exit_code == 7
