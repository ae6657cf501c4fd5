"""The result of sending or getting a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Generic, Protocol, TypeVar


class SizedFile(Protocol):
    """A file of a transfer."""

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        ...


FileT = TypeVar("FileT", bound=SizedFile)


@dataclass(slots=True, kw_only=True)
class TransferReport(Generic[FileT]):
    """What the results of `push`, `push_oci` and `pull` share.

    Attributes:
        files: the files of the model.
        seconds: time that it took.
    """

    files: list[FileT]
    seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> dict[str, object]:
        """The object of the command line."""
        return asdict(self) | {"size_bytes": self.size_bytes, "seconds": round(self.seconds, 3)}
