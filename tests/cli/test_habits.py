"""Command lines of other programs are answered with ours."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.group import build
from aprfmt.cli.other_tools import _COMMANDS, _NO_COMMANDS, _OPTIONS, _OPTIONS_OF, rephrase
from aprfmt.cli.training import _SECTIONS
from aprfmt.codecs.dtypes import find_dtype
from aprfmt.provenance.spdx import nearest_id
from aprtrain.config import command_fields

PHRASES = {
    "convert m --outfile x.gguf --outtype f16": "apr convert m --output x.gguf --dtype f16",
    "convert m --outfile=x.gguf": "apr convert m --output=x.gguf",
    "convert m -o x.gguf --dry-run": "apr convert m -o x.gguf --plan",
    "quantize in.gguf out.gguf Q4_K_M": "apr quantize in.gguf Q4_K_M -o out.gguf",
    "quantize in.gguf out.gguf q8_0 8": "apr quantize in.gguf q8_0 -o out.gguf --threads 8",
    "quantize in.gguf 'my out' iq2_xs --imatrix i": "apr quantize in.gguf iq2_xs -o 'my out' --imatrix i",
    "convert --hf-path org/m --mlx-path out -q --q-bits 4": "apr convert org/m --output out --bits 4 --format mlx",
    "convert --hf-path org/m -q": "apr convert org/m --bits 4 --output mlx_model --format mlx",
    "mlx_lm.convert --hf-path=m -q --quant-predicate mixed_4_6": (
        "apr convert m --recipe mixed_4_6 --output mlx_model --format mlx"
    ),
    "convert --hf-path m --quantize -o x": "apr convert m -o x --bits 4 --format mlx",
    "quantize --imatrix i --pure in.gguf out.gguf q4_k_m 8": (
        "apr quantize in.gguf q4_k_m -o out.gguf --threads 8 --imatrix i --pure"
    ),
    "llama-quantize in.gguf out.gguf q8_0": "apr quantize in.gguf q8_0 -o out.gguf",
    "quantize in.gguf q4_k_m 8": "apr quantize in.gguf q4_k_m -o ggml-model-q4_k_m.gguf --threads 8",
    "run -m m.gguf -ngl 99": "apr run m.gguf --gpu-layers 99",
    "quantize q4_k_m in.gguf": "apr quantize in.gguf q4_k_m",
    "quantize in.gguf q4_k_m out.gguf": "apr quantize in.gguf q4_k_m -o out.gguf",
    "quantize q4_k_m in.gguf out.gguf": "apr quantize in.gguf q4_k_m -o out.gguf",
    "mergekit-yaml recipe.yml out": "apr merge --config recipe.yml -o out",
    "llama-cli -p 'hi there' -m m.gguf -n 5": "apr run m.gguf -n 5 'hi there'",
    "mlx_lm.generate --model m --prompt=hi": "apr run m hi",
    "llama-perplexity -m m.gguf -f text.txt": "apr eval m.gguf --data text.txt",
    "llama-imatrix -m m.gguf -f text.txt -o i.dat": "apr imatrix m.gguf --data text.txt -o i.dat",
    "split m.gguf -o parts --shard-size 2GB": "apr shard m.gguf -o parts --shard-size 2GB",
    "tokenize m.gguf hello": "apr vocab m.gguf hello",
    "merge-lora m.gguf lora -o x.gguf": "apr merge-adapter m.gguf lora -o x.gguf",
    "upload m.gguf a/b --dry-run": "apr push m.gguf a/b --plan",
    "tensors m.gguf --grep norm -n 3": "apr tensors m.gguf --filter norm --limit 3",
    "quantize m --type q4_k_m": "apr quantize m q4_k_m",
    "quantize m --dtype=q4_k_m -o x.gguf": "apr quantize m q4_k_m -o x.gguf",
    "export m --to gguf -o x": "apr export m --format gguf -o x",
    "run m hi --temp 0.5 -t 4 -c 512 -s 1": "apr run m hi --temperature 0.5 --threads 4 --ctx 512 --seed 1",
    "inspect -v m": "apr inspect m",
    "llama-bench -m m.gguf -p 64": "apr bench m.gguf --prompt-tokens 64",
}


@pytest.mark.parametrize("theirs", PHRASES)
def test_they_are_rephrased(theirs: str) -> None:
    assert rephrase(shlex.split(theirs)) == PHRASES[theirs]


@pytest.mark.parametrize(
    "ours",
    [
        "convert m -o x.gguf --dtype f16",
        "quantize m q4_k_m -o x",
        "quantize a b",
        "inspect x",
        "quantize --imatrix i m q4_k_m -o x --threads 8",
        "quantize m q4_k_m -q -o x",
        "merge one two",
        "run m hi",
        "optimum m --model x",
    ],
)
def test_our_own_words_are_left_alone(ours: str) -> None:
    assert rephrase(shlex.split(ours)) is None


def test_what_is_suggested_exists() -> None:
    import typer

    group: Any = typer.main.get_command(build(None))
    known = {option for command in group.commands.values() for p in command.params for option in p.opts}
    future = {"--max-tokens", "--ctx", "--gpu-layers"} - known if "run" not in COMMANDS else set()
    assert {ours for ours in _OPTIONS.values() if ours} <= known | future
    assert {*_COMMANDS.values(), *_OPTIONS_OF} <= {*COMMANDS}
    assert not {*_COMMANDS, *_NO_COMMANDS} & {*COMMANDS}
    for command, options in _OPTIONS_OF.items():
        mine = {option for p in group.commands[command].params for option in p.opts}
        assert {ours for ours in options.values() if ours} <= mine


def test_the_answer_has_the_hint(apr: Any) -> None:
    done = apr("quantize", "in.gguf", "out.gguf", "Q4_K_M")
    assert done.code == 2
    assert "apr quantize in.gguf Q4_K_M -o out.gguf" in done.stderr


@pytest.mark.parametrize("word", _NO_COMMANDS)
def test_commands_that_only_others_have_are_answered(apr: Any, word: str) -> None:
    done = apr(word, "x")
    assert done.code == 2
    assert done.stderr == f"error: no such command {word!r}\nhint: {_NO_COMMANDS[word]}\n"
    named = re.findall(r"apr ([a-z]+)", _NO_COMMANDS[word])
    assert {*named} <= {*COMMANDS}


def test_the_quantization_of_mlx_does_not_silence_the_hint(apr: Any) -> None:
    done = apr("convert", "--hf-path", "org/m", "-q")
    assert done.code == 2
    assert "apr convert org/m --bits 4 --output mlx_model --format mlx" in done.stderr
    assert not apr("convert", "--nothing", "-q").stderr.count("hint")


def test_all_that_is_missing_is_told_at_once(apr: Any) -> None:
    done = apr("import")
    assert done.code == 2
    assert done.stderr.startswith("error: missing SRC and --output\n")
    assert "--output" not in apr("import", "-o", "x.apr").stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("import m.gguf", "apr import m.gguf -o PATH"),
        ("convert m.gguf out.apr --dtype q8_0", "apr convert m.gguf --dtype q8_0 -o out.apr"),
        ("convert m.gguf --dtype q8_0", "apr convert m.gguf --dtype q8_0 -o PATH"),
        ("convert --force m.gguf out.apr", "apr convert --force m.gguf -o out.apr"),
        ("diff a.gguf", "apr diff a.gguf B"),
        ("teacher m.gguf", "apr teacher m.gguf -d PATH[:WEIGHT] -o DIR"),
        ("merge a.gguf b.gguf", "apr merge a.gguf b.gguf -o PATH"),
    ],
)
def test_the_hint_is_the_command_line_with_what_is_missing(apr: Any, line: str, whole: str) -> None:
    assert f"hint: {whole}; apr {line.partition(' ')[0]} --help" in apr(*line.split()).stderr


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("tensors m.gguf lm_head", "apr tensors m.gguf --filter lm_head"),
        ("report m.gguf page.html --force", "apr report m.gguf --force -o page.html"),
        ("distill big.gguf small.gguf", "apr distill big.gguf --student small.gguf"),
        ("hex m.gguf m.gguf", "apr hex m.gguf --tensor m.gguf"),
        ("tree --sizes m.gguf attn", "apr tree --sizes m.gguf --filter attn"),
    ],
)
def test_a_word_too_many_gets_the_option_that_it_is_for(apr: Any, line: str, whole: str) -> None:
    done = apr(*line.split())
    assert done.code == 2
    assert f"hint: {whole}; apr {line.partition(' ')[0]} --help" in done.stderr
    assert "hint: apr tensors --help" in apr("tensors", "a", "b", "c").stderr


def test_a_file_in_place_of_a_command_is_inspected(apr: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    for word, said in (("m.gguf", "apr inspect m.gguf"), ("my model", "apr inspect 'my model'"), ("m", "apr --help")):
        assert apr(word).stderr == f"error: no such command '{word}'\nhint: {said}\n"


def test_only_likely_names_are_suggested(apr: Any) -> None:
    assert "did you mean" not in apr("update").stderr
    assert "did you mean" not in apr("inspect", "m", "--grep", "x").stderr
    assert "did you mean 'quantize'?" in apr("quant").stderr
    assert "did you mean --drop-layers or --keep-layers?" in apr("prune", "m", "--layers", "3", "-o", "x").stderr


def test_a_mistyped_path_names_the_nearest_beside_it(apr: Any, tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M.Q4_1.gguf").touch()
    typed = tmp_path / "SmolLM2-135M.gguf"
    assert apr("inspect", typed).stderr.endswith(f"hint: did you mean {tmp_path / 'SmolLM2-135M.Q4_1.gguf'}?\n")
    assert apr("inspect", "hf:org/repo").stderr.endswith("hint: write hf://org/repo\n")
    for path in (tmp_path / "qwen.apr", tmp_path / "nowhere" / "m.gguf"):
        assert apr("inspect", path).stderr.endswith("hint: check the path\n")


def test_an_output_with_blanks_is_quoted(apr: Any) -> None:
    assert "hint: apr convert m.gguf -o 'my out.apr'; " in apr("convert", "m.gguf", "my out.apr").stderr


def test_a_mix_before_the_model_is_told(apr: Any) -> None:
    done = apr("quantize", "q4_k_m", "m.gguf")
    assert done.code == 2
    assert "hint: apr quantize m.gguf q4_k_m" in done.stderr


def test_a_training_run_is_told_all_that_is_missing(apr: Any) -> None:
    done = apr("distill")
    assert done.code == 2
    for name in ("--student or --student-init", "--data", "--teacher", "--output", "--steps or --epochs"):
        assert f"{name} is missing" in done.stderr
    assert "apr distill TEACHER --student S --data FILES -o FOLDER --steps N" in done.stderr
    (line,) = [line for line in apr("pretrain", "--init", "m").stderr.splitlines() if line.startswith("error")]
    assert "--init" not in line
    assert "--data is missing" in line


@pytest.mark.parametrize("command", ["distill", "pretrain"])
def test_the_options_of_training_stand_in_sections(apr: Any, command: str) -> None:
    text = apr(command, "--help").stdout
    sections = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    wanted = [*_SECTIONS.values(), "Options"]
    assert [name for name in sections if name in wanted] == wanted
    for row in command_fields(command):
        assert len(re.findall(rf"^  .*{row.flag}\b(?!-)", text, re.MULTILINE)) >= 1, row.flag


@pytest.mark.parametrize(
    ("text", "dtype"), [("fp16", "F16"), ("float16", "F16"), ("bfloat16", "BF16"), ("FP32", "F32"), ("half", "F16")]
)
def test_floats_by_their_other_names(text: str, dtype: str) -> None:
    assert find_dtype(text).name == dtype


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("MIT Licence", "MIT"),
        ("The MIT License", "MIT"),
        ("Apache License, Version 2.0", "Apache-2.0"),
        ("apache2", "Apache-2.0"),
        ("bsd 3 clause", "BSD-3-Clause"),
        ("CC BY 4.0", "CC-BY-4.0"),
        ("the unlicense", "Unlicense"),
    ],
)
def test_the_nearest_licence(text: str, nearest: str) -> None:
    assert nearest_id(text) == nearest
