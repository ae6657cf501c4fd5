"""What an output takes over from what it replaces, links, long names, and what is swept."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aprfmt.errors import AprError, ExistsError, NotFoundError, RefusedError, StorageError
from aprfmt.io import system
from aprfmt.io.sink import AtomicFile, AtomicFolder
from aprfmt.io.temporary import sweep, temporary_beside

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as Linux publishes")

is_root = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(params=["unnamed", "named"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to write a file: without a name, and under a temporary one as on older or network file systems."""
    if request.param == "named":
        monkeypatch.setattr("aprfmt.io.sink.open_unnamed", lambda folder, mode: None)
    return str(request.param)


def write(path: Path, data: bytes = b"new", *, force: bool = True) -> None:
    with AtomicFile(path, force=force) as sink:
        sink.write(data)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- files ---


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o1755])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(mode)
    write(path)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)


@pytest.mark.usefixtures("way")
@pytest.mark.skipif(not is_root, reason="gives a file to another user")
def test_a_replaced_file_keeps_its_owner_and_group(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    os.chown(path, 1234, 2345)
    path.chmod(0o4640)
    write(path)
    info = path.stat()
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (1234, 2345, 0o4640)


@pytest.mark.usefixtures("way")
def test_what_the_group_may_do_goes_with_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(0o6664)
    stat_of = os.stat

    def of_another(place: str | int) -> os.stat_result:
        info = list(stat_of(place))
        if place == str(path):
            info[stat.ST_UID] = info[stat.ST_GID] = 4321
        return os.stat_result(info)

    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(
            "aprfmt.io.publish.os.stat", lambda place, **how: stat_of(place, **how) if how else of_another(place)
        )
        patch.setattr(os, "chown", refuse)
        write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.usefixtures("way")
def test_a_replaced_file_keeps_its_extended_attributes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    try:
        os.setxattr(path, "user.note", b"mine")
    except OSError:
        pytest.skip("no extended attributes here")
    write(path)
    assert os.getxattr(path, "user.note") == b"mine"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("force", [False, True])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, force: bool) -> None:
    path = tmp_path / "f"
    if force:
        path.write_bytes(b"old")

    def fail() -> None:
        with AtomicFile(path, force=force) as sink:
            sink.write(b"new")
            sink.flush()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [(name, (tmp_path / name).read_bytes()) for name in names(tmp_path)] == ([("f", b"old")] if force else [])


@pytest.mark.usefixtures("way")
def test_nobody_reads_the_new_file_before_it_has_the_old_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with AtomicFile(path, force=True) as sink:
        assert stat.S_IMODE(os.stat(sink.temporary).st_mode) == 0o600


@pytest.mark.usefixtures("way")
def test_the_file_behind_a_link_is_replaced(tmp_path: Path) -> None:
    for folder in ("real", "links"):
        (tmp_path / folder).mkdir()
    (tmp_path / "real" / "f").write_bytes(b"old")
    (tmp_path / "links" / "first").symlink_to("second")
    (tmp_path / "links" / "second").symlink_to("../real/f")
    write(tmp_path / "links" / "first")
    assert (tmp_path / "real" / "f").read_bytes() == b"new"
    assert os.readlink(tmp_path / "links" / "first") == "second"
    assert (names(tmp_path / "links"), names(tmp_path / "real")) == (["first", "second"], ["f"])


@pytest.mark.usefixtures("way")
def test_a_link_to_another_disk(tmp_path: Path) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("one disk only")
    other = Path("/dev/shm", f"apr-test-{os.getpid()}")
    link = tmp_path / "link"
    link.symlink_to(other)
    try:
        write(link)  # the link dangles
        write(link, b"newer")
        assert (link.is_symlink(), other.read_bytes()) == (True, b"newer")
    finally:
        other.unlink(missing_ok=True)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(ExistsError):
        write(tmp_path / "link", force=False)
    write(tmp_path / "link")
    assert (tmp_path / "there").read_bytes() == b"new"
    (tmp_path / "lost").symlink_to("no/folder")
    with pytest.raises(NotFoundError):
        write(tmp_path / "lost")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError):
        write(tmp_path / "loop")


@pytest.mark.skipif(not is_root, reason="makes a link of another user")
def test_another_users_link_in_a_shared_folder_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"old")
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o1777)
    link = tmp_path / "all" / "f"
    link.symlink_to("../mine")
    os.lchown(link, 1234, 1234)
    with pytest.raises(RefusedError, match="another user's symlink"):
        write(link)
    assert (tmp_path / "mine").read_bytes() == b"old"
    os.lchown(link, 0, 0)
    write(link)
    assert (tmp_path / "mine").read_bytes() == b"new"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127, "模" * 85, "\U0001f999" * 63, os.fsdecode(b"\xff" * 255)])
def test_names_of_255_bytes(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    write(tmp_path / name, b"newer")
    assert (tmp_path / name).read_bytes() == b"newer"
    for force in (False, True):
        with AtomicFolder(tmp_path / name[:-1], force=force) as folder:
            (folder / name).write_bytes(b"new")
    with AtomicFolder(tmp_path / name[:-1], force=True, shared=True) as folder:
        (folder / name).write_bytes(b"newer")
    assert (tmp_path / name[:-1] / name).read_bytes() == b"newer"
    assert len(names(tmp_path)) == 2


def test_a_file_without_a_name_leaves_nothing_to_be_found(tmp_path: Path) -> None:
    if system.open_unnamed(str(tmp_path), 0o600) is None:
        pytest.skip("this file system has none")
    with AtomicFile(tmp_path / "f") as sink:
        sink.write(b"half")
        sink.flush()
        assert names(tmp_path) == []
        again = [sys.executable, "-c", "import sys; print(open(sys.argv[1]).read())", sink.temporary]
        assert subprocess.run(again, capture_output=True, check=True).stdout == b"half\n"
    assert names(tmp_path) == ["f"]


def test_systems_without_files_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opens(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with AtomicFile(tmp_path / "f") as sink:
        sink.write(b"new")
        assert names(tmp_path) == [os.path.basename(sink.temporary)]
    assert names(tmp_path) == ["f"]


def test_a_disk_like_fat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links, files without a name and exchanges; owners and attributes cannot be set."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    for name in ("link", "chown", "setxattr"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("aprfmt.io.sink.open_unnamed", lambda folder, mode: None)
    monkeypatch.setattr("aprfmt.io.sink.exchange", refuse)
    for text in ("old", "new"):
        with AtomicFile(tmp_path / "f", force=text == "new") as sink:
            sink.write(text.encode())
        with AtomicFolder(tmp_path / "d", force=text == "new") as folder:
            (folder / "config.json").write_text(text)
        assert (tmp_path / "f").read_text() == (tmp_path / "d" / "config.json").read_text() == text
    with pytest.raises(ExistsError), AtomicFile(tmp_path / "f") as sink:
        sink.write(b"x")
    assert names(tmp_path) == ["d", "f"]
    assert (tmp_path / "f").read_text() == "new"


# --- sweeping ---


def left_by(process: str, folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aprfmt.io.temporary.process_name", lambda: process)
        path = Path(temporary_beside(str(folder / "f")))
    path.write_bytes(b"half")
    return path


@pytest.fixture
def ended() -> Iterator[str]:
    """Name of a process that has ended but was not waited for, as in a container without an init."""
    code = "from aprfmt.io.system import process_name; print(process_name(), flush=True)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield name
    child.stdout.close()
    child.wait()


def test_what_a_process_left_is_swept_when_it_has_ended(tmp_path: Path, ended: str) -> None:
    left_by(ended, tmp_path)
    write(tmp_path / "f")
    assert names(tmp_path) == ["f"]


def test_a_copy_of_what_a_process_left_stays(tmp_path: Path, ended: str) -> None:
    """Its name is signed for another folder: nobody knows what became of it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    left_by(ended, tmp_path / "a").rename(tmp_path / "b" / left_by(ended, tmp_path / "a").name)
    sweep(tmp_path / "b")
    assert len(names(tmp_path / "b")) == 1


def test_another_process_of_the_same_id_does_not_hide_it(tmp_path: Path) -> None:
    place, pid, start = system.process_name().split("-")
    left_by(f"{place}-{pid}-{int(start) - 1}", tmp_path)
    sweep(tmp_path)
    assert names(tmp_path) == []


def test_what_a_running_process_writes_stays(tmp_path: Path) -> None:
    paths = [left_by(system.process_name(), tmp_path), left_by(f"{system.process_name()[:16]}-1-{_start(1)}", tmp_path)]
    (tmp_path / ".notes.tmp").write_bytes(b"not ours")
    sweep(tmp_path)
    assert names(tmp_path) == sorted([".notes.tmp", *(path.name for path in paths)])


def _start(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def test_another_machines_files_stay_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by("0" * 16 + "-1-1", tmp_path)
    sweep(tmp_path)
    assert len(names(tmp_path)) == 1
    monkeypatch.setattr("aprfmt.io.temporary._ABANDONED_S", -60)
    sweep(tmp_path)
    assert names(tmp_path) == []


def test_what_was_left_before_the_machine_was_booted_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by(system.process_name()[:8] + "00000000-1-1", tmp_path)
    sweep(tmp_path)
    assert len(names(tmp_path)) == 1  # written after the boot: another container's
    monkeypatch.setattr("aprfmt.io.system._uptime", lambda: -60.0)
    sweep(tmp_path)
    assert names(tmp_path) == []


# --- folders ---


def replace_folder(path: Path) -> None:
    with AtomicFolder(path, force=True, stale=("w-*.bin",), last="config.json") as folder:
        (folder / "config.json").write_text("new")
        (folder / "w-1.bin").write_text("new")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "old"
    (path / "sub" / "empty").mkdir(parents=True)
    for name in ("config.json", "w-1.bin", "w-2.bin", "README.md", "sub/notes"):
        (path / name).write_text("old")
    (path / "link").symlink_to("README.md")
    (path / "folder-link").symlink_to("sub")
    (path / "dangling").symlink_to("nowhere")
    return path


def facts(path: Path) -> dict[str, tuple[object, ...]]:
    """What is to stay as it was: kind, mode, owner, times, inode of files, end of links."""
    found: dict[str, tuple[object, ...]] = {}
    for each in sorted(path.rglob("*")):
        info = each.lstat()
        is_folder = stat.S_ISDIR(info.st_mode)
        found[str(each.relative_to(path))] = (
            info.st_mode,
            info.st_uid,
            info.st_mtime_ns,
            0 if is_folder else info.st_ino,
            os.readlink(each) if each.is_symlink() else "",
        )
    return found


def test_a_replaced_folder_keeps_what_stays(old: Path) -> None:
    (old / "config.json").chmod(0o600)
    (old / "sub").chmod(0o750)
    old.chmod(0o2770)
    os.utime(old / "sub", (1e9, 1e9))
    before = facts(old)
    replace_folder(old)
    after = facts(old)
    changed = {"config.json", "w-1.bin", "w-2.bin"}
    assert {name: after[name] for name in after.keys() - changed} == {
        name: before[name] for name in before.keys() - changed
    }
    assert before.keys() - after.keys() == {"w-2.bin"}
    assert [(old / name).read_text() for name in ("config.json", "w-1.bin")] == ["new", "new"]
    assert stat.S_IMODE((old / "config.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(old.stat().st_mode) == 0o2770
    assert names(old.parent) == ["old"]


def test_a_replaced_folder_is_exchanged_in_one_step(old: Path) -> None:
    inode = old.stat().st_ino
    replace_folder(old)
    assert old.stat().st_ino != inode


def test_the_folder_behind_a_link_is_replaced(old: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("models/old")
    replace_folder(link)
    assert (os.readlink(link), (old / "config.json").read_text()) == ("models/old", "new")
    assert (names(tmp_path), names(old.parent)) == (["link", "models"], ["old"])


def test_the_folder_in_which_one_stands_stays_the_same(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inode = old.stat().st_ino
    monkeypatch.chdir(old / "sub")
    replace_folder(old)
    assert (old.stat().st_ino, (old / "config.json").read_text()) == (inode, "new")
    assert names(old) == ["README.md", "config.json", "dangling", "folder-link", "link", "sub", "w-1.bin"]


def test_a_folder_with_a_mount_inside_stays_the_same(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = f"1 2 0:3 / {old}/sub\\040x rw - ext4 /dev/x rw\n"
    table = old.parent / "mounts"
    table.write_text(mounted)
    opens = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *how, **more: opens(table if "mountinfo" in str(path) else path, *how, **more)
    )
    assert system.is_mounted(f"{old}/sub x")
    assert not system.is_mounted(f"{old}/sub")
    inode = old.stat().st_ino
    replace_folder(old)
    assert (old.stat().st_ino, (old / "w-1.bin").read_text()) == (inode, "new")


def test_a_folder_with_a_thousand_levels_stays_the_same(old: Path) -> None:
    inode, here = old.stat().st_ino, os.getcwd()
    try:
        os.chdir(old)
        for _ in range(1000):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    try:
        replace_folder(old)
        assert (old.stat().st_ino, (old / "w-1.bin").read_text()) == (inode, "new")
        assert names(old.parent) == ["old"]
        assert not [name for name in names(old) if name.endswith(".tmp")]
    finally:
        subprocess.run(["rm", "-r", str(old / "d")], check=True)


@pytest.mark.skipif(is_root, reason="root may write everywhere")
def test_a_read_only_folder_is_not_replaced(old: Path) -> None:
    old.chmod(0o555)
    with pytest.raises(StorageError):
        replace_folder(old)
    assert (old / "config.json").read_text() == "old"


@pytest.mark.skipif(not is_root, reason="becomes another user")
@pytest.mark.parametrize("mode", [0o555, 0o755, 0o1777])
def test_another_users_folders(tmp_path: Path, old: Path, mode: int) -> None:
    """A read-only folder is refused; in one that may be written to, and in a sticky one, the outcome is whole."""
    for place in (old, *old.rglob("*")):
        os.lchown(place, 1234, 1234)
    old.parent.chmod(mode)
    old.chmod(0o777 if mode == 0o1777 else 0o755)
    for place in (tmp_path, *tmp_path.parents[:-2]):
        place.chmod(place.stat().st_mode | 0o055)
    pid = os.fork()
    if pid == 0:  # in a child: the rest of the tests stay root
        try:
            os.setgid(4321 if mode == 0o1777 else 1234)
            os.setuid(4321 if mode == 0o1777 else 1234)
            replace_folder(old)
            os._exit(0)
        except AprError:
            os._exit(3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert {(old / name).read_text() for name in ("config.json", "w-1.bin")} == {"new"}
    assert (old.stat().st_uid, (old / "README.md").stat().st_uid) == (1234, 1234)
    assert names(old.parent) == ["old"]


@pytest.mark.parametrize("way", ["exchange", "switch"])
@pytest.mark.parametrize("name", ["README.md/x", "sub"])
def test_a_folder_in_the_way_of_a_file_is_an_error(
    old: Path, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "switch":
        monkeypatch.chdir(old)
    before = facts(old)
    with pytest.raises(StorageError) as caught, AtomicFolder(old, force=True) as folder:  # noqa: PT012
        (folder / "w-1.bin").write_text("new")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("new")
    assert (caught.value.path, name in caught.value.message) == (str(old), True)
    assert facts(old) == before
