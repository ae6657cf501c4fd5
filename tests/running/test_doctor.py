"""What `apr doctor` finds, and what it says of what is broken."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.cli.main import run
from aprfmt.llama.client import Llama, LlamaDiedError
from aprfmt.running import doctor


def finding(name: str) -> doctor.DoctorFinding:
    return next(found for found in aprfmt.doctor().findings if found.id == name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own are started in some tests only."""
    slow = (doctor._gpu, doctor._features)
    monkeypatch.setattr(doctor, "_CHECKS", tuple(check for check in doctor._CHECKS if check not in slow))


@pytest.mark.llama
def test_a_sound_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["schema"], body["passed"], body["version"]) == ("apr.doctor/1", True, aprfmt.__version__)
    found = {row["id"]: row for row in body["findings"]}
    assert {"python", "packages", "extra llama", "libggml", "llama.cpp", "processor"} <= found.keys()
    assert "numpy" in found["packages"]["message"]
    if find_spec("xllamacpp"):
        assert "works, built for" in found["llama.cpp"]["message"]


@pytest.mark.llama
def test_the_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"apr {aprfmt.__version__}"
    assert any(line.split()[:2] == ["ok", "python"] for line in lines)


def test_a_package_that_is_too_old_or_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def installed(name: str) -> str:
        if name == "lz4":
            raise PackageNotFoundError(name)
        return "0.1" if name == "numpy" else "99"

    monkeypatch.setattr(doctor, "_CHECKS", (doctor._packages,))
    monkeypatch.setattr(doctor, "requires", lambda name: ["numpy>=1.26", "lz4>=4.3", 'torch==2; extra == "train"'])
    monkeypatch.setattr(doctor, "version", installed)
    found = finding("packages")
    assert (found.status, found.message) == ("fail", "numpy is 0.1, not >=1.26; lz4 is missing")
    assert run(["doctor"]) == 1
    assert "pip install 'numpy>=1.26' 'lz4>=4.3'" in capsys.readouterr().out


_MEND = "pip install 'flash-attn-4[cu13]==4.0.0b36' quack-kernels==0.6.5"


@pytest.mark.parametrize(
    ("versions", "status", "message"),
    [
        ({}, "absent", "not installed; speeds up training on a Hopper GPU"),
        (
            {"flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5"},
            "ok",
            "flash-attn-4 4.0.0b36, quack-kernels 0.6.5: the tested combination of versions",
        ),
        (
            {"flash-attn-4": "4.0.0b37"},
            "warn",
            "flash-attn-4 is 4.0.0b37, not ==4.0.0b36; quack-kernels is missing: versions differ from the "
            "tested combination",
        ),
    ],
)
def test_pinned_kernels_are_compared_with_what_is_installed(
    versions: dict[str, str], status: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if name in versions:
            return versions[name]
        raise PackageNotFoundError(name)

    needed = ["numpy", "flash-attn-4[cu13]==4.0.0b36; extra == 'flash4'", "quack-kernels==0.6.5; extra == 'flash4'"]
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._pins,))
    monkeypatch.setattr(doctor, "requires", lambda name: [*needed, "torch; extra == 'train'"])
    monkeypatch.setattr(doctor, "version", installed)
    found = finding("extra flash4")
    assert (found.status, found.message) == (status, message)
    assert found.hint == (None if status == "ok" else _MEND)


def test_optional_features_of_the_trainer_are_shown_with_the_reason_and_the_line_that_mends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The packages are installed as far as anyone can tell, greet, and one of them cannot be imported."""
    for module, code in {
        "isal/isal_zlib": "raise ImportError('libisal.so.2: cannot open shared object file')",
        "isal/__init__": "",
        "blake3": "print('hello')",
    }.items():
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    for name in ("isal", "blake3"):
        (tmp_path / f"{name}-7.0.dist-info").mkdir()
        (tmp_path / f"{name}-7.0.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._features,))
    report = aprfmt.doctor()
    assert {row.id for row in report.findings} >= {"trainer: flash4", "trainer: quack", "trainer: triton"}
    found = {row.id: row for row in report.findings}
    assert found["trainer: blake3"].status == "ok"
    isal = found["trainer: isal"]
    assert (isal.status, isal.hint) == ("fail", "pip install isal")
    assert isal.message == (
        "isal 7.0 is not usable: ImportError: libisal.so.2: cannot open shared object file; "
        "it is for checksums of checkpoints"
    )


def test_features_that_end_their_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "isal").mkdir()
    (tmp_path / "isal/__init__.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._features,))
    found = finding("trainer")
    assert (found.status, found.hint) == ("fail", "python -m aprtrain.features shows why")


def test_extras_that_are_missing_name_their_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._extras,))
    report = aprfmt.doctor()
    assert report.passed
    assert {row.id for row in report.findings} == {f"extra {name}" for name in doctor.EXTRAS}
    assert all(row.status == "absent" for row in report.findings)
    assert finding("extra hub").hint == "pip install huggingface_hub"


def test_every_extra_of_the_project_is_known() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # The pinned kernels are for some GPUs alone, and no command needs them.
    others = ("all", "dev", "docs", "test", "llama-cpp-python", doctor._PINNED)
    assert extras.keys() - set(others) == doctor.EXTRAS.keys()
    for name, (package, _) in doctor.EXTRAS.items():
        assert any(line.split(">")[0].split("=")[0] == package for line in extras[name])


def _dies(*_: Any, **__: Any) -> None:
    raise LlamaDiedError("llama.cpp died (SIGILL): last words")


def test_a_llama_cpp_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._llama,))
    monkeypatch.setattr(Llama, "__init__", _dies)
    report = aprfmt.doctor()
    assert not report.passed
    assert finding("llama.cpp").message == "llama.cpp died (SIGILL): last words"


@pytest.mark.llama
def test_a_llama_cpp_that_needs_its_extra_buffers_off(monkeypatch: pytest.MonkeyPatch) -> None:
    if not find_spec("xllamacpp"):
        pytest.skip("xllamacpp is not installed")
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._llama,))
    monkeypatch.setattr(Llama, "engine", property(lambda self: f"{self.facts.engine}, extra buffers off"))
    found = finding("llama.cpp")
    assert found.status == "warn"
    assert "AMX" in found.message


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ('{"version": "2", "cuda": "12", "names": ["H200"]}', "ok"),
        ('{"version": "2", "cuda": null, "names": []}', "absent"),
        ("no JSON", "fail"),
    ],
)
def test_what_torch_says(answer: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._gpu,))
    monkeypatch.setattr(doctor, "find_spec", lambda name: True)
    monkeypatch.setattr(doctor, "_TORCH", f"print({answer!r})")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert finding("gpu").status == status


def test_a_disk_that_is_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._disks,))
    monkeypatch.setattr(doctor, "_LITTLE_DISK", 1 << 60)
    assert finding("disk: current folder").status == "warn"


def test_caches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "_CHECKS", (doctor._disks,))
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "a.gguf").write_bytes(bytes(2048))
    assert "2.00 KiB in 1 files" in finding("cache: exports for llama.cpp").message


def test_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    found = finding("disk: current folder")
    assert (found.status, found.message) == ("fail", "none: No such file or directory")
