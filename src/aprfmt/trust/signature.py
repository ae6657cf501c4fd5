"""The signature of an opened model: what it claims, or what was proven."""

from __future__ import annotations

from aprfmt.light_dataclass import light_dataclass

ED25519_METHOD = "ed25519"

FOLDER_SIGNATURE = "model.sig"
"""The signature of a folder, in it."""

UNREADABLE = "unreadable"
"""In place of a reader's name, for a file that no reader opens."""

REQUIRED_SIGNER = "APR_REQUIRE_SIGNATURE"
"""Environment variable: whose signature every model must have; set by `--require-signature`, so that the processes of a
command inherit it."""


@light_dataclass(frozen=True, slots=True)
class ModelSignature:
    """The signature of a model.

    Attributes:
        path: the signature file; of an `.apr` v1 with a signature in it, the file itself.
        root: the file or folder that it covers.
        method: "ed25519", "key", "certificate" or "sigstore".
        signer: who signed: proven if `verified`, otherwise what the signature claims.
        verified: whether it was checked with a trusted key, and every file with its digest.
    """

    path: str
    root: str
    method: str
    signer: str
    verified: bool = False

    def sentence(self) -> str:
        """Who signed, and whether that was verified."""
        if self.verified:
            return f"signed by {self.signer}"
        return f"signed by {self.signer}; not verified: pass --require-signature KEY"

    def check_claim(self) -> None:
        """Compares the files with the digests in the signature, whose signer nobody has checked.

        Raises ChecksumError for a file that was modified or removed since it was signed; CorruptError, StorageError.
        """
        if self.verified or self.method == ED25519_METHOD:  # whoever reads an .apr v1 verifies it
            return
        from aprfmt.trust.bundle import compare_files, read_bundle

        compare_files(read_bundle(self.path), self.root)
