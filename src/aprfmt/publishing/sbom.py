"""A bill of materials of a model: CycloneDX 1.6 (ML-BOM), of what its files say and of their digests.

Nothing is guessed: what a file does not say is left out. The same files give the same document, whatever the time.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import aprfmt
from aprfmt import formats
from aprfmt.codecs.dtypes import dtype_totals
from aprfmt.formats.apr_metadata import SOURCE_KEY
from aprfmt.inspection.quantized import count_packed
from aprfmt.io.links import check_links
from aprfmt.io.pipe import StartProgress
from aprfmt.io.source import is_folder
from aprfmt.model import Model
from aprfmt.provenance import provenance
from aprfmt.provenance.provenance import Provenance
from aprfmt.provenance.spdx import spdx_expression
from aprfmt.trust.contents import WHOLE, Serialization, digests, list_files, path_of
from aprfmt.types import Json, JsonObject, PathLike

LINEAGE = "aprfmt.lineage"
"""Metadata key of the training run that made a model."""

_SPEC = "1.6"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://cyclonedx.org/schema/bom-1.6")
_DOCUMENTS = (".cdx.json", "bom.json")
"""How the names of CycloneDX documents end: none lists itself or another one."""

_MODEL, _RUN = "model", "training"
_IMATRIX = ("quantize.imatrix.file", "quantize.imatrix.dataset", "quantize.imatrix.entries_count")


def sbom(path: PathLike, *, follow_links: bool = False, progress: StartProgress | None = None) -> JsonObject:
    """The bill of materials of a model as a CycloneDX 1.6 document: a JSON object.

    It names the model, its license, files with their SHA-256, architecture, dtypes, data sets, base models, the files
    that it was imported from, its quantization, and the training run that made it: command, configuration, digest of
    the data, versions and hardware.

    Args:
        path: the model, in any format. Documents of this kind beside it (`*.cdx.json`, `bom.json`) are not listed.
        follow_links: list files that symlinks refer to outside the folder.
        progress: called with the bytes to hash; returns a function to call as they are hashed.

    Raises:
        AprError: as `open`; RefusedError for a folder with devices or pipes, or with links out of it.
    """
    with formats.open_unchanged(path) as model:
        origin = provenance.read(model)
        hashes = _files(model, progress, follow_links=follow_links)
        lineage = _object(model.metadata.get(LINEAGE))
        components = [*_file_components(hashes), *_data(origin, lineage), *_bases(origin, lineage), *_sources(model)]
        document: JsonObject = {
            "bomFormat": "CycloneDX",
            "specVersion": _SPEC,
            "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, repr(sorted(hashes.items())))}",
            "version": 1,
            "metadata": {
                "tools": {"components": [{"type": "application", "name": "apr", "version": aprfmt.__version__}]},
                "component": _component(model, origin, hashes, lineage),
            },
            "components": list[Json](components),
            "dependencies": _dependencies(components),
        }
        if lineage:
            document["formulation"] = [_formula(lineage)]
    return document


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _files(model: Model, progress: StartProgress | None, *, follow_links: bool) -> dict[str, str]:
    """The SHA-256 of each file of the model, by name."""
    root = str(model.path)
    serialization = Serialization("files", "sha256", follows_links=True)
    if is_folder(root):
        folder = root
        names = [name for name in list_files(root, serialization) if not name.endswith(_DOCUMENTS)]
    else:
        paths = list(dict.fromkeys(source.path for source in model.sources))
        if paths == [root]:
            return {os.path.basename(root): digests(root, serialization, [WHOLE], progress)[WHOLE]}
        folder = os.path.dirname(root) or "."
        names = [os.path.relpath(path, folder) for path in paths]
    if not follow_links:
        check_links(folder, [path_of(folder, name) for name in names])
    return digests(folder, serialization, names, progress)


def _component(
    model: Model, origin: Provenance, hashes: Mapping[str, str], lineage: Mapping[str, object]
) -> JsonObject:
    info = origin.info
    found: JsonObject = {
        "type": "machine-learning-model",
        "bom-ref": _MODEL,
        "name": info.get("name") or Path(model.path).stem,
        **({"version": info["version"]} if "version" in info else {}),
        **({"description": info["description"]} if "description" in info else {}),
        **({"authors": [{"name": info["author"]}]} if "author" in info else {}),
        **({"licenses": licenses} if (licenses := _licenses(origin)) else {}),
        "modelCard": _card(model, origin, lineage),
        "properties": _properties(model),
    }
    if len(hashes) == 1:
        found["hashes"] = [_sha256(digest) for digest in hashes.values()]
    return found


def _sha256(digest: str) -> Json:
    return {"alg": "SHA-256", "content": digest}


def _licenses(origin: Provenance) -> list[Json]:
    stated = origin.info.get("license")
    if stated is None:
        return []
    known = spdx_expression(stated)
    if known is not None:
        is_id = " " not in known and not known.startswith("LicenseRef-")
        return [{"license": {"id": known}} if is_id else {"expression": known}]
    name = _text((origin.general or {}).get("license.name"))
    return [{"license": {"name": name or stated}}]


def _card(model: Model, origin: Provenance, lineage: Mapping[str, object]) -> Json:
    hparams = model.hparams
    parameters: JsonObject = {"task": "text-generation"} if hparams.architecture is not None else {}
    if hparams.architecture is not None:
        parameters["architectureFamily"] = hparams.architecture
    classes = model.metadata.get("hf_architecture") or model.metadata.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else classes
    if (name := _text(first)) is not None:
        parameters["modelArchitecture"] = name
    if data := _data(origin, lineage):
        parameters["datasets"] = [{"ref": str(row["bom-ref"])} for row in data]
    return {"modelParameters": parameters} if parameters else {}


def _properties(model: Model) -> list[Json]:
    entries = model.tensors.entries
    rows = [
        ("format", model.label),
        ("parameters", count_packed(model).param_count),
        ("tensors", len(entries)),
        *((f"dtype:{name}", f"{row['tensors']} tensors, {row['bytes']} bytes") for name, row in
          sorted(dtype_totals(entries).items())),
        *((key, model.metadata[key]) for key in _IMATRIX if key in model.metadata),
    ]  # fmt: skip
    if model.signature is not None:
        rows.append(("signature", model.signature.sentence()))
    return [_property(name, value) for name, value in rows]


def _property(name: str, value: object) -> Json:
    return {"name": f"aprfmt:{name}", "value": str(value)}


def _file_components(hashes: Mapping[str, str]) -> list[JsonObject]:
    if len(hashes) == 1:
        return []
    return [
        {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [_sha256(digest)]}
        for name, digest in sorted(hashes.items())
    ]


def _data(origin: Provenance, lineage: Mapping[str, object]) -> list[JsonObject]:
    """The data sets: those of the run, with the digest of all that it read, and those that the model names."""
    names = [name.strip() for name in origin.info.get("data_source", "").split(",") if name.strip()]
    rows = [row for row in _list(lineage.get("data_sources")) if _text(_object(row).get("name"))]
    of_run = {str(_object(row)["name"]): _object(row) for row in rows}
    found: list[JsonObject] = []
    for name in dict.fromkeys([*names, *of_run]):
        row: JsonObject = {
            "type": "data", "bom-ref": f"data:{name}", "name": name, "data": [{"type": "dataset", "name": name}],
        }  # fmt: skip
        if (license := origin.info.get("data_license")) is not None and name not in of_run:
            row["licenses"] = [{"license": {"name": license}}]
        if name in of_run and (digest := _text(lineage.get("data"))) is not None:
            row["properties"] = [_property("data-key", digest)]
        found.append(row)
    return found


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _bases(origin: Provenance, lineage: Mapping[str, object]) -> list[JsonObject]:
    """The models that it was made from: those that it names, and the teacher and the student of its training."""
    found: list[JsonObject] = []
    for row in _list((origin.general or {}).get("base_models")):
        base = _object(row)
        if (name := _text(base.get("name"))) is None:
            continue
        component: JsonObject = {"type": "machine-learning-model", "bom-ref": f"base:{name}", "name": name}
        if (who := _text(base.get("organization"))) is not None:
            component["group"] = who
        if (url := _text(base.get("repo_url"))) is not None:
            component["externalReferences"] = [{"type": "distribution", "url": url}]
        found.append(component)
    for role in ("teacher", "student"):
        model = _object(lineage.get(role))
        if (name := _text(model.get("name"))) is None:
            continue
        found.append(
            {
                "type": "machine-learning-model",
                "bom-ref": f"{role}:{name}",
                "name": name,
                "properties": [
                    _property(key, model[key]) for key in ("print", "architecture", "parameters", "made", "signature")
                    if model.get(key) is not None
                ] + [_property("role", role)],
            }
        )  # fmt: skip
    return found


def _sources(model: Model) -> list[JsonObject]:
    """The files that an `.apr` was imported from, with the digests that it keeps of them."""
    manifest = _object(model.metadata.get(SOURCE_KEY)) if model.convention == "apr" else {}
    found: list[JsonObject] = []
    for value in _list(manifest.get("files")):
        row = _object(value)
        if (name := _text(row.get("name"))) is None:
            continue
        component: JsonObject = {"type": "file", "bom-ref": f"source:{name}", "name": name}
        if (digest := _text(row.get("blake3"))) is not None:
            component["hashes"] = [{"alg": "BLAKE3", "content": digest}]
        elif (digest := _text(row.get("crc32"))) is not None:
            component["properties"] = [_property("crc32", digest)]
        found.append(component)
    return found


def _dependencies(components: Sequence[JsonObject]) -> list[Json]:
    refs = [str(row["bom-ref"]) for row in components]
    return [{"ref": _MODEL, "dependsOn": list[Json](refs)}] if refs else [{"ref": _MODEL}]


def _formula(lineage: Mapping[str, object]) -> Json:
    """The training run: what was run, with which versions, on what."""
    config = _object(lineage.get("config"))
    rows: Iterator[tuple[str, object]] = (
        *((f"version:{name}", value) for name, value in _object(lineage.get("versions")).items()),
        *((key, lineage[key]) for key in ("config_digest", "data", "hardware", "step", "tokens") if key in lineage),
        *((f"override:{n}", value) for n, value in enumerate(_list(lineage.get("overrides")))),
        *((f"config:{name}", value) for name, value in config.items() if value is not None),
    ).__iter__()
    command = _text(lineage.get("command")) or "train"
    return {
        "bom-ref": "formula",
        "workflows": [
            {
                "bom-ref": _RUN,
                "uid": _text(lineage.get("config_digest")) or _RUN,
                "name": f"apr {command}",
                "taskTypes": ["build"],
                "steps": [{"name": command, "commands": [{"executed": f"apr {command}"}]}],
                "properties": [_property(name, value) for name, value in rows],
            }
        ],
    }
