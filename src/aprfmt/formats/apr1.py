"""APR v1 (`APRN`): one serialized object with MessagePack metadata; signed and encrypted variants too.

    0                 header, 32 bytes
    32                metadata (MessagePack map)
    32 + metadata     payload as stored: bincode bytes, compressed, then encrypted
                      [signature 64, public key 32]
    end - 4           CRC-32 of everything before

The payload is opaque here: only the program that saved it knows the struct.

The metadata is a map with string keys: its fields have a fixed order and contain float32 or float64. It needs msgpack
1.2.4: older versions allocate lists of the length that a file claims, at each of up to 1,024 levels, before they see
the elements.

A payload encrypted by password: salt 16, nonce 12, ciphertext and tag (AES-256-GCM). For a recipient: ephemeral X25519
key 32, first 8 bytes of the recipient's public key, nonce 12, ciphertext and tag. The file does not tell which of the
two it is. `cryptography` is imported on first use. The cost of Argon2id is fixed; no file chooses it.

Encryption covers the payload only: the format has no associated data, so anyone can change header and metadata. A
signature covers all three. `V1File.authenticated` lists what a given key proves.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.errors import (
    ChecksumError,
    CorruptError,
    LimitError,
    RefusedError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from aprfmt.formats.apr1_crypto import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Entropy,
    decrypt,
    encrypt_password,
    encrypt_recipient,
    sign,
    verify,
)
from aprfmt.formats.apr1_metadata import dump_metadata, parse_metadata
from aprfmt.io.compress import Packed, lz4, packed, unlz4, unzstd, zstd
from aprfmt.io.crc import crc32_of, crc32_of_range
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Buffer, Source
from aprfmt.limits import MAX_COMPRESSED_BYTES, MAX_METADATA_BYTES, MAX_UNCOMPRESSED_BYTES
from aprfmt.model import Model, Tensor

if TYPE_CHECKING:
    pass

MAGIC = b"APRN"
_HEADER = struct.Struct("<4sBBHIIIBBB9x")
_HEADER_FIELDS = (
    *("magic", "major", "minor", "model_type", "metadata_size", "payload_size", "uncompressed_size"),
    *("compression", "flags", "quality"),
)
_FOOTER = 4
_UNANNOUNCED_BYTES = 64 << 20


_SIGNATURE_BLOCK = SIGNATURE_BYTES + PUBLIC_KEY_BYTES

MODEL_TYPES = {
    0x01: "LinearRegression", 0x02: "LogisticRegression", 0x03: "DecisionTree", 0x04: "RandomForest",
    0x05: "GradientBoosting", 0x06: "KMeans", 0x07: "Pca", 0x08: "NaiveBayes", 0x09: "Knn", 0x0A: "Svm",
    0x10: "NgramLm", 0x11: "Tfidf", 0x12: "CountVectorizer", 0x20: "NeuralSequential", 0x21: "NeuralCustom",
    0x30: "ContentRecommender", 0x40: "MixtureOfExperts", 0xFF: "Custom",
}  # fmt: skip
ENCRYPTED, SIGNED, LICENSED = 0x01, 0x02, 0x08
FLAGS = {
    "encrypted": ENCRYPTED, "signed": SIGNED, "streaming": 0x04, "licensed": LICENSED, "trueno_native": 0x10,
    "quantized": 0x20, "has_model_card": 0x40,
}  # fmt: skip
COMPRESSIONS = {0: "none", 1: "zstd-3", 2: "zstd-19", 3: "lz4"}
_PACK: dict[int, Callable[[Buffer], bytes]] = {
    0: bytes,
    1: lambda data: zstd(data, 3),
    2: lambda data: zstd(data, 19),
    3: lz4,
}
_UNPACK: dict[int, Callable[[Packed, int], Source]] = {
    0: lambda data, cap: Source.from_bytes(data.read(0, data.n_bytes), data.source.path),
    1: unzstd,
    2: unzstd,
    3: unlz4,
}

_UNPROVEN = (
    "header and metadata of an encrypted file are not authenticated; only a signature (public_key) protects them"
)


class V1File:
    """A v1 file. Its CRC, header, metadata and signature were checked when it was opened.

    Attributes:
        path: of the file.
        header: magic (bytes), major, minor, model_type, metadata_size, payload_size, uncompressed_size,
            compression, flags (bit 7 masked away), quality.
        metadata_bytes: the MessagePack bytes; `write_v1` accepts them unchanged.
        metadata: the same, parsed.
        signature_ok: None if the file is not signed, else True (reading refuses a bad signature).
        authenticated: those of "header", "metadata" and "payload" that the caller's keys prove; for an encrypted,
            unsigned file the payload, once decrypted. The key embedded in a signed file proves nothing.
        warnings: what is odd but readable.
    """

    def __init__(
        self,
        source: Source,
        *,
        password: str | bytes | None = None,
        private_key: bytes | None = None,
        public_key: bytes | None = None,
    ) -> None:
        self.path = path = source.path
        self.warnings: list[str] = []
        self._source = source
        self._password = password
        self._private_key = private_key
        self.header = _parse_header(source)
        self.payload_offset = _HEADER.size + self.header["metadata_size"]
        self._payload_end = self.payload_offset + self.header["payload_size"]
        _check_layout(source, self._payload_end, self.header, self.warnings)
        self.metadata_bytes = source.read(_HEADER.size, self.header["metadata_size"])
        self.metadata = parse_metadata(self.metadata_bytes, path, _HEADER.size)
        self.signature_ok: bool | None = None
        self._check_expected(password is not None or private_key is not None, public_key is not None)
        self.authenticated: tuple[str, ...] = ()
        if self.header["flags"] & SIGNED:
            block = source.read(self._payload_end, _SIGNATURE_BLOCK)
            verify(self._read(0), block, path, public_key)
            self.signature_ok = True
        if public_key is not None:
            self.authenticated = ("header", "metadata", "payload")
        elif self.is_encrypted:
            self.warnings.append(_UNPROVEN)

    def _check_expected(self, encrypted: bool, signed: bool) -> None:
        """Refuses a file that is not signed or encrypted as the caller's keys require: it may have been substituted."""
        if encrypted and not self.is_encrypted:
            raise RefusedError(
                "the file is not encrypted, although a password or private key was given",
                path=self.path,
                hint="if you trust it anyway, read it without a password or private key",
            )
        if signed and not self.header["flags"] & SIGNED:
            raise ChecksumError("the file is not signed, although a public key was given", path=self.path)

    @property
    def is_encrypted(self) -> bool:
        """Whether the payload needs a password or a private key."""
        return bool(self.header["flags"] & ENCRYPTED)

    @cached_property
    def stored_payload(self) -> bytes:
        """The payload as stored: compressed, encrypted; read on first use. Raises LimitError."""
        return self._read(self.payload_offset)

    def _read(self, start: int) -> bytes:
        """Reads from `start` to the end of the payload."""
        self._check_size()
        return self._source.read(start, self._payload_end - start)

    def _check_size(self) -> None:
        if self.header["payload_size"] > MAX_COMPRESSED_BYTES:
            raise LimitError(
                f"the payload has {self.header['payload_size']} bytes; the limit is {MAX_COMPRESSED_BYTES}",
                path=self.path,
                offset=12,
            )

    @cached_property
    def payload(self) -> bytes:
        """The bincode bytes. Raises RefusedError without the right key, CorruptError if damaged."""
        if self.is_encrypted:
            opened = decrypt(self.stored_payload, self.path, password=self._password, private_key=self._private_key)
            stored = packed(opened, self.path)
            self.authenticated = self.authenticated or ("payload",)
        elif "stored_payload" in vars(self):  # read before the file was closed
            stored = packed(self.stored_payload, self.path)
        else:
            stored = self._packed()
        with self._unpacked(stored) as plain:
            return plain.read(0, plain.size)

    def _packed(self) -> Packed:
        self._check_size()
        return Packed(self._source, self.payload_offset, self.header["payload_size"])

    def _unpacked(self, stored: Packed) -> Source:
        # A wrong size only causes a warning, but must not make a small file allocate a gigabyte.
        cap = max(self.header["uncompressed_size"], _UNANNOUNCED_BYTES)
        plain = _UNPACK[self.header["compression"]](stored, cap)
        self._compare_size(plain.size)
        return plain

    def _compare_size(self, n_bytes: int) -> None:
        if n_bytes != self.header["uncompressed_size"]:
            announced = self.header["uncompressed_size"]
            self.warnings.append(f"the header declares {announced} payload bytes, but the file has {n_bytes}")

    def payload_tensor(self, source: Source) -> list[Tensor]:
        """The U8 tensor `payload`, zero-copy from `source` if it is stored plain; none if encrypted."""
        if self.is_encrypted:
            self.warnings.append("the payload is encrypted: aprfmt.read_v1 takes its password or private key")
            return []
        offset, n_bytes = self.payload_offset, self.header["payload_size"]
        if self.header["compression"]:
            plain = self._unpacked(self._packed())
            source.unpacked.append(plain)
            offset, n_bytes, source = 0, plain.size, plain
        else:
            self._compare_size(n_bytes)
        return [Tensor("payload", "U8", (n_bytes,), offset, n_bytes, source)]


def embedded_key(source: Source) -> bytes | None:
    """The public key (Ed25519, 32 bytes) that a file says it is signed with; None if it is not signed.

    Raises TruncatedError, CorruptError.
    """
    header = _parse_header(source)
    if not header["flags"] & SIGNED:
        return None
    end = _HEADER.size + header["metadata_size"] + header["payload_size"]
    return source.read(end, _SIGNATURE_BLOCK)[SIGNATURE_BYTES:]


def _parse_header(source: Source) -> dict[str, Any]:
    path = source.path
    if source.size < _HEADER.size + _FOOTER:
        raise TruncatedError(f"an APR v1 file has at least 36 bytes, this one has {source.size}", path=path)
    header = dict(zip(_HEADER_FIELDS, _HEADER.unpack(source.read(0, _HEADER.size)), strict=True))
    if header["magic"] != MAGIC:
        raise CorruptError("not an APR v1 file: magic is not APRN", path=path, offset=0)
    header["flags"] &= 0x7F
    if header["major"] > 1:
        version = f"{header['major']}.{header['minor']}"
        raise UnsupportedError(
            f"unsupported APR v1 container version {version}; the latest is 1.0", path=path, offset=4
        )
    return header


def pack_header(header: Mapping[str, Any]) -> bytes:
    """The 32 bytes of a header, from the fields of V1File.header."""
    return _HEADER.pack(*(header[name] for name in _HEADER_FIELDS))


def _check_layout(source: Source, end: int, header: dict[str, Any], warnings: list[str]) -> None:
    """Checks bounds before the checksum, so that a truncated file is reported as such; then the fields' values."""
    end += _SIGNATURE_BLOCK if header["flags"] & SIGNED else 0
    path, last = source.path, source.size - _FOOTER
    if end > last:
        raise TruncatedError(
            f"the header declares {end + _FOOTER} bytes, but the file has {source.size}", path=path, offset=8
        )
    stored, computed = int.from_bytes(source.read(last, _FOOTER), "little"), crc32_of_range(source, 0, last)
    if stored != computed:
        raise ChecksumError(
            f"CRC-32 mismatch: the footer has {stored:08x}, computed {computed:08x}", path=path, offset=last
        )
    if header["model_type"] not in MODEL_TYPES:
        raise UnsupportedError(f"unknown model type {header['model_type']:#06x}", path=path, offset=6)
    if header["compression"] not in COMPRESSIONS:
        raise UnsupportedError(f"unknown compression {header['compression']}", path=path, offset=20)
    for name, limit, offset in (
        ("metadata_size", MAX_METADATA_BYTES, 8),
        ("uncompressed_size", MAX_UNCOMPRESSED_BYTES, 16),
    ):
        if header[name] > limit:
            raise LimitError(f"{name} is {header[name]}; the limit is {limit}", path=path, offset=offset)
    if end < last:
        warnings.append(f"{last - end} bytes between the payload and the checksum are ignored")


def read_v1(
    path: str | os.PathLike[str],
    *,
    password: str | bytes | None = None,
    private_key: bytes | None = None,
    public_key: bytes | None = None,
) -> V1File:
    """Reads an APR v1 file.

    Args:
        path: the file.
        password: password of the encrypted payload; a file that is not encrypted is refused.
        private_key: 32 raw bytes, X25519 private key of the recipient; takes precedence over `password`. A file that is
            not encrypted is refused.
        public_key: 32 raw bytes, Ed25519: the file must be signed with this key. Without it the embedded key is used,
            which proves that the file is intact but not who signed it.

    Raises:
        CorruptError, ChecksumError (also for an invalid or missing signature), UnsupportedError, NotFoundError;
        RefusedError for a file without the encryption that a key was given for.
        `.payload` decrypts on first access and raises RefusedError if the key is wrong.
    """
    with Source.open(path) as source:
        file = V1File(source, password=password, private_key=private_key, public_key=public_key)
        _ = file.stored_payload  # while the file is open
    return file


def write_v1(
    path: str | os.PathLike[str],
    payload: bytes,
    *,
    model_type: int,
    metadata: Mapping[str, object] | bytes,
    compression: int = 0,
    quality: int | None = None,
    flags: int | None = None,
    password: str | bytes | None = None,
    recipient_public_key: bytes | None = None,
    signing_key: bytes | None = None,
    entropy: Entropy = os.urandom,
    force: bool = True,
) -> None:
    """Writes an APR v1 file atomically.

    Args:
        path: the output.
        payload: bincode bytes of the model.
        model_type: a key of MODEL_TYPES.
        metadata: fields of METADATA_FIELDS, or MessagePack bytes to store unchanged.
        compression: 0 none, 1 zstd level 3, 2 zstd level 19, 3 LZ4; before encryption.
        quality: score from 1 to 100, None for a model that was not validated.
        flags: flag bits; by default LICENSED if the metadata has a license and the file is neither signed nor
            encrypted.
            SIGNED and ENCRYPTED always follow the keys.
        password: encrypts under a password (Argon2id, AES-256-GCM).
        recipient_public_key: 32 raw bytes, X25519: encrypts for its owner.
        signing_key: 32-byte Ed25519 seed: signs header, metadata and stored payload.
        entropy: source of salts, nonces and ephemeral keys; for tests.
        force: replace an existing file instead of raising ExistsError.

    Raises:
        UsageError: a value that the format cannot store.
        StorageError: the operating system refused.
    """
    if password is not None and recipient_public_key is not None:
        raise UsageError("encrypt the payload by password or for a recipient, not both")
    _check_arguments(model_type, compression, quality, len(payload))
    raw = bytes(metadata) if isinstance(metadata, bytes | bytearray) else dump_metadata(metadata)
    parsed = parse_metadata(raw, os.fspath(path))
    stored = _PACK[compression](payload)
    bits = 0
    if password is not None:
        stored, bits = encrypt_password(stored, password, entropy), ENCRYPTED
    elif recipient_public_key is not None:
        stored, bits = encrypt_recipient(stored, recipient_public_key, entropy), ENCRYPTED
    bits |= SIGNED if signing_key is not None else 0
    if flags is not None:
        bits |= flags & 0x7F & ~(ENCRYPTED | SIGNED)
    elif not bits and parsed.get("license") is not None:
        bits = LICENSED
    if max(len(raw), len(stored)) >= 1 << 32:
        raise UsageError("metadata and payload sizes of an APR v1 file must fit 32 bits", path=path)
    values = (MAGIC, 1, 0, model_type, len(raw), len(stored), len(payload), compression, bits, quality or 0)
    body = _HEADER.pack(*values) + raw + stored
    if signing_key is not None:
        body += sign(body, signing_key)
    with AtomicFile(path, force=force, n_bytes=len(body) + _FOOTER) as sink:
        sink.write(body)
        sink.write(struct.pack("<I", crc32_of(body)))


def _check_arguments(model_type: int, compression: int, quality: int | None, n_payload: int) -> None:
    if model_type not in MODEL_TYPES:
        known = ", ".join(f"{key:#x} {name}" for key, name in MODEL_TYPES.items())
        raise UsageError(f"unknown model type {model_type}", hint=f"known: {known}")
    if compression not in COMPRESSIONS:
        raise UsageError(f"unknown compression {compression}", hint="0 none, 1 zstd-3, 2 zstd-19, 3 lz4")
    if quality is not None and not 1 <= quality <= 100:
        raise UsageError(f"quality is {quality}; must be 1 to 100 for a validated model, else None")
    if n_payload > MAX_UNCOMPRESSED_BYTES:
        raise UsageError(f"the payload has {n_payload} bytes; the limit is {MAX_UNCOMPRESSED_BYTES}")


def open_model(path: Path) -> Model:
    """Opens a v1 file as a Model with one U8 tensor, `payload`, decompressed; none while encrypted.

    `metadata` contains the header fields, `model_type` by name, and the MessagePack fields; `native` is the V1File.
    Raises CorruptError, ChecksumError, UnsupportedError, NotFoundError.
    """
    source = Source.open(path)
    try:
        file = V1File(source)
        tensors = file.payload_tensor(source)
    except BaseException:
        source.close()
        raise
    header = {key: value for key, value in file.header.items() if key != "magic"}
    model_type = MODEL_TYPES[header["model_type"]]
    return Model(
        path=path, format="apr-v1", convention="apr", label="APR v1", version=f"{header['major']}.{header['minor']}",
        sources=[source], tensors=tensors, load_metadata=lambda: {**header, "model_type": model_type, **file.metadata},
        checksum=lambda: {"header": "none", "footer": "ok"},
        flags={name: bool(header["flags"] & bit) for name, bit in FLAGS.items()}, warnings=file.warnings, native=file,
    )  # fmt: skip
