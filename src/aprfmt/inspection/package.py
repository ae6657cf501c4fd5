"""What a conversion of a model's folder leaves out or refuses: file names, links to outside."""

from __future__ import annotations

from aprfmt.formats.hfdir import HfNative
from aprfmt.io.links import links_out
from aprfmt.io.names import NameFinding, findings
from aprfmt.model import Model


def folder_of(model: Model) -> HfNative | None:
    """The model's folder; None for a file."""
    native = model.native_as(HfNative)
    return native if native is not None and not native.alone else None


def refused_names(folder: HfNative) -> list[NameFinding]:
    """Problems that io.names finds in the names of the folder's files."""
    return findings(folder.further_files(), folder.own_names())


def outside_files(folder: HfNative) -> list[str]:
    """The folder's files that link to outside."""
    names = (*folder.own_names(), *folder.further_files())
    return links_out(folder.folder, [folder.folder / name for name in names])
