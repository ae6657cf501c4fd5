"""How a model's files become layers of an OCI manifest, and which files the layers of one are.

modelpack   CNCF ModelPack 1 (model-spec): each file a layer, its path in org.cncf.model.filepath. ORAS reads it too,
            by org.opencontainers.image.title, and Docker Model Runner for GGUF and safetensors
docker      the types of `docker model package`, which llama.cpp's -dr and older Docker Model Runners require
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from aprfmt.errors import AprError, CorruptError, LimitError, RefusedError, UnsupportedError
from aprfmt.formats.hf_files import WEIGHT_SUFFIXES
from aprfmt.io import names
from aprfmt.io.json_shape import list_of, mapping_of
from aprfmt.io.jsonx import loads
from aprfmt.io.registry import MANIFEST
from aprfmt.io.registry_path import DIGEST
from aprfmt.limits import MAX_CARRIED_FILES
from aprfmt.publishing.card import ModelRow
from aprfmt.types import Json, JsonObject

MODEL_PACK, DOCKER = "modelpack", "docker"
LAYOUTS = (MODEL_PACK, DOCKER)

_TITLE, _FILE_PATH = "org.opencontainers.image.title", "org.cncf.model.filepath"
_ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
_CONFIGS = {
    MODEL_PACK: "application/vnd.cncf.model.config.v1+json",
    DOCKER: "application/vnd.docker.ai.model.config.v0.1+json",
}
_WEIGHTS = "application/vnd.cncf.model.weight.v1.raw"
_SETTINGS = "application/vnd.cncf.model.weight.config.v1.raw"
_DOCS = "application/vnd.cncf.model.doc.v1.raw"
_CODE = "application/vnd.cncf.model.code.v1.raw"
_DOC_NAMES = re.compile(r"(?:licen[cs]e|notice|readme|use_policy)(?:[._-].*)?|.*\.(?:md|pdf|png|jpe?g|gif|svg)", re.I)
_GGUF, _SAFETENSORS = "application/vnd.docker.ai.gguf.v3", "application/vnd.docker.ai.safetensors"
_MMPROJ, _LICENSE = "application/vnd.docker.ai.mmproj", "application/vnd.docker.ai.license"
_TEMPLATE = "application/vnd.docker.ai.chat.template.jinja"
_TYPES: Sequence[tuple[Callable[[str], object], str]] = (
    (lambda name: name.endswith(WEIGHT_SUFFIXES), _WEIGHTS),
    (_DOC_NAMES.fullmatch, _DOCS),
    (lambda name: name.endswith((".py", ".sh")), _CODE),
    (lambda name: True, _SETTINGS),
)
_DOCKER_NAMES = {_GGUF: "*.gguf", _SAFETENSORS: "*.safetensors", _TEMPLATE: "*.jinja", _LICENSE: "licen[cs]e*"}
_NAMELESS = {
    _GGUF: "model.gguf",
    _SAFETENSORS: "model.safetensors",
    _MMPROJ: "mmproj.gguf",
    _LICENSE: "LICENSE",
    _TEMPLATE: "chat_template.jinja",
}
"""File names of layers that have none, by type: those that Docker writes."""

_PACKED = re.compile(r"[.+](?:tar|gzip|zstd)\b")
_ORAS_FILE, _ORAS_UNPACKS = "application/vnd.oci.image.layer.v1.tar", "io.deis.oras.content.unpack"
"""The type that oras push gives a file, archive or not, and the annotation of those that it made of folders."""

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, slots=True)
class OciLayer:
    """A file of an artifact.

    Attributes:
        name: its path.
        size_bytes: its size.
        sha256: its digest in hex.
        media_type: its type.
    """

    name: str
    size_bytes: int
    sha256: str
    media_type: str

    @property
    def digest(self) -> str:
        """The digest as registries write it."""
        return f"sha256:{self.sha256}"


def media_type(name: str, layout: str, *, is_towers: bool = False) -> str:
    """The type of a file. Raises RefusedError for one that the layout `docker` has no type for."""
    lower, base = name.lower(), name.lower().rpartition("/")[2]
    if layout == MODEL_PACK:
        return next(type for matches, type in _TYPES if matches(base))
    if is_towers and lower.endswith(".gguf"):
        return _MMPROJ
    found = next((type for type, pattern in _DOCKER_NAMES.items() if fnmatchcase(base, pattern)), None)
    if found is None:
        raise RefusedError(
            f"the docker layout has no type for {name}", hint="leave out --layout, or push the GGUF alone"
        )
    return found


def config_of(layout: str, model: ModelRow, info: Mapping[str, str], layers: Sequence[OciLayer]) -> bytes:
    """The configuration of an artifact: what its first model is. The same files give the same bytes."""
    size = next((f"{model.params / n:.1f}{unit}" for n, unit in _SCALES if model.params >= n), str(model.params))
    format = "gguf" if model.file.lower().endswith(".gguf") else "apr" if model.file.endswith(".apr") else "safetensors"
    digests: list[Json] = [layer.digest for layer in layers]
    config: JsonObject = {"format": format}
    if layout == DOCKER:
        config |= {"parameters": size.replace(".0", ""), "quantization": model.type}
        config |= {"architecture": model.architecture} if model.architecture else {}
        value: JsonObject = {
            "config": config, "descriptor": {}, "rootfs": {"type": "layers", "diff_ids": digests},
        }  # fmt: skip
    else:
        plain = model.type.lower() in ("f32", "f16", "bf16")
        config |= {"paramSize": size.lower(), "precision" if plain else "quantization": model.type.lower()}
        config |= {"architecture": "transformer"} if model.architecture else {}
        descriptor: JsonObject = {"family": model.architecture} if model.architecture else {}
        descriptor |= {key: info[key] for key in ("name", "version", "description") if info.get(key)}
        descriptor |= {"licenses": [info["license"]]} if info.get("license") else {}
        descriptor |= {"authors": [info["author"]]} if info.get("author") else {}
        value = {"descriptor": descriptor, "config": config, "modelfs": {"type": "layers", "diffIds": digests}}
    return _dump(value)


def digest_of(data: bytes) -> str:
    """The digest of bytes as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def manifest_of(layout: str, config: bytes, layers: Sequence[OciLayer]) -> bytes:
    """The manifest of an artifact with this configuration."""
    value: JsonObject = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        **({"artifactType": _ARTIFACT} if layout == MODEL_PACK else {}),
        "config": {"mediaType": _CONFIGS[layout], "digest": digest_of(config), "size": len(config)},
        "layers": [
            {
                "mediaType": layer.media_type,
                "digest": layer.digest,
                "size": layer.size_bytes,
                "annotations": {_TITLE: layer.name, _FILE_PATH: layer.name},
            }
            for layer in layers
        ],
    }
    return _dump(value)


def _dump(value: JsonObject) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def parse_manifest(data: bytes, path: str, *, allow_names: bool) -> list[OciLayer]:
    """The files of an artifact, in any of the layouts, and of `oras push`.

    Raises:
        CorruptError, LimitError: not a manifest of an artifact.
        RefusedError: names that must not be written.
        UnsupportedError: files that are packed into archives, or an index of several manifests.
    """
    try:
        value = mapping_of(loads(data))
        if "manifests" in value:
            raise UnsupportedError(
                "the address is an index of several manifests", hint="add the digest of one: NAME@sha256:..."
            )
        if value["schemaVersion"] != 2:
            raise ValueError
        rows = [mapping_of(row) for row in list_of(value["layers"])]
        if len(rows) > MAX_CARRIED_FILES:
            raise LimitError(f"more than {MAX_CARRIED_FILES} files in the artifact")
        layers = [_layer(row) for row in rows]
    except AprError as error:
        error.path = path
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError("not a manifest of an OCI artifact", path=path) from error
    if not layers:
        raise RefusedError("the artifact contains no files", path=path)
    layers = _numbered(layers)
    names.check([layer.name for layer in layers], path, allowed=allow_names)
    return layers


def _layer(row: Mapping[str, object]) -> OciLayer:
    kind, digest, size = str(row["mediaType"]), str(row["digest"]), row["size"]
    notes = mapping_of(row.get("annotations") or {})
    if type(size) is not int or size < 0 or not DIGEST.fullmatch(digest):
        raise ValueError
    name = notes.get(_FILE_PATH) or notes.get(_TITLE) or _NAMELESS.get(kind)
    if _PACKED.search(kind) and (kind != _ORAS_FILE or notes.get(_ORAS_UNPACKS) == "true"):
        raise UnsupportedError(f"{str(name)[:80]!r} is packed as {kind[:80]}", hint="unpack it with oras pull")
    if not isinstance(name, str):
        raise UnsupportedError(f"a layer of type {kind[:80]!r} has no file name", hint="this may be a container image")
    return OciLayer(name, size, digest.removeprefix("sha256:"), kind)


def _numbered(layers: Sequence[OciLayer]) -> list[OciLayer]:
    """Numbers the GGUF or safetensors files that would get the same name, as Docker does."""
    counts: dict[str, int] = {}
    for layer in layers:
        counts[layer.name] = counts.get(layer.name, 0) + 1
    seen: dict[str, int] = {}
    found = []
    for layer in layers:
        name, total = layer.name, counts[layer.name]
        if total > 1 and _NAMELESS.get(layer.media_type) == name:
            seen[name] = seen.get(name, 0) + 1
            stem, _, suffix = name.rpartition(".")
            name = f"{stem}-{seen[name]:05d}-of-{total:05d}.{suffix}"
        found.append(OciLayer(name, layer.size_bytes, layer.sha256, layer.media_type))
    return found
