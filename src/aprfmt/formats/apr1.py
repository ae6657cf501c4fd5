"""APR v1 (`APRN`): one serialised object with MessagePack metadata; signed and encrypted forms too.

    0                 header, 32 bytes
    32                metadata (MessagePack map)
    32 + metadata     payload as stored: bincode bytes, compressed, then encrypted
                      [signature 64, public key 32]
    end - 4           CRC-32 of everything before

The payload is opaque here: which struct it holds is known only to the program that saved it.

The metadata is a map with string keys: its fields have a fixed order, and hold float32 or float64. It needs msgpack
1.2.4: older ones allocate lists of the length that a file claims, at each of up to 1,024 levels, before they see the
elements.

A payload encrypted by password: salt 16, nonce 12, ciphertext and tag (AES-256-GCM). For a recipient: ephemeral
X25519 key 32, first 8 bytes of the recipient's public key, nonce 12, ciphertext and tag. Nothing in the file tells
which of the two it is. `cryptography` is imported on first use. The cost of Argon2id is fixed, no file chooses it.

Encryption covers the payload alone: the format has no associated data, so whoever has the file can change header and
metadata. A signature covers all three. `V1File.authenticated` names what a given key proves.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from aprfmt.errors import (
    ChecksumError,
    CorruptError,
    LimitError,
    MissingDependencyError,
    RefusedError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from aprfmt.io.compress import Packed, lz4, packed, unlz4, unzstd, zstd
from aprfmt.io.crc import crc32_of, crc32_of_range
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Buffer, Source
from aprfmt.limits import MAX_COMPRESSED_BYTES, MAX_JSON_DEPTH, MAX_METADATA_BYTES, MAX_UNCOMPRESSED_BYTES
from aprfmt.model import Model, Tensor
from aprfmt.types import Json, JsonObject

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

MAGIC = b"APRN"
_HEADER = struct.Struct("<4sBBHIIIBBB9x")
_HEADER_FIELDS = (
    *("magic", "major", "minor", "model_type", "metadata_size", "payload_size", "uncompressed_size"),
    *("compression", "flags", "quality"),
)
_FOOTER = 4
_UNANNOUNCED_BYTES = 64 << 20
SIGNATURE_BYTES = 64
PUBLIC_KEY_BYTES = 32
KEY_BYTES = 32

_SALT, _NONCE, _TAG, _KEY_HINT = 16, 12, 16, 8
_MEMORY_KIB, _PASSES, _LANES = 19456, 2, 1
_INFO = b"apr-v1-encrypt"

Entropy = Callable[[int], bytes]
"""Called with a length, gives that many random bytes."""

_SIGNATURE_BLOCK = SIGNATURE_BYTES + PUBLIC_KEY_BYTES

MODEL_TYPES = {
    0x01: "LinearRegression",
    0x02: "LogisticRegression",
    0x03: "DecisionTree",
    0x04: "RandomForest",
    0x05: "GradientBoosting",
    0x06: "KMeans",
    0x07: "Pca",
    0x08: "NaiveBayes",
    0x09: "Knn",
    0x0A: "Svm",
    0x10: "NgramLm",
    0x11: "Tfidf",
    0x12: "CountVectorizer",
    0x20: "NeuralSequential",
    0x21: "NeuralCustom",
    0x30: "ContentRecommender",
    0x40: "MixtureOfExperts",
    0xFF: "Custom",
}
ENCRYPTED, SIGNED, LICENSED = 0x01, 0x02, 0x08
FLAGS = {
    "encrypted": ENCRYPTED,
    "signed": SIGNED,
    "streaming": 0x04,
    "licensed": LICENSED,
    "trueno_native": 0x10,
    "quantized": 0x20,
    "has_model_card": 0x40,
}
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
    "header and metadata of an encrypted file are not authenticated: anybody may have changed them; "
    "a signature (public_key) covers them"
)

Kind: TypeAlias = "str | list[Kind] | Fields"
"""What a field holds. FREE: any JSON value, floats as float64. F32: a float32. FREE_MAP and LIST are left out when
empty. A tuple of fields is a struct; None fields are left out. [x]: an array of x, left out when None.
"""

Fields: TypeAlias = "tuple[tuple[str, Kind], ...]"

FREE, F32, FREE_MAP, LIST = "free", "f32", "map", "list"
_TEACHER: Fields = tuple((name, FREE) for name in ("hash", "signature", "model_type", "param_count"))
_TEACHER_WITH_ENSEMBLE: Fields = (*_TEACHER, ("ensemble_teachers", [_TEACHER]))
METADATA_FIELDS: Fields = (
    ("created_at", FREE),
    ("aprender_version", FREE),
    ("model_name", FREE),
    ("description", FREE),
    ("training", (("samples", FREE), ("duration_ms", FREE), ("source", FREE))),
    ("hyperparameters", FREE_MAP),
    ("metrics", FREE_MAP),
    ("custom", FREE_MAP),
    ("distillation", FREE),
    (
        "distillation_info",
        (
            ("method", FREE),
            ("teacher", _TEACHER_WITH_ENSEMBLE),
            ("params", (("temperature", F32), ("alpha", F32), ("beta", F32), ("epochs", FREE), ("final_loss", F32))),
            ("layer_mapping", [(("student_layer", FREE), ("teacher_layer", FREE), ("weight", F32))]),
        ),
    ),
    ("license", tuple((name, FREE) for name in ("uuid", "hash", "expiry", "seats", "licensee", "tier"))),
    (
        "model_card",
        (
            ("model_id", FREE),
            ("name", FREE),
            ("version", FREE),
            ("author", FREE),
            ("created_at", FREE),
            ("framework_version", FREE),
            ("rust_version", FREE),
            ("description", FREE),
            ("license", FREE),
            ("training_data", (("name", FREE), ("samples", FREE), ("hash", FREE))),
            ("hyperparameters", FREE_MAP),
            ("metrics", FREE_MAP),
            ("architecture", FREE),
            ("param_count", FREE),
            ("target_hardware", LIST),
            ("*", FREE),
        ),
    ),
)
_STRINGS = ("created_at", "aprender_version", "model_name", "description", "distillation")
_MAPS = ("training", "hyperparameters", "metrics", "custom", "distillation_info", "license", "model_card")


class V1File:
    """A v1 file. Its CRC, header, metadata and signature were checked when it was opened.

    Attributes:
        path: where it came from.
        header: magic (bytes), major, minor, model_type, metadata_size, payload_size, uncompressed_size,
            compression, flags (bit 7 masked away), quality.
        metadata_bytes: the MessagePack text; `write_v1` takes it as it is.
        metadata: the same, parsed.
        signature_ok: None where the file is not signed, else True (a bad signature is refused when reading).
        authenticated: those of "header", "metadata" and "payload" that the caller's keys have proven; of an encrypted
            file without a signature the payload, once it is decrypted. The key in a signed file proves nothing.
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
        """Refuses a file that lacks what the caller's keys are for: somebody may have put it in another's place."""
        if encrypted and not self.is_encrypted:
            raise RefusedError(
                "an encrypted file was expected, but this one is not encrypted",
                path=self.path,
                hint="if you trust it all the same, read it without a password or private key",
            )
        if signed and not self.header["flags"] & SIGNED:
            raise ChecksumError("a signed file was expected, but this one is not signed", path=self.path)

    @property
    def is_encrypted(self) -> bool:
        """Whether the payload needs a password or a private key."""
        return bool(self.header["flags"] & ENCRYPTED)

    @cached_property
    def stored_payload(self) -> bytes:
        """The payload as the file has it: compressed, encrypted; read on first use. Raises LimitError."""
        return self._read(self.payload_offset)

    def _read(self, start: int) -> bytes:
        """From `start` to the end of the payload."""
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
        """The bincode bytes. Raises RefusedError without the right key, CorruptError for damage."""
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
        # A wrong size is only warned about, but must not let a small file take a gigabyte.
        cap = max(self.header["uncompressed_size"], _UNANNOUNCED_BYTES)
        plain = _UNPACK[self.header["compression"]](stored, cap)
        self._compare_size(plain.size)
        return plain

    def _compare_size(self, n_bytes: int) -> None:
        if n_bytes != self.header["uncompressed_size"]:
            announced = self.header["uncompressed_size"]
            self.warnings.append(f"the header declares {announced} bytes of payload, there are {n_bytes}")

    def payload_tensor(self, source: Source) -> list[Tensor]:
        """The U8 tensor `payload`, zero-copy over `source` where it is stored plain; none if encrypted."""
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


def _parse_header(source: Source) -> dict[str, Any]:
    path = source.path
    if source.size < _HEADER.size + _FOOTER:
        raise TruncatedError(f"an APR v1 file has at least 36 bytes, this one {source.size}", path=path)
    header = dict(zip(_HEADER_FIELDS, _HEADER.unpack(source.read(0, _HEADER.size)), strict=True))
    if header["magic"] != MAGIC:
        raise CorruptError("not an APR v1 file: it does not begin with APRN", path=path, offset=0)
    header["flags"] &= 0x7F
    if header["major"] > 1:
        version = f"{header['major']}.{header['minor']}"
        raise UnsupportedError(f"APR v1 container of version {version}; 1.0 is the last", path=path, offset=4)
    return header


def _check_layout(source: Source, end: int, header: dict[str, Any], warnings: list[str]) -> None:
    """Bounds before the checksum, so that a file cut short is called that; the meaning of fields after it."""
    end += _SIGNATURE_BLOCK if header["flags"] & SIGNED else 0
    path, last = source.path, source.size - _FOOTER
    if end > last:
        raise TruncatedError(
            f"the header declares {end + _FOOTER} bytes, the file has {source.size}", path=path, offset=8
        )
    stored, computed = int.from_bytes(source.read(last, _FOOTER), "little"), crc32_of_range(source, 0, last)
    if stored != computed:
        raise ChecksumError(
            f"the footer says CRC-32 {stored:08x}, the bytes give {computed:08x}", path=path, offset=last
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
        password: of a payload encrypted by password; a file that is not encrypted is refused.
        private_key: 32 raw bytes, X25519, of the recipient of an encrypted payload; goes before `password`. A file
            that is not encrypted is refused.
        public_key: 32 raw bytes, Ed25519: the only key that may have signed the file; one that is not signed is
            refused. Without it the embedded key is used, which proves that the file is whole, but not who signed it.

    Raises:
        CorruptError, ChecksumError (also for a bad or missing signature), UnsupportedError, NotFoundError,
        RefusedError for a file without the encryption that a key was given for.
        Keys of an encrypted payload are used when `.payload` is asked for, which raises RefusedError where
        they do not fit.
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
    """Writes an APR v1 file under its name in one step.

    Args:
        path: the output.
        payload: bincode bytes of the model.
        model_type: a key of MODEL_TYPES.
        metadata: fields of METADATA_FIELDS, or MessagePack bytes to store as they are.
        compression: 0 none, 1 zstd level 3, 2 zstd level 19, 3 LZ4; before encryption.
        quality: score from 1 to 100, None for a model that was not validated.
        flags: flag bits; by default LICENSED where the metadata has a license and the file is neither signed
            nor encrypted. SIGNED and ENCRYPTED follow the keys in any case.
        password: encrypts under a password (Argon2id, AES-256-GCM).
        recipient_public_key: 32 raw bytes, X25519: encrypts for its owner.
        signing_key: 32-byte Ed25519 seed: signs header, metadata and stored payload.
        entropy: source of salts, nonces and ephemeral keys; for tests.
        force: whether an existing file is replaced; else ExistsError.

    Raises:
        UsageError: a value that the format cannot hold.
        StorageError: the operating system refused.
    """
    if password is not None and recipient_public_key is not None:
        raise UsageError("a payload is encrypted by password or for a recipient, not both")
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
        raise UsageError("an APR v1 file counts metadata and payload in 32 bits", path=path)
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
        raise UsageError(f"quality is {quality}; a validated model has 1 to 100, another one None")
    if n_payload > MAX_UNCOMPRESSED_BYTES:
        raise UsageError(f"the payload has {n_payload} bytes; readers stop at {MAX_UNCOMPRESSED_BYTES}")


def open_model(path: Path) -> Model:
    """A v1 file as a Model: its payload is one U8 tensor, `payload`, unpacked; absent while encrypted.

    `metadata` holds the header fields, `model_type` by name, and the MessagePack fields; `native` is the
    V1File. Raises CorruptError, ChecksumError, UnsupportedError, NotFoundError.
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
        path=path,
        format="apr-v1",
        convention="apr",
        label="APR v1",
        version=f"{header['major']}.{header['minor']}",
        sources=[source],
        tensors=tensors,
        load_metadata=lambda: {**header, "model_type": model_type, **file.metadata},
        checksum=lambda: {"header": "none", "footer": "ok"},
        flags={name: bool(header["flags"] & bit) for name, bit in FLAGS.items()},
        warnings=file.warnings,
        native=file,
    )


# --- encryption and signatures ---


def _key32(key: bytes, what: str) -> bytes:
    if len(key) != KEY_BYTES:
        raise UsageError(f"{what} must be {KEY_BYTES} raw bytes, not {len(key)}")
    return bytes(key)


def _password_key(password: str | bytes, salt: bytes) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

    secret = password.encode() if isinstance(password, str) else password
    try:
        kdf = Argon2id(salt=salt, length=KEY_BYTES, iterations=_PASSES, lanes=_LANES, memory_cost=_MEMORY_KIB)
        return kdf.derive(secret)
    except UnsupportedAlgorithm as error:
        raise MissingDependencyError(
            "this build of cryptography lacks Argon2id", hint="pip install -U cryptography"
        ) from error


def _public(key: X25519PrivateKey | Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _shared_key(private: X25519PrivateKey, public: bytes) -> bytes:
    """HKDF-SHA256 of the X25519 secret, no salt. A public key of small order has no secret: ValueError."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY_BYTES, None, _INFO).derive(secret)


def _x25519(private_key: bytes) -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(_key32(private_key, "an X25519 private key"))


def decrypt(stored: bytes, path: str, *, password: str | bytes | None, private_key: bytes | None) -> bytes:
    """The plain payload. Raises RefusedError without a fitting key, CorruptError where it is too short."""
    if private_key is not None:
        key, rest = _recipient_key(stored, path, private_key)
        wrong = "the payload was changed, or was not encrypted for this private key"
    elif password is not None:
        _check_length(stored, _SALT, path)
        key, rest = _password_key(password, stored[:_SALT]), stored[_SALT:]
        wrong = "wrong password, or the payload was changed"
    else:
        raise RefusedError(
            "the payload is encrypted", path=path, hint="give the password or the recipient's private key to read_v1"
        )
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(rest[:_NONCE], rest[_NONCE:], None)
    except InvalidTag:
        raise RefusedError(wrong, path=path) from None


def _check_length(stored: bytes, n_prefix: int, path: str) -> None:
    if len(stored) < n_prefix + _NONCE + _TAG:
        raise CorruptError("the encrypted payload is too short for its keys and tag", path=path)


def _recipient_key(stored: bytes, path: str, private_key: bytes) -> tuple[bytes, bytes]:
    private = _x25519(private_key)
    prefix = PUBLIC_KEY_BYTES + _KEY_HINT
    _check_length(stored, prefix, path)
    if stored[PUBLIC_KEY_BYTES:prefix] != _public(private)[:_KEY_HINT]:
        raise RefusedError(
            "the payload was encrypted for another recipient, or by password",
            path=path,
            hint="give the private key of the recipient, or the password",
        )
    try:
        return _shared_key(private, stored[:PUBLIC_KEY_BYTES]), stored[prefix:]
    except ValueError as error:
        raise CorruptError("the ephemeral key of the payload is not a usable X25519 key", path=path) from error


def encrypt_password(plain: bytes, password: str | bytes, entropy: Entropy) -> bytes:
    """`plain` encrypted under a password; draws the salt, then the nonce."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt, nonce = entropy(_SALT), entropy(_NONCE)
    return salt + nonce + AESGCM(_password_key(password, salt)).encrypt(nonce, plain, None)


def encrypt_recipient(plain: bytes, public_key: bytes, entropy: Entropy) -> bytes:
    """`plain` encrypted for the owner of an X25519 key; draws the ephemeral private key, then the nonce."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    public = _key32(public_key, "an X25519 public key")
    ephemeral, nonce = _x25519(entropy(KEY_BYTES)), entropy(_NONCE)
    try:
        key = _shared_key(ephemeral, public)
    except ValueError as error:
        raise UsageError("the recipient's public key is not a usable X25519 key") from error
    return _public(ephemeral) + public[:_KEY_HINT] + nonce + AESGCM(key).encrypt(nonce, plain, None)


def sign(message: bytes, signing_key: bytes) -> bytes:
    """Ed25519 signature block: signature 64, public key 32. `signing_key` is the 32-byte seed."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(_key32(signing_key, "an Ed25519 signing key"))
    return key.sign(message) + _public(key)


def verify(message: Buffer, block: bytes, path: str, trusted_key: bytes | None) -> None:
    """Checks a signature block against `trusted_key`, or the embedded key. Raises ChecksumError."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    embedded = bytes(block[SIGNATURE_BYTES:])
    public = embedded if trusted_key is None else _key32(trusted_key, "an Ed25519 public key")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(bytes(block[:SIGNATURE_BYTES]), message)
    except (InvalidSignature, ValueError):
        if public != embedded:
            raise ChecksumError("the file was signed with another key than the trusted one", path=path) from None
        raise ChecksumError(
            "the signature does not match the file", path=path, hint="the file was changed after it was signed"
        ) from None


# --- metadata ---


def dump_metadata(metadata: Mapping[str, object]) -> bytes:
    """`metadata` as the reference writes it: typed order, unset fields and empty maps left out, maps sorted.

    A missing `created_at` becomes the Unix time as decimal text, a missing `aprender_version` "aprfmt".
    Raises UsageError for unknown fields (free ones belong under `custom`) and for values that JSON cannot
    hold.
    """
    values = {"created_at": str(int(time.time())), "aprender_version": "aprfmt", **metadata}
    writer = _MetadataWriter()
    try:
        writer.write(values, METADATA_FIELDS, "metadata", 1)
    except (OverflowError, UnicodeEncodeError) as error:
        raise UsageError(f"a metadata value does not fit the format: {error}") from error
    return bytes(writer.out)


class _MetadataWriter:
    def __init__(self) -> None:
        import msgpack

        self.out = bytearray()
        self.packer = msgpack.Packer()

    def write(self, value: object, kind: Kind, where: str, depth: int) -> None:
        if depth > MAX_JSON_DEPTH:
            raise UsageError(f"metadata nested deeper than {MAX_JSON_DEPTH} levels")
        if isinstance(kind, tuple):
            self.write_struct(value, kind, where, depth)
        elif kind == F32:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{where} must be a number")
            self.out += struct.pack(">Bf", 0xCA, value)
        elif isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise UsageError(f"{where} has a key that is not text")
            ordered = sorted(value, key=lambda text: text.encode())
            self.write_map([(key, FREE, value[key]) for key in ordered], where, depth)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
            self.out += self.packer.pack_array_header(len(value))
            for index, item in enumerate(value):
                self.write(item, kind[0] if isinstance(kind, list) else FREE, f"{where}[{index}]", depth + 1)
        elif value is None or isinstance(value, bool | int | float | str):
            self.out += self.packer.pack(value)
        else:
            raise UsageError(f"{where} is a {type(value).__name__}, which JSON cannot hold")

    def write_struct(self, value: object, fields: Fields, where: str, depth: int) -> None:
        if not isinstance(value, Mapping):
            raise UsageError(f"{where} must be a map")
        known = dict(fields)
        extra = [key for key in value if key not in known]
        if extra and "*" not in known:
            raise UsageError(f"unknown field {where}.{extra[0]}", hint="put values of your own under custom")
        entries = [(key, kind, value.get(key)) for key, kind in fields if key != "*"]
        entries = [
            (key, kind, item)
            for key, kind, item in entries
            if item is not None and (item or kind not in (FREE_MAP, LIST))
        ]
        self.write_map(entries + [(key, FREE, value[key]) for key in sorted(extra)], where, depth)

    def write_map(self, entries: Sequence[tuple[str, Kind, object]], where: str, depth: int) -> None:
        self.out += self.packer.pack_map_header(len(entries))
        for key, kind, item in entries:
            self.out += self.packer.pack(key)
            self.write(item, kind, f"{where}.{key}", depth + 1)


def parse_metadata(raw: bytes, path: str, base: int = 0) -> JsonObject:
    """The metadata map. `base` is its offset in the file, for messages.

    Raises CorruptError (TruncatedError, LimitError) unless `raw` is exactly one map of the known shape:
    string keys, no duplicates, UTF-8 text, at most 127 levels.
    """
    try:
        value = _unpack_map(raw)
        for names, kind, what in ((_STRINGS, str, "text"), (_MAPS, dict, "a map")):
            for name in names:
                if value.get(name) is not None and not isinstance(value[name], kind):
                    raise CorruptError(f"metadata field {name} is not {what}")
    except CorruptError as error:
        error.path, error.offset = path, base
        raise
    return value


def _unpack_map(raw: bytes) -> JsonObject:
    import msgpack

    try:
        # Lengths beyond that of `raw` are refused, and no more is allocated than the elements that follow take.
        value: object = msgpack.unpackb(raw, object_pairs_hook=_to_map, strict_map_key=False)
    except CorruptError:
        raise
    except msgpack.ExtraData:
        raise CorruptError("bytes follow the metadata map inside its section") from None
    except msgpack.StackError:
        raise LimitError(f"metadata nested deeper than {MAX_JSON_DEPTH} levels") from None
    except msgpack.FormatError:
        raise CorruptError("the metadata holds a byte that MessagePack never uses") from None
    except UnicodeDecodeError:
        raise CorruptError("text in the metadata is not UTF-8") from None
    except ValueError:
        raise TruncatedError("the metadata ends in the middle of a value") from None
    if not isinstance(value, dict):
        raise CorruptError("the metadata is not a map")
    level: list[list[object] | dict[str, object]] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise LimitError(f"metadata nested deeper than {MAX_JSON_DEPTH} levels")
        children = [x for node in level for x in (node.values() if isinstance(node, dict) else node)]
        if not all(x is None or isinstance(x, bool | int | float | str | list | dict) for x in children):
            raise CorruptError("the metadata holds binary data")
        level = [x for x in children if isinstance(x, list | dict)]
    return value


def _to_map(pairs: list[tuple[object, Json]]) -> JsonObject:
    out: JsonObject = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise CorruptError("a metadata key is not text")
        if key in out:
            raise CorruptError(f"metadata key {key!r} occurs twice")
        out[key] = value
    return out
