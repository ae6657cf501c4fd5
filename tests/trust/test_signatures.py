"""Signatures of files and folders, both ways with model-signing, and every attack on them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from signed_models import ATTACKS, Signed, issue, write_signed

import aprfmt
from aprfmt.errors import ChecksumError, CorruptError, MissingDependencyError, RefusedError, StorageError
from aprfmt.trust.keys import generate

signing = pytest.importorskip("model_signing.signing")
from model_signing import hashing, verifying  # noqa: E402


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return write_signed(tmp_path_factory.mktemp("signed"))


@pytest.fixture
def folder(signed: Signed, tmp_path: Path) -> Path:
    """A copy of the signed folder, beside the stranger's."""
    shutil.copytree(signed.root / "stranger", tmp_path / "stranger")
    return Path(shutil.copytree(signed.folder, tmp_path / "model"))


def test_theirs_verifies_ours(signed: Signed) -> None:
    config = verifying.Config().use_elliptic_key_verifier(public_key=signed.public)
    config.verify(signed.folder, signed.folder / "model.sig")
    config = verifying.Config().use_elliptic_key_verifier(public_key=signed.public)
    config.verify(signed.gguf, Path(f"{signed.gguf}.sig"))


@pytest.mark.parametrize("hash", ["sha256", "blake3"])
def test_theirs_verifies_ours_of_each_hash_that_it_reads(signed: Signed, folder: Path, hash: str) -> None:
    aprfmt.sign(folder, key=signed.key, hash=hash, force=True)
    verifying.Config().use_elliptic_key_verifier(public_key=signed.public).verify(folder, folder / "model.sig")


@pytest.mark.parametrize("name", ["model", "tiny.gguf"])
def test_their_command_verifies_ours(signed: Signed, name: str) -> None:
    path = signed.root / name
    place = path / "model.sig" if path.is_dir() else Path(f"{path}.sig")
    words = [sys.executable, "-m", "model_signing", "verify", "key", str(path), "--signature", str(place)]
    done = subprocess.run([*words, "--public_key", signed.public], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


HASHINGS: dict[str, Callable[[hashing.Config], hashing.Config]] = {
    "sha256": lambda config: config.use_file_serialization(),
    "blake2": lambda config: config.use_file_serialization(hashing_algorithm="blake2"),
    "blake3": lambda config: config.use_file_serialization(hashing_algorithm="blake3"),
    "shards": lambda config: config.use_shard_serialization(shard_size=5000),
}


@pytest.mark.parametrize("name", HASHINGS)
def test_ours_verifies_theirs(signed: Signed, folder: Path, name: str) -> None:
    (folder / "model.sig").unlink()
    config = HASHINGS[name](hashing.Config()).set_ignored_paths(paths=["model.sig"])
    signer = signing.Config().set_hashing_config(config).use_elliptic_key_signer(private_key=signed.key)
    signer.sign(folder, folder / "model.sig")
    found = aprfmt.verify(folder, key=signed.public)
    assert found.signature.verified
    assert found.signature.signer.startswith("release.pub (")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[6000] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"model\.safetensors was modified"):
        aprfmt.verify(folder, key=signed.public)


def test_certificates_both_ways(folder: Path, tmp_path: Path) -> None:
    key, leaf, issuer, authority = issue(tmp_path)
    _, *_, stranger = issue(
        Path(shutil.copytree(tmp_path, tmp_path / "elsewhere", ignore=lambda *_: os.listdir(tmp_path)))
    )
    aprfmt.sign(folder, key=key, certificate=leaf, chain=[issuer], force=True)
    verifying.Config().use_certificate_verifier(certificate_chain=[authority]).verify(folder, folder / "model.sig")
    assert aprfmt.verify(folder, key=str(authority)).signature.method == "certificate"
    with aprfmt.open(folder) as model:
        assert model.signature is not None
        assert "CN=Release team" in model.signature.sentence()
    with pytest.raises(ChecksumError, match="signature is broken"):
        aprfmt.verify(folder, key=str(stranger))
    made = signing.Config().use_certificate_signer(
        private_key=key, signing_certificate=leaf, certificate_chain=[issuer]
    )
    (folder / "model.sig").unlink()
    made.set_hashing_config(hashing.Config().set_ignored_paths(paths=["model.sig"])).sign(folder, folder / "model.sig")
    assert aprfmt.verify(folder, key=str(authority)).signature.verified


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_by_name(signed: Signed, folder: Path, attack: str) -> None:
    aprfmt.verify(folder, key=signed.public)
    do, words = ATTACKS[attack]
    do(folder)
    with pytest.raises((ChecksumError, RefusedError), match=words):
        aprfmt.verify(folder, key=signed.public)


def test_every_bit_of_a_file_counts(signed: Signed, tmp_path: Path) -> None:
    copy = tmp_path / "m.gguf"
    data = signed.gguf.read_bytes()
    shutil.copy(f"{signed.gguf}.sig", f"{copy}.sig")
    for at in (0, 100, len(data) // 2, len(data) - 1):
        copy.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(ChecksumError, match="modified after it was signed"):
            aprfmt.verify(copy, key=signed.public, signature=f"{copy}.sig")
    copy.write_bytes(data)
    assert aprfmt.verify(copy, key=signed.public).n_files == 1


def test_a_signature_elsewhere_covers_what_was_signed(signed: Signed, folder: Path, tmp_path: Path) -> None:
    weights, place = folder / "model.safetensors", tmp_path / "elsewhere.sig"
    (folder / "model.sig").unlink()
    aprfmt.sign(weights, key=signed.key, output=place)  # with the files that it is read with
    assert aprfmt.verify(weights, key=signed.public, signature=place).signature.root == str(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ChecksumError, match=r"config\.json was modified"):
        aprfmt.verify(weights, key=signed.public, signature=place)


def test_a_bundle_that_was_edited_is_broken(signed: Signed, folder: Path) -> None:
    place = folder / "model.sig"
    bundle = json.loads(place.read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    (folder / "config.json").write_text("{}")
    resources = statement["predicate"]["resources"]
    next(row for row in resources if row["name"] == "config.json")["digest"] = hashlib.sha256(b"{}").hexdigest()
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    place.write_text(json.dumps(bundle))
    with pytest.raises(ChecksumError, match="signature is broken"):
        aprfmt.verify(folder, key=signed.public)


def test_a_signature_that_leaves_out_the_tokenizer_is_refused(signed: Signed, folder: Path) -> None:
    (folder / "model.sig").unlink()
    config = hashing.Config().set_ignored_paths(paths=["model.sig", "tokenizer.json", "README.md"])
    signer = signing.Config().set_hashing_config(config).use_elliptic_key_signer(private_key=signed.key)
    signer.sign(folder, folder / "model.sig")
    with pytest.raises(ChecksumError, match=r"does not cover tokenizer\.json$"):
        aprfmt.verify(folder, key=signed.public)


def test_who_signed_decides(signed: Signed, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"signed by the key .*, not by other.pub"):
        aprfmt.verify(folder, key=str(signed.root / "other.pub"))
    _, _, _, authority = issue(tmp_path)
    with pytest.raises(RefusedError, match=r"not by a certificate issued by authority\.pem"):
        aprfmt.verify(folder, key=str(authority))
    generate(tmp_path / "ed", "ed25519")
    with pytest.raises(RefusedError, match=r"an Ed25519 key signs \.apr v1 only"):
        aprfmt.verify(folder, key=str(tmp_path / "ed.pub"))


def test_links_are_covered_when_asked_for(signed: Signed, folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "config.json")
    (folder / "config.json").symlink_to(folder.parent / "config.json")
    with pytest.raises(RefusedError, match=r"config\.json is a symlink"):
        aprfmt.sign(folder, key=signed.key, force=True)
    aprfmt.sign(folder, key=signed.key, force=True, follow_links=True)
    assert aprfmt.verify(folder, key=signed.public).signature.verified


@pytest.mark.parametrize(
    "damage",
    [b"{", b'{"dsseEnvelope": 1}', b"[]", b'{"dsseEnvelope": {"payload": "e30="}, "verificationMaterial": {}}'],
)
def test_a_damaged_bundle_is_an_error(signed: Signed, folder: Path, damage: bytes) -> None:
    (folder / "model.sig").write_bytes(damage)
    with pytest.raises(CorruptError):
        aprfmt.verify(folder, key=signed.public)
    with pytest.raises(CorruptError):
        aprfmt.inspect(folder)


def test_a_bundle_cannot_name_files_outside(signed: Signed, folder: Path) -> None:
    place = folder / "model.sig"
    bundle = json.loads(place.read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    statement["predicate"]["resources"][0]["name"] = "../../etc/passwd"
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    place.write_text(json.dumps(bundle))
    with pytest.raises(CorruptError, match="not a file of its folder"):
        aprfmt.inspect(folder)


def test_signatures_of_other_programs_are_left_alone(signed: Signed, tmp_path: Path) -> None:
    copy = Path(shutil.copy(signed.gguf, tmp_path / "m.gguf"))
    Path(f"{copy}.sig").write_bytes(b"\x89\x02not ours")
    assert aprfmt.inspect(copy).signature is None


def test_sigstore_without_a_network(signed: Signed, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: object, **_: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(verifying.Config, "use_sigstore_verifier", unreachable)
    monkeypatch.setattr(signing.Config, "use_sigstore_signer", unreachable)
    with pytest.raises(StorageError, match="Sigstore cannot be reached") as caught:
        aprfmt.sign(folder, sigstore=True, force=True)
    assert "use a key" in str(caught.value.hint)
    with pytest.raises(RefusedError, match=r"not by me@example\.com"):
        aprfmt.verify(folder, key="sigstore:me@example.com,https://issuer.example")


def test_without_model_signing(signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(MissingDependencyError) as caught:
        aprfmt.verify(signed.folder, key=signed.public)
    assert caught.value.hint == "pip install model-signing pyopenssl"


def test_progress_and_report(signed: Signed) -> None:
    seen: list[int] = []
    totals: list[int] = []

    def start(total: int) -> Callable[[int, str], None]:
        totals.append(total)
        return lambda n_bytes, label: seen.append(n_bytes)

    report = aprfmt.verify(signed.folder, key=signed.public, progress=start)
    assert totals == [sum(seen)]
    assert report.n_files == len(list(signed.folder.iterdir())) - 1
    assert report.to_json()["verified"] is True
