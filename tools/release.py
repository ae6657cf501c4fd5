"""Builds a release into dist/: wheel and source archive, twice from the commit with the same bytes, their bill of
materials, checksums and signature; then the list of what is checked and what is left to do.

    python tools/release.py [--key release.key [--passphrase-file FILE]] [--out dist]

Only committed files are built. Exit status: 0 all checks passed, 1 one failed.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

import aprfmt
from aprfmt.errors import AprError
from aprfmt.trust.keys import public_of, read_passphrase, read_private

ROOT = Path(__file__).resolve().parents[1]
_BY_HAND = (
    "make test, make check, make conformance on the commit",
    "the date of the version in CHANGELOG.md",
    "git tag -s vVERSION; python -m twine upload dist/*.whl dist/*.tar.gz",
    "publish release.pub where users find it, not beside the files",
)


def git(*words: str) -> str:
    """What git prints. Raises CalledProcessError."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def build(out: Path) -> dict[str, str]:
    """Builds the commit in a folder of its own; returns the SHA-256 of each file of `out` by name."""
    with tempfile.TemporaryDirectory(prefix="apr-release-") as folder:
        archive = Path(folder) / "source.tar"
        git("archive", "-o", str(archive), "HEAD")
        source = Path(folder) / "source"
        shutil.unpack_archive(archive, source, filter="data")
        environment = os.environ | {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}
        words = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def bill_of_materials(wheel: Path, files: dict[str, str]) -> dict[str, object]:
    """The CycloneDX 1.6 document of a release: its files, and what the wheel requires, extras included."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(archive.read(name))
    requirements = [Requirement(text) for text in facts.get_all("Requires-Dist", [])]
    required = {req.name: req for req in requirements if "extra" not in str(req.marker or "")}
    optional = {req.name: req for req in requirements if req.name not in required and req.name != facts["Name"]}
    components: list[dict[str, object]] = [
        {"type": "file", "bom-ref": f"file:{file}", "name": file, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for file, digest in files.items()
    ]
    for scope, found in (("required", required), ("optional", optional)):
        for key, req in sorted(found.items()):
            limits = [{"name": "aprfmt:specifier", "value": str(req.specifier)}] if req.specifier else []
            purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', key).lower()}"
            components.append(
                {"type": "library", "bom-ref": purl, "name": key, "purl": purl, "scope": scope, "properties": limits}
            )
    own = f"pkg:pypi/{facts['Name']}@{facts['Version']}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(files, sort_keys=True))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": own, "name": facts["Name"], "version": facts["Version"], "purl": own,
                "licenses": [{"expression": facts["License-Expression"]}] if facts["License-Expression"] else [],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [str(row["bom-ref"]) for row in components]}],
    }  # fmt: skip


def check_installed(wheel: Path) -> str:
    """What the wheel, installed without its dependencies, says as its version."""
    with tempfile.TemporaryDirectory(prefix="apr-release-") as folder:
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, str(wheel)]
        subprocess.run(words, check=True)
        words = [sys.executable, "-c", "import aprfmt; print(aprfmt.__file__, aprfmt.__version__)"]
        done = subprocess.run(
            words, check=True, capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": folder}
        )
        place, version = done.stdout.split()
        assert place.startswith(folder), f"{place} is not the wheel's"
        return version


def main(argv: Sequence[str] | None = None) -> int:
    """Builds, checks, prints the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--key", type=Path, help="private key that signs the release: apr keygen -o release")
    parser.add_argument("--passphrase-file", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args(argv)
    passphrase = read_passphrase(given.passphrase_file) if given.passphrase_file else None
    version = aprfmt.__version__
    failed = []

    def check(what: str, is_good: Callable[[], object]) -> None:
        try:
            good = is_good()
        except (AprError, AssertionError, subprocess.CalledProcessError, OSError) as error:
            good, what = False, f"{what}: {error}"
        print(f"{'ok     ' if good else 'FAILED '} {what}", flush=True)
        if not good:
            failed.append(what)

    out: Path = given.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    check("every file is committed", lambda: not git("status", "--porcelain"))
    files = build(out)
    with tempfile.TemporaryDirectory(prefix="apr-release-") as second:
        check("wheel and source archive, built twice, have the same bytes", lambda: build(Path(second)) == files)
    wheel = next(out.glob("*.whl"))
    check(f"the wheel is version {version}", lambda: check_installed(wheel) == version)
    check(
        "CHANGELOG.md has the version",
        lambda: re.search(rf"^## .*{re.escape(version)}", (ROOT / "CHANGELOG.md").read_text(), re.M),
    )
    bill = out / f"aprfmt-{version}.cdx.json"
    bill.write_text(json.dumps(bill_of_materials(wheel, files), indent=2) + "\n")
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in files.items()))
    if given.key is None:
        print("missing signature: --key release.key (apr keygen -o release)")
    else:
        aprfmt.sign(out, key=given.key, passphrase=passphrase)
        public = out.parent / "release-key.pub"
        _write_public(given.key, passphrase, public)
        check("the signature of all files verifies", lambda: aprfmt.verify(out, key=str(public)).signature.verified)
        public.unlink()
    print("\nby hand:", *(f"  {line.replace('VERSION', version)}" for line in _BY_HAND), sep="\n")
    return 1 if failed else 0


def _write_public(key: Path, passphrase: bytes | None, public: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    found = public_of(read_private(key, passphrase))
    public.write_bytes(found.key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


if __name__ == "__main__":
    sys.exit(main())
