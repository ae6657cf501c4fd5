"""Signing, encrypting and decrypting `.apr` v1 files: metadata and the compressed payload keep their bytes."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from itertools import chain

from aprfmt.errors import RefusedError, UsageError
from aprfmt.formats.apr1 import ENCRYPTED, MAGIC, SIGNED, V1File, pack_header, read_v1
from aprfmt.formats.apr1_crypto import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    decrypt,
    decrypt_stream,
    encrypt_password,
    encrypt_recipient,
    encrypt_stream,
    envelope_bytes,
    sign,
)
from aprfmt.formats.apr1_metadata import dump_metadata
from aprfmt.io.crc import crc32, crc32_of
from aprfmt.io.sink import AtomicFile, check_target
from aprfmt.io.source import Source, is_folder
from aprfmt.limits import MAX_UNCOMPRESSED_BYTES
from aprfmt.text import format_bytes, plural
from aprfmt.types import PathLike

_CUSTOM = 0xFF
_CHECKSUM_BYTES = 4
_FILE_KEY = "aprfmt.file"


@dataclass(slots=True)
class CryptReport:
    """The result of `encrypt_file` and `decrypt_file`.

    Attributes:
        source, output: paths as given.
        method: "password" or "recipient".
        output_bytes: size of the output.
        warnings: what the output lacks that the source had.
    """

    source: str
    output: str
    method: str
    output_bytes: int
    warnings: list[str] = field(default_factory=list)


def sign_v1(path: PathLike, output: PathLike, signing_key: bytes, *, force: bool = False) -> None:
    """Writes a copy of an `.apr` v1 with an Ed25519 signature of header, metadata and payload, in place of any other.

    Args:
        path: the file; its payload may be encrypted.
        output: the file to write.
        signing_key: 32-byte Ed25519 seed.
        force: replace an existing output.

    Raises:
        CorruptError, ChecksumError, NotFoundError, ExistsError, StorageError.
    """
    check_target(output, [os.fspath(path)], force)
    _write(output, read_v1(path), flags=SIGNED, signing_key=signing_key, force=force)


def _write(
    output: PathLike,
    file: V1File,
    *,
    payload: bytes | None = None,
    flags: int = 0,
    dropped: int = 0,
    signing_key: bytes | None = None,
    force: bool,
) -> int:
    """Writes `file` with another payload and more or fewer flags; returns its size."""
    stored = file.stored_payload if payload is None else payload
    bits = file.header["flags"] & ~dropped | flags
    body = pack_header({**file.header, "magic": MAGIC, "payload_size": len(stored), "flags": bits})
    body += file.metadata_bytes + stored
    if signing_key is not None:
        body += sign(body, signing_key)
    with AtomicFile(output, force=force, n_bytes=len(body) + 4) as sink:
        sink.write(body)
        sink.write(struct.pack("<I", crc32_of(body)))
    return len(body) + 4


def encrypt_file(
    path: PathLike,
    output: PathLike,
    *,
    password: bytes | None = None,
    recipient: bytes | None = None,
    force: bool = False,
) -> CryptReport:
    """Encrypts a file as an `.apr` v1, the form of the reference: AES-256-GCM under a password or for a recipient.

    An `.apr` v1 keeps its metadata, readable. Any other file, of up to 1 GiB, becomes the payload of a new `.apr` v1
    whose metadata has nothing but its name.

    Args:
        path: the file.
        output: the file to write.
        password: the key comes from it by Argon2id.
        recipient: 32 raw bytes, X25519: encrypts for the owner of this public key.
        force: replace an existing output.

    Raises:
        RefusedError: a folder, a file of more than 1 GiB, or one that is encrypted.
        UsageError: neither or both of password and recipient.
        NotFoundError, ExistsError, StorageError.
    """
    name, target = os.fspath(path), os.fspath(output)
    check_target(target, [name], force)
    if is_folder(name):
        raise RefusedError("a folder cannot be encrypted", path=name, hint="convert it to one .apr or GGUF first")
    with Source.open(name) as source:
        head, size = source.read(0, min(4, source.size)), source.size
    report = CryptReport(name, target, "password" if password is not None else "recipient", 0)
    if head == MAGIC:
        file = read_v1(name)
        if file.is_encrypted:
            raise RefusedError("the file is encrypted already", path=name, hint=f"apr decrypt {name} -o PLAIN")
        if file.header["flags"] & SIGNED:
            report.warnings.append("the signature is dropped: it covers the plain payload; sign the encrypted file")
        signature = SIGNATURE_BYTES + PUBLIC_KEY_BYTES if file.header["flags"] & SIGNED else 0
        known = len(pack_header({**file.header, "magic": MAGIC})) + len(file.metadata_bytes) + len(file.stored_payload)
        if (extra := size - known - signature - _CHECKSUM_BYTES) > 0:
            report.warnings.append(f"{plural(extra, 'byte')} after the payload dropped: no reader uses them")
        stored = _encrypted(file.stored_payload, password, recipient)
        report.output_bytes = _write(target, file, payload=stored, flags=ENCRYPTED, dropped=SIGNED, force=force)
        return report
    if size > MAX_UNCOMPRESSED_BYTES:
        raise RefusedError(
            f"the file has {format_bytes(size)}; an encrypted .apr v1 is limited to 1 GiB",
            path=name,
            hint="encrypt large files with age or gpg",
        )
    report.output_bytes = _encrypt_file(name, target, password, recipient, force=force)
    return report


def _encrypt_file(name: str, target: str, password: bytes | None, recipient: bytes | None, *, force: bool) -> int:
    """Writes a file as the encrypted payload of a new `.apr` v1, in pieces; returns the size of the output."""
    if (password is None) == (recipient is None):
        raise UsageError("encrypt by password or for a recipient")
    metadata = dump_metadata({"custom": {_FILE_KEY: os.path.basename(name)}})
    with Source.open(name) as source:
        n_payload = source.size + envelope_bytes(for_recipient=recipient is not None)
        header = dict.fromkeys(("minor", "compression", "quality"), 0) | {
            "magic": MAGIC, "major": 1, "model_type": _CUSTOM, "metadata_size": len(metadata),
            "payload_size": n_payload, "uncompressed_size": source.size, "flags": ENCRYPTED,
        }  # fmt: skip
        pieces = chain((pack_header(header), metadata), encrypt_stream(source, password, recipient, os.urandom))
        with AtomicFile(target, force=force, n_bytes=n_payload + len(metadata)) as sink:
            total = crc = 0
            for data in pieces:
                sink.write(data)
                total, crc = total + len(data), crc32(data, crc)
            source.check_unchanged()
            sink.write(struct.pack("<I", crc))
    return total + _CHECKSUM_BYTES


def _encrypted(stored: bytes, password: bytes | None, recipient: bytes | None) -> bytes:
    if password is not None:
        return encrypt_password(stored, password, os.urandom)
    assert recipient is not None
    return encrypt_recipient(stored, recipient, os.urandom)


def decrypt_file(
    path: PathLike,
    output: PathLike,
    *,
    password: bytes | None = None,
    private_key: bytes | None = None,
    force: bool = False,
) -> CryptReport:
    """Decrypts an `.apr` v1: to a plain `.apr` v1, or to the file that `encrypt_file` put in it.

    Args:
        path: the encrypted file.
        output: the file to write.
        password: the password.
        private_key: 32 raw bytes, X25519 private key of the recipient.
        force: replace an existing output.

    Raises:
        RefusedError: wrong password or key, or a file that is not encrypted.
        CorruptError, ChecksumError, NotFoundError, ExistsError, StorageError.
    """
    name, target = os.fspath(path), os.fspath(output)
    check_target(target, [name], force)
    report = CryptReport(name, target, "password" if private_key is None else "recipient", 0)
    with Source.open(name) as source:
        file = V1File(source, password=password, private_key=private_key)
        custom = file.metadata.get("custom")
        holds_file = file.header["model_type"] == _CUSTOM and isinstance(custom, dict) and _FILE_KEY in custom
        if holds_file and file.is_encrypted and not file.header["compression"]:
            start, n_bytes = file.payload_offset, file.header["payload_size"]
            with AtomicFile(target, force=force, n_bytes=n_bytes) as sink:
                for data in decrypt_stream(source, start, n_bytes, password=password, private_key=private_key):
                    sink.write(data)
                    report.output_bytes += len(data)
            return report
        _ = file.stored_payload  # while the file is open
    if holds_file:
        with AtomicFile(target, force=force, n_bytes=len(file.payload)) as sink:
            sink.write(file.payload)
        report.output_bytes = len(file.payload)
        return report
    if file.header["flags"] & SIGNED:
        report.warnings.append("the signature is dropped: it covers the encrypted payload")
    stored = decrypt(file.stored_payload, name, password=password, private_key=private_key)
    report.output_bytes = _write(target, file, payload=stored, dropped=ENCRYPTED | SIGNED, force=force)
    return report
