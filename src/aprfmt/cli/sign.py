"""`apr keygen`, `apr sign`, `apr verify`, `apr encrypt`, `apr decrypt`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.options import ForceOption, OutputOption
from aprfmt.cli.output import out, pairs, printable, progress_bar
from aprfmt.errors import RefusedError, UsageError
from aprfmt.text import format_bytes, format_seconds

if TYPE_CHECKING:
    from aprfmt.formats.apr1_edit import CryptReport
    from aprfmt.publishing.signing import SignatureReport

PassphraseFileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Read the passphrase from the first line of FILE. [default: ask for it]"),
]
SignedArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A model in any format, or a folder with all its files.")
]


def keygen(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="NAME", help="Write NAME.key (mode 0600) and NAME.pub.")
    ],
    *,
    type: Annotated[
        str, typer.Option(metavar="TYPE", help="p256, p384, p521: signs any model; ed25519: .apr v1; x25519: decrypts.")
    ] = "p256",
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Ask for a passphrase and encrypt the private key with it.")
    ] = False,
    passphrase_file: PassphraseFileOption = None,
    force: ForceOption = False,
) -> None:
    """Make a key pair: a private key to sign or decrypt with, and its public key to give away.

    \b
    apr keygen -o release
    apr keygen -o inbox --type x25519 --passphrase-file secret.txt
    """
    from aprfmt.trust.keys import KINDS, generate, public_of, short

    secret = _passphrase(passphrase_file, twice=True) if passphrase or passphrase_file is not None else None
    made = generate(output, type, passphrase=secret, force=force)
    fingerprint = public_of(made).fingerprint
    body = {
        "private_key": made.path,
        "public_key": f"{output}.pub",
        "type": made.kind,
        "fingerprint": fingerprint,
        "encrypted": secret is not None,
    }
    rows = [("public key", f"{output}.pub"), ("type", f"{made.kind}: {KINDS[made.kind]}")]
    rows.append(("fingerprint", short(fingerprint)))
    out.result(body, [f"{out.style('wrote', 'green')} {out.style(printable(made.path), 'bold')}", *pairs(rows)])


def sign(
    file: SignedArgument,
    *,
    key: Annotated[Path | None, typer.Option(metavar="KEY", help="Private key (PEM, mode 0600).")] = None,
    passphrase_file: PassphraseFileOption = None,
    certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="Certificate of the key.")] = None,
    chain: Annotated[
        list[Path] | None, typer.Option(metavar="PEM", help="Intermediate certificate up to a trusted one; repeatable.")
    ] = None,
    sigstore: Annotated[
        bool, typer.Option("--sigstore", help="Sign with an identity instead of a key; needs a network.")
    ] = False,
    identity_token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="OpenID Connect token for --sigstore. [default: the CI job's]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="Signature file. [default: FILE.sig, FOLDER/model.sig]"),
    ] = None,
    hash: Annotated[
        str, typer.Option(metavar="NAME", help="Hash function: sha256, blake3 (fastest) or blake2b.")
    ] = "sha256",
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Also sign the files that symlinks point to.")
    ] = False,
    force: ForceOption = False,
) -> None:
    """Sign a model: weights, tokenizer, templates and configuration, with one signature.

    Writes an OpenSSF Model Signing bundle, which model-signing and other tools verify. With an Ed25519 key, writes an
    .apr v1 that holds its signature.

    \b
    apr sign model.gguf --key release.key
    apr sign ./Qwen2.5-0.5B --key locked.key --passphrase-file secret.txt
    apr sign ./Qwen2.5-0.5B --key team.key --certificate team.pem --chain ca.pem
    apr sign v1.apr --key ed.key -o signed.apr
    """
    with progress_bar("hashing") as progress:
        report = aprfmt.sign(
            file, key=key, passphrase=_of_key(key, passphrase_file), certificate=certificate, chain=chain or (),
            sigstore=sigstore, identity_token=identity_token, output=output, hash=hash, follow_links=follow_links,
            force=force, progress=progress,
        )  # fmt: skip
    out.result(report.to_json(), _lines("signed", report))


def verify(
    file: SignedArgument,
    *,
    key: Annotated[
        str, typer.Option(metavar="KEY", help="Public key or CA certificates (PEM), or sigstore:ID,ISSUER.")
    ],
    signature: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Signature file. [default: FILE.sig, FOLDER/model.sig]")
    ] = None,
) -> None:
    """Verify who signed a model, and that nothing was modified, added or removed since.

    Exit status: 0 verified, 4 modified or broken signature, 5 not signed, or signed by someone else.

    \b
    apr verify model.gguf --key release.pub
    apr verify ./Qwen2.5-0.5B --key authority.pem
    """
    with progress_bar("hashing") as progress:
        report = aprfmt.verify(file, key=key, signature=signature, progress=progress)
    out.result(report.to_json(), _lines("verified", report))


def _lines(word: str, report: SignatureReport) -> list[str]:
    rate = f", {format_bytes(report.n_bytes / report.seconds)}/s" if report.seconds > 0 else ""
    rows = [
        ("signed by", report.signature.signer),
        ("covers", report.covers),
        ("signature", report.signature.path),
        ("size", format_bytes(report.n_bytes)),
        ("time", f"{format_seconds(report.seconds)}{rate}"),
    ]
    return [f"{out.style(word, 'green')} {out.style(printable(report.file), 'bold')}", *pairs(rows)]


def encrypt(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An .apr v1, or any other file of up to 1 GiB.")],
    output: OutputOption,
    *,
    recipient: Annotated[
        Path | None, typer.Option(metavar="PUB", help="Encrypt for the owner of this X25519 public key.")
    ] = None,
    passphrase_file: PassphraseFileOption = None,
    force: ForceOption = False,
) -> None:
    """Encrypt a file as an .apr v1, under a passphrase or for a recipient: AES-256-GCM, Argon2id, X25519.

    The metadata of an .apr v1 stays readable. Sign the encrypted file, not the plain one.

    \b
    apr encrypt v1.apr -o secret.apr --passphrase-file secret.txt
    apr encrypt model.gguf -o letter.apr --recipient inbox.pub
    """
    from aprfmt.formats.apr1_edit import encrypt_file
    from aprfmt.trust.keys import read_public

    if recipient is not None and passphrase_file is not None:
        raise UsageError("--recipient and --passphrase-file are mutually exclusive")
    public = read_public(recipient).raw() if recipient is not None else None
    secret = _passphrase(passphrase_file, twice=True) if recipient is None else None
    _crypted("encrypted", encrypt_file(file, output, password=secret, recipient=public, force=force))


def decrypt(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file written by apr encrypt or the reference implementation.")
    ],
    output: OutputOption,
    *,
    key: Annotated[Path | None, typer.Option(metavar="KEY", help="X25519 private key of the recipient.")] = None,
    passphrase_file: PassphraseFileOption = None,
    force: ForceOption = False,
) -> None:
    """Decrypt an .apr v1, with its passphrase or the recipient's private key.

    With --key, the passphrase is that of the key file.

    \b
    apr decrypt secret.apr -o plain.apr --passphrase-file secret.txt
    apr decrypt letter.apr -o plain.gguf --key inbox.key
    """
    from aprfmt.formats.apr1_edit import decrypt_file
    from aprfmt.trust.keys import read_private

    private = read_private(key, _of_key(key, passphrase_file)).raw() if key is not None else None
    secret = _passphrase(passphrase_file) if key is None else None
    _crypted("decrypted", decrypt_file(file, output, password=secret, private_key=private, force=force))


def _crypted(word: str, report: CryptReport) -> None:
    for warning in report.warnings:
        out.warning(warning)
    body = {
        "source": report.source,
        "output": report.output,
        "method": report.method,
        "output_bytes": report.output_bytes,
        "warnings": report.warnings,
    }
    rows = [("method", report.method), ("size", format_bytes(report.output_bytes))]
    out.result(body, [f"{out.style(word, 'green')} {out.style(printable(report.output), 'bold')}", *pairs(rows)])


def _of_key(key: Path | None, file: Path | None) -> bytes | None:
    """The passphrase of a private key: of a file, or asked for if the key is encrypted."""
    if key is None:
        return None
    if file is not None:
        return _passphrase(file)
    from aprfmt.trust.keys import read_private

    try:
        read_private(key)
    except RefusedError as error:
        if "encrypted" not in error.message or not sys.stdin.isatty():
            raise
        return _passphrase(None)
    return None


def _passphrase(file: Path | None, *, twice: bool = False) -> bytes:
    """A passphrase from a file, or typed in a terminal, never echoed. Raises UsageError without either."""
    from aprfmt.trust.keys import read_passphrase

    if file is not None:
        return read_passphrase(file)
    if not sys.stdin.isatty():
        raise UsageError("no terminal to ask for a passphrase", hint="--passphrase-file FILE")
    from getpass import getpass

    text = getpass("passphrase: ")
    if not text:
        raise UsageError("the passphrase is empty")
    if twice and getpass("repeat it: ") != text:
        raise UsageError("the passphrases differ")
    return text.encode()
