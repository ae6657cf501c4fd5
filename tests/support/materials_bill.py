"""Judges bills of materials by cyclonedx-python-lib, against the strict schema of CycloneDX 1.6."""

import json

import pytest


def check_bill(document: object) -> None:
    """Fails for a document that the schema does not allow."""
    validation = pytest.importorskip("cyclonedx.validation.json")  # takes seconds to import
    schema = pytest.importorskip("cyclonedx.schema")
    found = validation.JsonStrictValidator(schema.SchemaVersion.V1_6).validate_str(json.dumps(document))
    assert found is None, found
