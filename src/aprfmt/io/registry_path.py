"""Addresses of OCI registries."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from aprfmt.errors import UsageError
from aprfmt.light_dataclass import light_dataclass

SCHEME = "oci://"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_PATH = re.compile(
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*(?::\d{1,5})?|\[[0-9a-fA-F:]+\](?::\d{1,5})?)"
    r"/(?P<name>[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


@light_dataclass(frozen=True, slots=True)
class RegistryPath:
    """An address of a registry: oci://HOST[:PORT]/NAME[:TAG][@DIGEST].

    Attributes:
        host: with the port.
        name: of the repository.
        reference: tag or digest; "latest" if the address has neither.
    """

    host: str
    name: str
    reference: str

    @property
    def url(self) -> str:
        """Where the registry's API is: https, but http on this machine."""
        scheme = "http" if is_this_machine(self.host) else "https"
        return f"{scheme}://{self.host}/v2/{self.name}"

    def __str__(self) -> str:
        mark = "@" if DIGEST.fullmatch(self.reference) else ":"
        return f"{SCHEME}{self.host}/{self.name}{mark}{self.reference}"


def is_this_machine(host: str) -> bool:
    """Whether a host, with its port, is this machine."""
    return (urlsplit(f"//{host}").hostname or "") in _THIS_MACHINE


def parse_address(text: str) -> RegistryPath:
    """Parses an address. Raises UsageError."""
    match = _PATH.fullmatch(text.removeprefix(SCHEME).removesuffix("/"))
    if match is None or "://" in text.removeprefix(SCHEME):
        hint = f"write {SCHEME}registry.example.com/team/model:tag; of the hub: apr convert hf://org/repo -o model.gguf"
        raise UsageError(f"not an address of a registry: {text!r}", hint=hint)
    return RegistryPath(match["host"], match["name"], match["digest"] or match["tag"] or "latest")


def is_registry(text: str) -> bool:
    """Whether an argument is the address of a registry."""
    return text.lower().startswith(SCHEME)
