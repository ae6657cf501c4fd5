"""What `make release` writes beside the wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

from materials_bill import check_bill

import release

METADATA = """\
Metadata-Version: 2.4
Name: aprfmt
Version: 1.2.3
License-Expression: Apache-2.0
Provides-Extra: hub
Requires-Dist: numpy>=1.26
Requires-Dist: huggingface_hub>=1.0; extra == 'hub'
Requires-Dist: aprfmt[hub]; extra == 'hub'
"""


def test_the_bill_of_materials_names_files_and_requirements(tmp_path: Path) -> None:
    wheel = tmp_path / "aprfmt-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("aprfmt-1.2.3.dist-info/METADATA", METADATA)
    found = release.bill_of_materials(wheel, {wheel.name: "0" * 64})
    check_bill(found)
    rows = {str(row["name"]): row for row in found["components"]}  # type: ignore[attr-defined]
    assert rows[wheel.name]["hashes"] == [{"alg": "SHA-256", "content": "0" * 64}]
    assert (rows["numpy"]["scope"], rows["huggingface_hub"]["scope"]) == ("required", "optional")
    assert rows["huggingface_hub"]["purl"] == "pkg:pypi/huggingface-hub"
    assert found == release.bill_of_materials(wheel, {wheel.name: "0" * 64})
