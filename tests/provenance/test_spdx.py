"""Licence ids from users are SPDX; those of sources are kept and named."""

from __future__ import annotations

import pytest

from aprfmt.errors import UsageError
from aprfmt.provenance.spdx import canonical_license, is_spdx, license_warnings, nearest_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("apache-2.0", "Apache-2.0"),
        ("MIT", "MIT"),
        (" mit ", "MIT"),
        ("cc-by-sa-4.0", "CC-BY-SA-4.0"),
        ("apache-2.0 or mit", "Apache-2.0 OR MIT"),
        ("LicenseRef-mine", "LicenseRef-mine"),
        ("gpl-3.0-only with classpath-exception-2.0", "GPL-3.0-only WITH Classpath-exception-2.0"),
    ],
)
def test_ids_are_spelled_as_spdx_does(text: str, expected: str) -> None:
    assert canonical_license(text, "--license") == expected
    assert is_spdx(text)


@pytest.mark.parametrize("text", ["unknown", "Proprietary", "TBD", "", " ", "llama3", "MIT AND", "LicenseRef-a b", "é"])
def test_what_names_no_licence_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        canonical_license(text, "--data-license")
    assert "--data-license" in error.value.message
    assert "LicenseRef-" in str(error.value.hint)
    assert error.value.exit_code == 2


def test_the_nearest_id_is_named() -> None:
    assert nearest_id("apache2") == "Apache-2.0"
    assert nearest_id("cc-by-sa-4") == "CC-BY-SA-4.0"
    assert nearest_id("unknown") is None
    assert nearest_id("zzzzqqqq") is None


def test_a_sources_licence_is_only_warned_about() -> None:
    assert license_warnings("apache-2.0") == license_warnings("mit,apache-2.0") == license_warnings(None) == []
    assert "'gemma'" in license_warnings("gemma")[0]
    assert "'other' (llama3)" in license_warnings("other", "llama3")[0]
