"""Key files and passphrases; encrypted and signed `.apr` v1 files through the command line."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError, ExistsError, RefusedError, UsageError
from aprfmt.formats.apr1_edit import decrypt_file, encrypt_file, sign_v1
from aprfmt.trust import keys
from aprfmt.trust.keys import KINDS, generate, public_of, read_passphrase, read_private, read_public, read_signer

VECTORS = Path(__file__).resolve().parents[2] / "fixtures" / "vectors" / "golden"


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_pair(kind: str, tmp_path: Path) -> None:
    made = generate(tmp_path / "k", kind)
    assert stat.S_IMODE((tmp_path / "k.key").stat().st_mode) == 0o600
    found = read_private(tmp_path / "k.key")
    assert (found.kind, public_of(found).fingerprint) == (kind, read_public(tmp_path / "k.pub").fingerprint)
    assert made.kind == kind
    with pytest.raises(ExistsError):
        generate(tmp_path / "k", kind)
    (tmp_path / "k.key").chmod(0o640)
    generate(tmp_path / "k", kind, force=True)
    assert stat.S_IMODE((tmp_path / "k.key").stat().st_mode) == 0o600
    assert public_of(read_private(tmp_path / "k.key")).fingerprint != public_of(found).fingerprint


def test_a_passphrase_protects_the_key(tmp_path: Path) -> None:
    generate(tmp_path / "k", passphrase=b"correct horse")
    assert b"ENCRYPTED" in (tmp_path / "k.key").read_bytes()
    assert read_private(tmp_path / "k.key", b"correct horse").kind == "p256"
    with pytest.raises(RefusedError, match="wrong passphrase"):
        read_private(tmp_path / "k.key", b"wrong horse")
    with pytest.raises(RefusedError, match="private key is encrypted"):
        read_private(tmp_path / "k.key")
    with pytest.raises(UsageError, match="passphrase is empty"):
        generate(tmp_path / "e", passphrase=b"")


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    generate(tmp_path / "k")
    (tmp_path / "k.key").chmod(0o644)
    with pytest.raises(RefusedError, match="other users can read") as caught:
        read_private(tmp_path / "k.key")
    assert caught.value.hint == f"chmod 600 {tmp_path}/k.key"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", r"not a public key.*\n.*pass the public key, NAME\.pub"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "not a public key"),
        (b"x" * ((1 << 20) + 1), "limited to"),
    ],
)
def test_what_is_no_key_is_said(text: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "k.pub").write_bytes(text)
    with pytest.raises(UsageError) as caught:
        read_signer(str(tmp_path / "k.pub"))
    assert re.search(words, f"{caught.value.message}\n{caught.value.hint}")


def test_signers_are_named(tmp_path: Path) -> None:
    generate(tmp_path / "release")
    assert str(read_signer(str(tmp_path / "release.pub"))).startswith("release.pub (")
    found = read_signer("sigstore:a,b@example.com,https://issuer.example")
    assert found == keys.SigstoreIdentity("a,b@example.com", "https://issuer.example")
    with pytest.raises(UsageError, match="not a signer"):
        read_signer("sigstore:me")


def test_a_passphrase_is_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes("pass wörd \nsecond".encode())
    assert read_passphrase(tmp_path / "p") == "pass wörd ".encode()
    (tmp_path / "p").write_bytes(b"\n")
    with pytest.raises(UsageError, match="empty"):
        read_passphrase(tmp_path / "p")


SECRET = b"correct horse"
RECIPIENT = X25519PrivateKey.from_private_bytes(bytes(range(32)))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.apr"
    path.write_bytes((VECTORS / "v1_zstd3.apr").read_bytes())
    return path


@pytest.mark.parametrize("by_password", [True, False])
def test_what_is_encrypted_comes_back_byte_for_byte(plain: Path, tmp_path: Path, by_password: bool) -> None:
    lock = {"password": SECRET} if by_password else {"recipient": RECIPIENT.public_key().public_bytes_raw()}
    key = {"password": SECRET} if by_password else {"private_key": RECIPIENT.private_bytes_raw()}
    encrypt_file(plain, tmp_path / "secret.apr", **lock)  # type: ignore[arg-type]
    assert aprfmt.read_v1(tmp_path / "secret.apr", **key).payload == aprfmt.read_v1(plain).payload
    decrypt_file(tmp_path / "secret.apr", tmp_path / "back.apr", **key)  # type: ignore[arg-type]
    assert (tmp_path / "back.apr").read_bytes() == plain.read_bytes()
    with pytest.raises(RefusedError, match="encrypted already"):
        encrypt_file(tmp_path / "secret.apr", tmp_path / "twice.apr", **lock)  # type: ignore[arg-type]


def test_any_file_can_be_encrypted(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(os.urandom(100_000))
    encrypt_file(tmp_path / "m.gguf", tmp_path / "m.apr", password=SECRET)
    data = (tmp_path / "m.apr").read_bytes()
    assert data[:4] == b"APRN"
    assert (tmp_path / "m.gguf").read_bytes()[:32] not in data
    decrypt_file(tmp_path / "m.apr", tmp_path / "back.gguf", password=SECRET)
    assert (tmp_path / "back.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    for at in (len(data) // 2, len(data) - 20):
        (tmp_path / "m.apr").write_bytes(_refooted(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]))
        with pytest.raises(RefusedError, match="wrong password, or the payload was modified"):
            decrypt_file(tmp_path / "m.apr", tmp_path / "no.gguf", password=SECRET)
    assert not (tmp_path / "no.gguf").exists()


def _refooted(data: bytes) -> bytes:
    """With the checksum that fits."""
    import zlib

    return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


@pytest.mark.parametrize("by_password", [True, False])
def test_what_was_modified_is_not_decrypted(tmp_path: Path, by_password: bool) -> None:
    generate(tmp_path / "inbox", "x25519")
    plain, secret, out = tmp_path / "m.bin", tmp_path / "m.apr", tmp_path / "o.bin"
    plain.write_bytes(os.urandom(3 << 20))  # several pieces
    lock = {"password": SECRET} if by_password else {"recipient": read_public(tmp_path / "inbox.pub").raw()}
    key = {"password": SECRET} if by_password else {"private_key": read_private(tmp_path / "inbox.key").raw()}
    assert encrypt_file(plain, secret, **lock).output_bytes == secret.stat().st_size  # type: ignore[arg-type]
    assert aprfmt.read_v1(secret, **key).payload == plain.read_bytes()
    decrypt_file(secret, out, **key)  # type: ignore[arg-type]
    assert out.read_bytes() == plain.read_bytes()
    data = bytearray(secret.read_bytes())
    for at in (len(data) - 5, len(data) // 2, len(data) - (3 << 20)):  # the tag, and what it covers
        edited = bytearray(data)
        edited[at] ^= 1
        secret.write_bytes(_refooted(bytes(edited)))
        with pytest.raises(RefusedError, match="modified"):
            decrypt_file(secret, out, force=True, **key)
        assert out.read_bytes() == plain.read_bytes()


def test_the_encrypted_vector_of_the_reference(tmp_path: Path) -> None:
    decrypt_file(VECTORS / "v1_encrypted_password.apr", tmp_path / "o.apr", password=b"correct horse")
    assert aprfmt.read_v1(tmp_path / "o.apr").payload == aprfmt.read_v1(VECTORS / "v1_golden_none.apr").payload


def test_signing_again_gives_the_signed_vector(tmp_path: Path) -> None:
    sign_v1(VECTORS / "v1_signed_ed25519.apr", tmp_path / "o.apr", bytes(range(32)))
    assert (tmp_path / "o.apr").read_bytes() == (VECTORS / "v1_signed_ed25519.apr").read_bytes()


def test_signed_v1_files_through_the_commands(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = str(tmp_path)
    (tmp_path / "secret.txt").write_bytes(SECRET + b"\n")
    assert run(["keygen", "-o", f"{at}/ed", "--type", "ed25519", "--passphrase-file", f"{at}/secret.txt"]) == 0
    assert run(["keygen", "-o", f"{at}/other", "--type", "ed25519"]) == 0
    sign = ["sign", str(plain), "--key", f"{at}/ed.key", "-o", f"{at}/signed.apr"]
    assert run(sign) == 5
    assert "private key is encrypted" in capsys.readouterr().err
    assert run([*sign, "--passphrase-file", f"{at}/secret.txt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "ed25519"
    signed = tmp_path / "signed.apr"
    assert run(["verify", str(signed), "--key", f"{at}/ed.pub"]) == 0
    assert run(["verify", str(signed), "--key", f"{at}/other.pub"]) == 4
    assert "not signed with the trusted key" in capsys.readouterr().err
    for command in ("inspect", "tensors", "validate"):
        assert run([command, str(plain), "--require-signature", f"{at}/ed.pub"]) == 5
        assert "not signed" in capsys.readouterr().err
        assert run([command, str(signed), "--require-signature", f"{at}/ed.pub", "-q"]) == 0
    data = signed.read_bytes()
    for offset in (22, 40, len(data) - 150):
        signed.write_bytes(_refooted(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]))
        assert run(["inspect", str(signed), "--require-signature", f"{at}/ed.pub"]) == 4
    stripped = bytearray(data[:-100] + data[-4:])
    stripped[21] &= ~2
    signed.write_bytes(_refooted(bytes(stripped)))
    capsys.readouterr()
    assert run(["verify", str(signed), "--key", f"{at}/ed.pub"]) == 5
    assert "a signature by" in capsys.readouterr().err


def test_encrypted_files_through_the_commands(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = str(tmp_path)
    (tmp_path / "secret.txt").write_bytes(SECRET)
    (tmp_path / "wrong.txt").write_bytes(b"battery")
    assert run(["encrypt", str(plain), "-o", f"{at}/e.apr"]) == 2
    assert "--passphrase-file" in capsys.readouterr().err
    assert run(["encrypt", str(plain), "-o", f"{at}/e.apr", "--passphrase-file", f"{at}/secret.txt"]) == 0
    assert run(["decrypt", f"{at}/e.apr", "-o", f"{at}/d.apr", "--passphrase-file", f"{at}/wrong.txt"]) == 5
    assert not (tmp_path / "d.apr").exists()
    assert run(["decrypt", f"{at}/e.apr", "-o", f"{at}/d.apr", "--passphrase-file", f"{at}/secret.txt"]) == 0
    assert (tmp_path / "d.apr").read_bytes() == plain.read_bytes()
    assert run(["keygen", "-o", f"{at}/inbox", "--type", "x25519"]) == 0
    assert run(["encrypt", str(plain), "-o", f"{at}/r.apr", "--recipient", f"{at}/inbox.pub"]) == 0
    assert run(["decrypt", f"{at}/r.apr", "-o", f"{at}/d.apr", "--key", f"{at}/inbox.key", "--force"]) == 0
    assert (tmp_path / "d.apr").read_bytes() == plain.read_bytes()
    assert run(["convert", f"{at}/r.apr", "-o", f"{at}/x.gguf"]) == 5
    assert "apr decrypt" in capsys.readouterr().err


def test_errors_name_what_to_do(plain: Path, tmp_path: Path) -> None:
    generate(tmp_path / "ed", "ed25519")
    generate(tmp_path / "x", "x25519")
    with pytest.raises(UsageError, match="stored in the file"):
        aprfmt.sign(plain, key=tmp_path / "ed.key")
    with pytest.raises(UsageError, match="with a key or with --sigstore"):
        aprfmt.sign(plain)
    for wrong in ({"hash": "md5"}, {"chain": [plain]}):
        with pytest.raises(AprError):
            aprfmt.sign(plain, key=tmp_path / "ed.key", **wrong)
