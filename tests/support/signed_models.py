"""Keys, certificates and signed models, and what an attacker does to them."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from demo_model import build

import aprfmt
from aprfmt.trust.keys import generate


@dataclass(frozen=True)
class Signed:
    """A folder that was signed with `key`, a GGUF beside it too, and somebody else's key and signed model."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "model"

    @property
    def gguf(self) -> Path:
        return self.root / "tiny.gguf"

    @property
    def key(self) -> Path:
        return self.root / "release.key"

    @property
    def public(self) -> str:
        return str(self.root / "release.pub")


def write_signed(root: Path) -> Signed:
    """Makes them below `root`."""
    made = Signed(root)
    build(made.gguf)
    aprfmt.export_model(made.gguf, made.folder, format="hf")
    shutil.copytree(made.folder, root / "stranger")
    config = json.loads((root / "stranger/config.json").read_text())
    for path in (root / "stranger").iterdir():
        path.write_bytes(path.read_bytes() + b" ")
    (root / "stranger/config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    for name in ("release", "other"):
        generate(root / name)
    aprfmt.sign(made.folder, key=made.key)
    aprfmt.sign(made.gguf, key=made.key)
    aprfmt.sign(root / "stranger", key=made.key)
    return made


def _flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def _rename_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    assert b"layers.0.self_attn.q_proj" in data
    path.write_bytes(data.replace(b"layers.0.self_attn.q_proj", b"layers.0.self_attn.v_PROJ", 1))


def _swap_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = list(vocab)[40:42]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit of a weight": (lambda folder: _flip(folder / "model.safetensors", -1), "model.safetensors was modified"),
    "a renamed tensor": (_rename_tensor, "model.safetensors was modified"),
    "a swapped tokenizer": (_swap_tokenizer, "tokenizer.json was modified"),
    "another chat template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ 'obey' }}"),
        "chat_template.jinja was modified",
    ),
    "a removed file": (lambda folder: (folder / "tokenizer_config.json").unlink(), "tokenizer_config.json was removed"),
    "an added file": (
        lambda folder: (folder / "generation_config.json").write_text('{"temperature": 9}'),
        "generation_config.json was added",
    ),
    "a stripped signature": (lambda folder: (folder / "model.sig").unlink(), "not signed"),
    "the signature of another model": (
        lambda folder: shutil.copy(folder.parent / "stranger/model.sig", folder / "model.sig"),
        "belongs to another model, stranger",
    ),
}
"""What is done to a copy of the signed folder, and what the refusal says."""


def issue(root: Path) -> tuple[Path, Path, Path, Path]:
    """A private key, its certificate, that of its issuer, and that of a root authority, as PEM files."""
    now = datetime.datetime(2026, 1, 1)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def certificate(subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, by: ec.EllipticCurvePrivateKey) -> Path:
        is_authority = subject != "Release team"
        made = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now)
            .not_valid_after(now + datetime.timedelta(days=36500))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority,
                    content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
                    encipher_only=False, decipher_only=False,
                ),
                critical=True,
            )
            .sign(by, hashes.SHA256())
        )  # fmt: skip
        path = root / f"{subject.split(maxsplit=1)[0].lower()}.pem"
        path.write_bytes(made.public_bytes(pem.Encoding.PEM))
        return path

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
    authority = certificate("Authority", keys[0], "Authority", keys[0])
    issuer = certificate("Issuer", keys[1], "Authority", keys[0])
    leaf = certificate("Release team", keys[2], "Issuer", keys[1])
    private = root / "certified.key"
    private.touch(mode=0o600)
    private.write_bytes(keys[2].private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()))
    return private, leaf, issuer, authority
