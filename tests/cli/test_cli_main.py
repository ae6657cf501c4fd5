"""The frame: exit codes, the JSON envelope, signals, streams, start-up cost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import demo_model
import pytest

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.main import main, run
from aprfmt.cli.output import out
from aprfmt.errors import Terminated

Apr = Callable[..., Any]
HEAVY = ("torch", "numpy", "transformers", "gguf", "typer", "click", "tokenizers")


def spawn(*words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "aprfmt", *words], capture_output=True, env=os.environ | env, check=False
    )


def test_version_imports_nothing_heavy() -> None:
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: sys.stderr.write(','.join(m for m in {HEAVY} if m in sys.modules)))\n"
        "sys.argv = ['apr', '--version']\n"
        "from aprfmt.cli.main import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("apr ")
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["inspect", "tree", "hex"])
def test_looking_imports_nothing_heavy(tiny_gguf: Path, name: str) -> None:
    heavy = ("torch", "numpy", "transformers", "gguf", "tokenizers", "rich")
    code = (
        "import sys\nfrom aprfmt.cli.main import run\n"
        f"assert run([{name!r}, {str(tiny_gguf)!r}, '--json']) == 0\n"
        f"sys.stderr.write(','.join(m for m in {heavy} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_one_model_is_inspected_with_the_modules_of_its_kind_alone(tiny_gguf: Path) -> None:
    code = (
        "import sys\nfrom aprfmt.cli.main import run\n"
        f"assert run(['inspect', {str(tiny_gguf)!r}, '--json']) == 0\n"
        "sys.stderr.write(','.join(m for m in sys.modules if m.startswith('aprfmt') or m == 'typer'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stderr.split(",")
    others = ("typer", "aprfmt.canonical.read", "aprfmt.canonical.adapter", "aprfmt.io.pipe")
    assert not {*others, "aprfmt.arch.blocks.tower"} & {*modules}
    assert len([name for name in modules if name.startswith("aprfmt.arch.families.")]) == 1
    assert len(modules) <= 80


@pytest.mark.parametrize("more", [[], ["--json"], ["-q"]])
def test_inspecting_without_a_parser_says_the_same(apr: Apr, tiny_gguf: Path, more: list[str]) -> None:
    plain, parsed = apr("inspect", tiny_gguf, *more), apr(*more, "inspect", "--", tiny_gguf)
    assert plain.code == parsed.code == 0
    assert plain.stdout == parsed.stdout
    assert bool(plain.stdout) == ("-q" not in more)


def test_version_json() -> None:
    done = spawn("--version", "--json")
    body = json.loads(done.stdout)
    assert body["schema"] == "apr.version/1"
    assert body["ok"] is True
    assert set(body) == {"schema", "ok", "name", "version", "python"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(apr: Apr, name: str) -> None:
    done = apr(name, "--help")
    assert done.code == 0
    assert f"apr {name}" in done.stdout.split("Options:")[0].split("Usage:")[1].partition("\n")[2]
    assert "\\[" not in done.stdout
    arguments = done.stdout.partition("Arguments:")[2].split("Options:")[0]
    for words in re.findall(r"^  \[?[A-Z]+\]?(.*)$", arguments, re.MULTILINE):
        assert words.strip() not in ("", "[required]"), "an argument without help"
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "--json" in done.stdout


@pytest.mark.parametrize(
    ("name", "own", "shared"),
    [("prune", "--drop-layers", "--dtype"), ("merge", "--method", "--dtype"), ("run", "--system", "--threads")],
)
def test_help_begins_with_what_a_command_alone_has(apr: Apr, name: str, own: str, shared: str) -> None:
    options = apr(name, "--help").stdout.partition("Options:")[2]
    assert options.index(own) < min(options.index(shared), options.index("--json"))


def test_options_stand_in_sections_behind_those_that_most_need(apr: Apr) -> None:
    shown = apr("export", "--help").stdout
    titles = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert titles[:3] == ["Arguments", "Options", "Quantization"]
    assert titles[-1] == "Speed, memory and disk"
    sections = dict(zip(titles, re.split(r"^\w.*:$", shown, flags=re.MULTILINE)[1:], strict=True))
    places = {
        "--output": "Options",
        "--plan": "Options",
        "--json": "Options",
        "--imatrix": "Quantization",
        "--bits": "MLX",
    }
    places |= {"--pre": "Tokenizer", "--license": "Provenance", "--threads": titles[-1]}
    for option, title in places.items():
        assert [name for name, text in sections.items() if f"{option} " in text or f"{option}," in text] == [title]
    assert "Quantization:" not in apr("inspect", "--help").stdout


def test_help_lists_every_command_without_importing_any(apr: Apr) -> None:
    done = apr("--help")
    assert done.code == 0
    assert all(row.help in done.stdout for row in COMMANDS.values())


@pytest.mark.parametrize(
    "words",
    [("inspect",), ("nope",), ("inspect", "x", "--nope"), ("tensors", "x", "--limit", "many"), ("import", "x"), ()],
)
def test_usage_errors(apr: Apr, words: tuple[str, ...]) -> None:
    done = apr(*words, "--json")
    assert done.code == 2
    assert done.json["schema"] == "apr.error/1"
    assert done.json["ok"] is False
    assert set(done.json["error"]) == {"code", "message", "path", "tensor", "offset", "hint"}
    assert done.json["error"]["code"] == "usage"


def test_errors_as_text_go_to_stderr(apr: Apr, tmp_path: Path) -> None:
    done = apr("inspect", tmp_path / "none.apr")
    assert (done.code, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ")
    assert "none.apr" in done.stderr


@pytest.mark.parametrize(("data", "code"), [(b"", 3), (b"hello world", 3), (b"APR\0" + b"\xff" * 99, 4), (b"GGUF", 4)])
def test_bad_files(apr: Apr, tmp_path: Path, data: bytes, code: int) -> None:
    path = tmp_path / "junk.apr"
    path.write_bytes(data)
    done = apr("inspect", path, "--json")
    assert done.code == code
    assert done.json["error"]["path"] == str(path)


def _wrapped(error: BaseException) -> RuntimeError:
    """As Python 3.11 does while a class is made."""
    wrapping = RuntimeError("Error calling __set_name__")
    wrapping.__cause__ = error
    return wrapping


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (PermissionError(13, "Permission denied", "/x"), 7, "storage"),
        (FileNotFoundError(2, "No such file", "/x"), 3, "not-found"),
        (OSError(28, "No space left on device", "/x"), 7, "storage"),
        (MemoryError(), 7, "memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Terminated(15), 143, "terminated"),
        (_wrapped(KeyboardInterrupt()), 130, "interrupted"),
        (_wrapped(Terminated(15)), 143, "terminated"),
        (ZeroDivisionError("oops"), 70, "internal"),
        (RecursionError("deep"), 70, "internal"),
    ],
)
def test_outcomes(apr: Apr, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, word: str) -> None:
    def boom(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("aprfmt.cli.main._dispatch", boom)
    done = apr("inspect", "x", "--json")
    assert done.code == code
    assert done.json["error"]["code"] == word
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(apr: Apr, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(arguments: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("aprfmt.cli.main._dispatch", boom)
    monkeypatch.setenv("APR_DEBUG", "1")
    assert "Traceback" in apr("inspect", "x").stderr


def test_a_failing_diff_is_trouble(apr: Apr, tmp_path: Path) -> None:
    done = apr("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert done.code == 2
    assert done.json["error"]["code"] == "not-found"


def test_closed_pipe_is_quiet(tiny_gguf: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "aprfmt", "tensors", str(tiny_gguf)]
    done = subprocess.run(words, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == 141


def test_full_disk_behind_stdout_is_a_failure(tiny_gguf: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-m", "aprfmt", "tensors", str(tiny_gguf)]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 7
    assert done.stderr.startswith(b"error: cannot write to standard output: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_json_that_nobody_reads_to_its_end_is_a_failure(tiny_gguf: Path, tmp_path: Path, unbuffered: str) -> None:
    from aprfmt import save_file

    path = tmp_path / "long.apr"
    save_file({}, path, metadata={"model_type": "test", "description": "x" * 400_000})
    words = [sys.executable, "-m", "aprfmt", "inspect", str(path), "--json"]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(os.read(process.stdout.fileno(), 5)) == 5
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=20) == 141


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_closed_streams_change_no_exit_code(tiny_gguf: Path) -> None:
    def shell(line: str) -> tuple[int, bytes]:
        words = ["sh", "-c", f"{line}", sys.executable, str(tiny_gguf)]
        done = subprocess.run(words, capture_output=True, check=False)
        return done.returncode, done.stderr

    assert shell('"$0" -m aprfmt tensors "$1" >&-') == (0, b"")
    assert shell('"$0" -m aprfmt --version >&-') == (0, b"")
    assert shell('"$0" -m aprfmt inspect "$1.none" 2>&-')[0] == 3


def test_ctrl_c_while_starting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def boom(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("aprfmt.cli.main.run", boom)
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "x"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "error: interrupted; no partial output is left\n"


def test_a_seed_without_a_temperature_is_named(apr: Apr, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = "note: --seed has no effect at temperature 0; --temperature 0.8 samples\n"
    line = ["run", tmp_path / "none.gguf", "hi", "--seed", "3"]
    assert apr(*line).stderr.startswith(note)
    assert note not in apr(*line, "--temperature", "0.8").stderr


def test_text_that_was_printed_remains_after_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def boom(arguments: list[str]) -> int:
        out.stream("Once upon")
        raise KeyboardInterrupt

    monkeypatch.setattr("aprfmt.cli.main._dispatch", boom)
    assert run(["run", "m.gguf", "x"]) == 130
    assert capsys.readouterr() == ("Once upon", "error: interrupted\n")


def test_ctrl_c_while_a_module_makes_its_dataclasses(tmp_path: Path) -> None:
    """They run text by `exec`, of which the interpreter remembers that it was interrupted."""
    (tmp_path / "interrupted.py").write_text(
        "from aprfmt.cli import main\nmain.run = lambda arguments: exec('raise KeyboardInterrupt')\nmain.main([])\n"
    )
    words = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"error: interrupted; no partial output is left\n")


def test_near_names_are_suggested(apr: Apr) -> None:
    error = apr("insp", "x", "--json").json["error"]
    assert error["message"] == "no such command 'insp'"
    assert error["hint"] == "did you mean 'inspect'? apr --help"
    error = apr("inspect", "x", "--qualit", "--json").json["error"]
    assert error["message"] == "no such option: --qualit"
    assert error["hint"] == "did you mean --quality or --quiet? apr inspect --help"
    assert "integer" in apr("tensors", "x", "--limit", "many").stderr
    assert apr("inspect", "x", "y", "--json").json["error"]["message"] == "got unexpected extra argument(s) (y)"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("inspect x --drop-layers 3", "no such option: --drop-layers; it is an option of apr prune"),
        ("lint x --min-score 3", "no such option: --min-score; it is an option of apr validate"),
        ("lint x --no-such-thing", "no such option: --no-such-thing"),
    ],
)
def test_an_option_of_another_command_is_known(apr: Apr, typed: str, message: str) -> None:
    error = apr(*typed.split(), "--json").json["error"]
    assert (error["message"], error["hint"]) == (message, f"apr {typed.split(maxsplit=1)[0]} --help")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("distill --teacher t --student s --data d -o o --steps 3 --optimzer muon", "--optimizer muon"),
        ("distill --teacher t --student s --data d -o o --steps 3 --weigth-decay 0", "--weight-decay 0"),
        ("quantize x.gguf q4_k_m -o y.gguf --imatrx m", "--imatrix m"),
    ],
)
def test_a_misspelled_option_is_spelled_in_the_line(apr: Apr, typed: str, meant: str) -> None:
    line, _, _ = typed.rpartition(" --")
    error = apr(*typed.split(), "--json").json["error"]
    assert error["hint"].startswith(f"apr {line} {meant} --json\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_leave_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    script = (
        "import sys, time\n"
        "from aprfmt.cli import main\n"
        "from aprfmt.io.sink import AtomicFile\n"
        "def work(arguments):\n"
        f"    with AtomicFile({str(tmp_path / 'out.bin')!r}) as sink:\n"
        "        sink.write(b'half')\n"
        "        print('started', flush=True)\n"
        "        time.sleep(30)\n"
        "main._dispatch = work\n"
        "main.main(['import', 'x'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert b"Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.turns
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "wanted", "never"),
    [
        ("apr quantize m.gguf q4_k", ["q4_k_m", "q4_k_s"], "q5_k_m"),
        ("apr export m.gguf --dtype bf", ["bf16"], "f16"),
        ("apr export m.gguf --format gg", ["gguf"], "hf"),
        ("apr import m.gguf --arch qwen3", ["qwen3", "qwen3_moe"], "llama"),
        ("apr architectures qwen3", ["qwen3", "qwen3_moe"], "llama"),
        ("apr hex MODEL --tensor blk.0.attn_", ["blk.0.attn_q.weight", "blk.0.attn_k.weight"], "blk.1.attn_q.weight"),
        ("apr tensors MODEL --filter blk.1.ffn_u", ["blk.1.ffn_up.weight"], "blk.1.ffn_down.weight"),
        ("apr tensors missing.gguf --filter b", [], "blk"),
    ],
)
def test_values_are_completed(shell: str, line: str, wanted: list[str], never: str, tmp_path: Path) -> None:
    demo_model.build(tmp_path / "m.gguf")
    line = line.replace("MODEL", str(tmp_path / "m.gguf"))
    env = {
        "_APR_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    if shell == "bash":
        env |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = spawn(**env)
    words = re.findall(r"[\w.]+", done.stdout.decode())
    assert {*wanted} <= {*words}
    assert never not in words
    assert not done.stderr


def test_completion_script_and_words() -> None:
    env = {"COMP_WORDS": "apr inspect --q", "COMP_CWORD": "2", "_APR_COMPLETE": "complete_bash"}
    assert spawn(**env).stdout.split() == [b"--quality", b"--quiet"]
    env = {"COMP_WORDS": "apr ins", "COMP_CWORD": "1", "_APR_COMPLETE": "complete_bash"}
    assert spawn(**env).stdout.split() == [b"inspect"]
