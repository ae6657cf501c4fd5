"""Models in OCI registries: `aprfmt.push_oci` stores one as an artifact, `aprfmt.pull` gets one.

A blob is sent only if the registry does not have it. Uploads and downloads continue where they were interrupted, and
every digest is compared: the registry's on upload, ours on download, before a file gets its name.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aprfmt import formats
from aprfmt.errors import RefusedError, UsageError, storage_errors
from aprfmt.formats.signatures import required_signer
from aprfmt.formats.signatures import verify as verify_signature
from aprfmt.io.cache import CACHE_VARIABLE, cache_home, own_folder
from aprfmt.io.hub_cache import fetch_blob
from aprfmt.io.links import check_links
from aprfmt.io.pipe import StartProgress
from aprfmt.io.registry import Registry
from aprfmt.io.registry_path import parse_address
from aprfmt.io.sink import AtomicFolder, check_target
from aprfmt.io.source import is_folder
from aprfmt.provenance import provenance
from aprfmt.publishing.oci_layout import (
    LAYOUTS,
    MODEL_PACK,
    OciLayer,
    config_of,
    digest_of,
    manifest_of,
    media_type,
    parse_manifest,
)
from aprfmt.publishing.survey import identity_of, publishable, survey
from aprfmt.publishing.transfer import TransferReport
from aprfmt.text import first_few, format_bytes, plural
from aprfmt.trust.contents import WHOLE, Serialization, digests
from aprfmt.trust.signature import UNREADABLE
from aprfmt.types import PathLike

_KEPT_S = 7 * 24 * 3600.0


@dataclass(slots=True, kw_only=True)
class OciPushReport(TransferReport[OciLayer]):
    """The result of `push_oci`; `to_json` is the object of `apr push --json` for a registry.

    Attributes:
        source: the path as given.
        target: the address.
        digest: of the manifest.
        layout: "modelpack" or "docker".
        license: the license in the configuration; None without one.
        files: the layers.
        uploaded: names of the files that the registry did not have.
        plan: whether nothing was sent.
        warnings: what the user should know.
        seconds: time that it took.
    """

    source: str
    target: str
    digest: str
    layout: str
    license: str | None
    uploaded: list[str] = field(default_factory=list)
    plan: bool = False
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class PullReport(TransferReport[OciLayer]):
    """The result of `pull`; `to_json` is the object of `apr pull --json`.

    Attributes:
        source: the address.
        output: the folder.
        digest: of the manifest.
        files: the files that were written.
        reused_bytes: bytes that an earlier, interrupted run had received.
        signature: who signed; None unless a signature is required.
        seconds: time that it took.
    """

    source: str
    output: str
    digest: str
    reused_bytes: int = 0
    signature: str | None = None


def push_oci(
    source: PathLike,
    target: str,
    *,
    layout: str = MODEL_PACK,
    license: str | None = None,
    no_license: bool = False,
    follow_links: bool = False,
    plan: bool = False,
    progress: StartProgress | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> OciPushReport:
    """Stores a model file, or all files of a folder, in an OCI registry as an artifact.

    The same files give the same digest. Credentials are those of `docker login`.

    Args:
        source: the file or folder.
        target: oci://HOST[:PORT]/NAME[:TAG]; the tag "latest" is the default.
        layout: "modelpack", which ModelPack, ORAS and Docker Model Runner read, or "docker", the types of `docker model
            package`, for GGUF, safetensors, templates and licenses.
        license: license of a model that states none.
        no_license: publish without a license.
        follow_links: send files that symlinks refer to outside the folder.
        plan: report what would be sent, without a network.
        progress: called with the number of bytes to hash and to send; returns a function to call with those of each
            step.
        log: called with a line before files are sent.

    Raises:
        RefusedError: no license, nothing to publish, a file that changed, or no access to the registry.
        UsageError: not an address, or an unknown layout.
        NotFoundError, StorageError: no such source, or the registry cannot be reached.
    """
    start, name = time.monotonic(), formats.path_text(source, "source")
    where = parse_address(target)
    if layout not in LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}", hint=f"one of: {', '.join(LAYOUTS)}")
    if where.reference.startswith("sha256:"):
        raise UsageError("an upload needs an address with a tag, not a digest", hint="write NAME:TAG")
    paths, refused = publishable(source, follow_links=follow_links)
    if license is not None:
        provenance.from_flags({"license": license})
    models, info, _, warnings = survey(name, paths)
    if refused:
        warnings.append(f"not uploaded: {first_few(refused)}")
    known = license or info.get("license")
    if known is None and not no_license:
        raise RefusedError(
            "the license of the model is missing",
            path=source,
            hint="set it with --license apache-2.0, or upload without one: --no-license",
        )
    info = info | ({"license": known} if known is not None else {})
    towers = {row.file for row in models if row.type.startswith("towers")}
    types = {file: media_type(file, layout, is_towers=file in towers) for file in paths}
    before = {file: identity_of(path) for file, path in paths.items()}
    hashes = _sums(paths, progress)
    layers = [OciLayer(file, before[file].size, hashes[file], types[file]) for file in paths]
    config = config_of(layout, models[0], info, layers)
    registry = Registry(where)
    manifest = manifest_of(layout, config, layers)
    report = OciPushReport(
        source=name, target=str(where), digest=digest_of(manifest), layout=layout, license=known, files=layers,
        plan=plan, warnings=warnings,
    )  # fmt: skip
    if not plan:
        if not follow_links and is_folder(source):
            check_links(source, paths.values())  # again: a link may have come since
        if any(identity_of(path) != before[file] for file, path in paths.items()):
            raise RefusedError("a file changed while it was read", path=source, hint="run it again")
        report.uploaded = _send(registry, paths, layers, progress, log)
        registry.upload_bytes(config)
        registry.put_manifest(manifest)
    report.seconds = time.monotonic() - start
    return report


def _sums(paths: dict[str, Path], progress: StartProgress | None) -> dict[str, str]:
    """The SHA-256 of each file in hex."""
    total = sum(path.stat().st_size for path in paths.values())
    advance = progress(total) if progress is not None else lambda n_bytes, label: None
    how = Serialization("files", "sha256")
    return {file: digests(path, how, [WHOLE], lambda total: advance)[WHOLE] for file, path in paths.items()}


def _send(
    registry: Registry,
    paths: dict[str, Path],
    layers: Sequence[OciLayer],
    progress: StartProgress | None,
    log: Callable[[str], None],
) -> list[str]:
    """Sends the files that the registry does not have; returns their names."""
    known: set[str] = set()
    wanted = []
    for layer in layers:
        if layer.digest not in known and not registry.has(layer.digest):
            wanted.append(layer)
        known.add(layer.digest)
    total = sum(layer.size_bytes for layer in wanted)
    log(f"uploading {plural(len(wanted), 'file')}, {format_bytes(total)}, to {registry.where}")
    advance = progress(total) if progress is not None and wanted else lambda n_bytes, label: None
    for layer in wanted:

        def sent(n_bytes: int, label: str = layer.name) -> None:
            advance(n_bytes, label)

        registry.upload(str(paths[layer.name]), layer.digest, layer.size_bytes, sent)
    return [layer.name for layer in wanted]


def pull(
    source: str,
    output: PathLike | None = None,
    *,
    allow_names: bool = False,
    force: bool = False,
    progress: StartProgress | None = None,
) -> PullReport:
    """Gets a model from an OCI registry: artifacts of ModelPack, `docker model package` and `oras push`.

    All files appear together, each with its right digest. With a required signer (`--require-signature`) the files must
    be what that signer signed.

    Args:
        source: oci://HOST[:PORT]/NAME[:TAG][@sha256:DIGEST].
        output: the folder; default: the last part of NAME.
        allow_names: write files with names that other programs act on.
        force: replace files of an existing folder.
        progress: called with the number of bytes to receive; returns a function to call with those of each step.

    Raises:
        NotFoundError: not in the registry.
        ChecksumError: bytes that differ from their digest, or from what was signed.
        RefusedError: no access, risky file names, or not signed by the required signer.
        UnsupportedError: a container image, or files packed into archives.
        CorruptError, StorageError.
    """
    start, where = time.monotonic(), parse_address(source)
    target = os.fspath(output) if output is not None else where.name.rpartition("/")[2]
    check_target(target, [], force, folder=True)
    signer = required_signer()
    registry = Registry(where)
    digest, data = registry.manifest()
    layers = parse_manifest(data, str(where), allow_names=allow_names)
    report = PullReport(source=str(where), output=target, digest=digest, files=layers)
    blobs = _blobs()
    total = sum(layer.size_bytes for layer in layers)
    advance = progress(total) if progress is not None else lambda n_bytes, label: None
    for layer in layers:
        report.reused_bytes += _fetch(registry, layer, blobs / layer.sha256, advance)
    with AtomicFolder(target, force=force, n_bytes=0 if _same_disk(blobs, target) else report.size_bytes) as folder:
        for layer in layers:
            _place(blobs / layer.sha256, folder / layer.name)
        if signer is not None:
            report.signature = verify_signature(folder, UNREADABLE, signer).sentence()
    for layer in layers:
        (blobs / layer.sha256).unlink(missing_ok=True)
    report.seconds = time.monotonic() - start
    return report


def _blobs() -> Path:
    """The folder of received files that no output has yet; what is older than a week is removed."""
    folder = cache_home() / "oci" / "blobs"
    own_folder(folder.parent)
    own_folder(folder)
    with storage_errors(folder):
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _KEPT_S:
                    os.unlink(entry.path)
    return folder


def _fetch(registry: Registry, layer: OciLayer, blob: Path, advance: Callable[[int, str], object]) -> int:
    """Receives a file, unless it is there with the right digest; returns how many bytes were."""

    def received(n_bytes: int) -> None:
        advance(n_bytes, layer.name)

    if blob.is_file():
        if _sums({"": blob}, None)[""] == layer.sha256:
            received(layer.size_bytes)
            return layer.size_bytes
        blob.unlink()
    reused = 0

    def begin(size: int, done: int) -> Callable[[int], None]:
        nonlocal reused
        reused = done
        received(done)
        return received

    fetch_blob(registry.remote_file(layer.digest, layer.size_bytes, layer.name), blob, begin, CACHE_VARIABLE)
    return reused


def _same_disk(blobs: Path, target: str) -> bool:
    return os.stat(blobs).st_dev == os.stat(os.path.dirname(os.path.abspath(target))).st_dev


def _place(blob: Path, path: Path) -> None:
    """Puts a verified blob into the output: linked where possible, else copied."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(blob, path)
        except OSError:
            shutil.copyfile(blob, path)
