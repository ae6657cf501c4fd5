"""Signatures that tell this user's leftovers of a killed run from files that somebody else put there.

$XDG_STATE_HOME/aprfmt/secret, else ~/.local/state/aprfmt/secret
    32 random bytes that only the user can read, created with the first temporary name

An unpacked archive can contain any file name and any record, but no signature by this key.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import cache

from aprfmt.io.publish import sync_folder

_FOLDER, _FILE = "aprfmt", "secret"
_SECRET_BYTES = 32
_TAG_BYTES = 8


def sign(purpose: str, data: bytes) -> str | None:
    """Signs `data` for one `purpose`: 16 hexadecimal digits; None without a secret."""
    key = _secret(_folder())[0]
    if key is None:
        return None
    from hashlib import blake2b

    return blake2b(data, key=key, person=purpose.encode(), digest_size=_TAG_BYTES).hexdigest()


def is_signed(purpose: str, data: bytes, tag: str) -> bool:
    """Whether `tag` is this user's signature of `data`."""
    from hmac import compare_digest

    expected = sign(purpose, data)
    return expected is not None and compare_digest(expected.encode(), tag.encode(errors="replace"))


def why_unsigned() -> str | None:
    """Why this user cannot sign; None if a secret exists."""
    return _secret(_folder())[1]


def identity(info: os.stat_result) -> list[int]:
    """Identifies a version of a file: inode, size, mtime in ns.

    Without the device, whose number may change at boot. A copy has other inodes. On some network disks so has a file
    that
    was looked at before: interrupted work there is never completed automatically.
    """
    return [info.st_ino, info.st_size, info.st_mtime_ns]


def folder_identity(folder: str) -> int:
    """Distinguishes a folder from its copies while its files change. Raises OSError."""
    return identity(os.stat(folder or os.curdir))[0]


def _folder() -> str:
    """The folder of the secret, "" without a home folder."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification requires
        base = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, _FOLDER) if os.path.isabs(base) else ""


@cache
def _secret(folder: str) -> tuple[bytes | None, str | None]:
    """The secret stored in `folder`, created if missing; or None and the reason."""
    if not folder:
        return None, "no home folder found, and XDG_STATE_HOME is not set"
    path = os.path.join(folder, _FILE)
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(folder, stat.S_IRWXU)
        info = os.lstat(folder)
        if not stat.S_ISDIR(info.st_mode) or not _is_own(info, stat.S_IWGRP | stat.S_IWOTH):
            return None, f"{folder} must be a folder that you own and only you can write to"
        try:
            return _read(path)
        except FileNotFoundError:
            _make(path)
            return _read(path)
    except OSError as error:
        return None, f"{path}: {error.strerror}"


def _read(path: str) -> tuple[bytes | None, str | None]:
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        info = os.fstat(fd)
        is_fit = stat.S_ISREG(info.st_mode) and _is_own(info, stat.S_IRWXG | stat.S_IRWXO)
        data = os.read(fd, _SECRET_BYTES + 1) if is_fit else b""
    finally:
        os.close(fd)
    if len(data) != _SECRET_BYTES:
        return None, f"{path} must be a file of {_SECRET_BYTES} bytes that you own and only you can read"
    return data, None


def _make(path: str) -> None:
    """Creates a secret; of two processes one wins. Raises OSError."""
    new = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    try:
        try:
            os.write(fd, os.urandom(_SECRET_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(new, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.rename(new, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(new)
    sync_folder(os.path.dirname(path))


def _is_own(info: os.stat_result, denied: int) -> bool:
    """Whether the user owns it and nobody has one of the permissions `denied`."""
    return not hasattr(os, "geteuid") or (info.st_uid == os.geteuid() and not info.st_mode & denied)
