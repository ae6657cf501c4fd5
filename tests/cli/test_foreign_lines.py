"""Every command line of other programs that we answer: what we make of it, and that our line runs to its end."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_model import build
from hub_server import attach, serve
from plain_models import write_adapter, write_folder
from train_corpora import functions

import aprfmt
from aprfmt.cli import foreign_commands, foreign_options, other_names, other_tools
from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.failures import meant
from aprfmt.cli.group import build as build_group
from aprfmt.cli.output import out
from aprfmt.errors import UsageError

pytestmark = pytest.mark.usefixtures("two_processors")

LINES = Path(__file__).with_name("foreign_lines.txt").read_text().splitlines()[2:]
FOREIGN = dict(zip(LINES[::2], (line.strip() for line in LINES[1::2]), strict=True))
OURS = [
    *dict.fromkeys(
        one
        for line in FOREIGN.values()
        for one in line.removeprefix("? ").split("; apr ")
        if one != "?" and not one.startswith("resume")  # test_resume has real runs
    )
]

MAY_BE_1 = {"diff", "qa", "doctor", "validate"}
"""Commands whose exit status 1 is an answer."""

TRAINING = "--device cpu --seq-len 32 --tokens-per-step 64 --micro-tokens 64 --eval-tokens 64 --held-out 0.1 --plan"
FILLED_IN = {"MODEL": "m.gguf", "FILE": "m.gguf", "SRC": "model", "DATA": "c.jsonl", "OUT": "out", "STEPS": "1"}


def suggested(line: str) -> tuple[str, bool]:
    """What the hint of a line begins with, and whether it is run."""
    words = shlex.split(line)
    out.configure(words)
    error = other_tools.parse(words) if words[0] in COMMANDS else Exception("no such command")
    assert error is not None, "our own line"
    found = other_tools.suggest(words, error)
    assert found is not None
    return "; apr ".join(map(shlex.join, (found.words, *found.more))), found.runs(words)


def test_there_are_150() -> None:
    assert len(FOREIGN) >= 150


@pytest.mark.parametrize("line", FOREIGN)
def test_the_line_is_answered(line: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    ours, runs = suggested(line)
    assert ("" if runs else "? ") + ours == FOREIGN[line] + " " * (FOREIGN[line] == "?")


@pytest.mark.parametrize("line", ["verify m.gguf me.pub", "verify me.pub m.gguf"])
def test_a_key_is_not_a_list_of_digests(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "m.gguf")
    (tmp_path / "me.pub").touch()
    assert suggested(line) == ("verify m.gguf --key me.pub", True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the lines name, at tiny sizes."""
    root = tmp_path_factory.mktemp("foreign")
    build(root / "m.gguf")
    shutil.copy(root / "m.gguf", root / "m2.gguf")
    aprfmt.import_model(root / "m.gguf", root / "m.apr")
    aprfmt.quantize_model(root / "m.gguf", root / "q.gguf", "q8_0")
    (root / "shards").mkdir()
    (root / "parts").mkdir()
    aprfmt.convert_model(root / "m.gguf", root / "shards" / "m.gguf", shard_size="100KB")
    write_folder(root / "model")
    write_adapter(root / "adapter")
    aprfmt.merge_adapter(root / "model", root / "adapter", root / "tuned", format="hf")
    aprfmt.convert_model(root / "tuned", root / "base.gguf")
    aprfmt.convert_model(root / "adapter", root / "lora.gguf", base=root / "model")
    (root / "text.txt").write_text("The cat sat on the mat and looked at the rain in the garden. " * 40)
    (root / "c.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in functions(30)))
    (root / "recipe.yaml").write_text("merge_method: linear\nmodels: [{model: model, parameters: {weight: 1}}]\n")
    (root / "chat.json").write_text('[{"role": "user", "content": "hey"}]')
    (root / "chat.jinja").write_text("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    aprfmt.imatrix(root / "m.gguf", root / "text.txt", root / "m.imatrix.gguf", chunk_size=32)
    values = {
        "general.license": "mit",
        "general.name": "demo",
        "tokenizer.chat_template": (root / "chat.jinja").read_text(),
    }
    aprfmt.edit_metadata(root / "m.gguf", values)
    (root / "Modelfile.small").write_text("FROM ./m.gguf\n")
    (root / "Modelfile.folder").write_text("# of a folder\nfrom model\nPARAMETER temperature 0.2\n")
    (root / "SUMS").write_text(f"{hashlib.sha256((root / 'm.gguf').read_bytes()).hexdigest()}  m.gguf\n")
    (root / "run").mkdir()
    (root / "run" / "metrics.jsonl").write_text('{"event": "step", "step": 1, "tokens": 8, "loss": 2.0, "ce": 2.0}\n')
    return root


@pytest.mark.llama
@pytest.mark.turns(of=6)
@pytest.mark.parametrize("line", OURS)
def test_our_line_runs_to_its_end(
    line: str, world: Path, apr: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(world, here := tmp_path / "here", copy_function=shutil.copy2 if "set" in line else os.link)
    monkeypatch.chdir(here)
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    words = [FILLED_IN.get(word, word) for word in shlex.split(line)]
    words[1:1] = TRAINING.split() if words[0] in ("distill", "pretrain") else []
    words += {"distill": ["--allow-same-arch"], "push": ["--no-license"]}.get(words[0], [])
    if words[0] == "run" and "hi" not in words and "--embed" not in words:
        words.append("hi")
    if any("org/repo" in word for word in words):
        (here / "plain" / "README.md").parent.mkdir()
        with serve("org/repo") as hub:
            attach(hub, tmp_path, monkeypatch)
            hub.exists = words[0] != "push"
            hub.files = {path.name: path.read_bytes() for path in (here / "model").iterdir()}
            monkeypatch.setenv("HF_TOKEN", "hf_x")
            monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
            done = apr(*words, *(["--plan"] if words[0] == "push" and "--plan" not in words else []))
    else:
        done = apr(*words)
    assert done.code in ((0, 1) if words[0] in MAY_BE_1 else (0,)), done.stdout + done.stderr


def test_what_the_tables_name_exists() -> None:
    import typer

    group: Any = typer.main.get_command(build_group(None))
    known = {option for command in group.commands.values() for p in command.params for option in p.opts}

    def options(meanings: Any) -> set[str]:
        words = {m.partition("=")[0] for m in meanings.values() if isinstance(m, str) and m.startswith("-")}
        return words - {""}

    assert options(foreign_options.OPTIONS) <= known
    assert {*foreign_options.OPTIONS_OF} <= {*COMMANDS}
    assert {*other_names.SAME.values()} <= {*foreign_commands.FOREIGN, *COMMANDS}
    assert not {*other_names.SAME} & {*foreign_commands.FOREIGN, *COMMANDS}
    assert {*other_names._NAMES} <= {*foreign_commands.FOREIGN, *COMMANDS}
    for name, foreign in foreign_commands.FOREIGN.items():
        command = foreign.ours.split()[:1]
        assert {*command} <= {*COMMANDS}, name
        mine = {option for p in group.commands[command[0]].params for option in p.opts} if command else set()
        assert {word for word in map(_option_of, foreign.ours.split()) if word} <= mine, name


def _option_of(word: str) -> str:
    return word.partition("=")[0] if word.startswith("-") else ""


def test_a_line_that_means_the_same_is_run_with_a_note(apr: Any, world: Path, tmp_path: Path) -> None:
    made = tmp_path / "out.gguf"
    done = apr("llama-quantize", world / "m.gguf", made, "Q8_0")
    assert done.code == 0
    assert done.stderr.startswith(f"note: apr quantize {world / 'm.gguf'} Q8_0 -o {made}\n")
    assert made.exists()
    again = apr("llama-quantize", world / "m.gguf", made, "Q8_0")  # never overwritten by a guess
    assert again.code == 5
    assert "--force" in again.stderr
    assert apr("llama-gguf-hash", world / "m.gguf", "--json").json["schema"] == "apr.tensors/1"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("hf upload org/repo absent", "apr push absent org/repo"),
        ("ollama push org/repo", "apr push SRC org/repo"),
        ("convert m.gguf --out x.gguf --yes", "apr convert m.gguf --output x.gguf --force"),
        ("trl gkd --model a --teacher b --dataset c", "apr distill b --student a --data c -o run --epochs 3"),
        ("llama-cli -m m.gguf -p hi --mirostat 2", "apr run m.gguf hi\n      without --mirostat\n"),
        ("llama-server -m m.gguf --port 80", "llama-server -m m.gguf --port 80\n"),
        ("serve model -c 9", "apr convert model -o model.gguf && llama-server -m model.gguf -c 9\n"),
        ("run-server m.gguf 8080", "llama-server -m m.gguf --port 8080\n"),
        ("serve --port 8080 m.gguf", "llama-server -m m.gguf --port 8080\n"),
        ("run m.gguf --api", "llama-server -m m.gguf\n"),
        ("vllm serve m.gguf -x", "apr convert m.gguf -o m-hf --format hf && vllm serve m-hf -x\n"),
        ("embed m.gguf 'a b' -o 'e f'", "apr run m.gguf --embed 'a b' --json > 'e f'\n"),
        ("ollama pull llama3", "apr convert hf://org/repo -o model.gguf\n      every command also reads hf://org/repo"),
        ("pull llama3.2:1b", "apr convert hf://org/repo -o model.gguf\n"),
        ("pull localhost:5000/model:1", "apr pull oci://localhost:5000/model:1\n"),
        ("huggingface-cli login", "hf auth login"),
    ],
)
def test_what_publishes_overwrites_or_differs_is_only_suggested(apr: Any, line: str, hint: str) -> None:
    done = apr(*shlex.split(line))
    assert done.code == 2
    assert f"hint: {hint}" in done.stderr


@pytest.mark.parametrize("program", ["llama-server", "ollama"])
def test_another_program_is_named_with_its_whole_line(
    program: str, apr: Any, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    typed, hint = {
        "llama-server": ("serve m.gguf", "llama-server -m m.gguf"),
        "ollama": ("modelfile Modelfile.small", "ollama create model -f Modelfile.small"),
    }[program]
    monkeypatch.setenv("PATH", str(tmp_path))
    done = apr(*shlex.split(typed))
    assert f"{program} is another program, not installed here\nhint: {hint}\n" in done.stderr
    (tmp_path / program).write_text("#!/bin/sh\n")
    (tmp_path / program).chmod(0o755)
    assert f"installed here as {tmp_path / program}\nhint: {hint}\n" in apr(*shlex.split(typed)).stderr


def test_an_option_is_added_to_the_whole_line(apr: Any, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    refused = apr("convert", "model", "q.gguf", "--dtype", "f16")
    assert refused.code == 5
    assert (
        "hint: apr convert model --dtype f16 -o q.gguf --force\n      to replace it; to keep both:\n" in refused.stderr
    )
    assert refused.stderr.endswith("      apr convert model --dtype f16 -o q-2.gguf\n")
    refused = apr("quantize", "q.gguf", "q4_0", "-o", "never.gguf")
    line = "apr quantize q.gguf q4_0 -o never.gguf --allow-requantize"
    assert f"hint: {line}\n      or start from the unquantized model\n" in refused.stderr
    refused = apr("inspect", "m.gguf", "--metdata")
    assert "hint: apr inspect m.gguf --metadata\n" in refused.stderr


def test_the_base_of_an_adapter_is_suggested_by_its_name(world: Path, tmp_path: Path, apr: Any) -> None:
    shutil.copytree(world / "model", tmp_path / "tiny")
    shutil.copytree(world / "adapter", tmp_path / "tiny-lora")
    assert suggested(f"convert-lora {tmp_path / 'tiny-lora'}")[1], "config.json describes the base"
    (tmp_path / "tiny-lora" / "config.json").unlink()
    done = apr("convert-lora", tmp_path / "tiny-lora")
    line, why = done.stderr.partition("hint: apr ")[2].splitlines()
    assert why.strip() == f"{tmp_path / 'tiny'} is taken as the base model because of its name"
    assert line.startswith(f"convert {tmp_path / 'tiny-lora'} --base {tmp_path / 'tiny'} -o ")


def test_a_layer_and_a_name_are_one_pattern(world: Path, apr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    wanted = {f"blk.1.{name}.weight" for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")}
    for line in (
        "tensors m.gguf --layer 1 --grep attn",
        "ls m.gguf --name attn --layer 1",
        "ls m.gguf --layer 1 --filter blk.1.attn",
        "inspect m.gguf --tensors --block 1 --filter 'attn*'",
    ):
        done = apr(*shlex.split(line))
        assert {row.split()[0] for row in done.stdout.splitlines() if row.startswith("blk.")} == wanted, line


def test_lines_for_two_types_write_two_files() -> None:
    lines = ("to-gguf x --dtype f16", "to-gguf x --dtype q8_0", "to-mlx x --bits 4", "to-mlx x --bits 8")
    found = [other_tools.rephrase(line.split()) for line in lines]
    names = [one.words[one.words.index("-o") + 1] for one in found if one is not None]
    assert names == ["x-f16.gguf", "x-q8_0.gguf", "x-4bit-mlx", "x-8bit-mlx"]


def test_models_and_adapters_are_told_apart_by_merge(apr: Any, world: Path, tmp_path: Path) -> None:
    base, lora, made = world / "model", world / "adapter", tmp_path / "out"
    done = apr("merge", base, lora, "-o", made)
    assert done.code == 2
    line = done.stderr.partition("hint: apr ")[2]
    assert line == f"merge-adapter {base} {lora} -o {made}\n"
    assert apr(*shlex.split(line)).code == 0


def test_an_adapter_before_its_base_is_merged_into_it(apr: Any, world: Path, tmp_path: Path) -> None:
    base, lora, made = world / "model", world / "adapter", tmp_path / "out"
    done = apr("merge-adapter", lora, base, "-o", made)
    assert done.code == 0
    assert done.stderr.startswith(f"note: apr merge-adapter {base} {lora} -o {made}\n")
    assert aprfmt.diff(made, world / "tuned", values=True).identical


def test_shards_are_joined_by_the_line_that_shard_names(apr: Any, world: Path, tmp_path: Path) -> None:
    made = tmp_path / "joined.gguf"
    done = apr("shard", world / "shards", "-o", made)
    assert done.code == 2
    line = done.stderr.partition("hint: to join shards: apr ")[2].partition(";")[0]
    assert apr(*shlex.split(line)).code == 0
    assert made.is_file()


def test_q_with_the_format_mlx_is_not_taken_for_quiet(apr: Any, world: Path, tmp_path: Path) -> None:
    done = apr("convert", world / "model", "-o", tmp_path / "out", "--format", "mlx", "-q")
    assert done.code == 2
    assert "--bits 4" in done.stderr
    assert not (tmp_path / "out").exists()


def test_text_behind_a_model_is_the_data_of_imatrix(apr: Any, world: Path, tmp_path: Path) -> None:
    made = tmp_path / "i.gguf"
    model, text = world / "m.gguf", world / "text.txt"
    done = apr("imatrix", model, "-f", text, "-o", made, "--plan")
    assert done.code == 0
    assert done.stderr.startswith(f"note: apr imatrix {model} --data {text} -o {made}\n")
    made.write_text("kept")
    assert apr("imatrix", model, "-f", text, "-o", made).code == 5, "-f is not --force then"
    assert made.read_text() == "kept"
    assert apr("imatrix", model, text, "-o", made, "--plan").code == 0
    assert "--merge" in apr("imatrix", model, model, "-o", made).stderr


def test_a_quantization_of_a_repository_is_pulled_as_a_file() -> None:
    found = other_tools.rephrase(["ollama", "pull", "hf.co/org/repo:Q4_K_M"])
    assert found is not None
    assert found.line() == "apr convert hf://org/repo:Q4_K_M -o repo-Q4_K_M.gguf"


def test_a_modelfile_names_the_model(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama reads a GGUF itself; our line must not overwrite the user's Modelfile."""
    monkeypatch.chdir(world)
    found = other_tools.rephrase(["create", "tiny", "-f", "Modelfile.small"])
    assert found is not None
    assert found.hint() == "\n".join(
        ("ollama create tiny -f Modelfile.small", "Ollama reads ./m.gguf directly: no conversion is needed")
    )
    found = other_tools.rephrase(["create", "tiny", "-f", "Modelfile.folder"])
    assert found is not None
    assert found.line() == (
        "apr convert model -o tiny.gguf && sed 's|^FROM .*|FROM ./tiny.gguf|' Modelfile.folder > tiny.Modelfile"
        " && ollama create tiny -f tiny.Modelfile"
    )
    assert found.because.startswith("apr does not create Ollama models; ollama is another program")


def test_a_list_names_the_models_of_a_folder(world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any) -> None:
    monkeypatch.chdir(world)
    (world / "half.gguf").write_bytes(b"PK\3\4")
    done = apr("list")
    assert done.code == 0
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert {"adapter", "base.gguf", "m.apr", "model", "tuned"} < {*names}
    assert [name for name in names if name.startswith("shards")] == [f"shards/{min(os.listdir('shards'))}"]
    assert "unreadable: half.gguf: a zip" in done.stdout
    (world / "half.gguf").unlink()
    found = apr("inspect", ".", "--json").json
    assert found["schema"] == "apr.inspect/1"
    sizes = {model["path"]: (model["format"], model["files"], model["size_bytes"]) for model in found["models"]}
    assert sizes["m.gguf"] == ("gguf", 1, (world / "m.gguf").stat().st_size)
    assert sizes["adapter"][0] == "adapter"


def test_an_output_that_is_missing_gets_a_name(world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any) -> None:
    monkeypatch.chdir(world)
    for line, ours in (
        (("convert", "model", "--format", "mlx"), "apr convert model --format mlx -o model-mlx"),
        (("merge", "model", "adapter"), "apr merge-adapter model adapter -o merged"),
        (("import", "m.gguf"), "apr import m.gguf -o m-2.apr"),  # m.apr exists
    ):
        assert apr(*line, "--plan").stderr.startswith(f"note: {ours[:18]}"), ours
        found = other_tools.suggest(line, other_tools.parse(line) or Exception())
        assert found is not None
        assert found.line() == ours
    assert "hint: apr convert model -o model.gguf\n" in apr("convert", "model").stderr, "the format is unclear"
    assert "hint: apr merge model tuned -o x --method linear\n" in apr("merge", "model", "tuned", "-o", "x").stderr


def test_weights_without_a_method_are_those_of_a_mean(world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any) -> None:
    monkeypatch.chdir(world)
    words = ("merge", "model", "tuned", "--weight", "0.25", "--weight", "0.75", "-o", "mean", "--plan")
    done = apr(*words)
    assert done.code == 0
    assert done.stderr.startswith(f"note: apr {' '.join(words)} --method linear\n")
    refused = apr(*words, "--base", "model")
    assert refused.code == 2
    assert f"hint: apr {' '.join(words)} --base model --method linear\n" in refused.stderr


def test_a_recipe_or_a_page_as_the_only_other_word(world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any) -> None:
    monkeypatch.chdir(world)
    assert apr("merge", "recipe.yaml", "-o", "never", "--plan").code == 0
    assert apr("report", "run", "never.html", "--json").json["schema"] == "apr.report/1"
    (world / "never.html").unlink()
    assert apr("report", "m2.gguf").stderr == "note: apr report m2.gguf -o m2.html\n"
    assert "hint: apr report m2.gguf -o m2.html --force\n" in apr("report", "m2.gguf").stderr
    (world / "m2.html").unlink()


def test_a_line_for_several_models_is_run_for_each(world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any) -> None:
    monkeypatch.chdir(world)
    (world / "bad.gguf").write_bytes(b"<html>")
    done = apr("check", "bad.gguf", "m.gguf", "m2.gguf")
    assert done.code == 3  # of the first: a later one that is fine does not hide it
    assert [line for line in done.stderr.splitlines() if line.startswith("note")] == [
        f"note: apr validate {name}" for name in ("bad.gguf", "m.gguf", "m2.gguf")
    ]
    assert done.stdout.count("passed, score") == 2
    (world / "bad.gguf").unlink()


def test_a_training_runs_under_other_names_of_its_options(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    typed = [
        "distill",
        "--teacher",
        "tuned",
        "--student",
        "model",
        "--data",
        "c.jsonl",
        "--max-steps",
        "2",
        "-o",
        "out",
    ]
    for line in (
        typed,
        ["train", *typed[1:]],
        [word for word in typed if word not in ("-o", "out")],
        ["distill", "tuned", "model", *typed[5:]],
        ["sft", "model", *typed[5:]],
    ):
        assert suggested(shlex.join(line))[1], line
    without_length = [word for word in typed if word not in ("--max-steps", "2")]
    for line in (
        ["train", *without_length[1:]],
        ["sft", "model", *without_length[5:]],
        ["distill", "tuned", "model", *without_length[5:]],
        ["mlx_lm.lora", "--model", "model", "--train", "--data", "c.jsonl"],
        ["dpo", "model", *typed[5:]],  # another training
    ):
        assert not suggested(shlex.join(line))[1], line


def test_templates_are_set_by_other_names_and_tried_by_the_hint(world: Path, tmp_path: Path, apr: Any) -> None:
    model, template, broken = tmp_path / "m.gguf", tmp_path / "t.jinja", tmp_path / "b.jinja"
    shutil.copy(world / "m.gguf", model)
    template.write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    broken.write_text("nothing")
    assert apr("set", model, "chat_template", template).code == 0
    assert apr("meta", "template", "render", model).stdout.strip() == "<Hello>"
    for words in (("--template", template), ("--chat-template", template), (f"chat_template=@{template}",)):
        done = apr("meta", "set", model, *words)
        assert done.stdout == f"{model} is unchanged: it already has these values\n", done.stderr
    refused = apr("meta", "set", model, "--template", broken)
    assert refused.code == 5
    line = refused.stderr.partition("hint: ")[2]
    assert apr(*shlex.split(line)[1:]).stdout.strip() == "nothing"


def test_metadata_in_any_order_and_by_short_keys(world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any) -> None:
    monkeypatch.chdir(world)
    for words in (
        ("set", "m2.gguf", "name", "one"),
        ("m2.gguf", "general.name=two"),
        ("set", "general.name", "three", "m2.gguf"),
        ("m2.gguf", "--name", "four"),
    ):
        assert apr("meta", *words).code == 0, words
        assert apr("meta", "get", "m2.gguf", "general.name").stdout.strip() in words[-1] + words[-2], words
    assert apr("meta", "set", "m2.gguf", "tokenizer.chat_template", "chat.jinja").code == 0
    assert apr("meta", "template", "m2.gguf").stdout == (world / "chat.jinja").read_text()


def test_a_folder_of_one_model_is_that_model(world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any) -> None:
    monkeypatch.chdir(world)
    first = "shards/m-00001-of-00002.gguf"
    done = apr("convert", "shards/", "-o", "whole.gguf", "--plan")
    assert done.code == 0
    assert done.stderr.startswith(f"note: apr convert {first} -o whole.gguf --plan\n")
    assert apr("convert", "shards", "whole.gguf", "--plan").code == 0
    for words in (("shards",), (first, first.replace("00001-", "00002-"))):
        done = apr("merge", *words, "-o", "whole.gguf")
        assert done.code == 0
        assert done.stderr.startswith(f"note: apr convert {first} -o whole.gguf\n")
        assert aprfmt.diff("whole.gguf", first, values=True).identical
        (world / "whole.gguf").unlink()


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("pull org/repo", "convert hf://org/repo -o repo --format hf"),
        ("pull hf.co/org/repo:Q4_K_M", "convert hf://org/repo:Q4_K_M -o repo-Q4_K_M.gguf"),
        ("pull llama3.2:1b", None),
        ("pull org/repo -o out", None),
        ("validate SUMS", "validate m.gguf --sha256 SUMS"),
        ("validate tuned", None),
        ("export m.gguf -o p.html", "report m.gguf -o p.html"),
        ("export m.gguf -o p.x", None),
        ("validate two", "validate two/a.gguf; apr validate two/b.gguf"),
    ],
)
def test_our_own_lines_that_are_refused_are_taken_as_meant(
    line: str, ours: str | None, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    (world / "two").mkdir(exist_ok=True)
    for name in ("a", "b"):
        (world / "two" / f"{name}.gguf").touch()
    found = meant(UsageError("refused"), line.split())
    assert (found and found.line()) == (f"apr {ours}" if ours else None)


def test_a_word_that_is_no_file_is_looked_up_too(world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any) -> None:
    """typer takes these lines, so they are answered once the model is not found."""
    monkeypatch.chdir(world)
    done = apr("vocab", "a b", "m.gguf")
    assert done.code == 0
    assert done.stderr == "note: apr vocab m.gguf 'a b'\n"
    assert apr("vocab", "encode", "m.gguf", "hey").stderr == "note: apr vocab m.gguf hey\n"
    assert apr("vocab", "absent.gguf", "hey").stderr.startswith("error: absent.gguf: no such file")


def test_a_signature_is_not_answered_by_a_checksum(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apr: Any
) -> None:
    """`verify` without a key checks the file for a person, and says so, unless a signature lies next to it."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(world / "m.gguf", "m.gguf")
    done = apr("verify", "m.gguf")
    assert done.code == 2, "a script that forgets the key must not pass"
    assert "hint: apr validate m.gguf\n      apr validate checks the file itself; apr verify FILE --key" in done.stderr
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        assert suggested("verify m.gguf") == ("validate m.gguf", True)
        assert apr("verify", "m.gguf", "--json").code == 2
    (tmp_path / "m.gguf.sig").touch()
    assert suggested("verify m.gguf") == ("verify m.gguf --key KEY", False)


@pytest.mark.llama
def test_an_embedding_names_the_line_that_prints_all_of_it(
    world: Path, monkeypatch: pytest.MonkeyPatch, apr: Any
) -> None:
    """In a terminal; a pipe gets all of it."""
    with monkeypatch.context() as patch:
        patch.setattr(type(sys.stdout), "isatty", lambda stream: stream is sys.stdout, raising=False)
        done = apr("embed", world / "m.gguf", "a b")
    line, behind = done.stderr.partition("hint: ")[2].splitlines()
    body = apr(*shlex.split(line)[1:]).json
    assert behind.split() == f"prints all {len(body['items'][0]['vector'])} values".split()
