"""hf:// addresses: the local cache by its layout, then the library, then clear refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import aprfmt
from aprfmt.errors import MissingDependencyError, NotFoundError, RefusedError, UsageError
from aprfmt.formats import hub, hub_errors

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds org/name at SHA, offline."""
    for key in ("HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fill(tmp_path / "hub", "org/name")
    return tmp_path / "hub"


def fill(cache: Path, repo: str, name: str = "model.safetensors", ref: str = "main") -> Path:
    """Adds one weights file, as huggingface_hub lays it out; returns the snapshot."""
    root = cache / ("models--" + repo.replace("/", "--"))
    for folder in ("blobs", f"snapshots/{SHA}", f"refs/{Path(ref).parent}"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(SHA)
    safetensors.numpy.save_file({"a": np.zeros(3, dtype=np.float32)}, root / "blobs" / "b0")
    (root / "snapshots" / SHA / name).symlink_to("../../blobs/b0")
    return root / "snapshots" / SHA


@pytest.mark.parametrize("suffix", ["", "@main", f"@{SHA}", "/"])
def test_the_cache_is_found(cache: Path, suffix: str) -> None:
    address = f"hf://org/name{suffix}"
    assert hub.snapshot(address) == cache / "models--org--name" / "snapshots" / SHA
    with aprfmt.open(address) as model:
        assert model.format == "hf"
        assert list(model.tensors) == ["a"]


def test_one_file(cache: Path) -> None:
    folder = fill(cache, "org/name", "x.Q4_1.gguf")
    assert hub.snapshot("hf://org/name/x.Q4_1.gguf") == folder / "x.Q4_1.gguf"
    assert hub.snapshot("hf://org/name@main/x.Q4_1.gguf") == folder / "x.Q4_1.gguf"
    with pytest.raises(NotFoundError):
        hub.snapshot("hf://org/name/y.gguf")


def test_revisions_with_a_slash(cache: Path) -> None:
    fill(cache, "org/pull", ref="refs/pr/3")
    assert hub.snapshot("hf://org/pull@refs/pr/3").name == SHA
    with pytest.raises(NotFoundError):
        hub.snapshot("hf://org/pull")


@pytest.mark.parametrize(
    "address",
    [
        "hf://",
        "hf://org",
        "hf://org/",
        "hf:///name",
        "hf://org/name@",
        "hf://../name",
        "hf://org/..",
        "hf://org/name@../../x",
        "hf://org/name/../../x",
        "hf://org/name/a/../../x",
        "hf://org/name@..",
        "hf://org--x/name",
        "hf://org/na me",
        "hf://org/name\n",
        "hf://org/name\0",
        "hf://org/name/a\\b",
        "org/name",
    ],
)
def test_bad_addresses_are_refused(cache: Path, address: str) -> None:
    with pytest.raises(UsageError):
        hub.parse(address)


def test_offline_says_so(cache: Path) -> None:
    with pytest.raises(NotFoundError, match="HF_HUB_OFFLINE") as caught:
        aprfmt.open("hf://org/other")
    assert caught.value.exit_code == 3
    with pytest.raises(NotFoundError):
        hub.snapshot("hf://org/name@other")


def test_a_hostile_ref_leads_nowhere(cache: Path) -> None:
    (cache / "models--org--name" / "refs" / "main").write_text("../../../..")
    with pytest.raises(NotFoundError):
        hub.snapshot("hf://org/name")


def test_a_snapshot_without_weights_is_not_enough(cache: Path) -> None:
    (cache / "models--org--name" / "snapshots" / SHA / "model.safetensors").unlink()
    with pytest.raises(NotFoundError):
        hub.snapshot("hf://org/name")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], expected: str) -> None:
    assert hub_errors.cache_folder(environment) == Path(expected)


def test_a_home_of_nobody_is_refused() -> None:
    with pytest.raises(UsageError, match="~no-such-user/models") as caught:
        hub_errors.cache_folder({"HF_HOME": "~no-such-user/models"})
    assert caught.value.hint == "set HF_HOME=FOLDER"


def test_the_default_cache_is_that_of_the_library() -> None:
    assert hub_errors.cache_folder({}) == Path.home() / ".cache" / "huggingface" / "hub"


def test_the_library_is_not_asked_for_what_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.snapshot("hf://org/name")


def test_a_half_fetched_snapshot_is_completed_or_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "models--org--name" / "snapshots" / SHA
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(RefusedError, match="model-00002-of-00002"):
        aprfmt.open("hf://org/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(MissingDependencyError):
        hub.snapshot("hf://org/name")


def test_without_the_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(MissingDependencyError) as caught:
        hub.snapshot("hf://org/other")
    assert caught.value.exit_code == 6
    assert caught.value.hint is not None
    assert "pip install" in caught.value.hint


def test_the_real_library_knows_these_names() -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    for name in hub_errors._ANSWERS:
        assert issubclass(getattr(errors, name), Exception)


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("hf:/org/name", "hf://org/name"),
        ("HF://org/name", "hf://org/name"),
        ("hf:org/name", "hf://org/name"),
        ("https:/hub.invalid/org/name", "https://hub.invalid/org/name"),
        ("s3:/b/x", "aws s3 cp --recursive s3://b/x FOLDER"),
        ("gs://b/x", "gcloud storage cp --recursive gs://b/x FOLDER"),
        ("file:///tmp/x.gguf", "write /tmp/x.gguf"),
    ],
)
def test_a_mistyped_address_gets_the_right_one(address: str, hint: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        aprfmt.open(address)
    assert hint in (caught.value.hint or "")
    assert caught.value.path == address
