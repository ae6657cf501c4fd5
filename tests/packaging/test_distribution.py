"""The wheel and the source archive: what they hold, and that the wheel alone does the main job without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import aprfmt

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.network, pytest.mark.slow]


@dataclass(frozen=True)
class Distribution:
    wheel: Path
    sdist: Path


def run(*words: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def new_environment(path: Path) -> Path:
    """The Python of a fresh virtual environment, into which this one's pip installs."""
    run(sys.executable, "-m", "venv", "--without-pip", path)
    return path / "bin" / "python"


def pip_install(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """What `make dist` writes."""
    work = tmp_path_factory.mktemp("dist")
    python = new_environment(work / "builder")
    done = pip_install(python, "build", "hatchling")
    if done.returncode:
        message = f"no package index gives `build`: {done.stderr.strip()[-200:]}"
        (pytest.fail if os.environ.get("APR_REQUIRE_MATERIAL") == "1" else pytest.skip)(message)
    run(python, "-m", "build", "--no-isolation", "--outdir", work / "out", ROOT)
    (wheel,), (sdist,) = (work / "out").glob("*.whl"), (work / "out").glob("*.tar.gz")
    return Distribution(wheel, sdist)


@pytest.fixture(scope="module")
def clean(distribution: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that holds the wheel and what it requires, prebuilt packages alone."""
    python = new_environment(tmp_path_factory.mktemp("clean") / "env")
    done = pip_install(python, "--only-binary", ":all:", distribution.wheel)
    assert done.returncode == 0, done.stderr
    return python.parent


def test_both_archives_have_the_version_and_what_is_not_code(distribution: Distribution) -> None:
    assert distribution.wheel.name == f"aprfmt-{aprfmt.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(distribution.wheel) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"aprfmt-{aprfmt.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {aprfmt.__version__}\n" in metadata
    data = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert "aprfmt/cli/demo-tiny.gguf" in data
    assert names - {name for name in names if ".dist-info/" in name} == data
    with tarfile.open(distribution.sdist) as sdist:
        top = f"aprfmt-{aprfmt.__version__}/"
        assert {f"{top}{name}" for name in ("pyproject.toml", "LICENSE", "CHANGELOG.md", "Makefile")} <= set(
            sdist.getnames()
        )


def test_the_wheel_does_the_main_job_without_a_compiler(clean: Path, tmp_path: Path, smollm2_short: Path) -> None:
    nothing = {"PATH": str(clean), "HOME": str(tmp_path), "LANG": "C.UTF-8"}

    def apr(*words: str | Path) -> dict[str, Any]:
        body = json.loads(run(clean / "apr", *words, "--json", env=nothing, cwd=tmp_path))
        assert body["ok"] is True
        assert isinstance(body, dict)
        return body

    assert apr("--version")["version"] == aprfmt.__version__
    apr("import", smollm2_short, "-o", "model.apr")
    assert apr("inspect", "model.apr")["architecture"] == "llama"
    apr("export", "model.apr", "-o", "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == smollm2_short.read_bytes()
    apr("quantize", "model.apr", "Q4_K_M", "--allow-requantize", "-o", "small.gguf")
    dtypes = apr("inspect", "small.gguf")["dtypes"]
    assert {"Q4_K", "Q6_K", "Q5_0", "Q8_0", "F32"} == set(dtypes), "the mix that llama.cpp makes of these widths"
    found = {row["id"]: row for row in apr("doctor")["findings"]}
    assert found["packages"]["status"] == "ok"
    assert found["libggml"]["status"] == "ok"


def test_what_is_missing_is_named_with_a_command_that_works(clean: Path, tmp_path: Path) -> None:
    found = json.loads(run(clean / "apr", "doctor", "--json", env={"HOME": str(tmp_path)}))["findings"]
    absent = {row["id"]: row["hint"] for row in found if row["status"] == "absent"}
    assert {"extra llama", "extra train", "extra fast"} <= absent.keys()
    assert absent["extra train"] == "pip install torch"
    words = absent["extra llama"].partition(",")[0].split()
    assert words[:2] == ["pip", "install"]
    done = pip_install(clean / "python", "--only-binary", ":all:", *words[2:])
    assert done.returncode == 0, done.stderr
    after = run(clean / "apr", "doctor", "--json", env={"HOME": str(tmp_path)})
    assert {row["id"]: row["status"] for row in json.loads(after)["findings"]}["llama.cpp"] == "ok"
