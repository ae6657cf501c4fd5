"""The secret of the user: made once, used only where nobody else can know or change it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aprfmt.errors import RefusedError
from aprfmt.io import signature
from aprfmt.io.sink import AtomicFolder
from aprfmt.io.switch import Switch
from aprfmt.io.temporary import sweep, temporary_beside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="permissions as on Linux")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a" / "state"))
    return tmp_path / "a" / "state" / "aprfmt"


def modes(folder: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]


def test_it_is_made_once_for_the_user_alone(state: Path) -> None:
    before = os.umask(0)
    try:
        tag = signature.sign("x", b"data")
    finally:
        os.umask(before)
    assert tag
    assert (len(tag), modes(state)) == (16, [0o700, 0o600])
    assert [path.name for path in state.iterdir()] == ["secret"]
    assert len((state / "secret").read_bytes()) == 32
    code = "from aprfmt.io.signature import sign; print(sign('x', b'data'))"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert again.strip() == tag
    assert signature.is_signed("x", b"data", tag)
    assert not signature.is_signed("y", b"data", tag)
    assert not signature.is_signed("x", b"Data", tag)
    assert not signature.is_signed("x", b"data", "ü")


def test_nothing_is_signed_alike_with_another_secret(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = signature.sign("x", b"")
    monkeypatch.setenv("XDG_STATE_HOME", str(state.parent / "other"))
    assert signature.sign("x", b"") not in (None, first)


def test_two_processes_make_one(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(source: str, target: str) -> None:
        Path(target).write_bytes(b"s" * 32)
        Path(target).chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert signature.sign("x", b"")
    assert [(path.name, path.read_bytes()) for path in state.iterdir()] == [("secret", b"s" * 32)]


def _shared(state: Path) -> None:
    (state / "secret").chmod(0o640)


def _link(state: Path) -> None:
    (state / "secret").rename(state / "s")
    (state / "secret").symlink_to("s")


def _short(state: Path) -> None:
    (state / "secret").write_bytes(b"x" * 31)


def _long(state: Path) -> None:
    (state / "secret").write_bytes(b"x" * 33)


def _pipe(state: Path) -> None:
    (state / "secret").unlink()
    os.mkfifo(state / "secret", 0o600)


def _open_folder(state: Path) -> None:
    state.chmod(0o770)


def _linked_folder(state: Path) -> None:
    state.rename(state.with_name("s"))
    state.symlink_to("s")


def _file(state: Path) -> None:
    (state / "secret").unlink()
    state.rmdir()
    state.write_text("")


@pytest.mark.parametrize("change", [_shared, _link, _short, _long, _pipe, _open_folder, _linked_folder, _file])
def test_one_that_others_can_know_is_not_used(state: Path, change: object) -> None:
    assert signature.sign("x", b"")
    signature._secret.cache_clear()
    change(state)  # type: ignore[operator]
    assert signature.sign("x", b"") is None
    assert str(state) in str(signature.why_unsigned())


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("name", ["", "secret"])
def test_another_users_is_not_used(state: Path, name: str) -> None:
    assert signature.sign("x", b"")
    signature._secret.cache_clear()
    os.chown(state / name, 1234, 1234)
    assert signature.sign("x", b"") is None


@pytest.mark.parametrize("value", ["", "relative"])
def test_it_lies_in_the_home_folder(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert signature.sign("x", b"")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("secret")] == [".local/state/aprfmt/secret"]


def test_without_a_home_writing_works_and_recovery_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    (tmp_path / "m").write_text("old")
    left = Path(temporary_beside(str(tmp_path / "f")))
    left.write_text("half")
    with monkeypatch.context() as patch:
        patch.setattr(Switch, "forward", _kill)
        patch.setattr(Switch, "_back", _kill)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path)
    monkeypatch.setattr("aprfmt.io.temporary.is_running", lambda process: False)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(RefusedError, match="no home folder") as caught:
        sweep(tmp_path)
    assert "rm -r" in str(caught.value.hint)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert (tmp_path / "m").read_text() == "old"


def write(folder: Path) -> None:
    with AtomicFolder(folder, shared=True, force=True) as temporary:
        (temporary / "m").write_text("new")


def _kill(switch: Switch) -> None:
    raise KeyboardInterrupt


def test_nothing_is_signed_before_a_name_is_needed(state: Path, tmp_path: Path) -> None:
    """Start-up reads no secret, and an output without a temporary name makes none."""
    code = "import aprfmt, aprfmt.cli.main, aprfmt.io.sink"
    subprocess.run([sys.executable, "-c", code], check=True)
    sweep(tmp_path)
    assert not state.exists()
