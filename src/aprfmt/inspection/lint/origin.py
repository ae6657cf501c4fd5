"""Rules about provenance: license, name, base model, card."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from aprfmt.canonical.model import Canonical
from aprfmt.canonical.model_kinds import is_adapter
from aprfmt.formats.hfdir import HfNative
from aprfmt.inspection.describe import typed_metadata
from aprfmt.inspection.lint.common import BLOCK_TYPES, fail, is_main, matrices_of, set_key, skip
from aprfmt.inspection.validate import Check, Subject
from aprfmt.io.source import is_file
from aprfmt.provenance import provenance


def no_license(subject: Subject) -> Iterator[Check]:
    """`provenance.no-license`: the license of the weights is stated."""
    if not is_main(subject):
        yield skip("not a complete model")
    elif not typed_metadata(subject.model).get("license"):
        fix = set_key(subject.model, "general.license", "apache-2.0", "--license Apache-2.0")
        yield fail("the license of the weights is missing", fix)


def odd_license(subject: Subject) -> Iterator[Check]:
    """`provenance.license-not-spdx`: the license is an SPDX id."""
    for warning in provenance.read(subject.model).warnings:
        if "SPDX" in warning:
            fix = "use an SPDX id, or `license: other` with `license_name` (general.license.name) and a link"
            yield fail(warning, fix)


def no_name(subject: Subject) -> Iterator[Check]:
    """`provenance.no-name`: the model has a name."""
    if is_main(subject) and subject.model.convention != "hf" and not typed_metadata(subject.model).get("name"):
        fix = set_key(subject.model, "general.name", "'My Model 7B'", "--set name='My Model 7B'")
        yield fail("the model name is missing", fix)


def no_base_model(subject: Subject) -> Iterator[Check]:
    """`provenance.no-base-model`: a quantization or an adapter states its base model."""
    found = subject.canonical
    general = provenance.read(subject.model).general or {}
    base = found.adapter.base if isinstance(found, Canonical) and found.adapter is not None else None
    blocks = [t for t in matrices_of(subject.model) if t.dtype in BLOCK_TYPES]
    if (blocks or is_adapter(subject.model)) and not (base or general.get("base_models")):
        fix = "add `base_model: ORG/MODEL` to the front matter of the original README.md and convert again"
        what = "an adapter" if is_adapter(subject.model) else "a quantization"
        yield fail(f"{what} without the name of its base model", fix)


def no_card(subject: Subject) -> Iterator[Check]:
    """`card.missing`: a folder has a model card."""
    native = subject.model.native_as(HfNative)
    if native is None or native.alone:
        yield skip("not a model folder")
    elif not is_file(native.folder / "README.md"):
        fix = (
            f"write {shlex.quote(str(native.folder / 'README.md'))} with license, base_model and language in "
            "its front matter"
        )
        yield fail("the folder has no model card (README.md)", fix)
