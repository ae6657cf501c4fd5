"""JUnit XML and SARIF of validate, lint and qa, and the files for CI services."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.inspection.ci_reports import CiCase, junit, sarif

ROOT = Path(__file__).parents[2]
CASES = [
    CiCase("a.rule", "pass", "fine"),
    CiCase("b.rule", "fail", 'it is <wrong> & "bad"\x00\x1b', "blk.0.weight", "apr convert 'a b'"),
    CiCase("c.rule", "warn", "odd"),
    CiCase("d.rule", "note", "by the way"),
    CiCase("e.rule", "skip", "does not apply"),
    CiCase("f.rule", "error", "it ended"),
]


def read_junit(path: Path) -> ET.Element:
    (suite,) = ET.fromstring(path.read_bytes())
    return suite


def outcomes(suite: ET.Element) -> dict[str, str]:
    return {case.attrib["name"]: next((child.tag for child in case), "passed") for case in suite}


def test_junit_counts_and_escapes() -> None:
    (suite,) = ET.fromstring(junit("lint", "dir/m.gguf", CASES))
    assert {k: suite.attrib[k] for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6", "failures": "1", "errors": "1", "skipped": "1",
    }  # fmt: skip
    assert outcomes(suite) == {
        "a.rule": "passed",
        "b.rule blk.0.weight": "failure",
        "c.rule": "system-out",
        "d.rule": "system-out",
        "e.rule": "skipped",
        "f.rule": "error",
    }
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.attrib["message"] == 'it is <wrong> & "bad"??'
    assert (failure.text or "").endswith("(blk.0.weight)\napr convert 'a b'")


def test_sarif_has_what_code_scanning_asks_for() -> None:
    body = json.loads(sarif("lint", "./a b/m.gguf", CASES))
    (run,) = body["runs"]
    assert (body["version"], run["tool"]["driver"]["name"]) == ("2.1.0", "apr")
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert [(row["ruleId"], row["level"]) for row in run["results"]] == [
        ("b.rule", "error"), ("c.rule", "warning"), ("d.rule", "note"), ("f.rule", "error"),
    ]  # fmt: skip
    for row in run["results"]:
        assert row["ruleId"] in rules
        place = row["locations"][0]["physicalLocation"]
        assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("a%20b/m.gguf", 1)
    assert run["results"][0]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "blk.0.weight"
    assert run["invocations"] == [{"executionSuccessful": False}]
    assert len({row["partialFingerprints"]["apr/v1"] for row in run["results"]}) == 4


def test_reports_say_what_the_command_says(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    done = apr("lint", tiny_gguf, "--junit", tmp_path / "l.xml", "--sarif", tmp_path / "l.sarif", "--json")
    found = done.json
    failed = {row["id"] for row in found["findings"] if row["level"] in ("error", "warn")}
    outcome = outcomes(read_junit(tmp_path / "l.xml"))
    assert {name.split()[0] for name, tag in outcome.items() if tag == "failure"} == failed
    assert (done.code == 1) == bool(failed)
    results = json.loads((tmp_path / "l.sarif").read_text())["runs"][0]["results"]
    assert len(results) == len(found["findings"])
    assert apr("validate", tiny_gguf, "--junit", tmp_path / "v.xml").code == 0
    assert read_junit(tmp_path / "v.xml").attrib["failures"] == "0"
    assert apr("validate", tiny_gguf, "--min-score", "100", "--junit", tmp_path / "v.xml").code in (0, 5)
    with aprfmt.open(tiny_gguf) as model:
        last = list(model.tensors.values())[-1]
        offset, n_bytes = last.offset, last.n_bytes
    broken = tmp_path / "nan.gguf"
    data = bytearray(tiny_gguf.read_bytes())
    data[offset : offset + n_bytes] = b"\xff" * n_bytes
    broken.write_bytes(data)
    done = apr("validate", broken, "--junit", tmp_path / "v.xml", "--json")
    assert (done.code, done.json["passed"]) == (5, False)
    fails = [check for check in done.json["checks"] if check["status"] == "fail"]
    assert int(read_junit(tmp_path / "v.xml").attrib["failures"]) == len(fails) > 0


def test_a_command_that_cannot_finish_is_reported(apr: Any, tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<!doctype html><title>Not found</title>")
    report = tmp_path / "r.xml"
    assert apr("validate", tmp_path / "page.gguf", "--junit", report).code == 3
    assert (
        outcomes(read_junit(report)) == {"unknown_format": "error"} or "error" in outcomes(read_junit(report)).values()
    )
    assert apr("qa", tmp_path / "none.gguf", "--junit", report).code == 3  # an earlier report is replaced
    (tmp_path / "mine.xml").write_text("<mine/>")
    done = apr("lint", tmp_path / "page.gguf", "--junit", tmp_path / "mine.xml")
    assert done.code == 5
    assert (tmp_path / "mine.xml").read_text() == "<mine/>"


@pytest.mark.llama
def test_gates_are_cases(apr: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    done = apr("qa", tiny_gguf, "--junit", tmp_path / "q.xml", "--json")
    outcome = outcomes(read_junit(tmp_path / "q.xml"))
    gates = {gate["id"]: gate for gate in done.json["gates"]}
    assert set(outcome) == set(gates)
    for name, gate in gates.items():
        wanted = {"pass": "passed", "fail": "failure"}.get(gate["status"], "failure" if gate["required"] else "skipped")
        assert outcome[name] == wanted


def steps(name: str) -> Any:
    import yaml

    return yaml.safe_load((ROOT / "ci" / name).read_text())


def test_the_action_runs_the_checks_it_is_asked_for(tiny_gguf: Path, tmp_path: Path) -> None:
    """The script of the action with the inputs that it declares, each in an environment variable."""
    action = steps("action.yml")
    step = action["runs"]["steps"][-1]
    inputs = {name: row.get("default", "") for name, row in action["inputs"].items()} | {
        "model": str(tiny_gguf), "checks": "validate lint", "reports": str(tmp_path / "a b"),
    }  # fmt: skip
    env = {key: inputs[re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", text)[1]] for key, text in step["env"].items()}  # type: ignore[index]
    env = {**os.environ, **env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step["run"]], env=env, capture_output=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    made = sorted(path.name for path in (tmp_path / "a b").iterdir())
    assert made == ["lint.sarif", "lint.xml", "validate.sarif", "validate.xml"]
    assert "${{" not in step["run"], "an input in a script is code that its author chooses"


def test_the_files_name_commands_and_options_that_exist() -> None:
    import typer

    from aprfmt.cli.group import build

    group: Any = typer.main.get_command(build(None))
    job = steps("gitlab.yml")["check-model"]
    lines = [line for line in job["script"] if line.startswith("apr ")]
    assert len(lines) == 3
    for line in lines:
        command, options = line.split()[1], re.findall(r"--[\w-]+", line)
        assert {*options} <= {name for p in group.commands[command].params for name in p.opts}
    reports = {re.search(r"--junit (\S+)", line)[1] for line in lines}  # type: ignore[index]
    assert reports == {*job["artifacts"]["reports"]["junit"]}
    text = (ROOT / "ci" / "Containerfile").read_text()
    assert re.findall(r"^(FROM|ENTRYPOINT|USER) ", text, re.MULTILINE) == ["FROM", "USER", "ENTRYPOINT"]
