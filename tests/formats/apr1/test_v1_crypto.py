"""Signed and encrypted v1 files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apr1_images import v1_bytes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from natives import native

import aprfmt
from aprfmt.errors import ChecksumError, CorruptError, RefusedError, UsageError
from aprfmt.formats import apr1, apr1_crypto
from aprfmt.formats.apr1 import V1File

META = {"created_at": "1700000000", "aprender_version": "0.0.0-golden", "model_name": "golden-v1"}
SEED = bytes(range(32))
RECIPIENT = bytes(range(64, 96))
RECIPIENT_PUBLIC = X25519PrivateKey.from_private_bytes(RECIPIENT).public_key().public_bytes_raw()
SIGNER_PUBLIC = Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()
Vector = Callable[[str], Path]
Put = Callable[[bytes], Path]


def entropy(*draws: bytes) -> Callable[[int], bytes]:
    """Gives the prepared bytes, and insists on their lengths."""
    left = list(draws)

    def draw(n: int) -> bytes:
        data = left.pop(0)
        assert len(data) == n
        return data

    return draw


@pytest.fixture
def golden_payload(vector: Vector) -> bytes:
    return aprfmt.read_v1(vector("v1_golden_none")).payload


def test_writes_the_signed_vector(vector: Vector, golden_payload: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    aprfmt.write_v1(path, golden_payload, model_type=1, metadata=META, signing_key=SEED)
    assert path.read_bytes() == vector("v1_signed_ed25519").read_bytes()


def test_writes_the_encrypted_vector(vector: Vector, golden_payload: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.apr"
    draws = entropy(bytes(range(16)), bytes(range(100, 112)))
    aprfmt.write_v1(path, golden_payload, model_type=1, metadata=META, password="correct horse", entropy=draws)
    assert path.read_bytes() == vector("v1_encrypted_password").read_bytes()


def test_the_password_key_is_the_one_of_the_vector(records: dict[str, Any]) -> None:
    key = apr1_crypto._password_key("correct horse", bytes(range(16)))
    assert key.hex() == records["v1_encrypted_password"]["derived_key_hex"]


def test_signature_states(vector: Vector) -> None:
    signed = vector("v1_signed_ed25519")
    assert aprfmt.read_v1(signed).signature_ok is True
    assert aprfmt.read_v1(signed, public_key=SIGNER_PUBLIC).signature_ok is True
    assert aprfmt.read_v1(vector("v1_golden_none")).signature_ok is None
    with pytest.raises(ChecksumError, match="not signed with the trusted key"):
        aprfmt.read_v1(signed, public_key=RECIPIENT_PUBLIC)
    with pytest.raises(ChecksumError, match="not signed"):
        aprfmt.read_v1(vector("v1_golden_none"), public_key=SIGNER_PUBLIC)
    with pytest.raises(UsageError):
        aprfmt.read_v1(signed, public_key=b"short")
    with aprfmt.open(signed) as model:
        assert model.flags["signed"]


ALL = ("header", "metadata", "payload")
WRITTEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "signed": {"signing_key": SEED},
    "password": {"password": "p"},
    "recipient": {"recipient_public_key": RECIPIENT_PUBLIC},
    "signed, password": {"signing_key": SEED, "password": "p"},
    "signed, recipient": {"signing_key": SEED, "recipient_public_key": RECIPIENT_PUBLIC},
}
KEYS: dict[str, dict[str, Any]] = {
    "signed": {"public_key": SIGNER_PUBLIC},
    "password": {"password": "p"},
    "recipient": {"private_key": RECIPIENT},
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("asked", [name for name in WRITTEN if name != "plain"])
def test_a_file_without_what_the_keys_are_for_is_refused(written: str, asked: str, tmp_path: Path) -> None:
    """A stranger's file in the place of a signed or an encrypted one never gives its payload."""
    path, payload = tmp_path / "m.apr", b"payload" * 9
    aprfmt.write_v1(path, payload, model_type=1, metadata=META, **WRITTEN[written])
    keys = {name: value for part in asked.split(", ") for name, value in KEYS[part].items()}
    has, wants = set(written.split(", ")), set(asked.split(", "))
    if wants <= has:
        file = aprfmt.read_v1(path, **keys)
        if wants != {"signed"} or has == wants:
            assert file.payload == payload
        assert file.authenticated == (ALL if "signed" in wants else ("payload",))
        assert any("not authenticated" in text for text in file.warnings) is ("signed" not in wants)
    else:
        with pytest.raises(
            (RefusedError, ChecksumError), match=r"although|not encrypted for|wrong password|by password"
        ):
            _ = aprfmt.read_v1(path, **keys).payload


@pytest.mark.parametrize("written", WRITTEN)
def test_without_keys_nothing_is_authenticated(written: str, tmp_path: Path) -> None:
    aprfmt.write_v1(tmp_path / "m.apr", b"payload", model_type=1, metadata=META, **WRITTEN[written])
    file = aprfmt.read_v1(tmp_path / "m.apr")
    assert file.authenticated == ()
    assert any("not authenticated" in text for text in file.warnings) is file.is_encrypted


def test_changed_metadata_of_an_encrypted_file_are_not_called_authentic(tmp_path: Path, put: Put) -> None:
    """The format covers the payload alone: the key proves the payload, and the result names no more."""
    from apr1_images import with_footer

    path = tmp_path / "m.apr"
    for signing_key in (None, SEED):
        aprfmt.write_v1(path, b"payload", model_type=1, metadata=META, password="p", signing_key=signing_key)
        raw = path.read_bytes()[:-4].replace(b"golden-v1", b"forged-v1")
        forged = put(with_footer(raw))
        if signing_key is not None:
            with pytest.raises(ChecksumError, match="signature"):
                aprfmt.read_v1(forged, password="p")
            continue
        file = aprfmt.read_v1(forged, password="p")
        assert file.payload == b"payload"
        assert file.authenticated == ("payload",)


def test_no_file_chooses_the_cost_of_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the salt and the header hold, Argon2id takes 19 MiB and two passes."""
    from cryptography.hazmat.primitives.kdf import argon2

    seen: list[dict[str, Any]] = []

    class Watched:
        def __init__(self, **settings: Any) -> None:
            seen.append({key: value for key, value in settings.items() if key != "salt"})

        def derive(self, secret: bytes) -> bytes:
            return bytes(32)

    monkeypatch.setattr(argon2, "Argon2id", Watched)
    path = tmp_path / "m.apr"
    for byte in (b"\0", b"\xff"):
        raw = v1_bytes(flags=apr1.ENCRYPTED, payload=byte * 99)
        path.write_bytes(raw)
        with pytest.raises(RefusedError):
            _ = aprfmt.read_v1(path, password="p").payload
    assert seen == [{"length": 32, "iterations": 2, "lanes": 1, "memory_cost": 19456}] * 2


@pytest.mark.parametrize("at", [22, 40, 120, 170, 240])
def test_a_change_after_signing_is_found(vector: Vector, put: Put, at: int) -> None:
    """In the header, metadata, payload, signature and public key, with the CRC made to fit again."""
    from apr1_images import with_footer

    raw = bytearray(vector("v1_signed_ed25519").read_bytes()[:-4])
    raw[at] ^= 1
    for read in (aprfmt.read_v1, aprfmt.open):
        with pytest.raises(ChecksumError, match="signature"):
            read(put(with_footer(bytes(raw))))


def test_an_encrypted_file_opens_without_its_key(vector: Vector) -> None:
    with aprfmt.open(vector("v1_encrypted_password")) as model:
        assert list(model.tensors) == []
        assert model.metadata["model_name"] == "golden-v1"
        assert model.flags["encrypted"]
        assert any("encrypted" in text for text in model.warnings)
        with pytest.raises(RefusedError) as caught:
            _ = native(model, V1File).payload
    assert caught.value.hint is not None
    assert "password" in caught.value.hint


def test_wrong_keys(vector: Vector) -> None:
    path = vector("v1_encrypted_password")
    attempts: list[dict[str, Any]] = [{}, {"password": "wrong"}, {"password": ""}, {"private_key": RECIPIENT}]
    for keys in attempts:
        with pytest.raises(RefusedError):
            _ = aprfmt.read_v1(path, **keys).payload
    with pytest.raises(UsageError):
        _ = aprfmt.read_v1(path, private_key=b"short").payload


@pytest.mark.parametrize("compression", [0, 1, 3])
def test_recipient_round_trip(tmp_path: Path, compression: int) -> None:
    path, payload = tmp_path / "m.apr", b"secret" * 50
    aprfmt.write_v1(
        path,
        payload,
        model_type=1,
        metadata=META,
        compression=compression,
        recipient_public_key=RECIPIENT_PUBLIC,
        signing_key=SEED,
    )
    file = aprfmt.read_v1(path, private_key=RECIPIENT, public_key=SIGNER_PUBLIC)
    assert file.payload == payload
    assert file.header["flags"] == 3
    assert file.header["uncompressed_size"] == len(payload)
    assert b"secret" not in path.read_bytes()
    attempts: list[dict[str, Any]] = [{}, {"password": "x"}, {"private_key": SEED}]
    for keys in attempts:
        with pytest.raises(RefusedError):
            _ = aprfmt.read_v1(path, **keys).payload


def test_recipient_layout(tmp_path: Path) -> None:
    """Ephemeral key, start of the recipient's, nonce, ciphertext: decrypted from the outside."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    path, ephemeral, nonce = tmp_path / "m.apr", bytes(range(1, 33)), bytes(range(12))
    aprfmt.write_v1(
        path,
        b"plain",
        model_type=1,
        metadata=META,
        recipient_public_key=RECIPIENT_PUBLIC,
        entropy=entropy(ephemeral, nonce),
    )
    stored = aprfmt.read_v1(path).stored_payload
    public = X25519PrivateKey.from_private_bytes(ephemeral).public_key().public_bytes_raw()
    assert stored[:52] == public + RECIPIENT_PUBLIC[:8] + nonce
    secret = X25519PrivateKey.from_private_bytes(RECIPIENT).exchange(X25519PublicKey.from_public_bytes(public))
    key = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"apr-v1-encrypt").derive(secret)
    assert AESGCM(key).decrypt(nonce, stored[52:], None) == b"plain"


def test_every_write_draws_fresh_randomness(tmp_path: Path) -> None:
    path, seen = tmp_path / "m.apr", set()
    ways: list[dict[str, Any]] = [{"password": "x"}, {"recipient_public_key": RECIPIENT_PUBLIC}]
    for _ in range(2):
        for keys in ways:
            aprfmt.write_v1(path, b"x", model_type=1, metadata=META, **keys)
            seen.add(aprfmt.read_v1(path).stored_payload[:28])
    assert len(seen) == 4


@pytest.mark.parametrize("n", [0, 43, 67])
def test_short_encrypted_payloads(put: Put, n: int) -> None:
    stored = (bytes(32) + RECIPIENT_PUBLIC)[:n].ljust(n, b"\0")
    file = aprfmt.read_v1(put(v1_bytes(payload=stored, flags=1)), private_key=RECIPIENT)
    with pytest.raises(CorruptError):
        _ = file.payload
    if n < 44:
        with pytest.raises(CorruptError):
            _ = aprfmt.read_v1(put(v1_bytes(payload=stored, flags=1)), password="x").payload


def test_an_ephemeral_key_of_small_order_is_refused(put: Put) -> None:
    stored = bytes(32) + RECIPIENT_PUBLIC[:8] + bytes(40)
    with pytest.raises(CorruptError, match="ephemeral"):
        _ = aprfmt.read_v1(put(v1_bytes(payload=stored, flags=1)), private_key=RECIPIENT).payload
