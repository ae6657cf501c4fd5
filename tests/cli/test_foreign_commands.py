"""Command lines of other programs are answered with ours."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from aprfmt.cli.other_tools import rephrase
from aprfmt.cli.training import _SECTIONS
from aprfmt.codecs.dtypes import find_dtype
from aprfmt.provenance.spdx import nearest_id
from aprtrain.config import command_fields


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
        "eval m --data text.txt",
        "optimum m --model x",
    ],
)
def test_our_own_words_are_left_alone(ours: str) -> None:
    assert rephrase(shlex.split(ours)) is None


def test_the_quantization_of_mlx_does_not_silence_the_hint(apr: Any) -> None:
    done = apr("convert", "--hf-path", "./m", "-q")
    assert done.code == 3
    assert done.stderr.startswith("note: apr convert ./m --bits 4 --output mlx_model --format mlx\n")
    assert not apr("convert", "--nothing", "-q").stderr.count("hint")


def test_all_that_is_missing_is_told_at_once(apr: Any) -> None:
    done = apr("import")
    assert done.code == 2
    assert done.stderr.startswith("error: missing SRC and --output\n")
    assert "--output" not in apr("import", "-o", "x.apr").stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("convert m.gguf", "apr convert m.gguf -o m.gguf"),
        ("diff a.gguf", "apr diff a.gguf B"),
        ("teacher m.gguf", "apr teacher m.gguf -d PATH -o m-logprobs"),
    ],
)
def test_the_hint_is_the_command_line_with_what_is_missing(apr: Any, line: str, whole: str) -> None:
    assert f"hint: {whole}\n      apr {line.partition(' ')[0]} --help\n" in apr(*line.split()).stderr


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("tensors m.gguf lm_head", "apr tensors m.gguf --filter lm_head"),
        ("hex m.gguf m.gguf", "apr hex m.gguf --tensor m.gguf"),
        ("tree --sizes m.gguf attn", "apr tree m.gguf --filter attn --sizes"),
        ("convert m.gguf out.apr --dtype q8_0", "apr convert m.gguf --dtype q8_0 -o out.apr"),
        ("convert --force m.gguf out.apr", "apr convert --force m.gguf -o out.apr"),
        ("convert m.gguf 'my out.apr'", "apr convert m.gguf -o 'my out.apr'"),
        ("m.gguf", "apr inspect m.gguf"),
        ("import m.gguf", "apr import m.gguf -o m.apr"),
        ("convert m.gguf --dtype q8_0", "apr convert m.gguf --dtype q8_0 -o m-q8_0.gguf"),
        ("merge m.gguf b.gguf", "apr merge m.gguf b.gguf -o merged"),
    ],
)
def test_a_word_too_many_gets_the_option_that_it_is_for(apr: Any, line: str, ours: str) -> None:
    done = apr(*shlex.split(line))
    assert done.code == 3  # m.gguf is not there
    assert done.stderr.startswith(f"note: {ours}\n")


def test_two_words_too_many_are_not_guessed(apr: Any) -> None:
    assert "hint: apr tensors --help" in apr("tensors", "a", "b", "c").stderr
    done = apr("distill", "big.gguf", "small.gguf")
    assert done.stderr.startswith("note: apr distill big.gguf --student small.gguf\nerror: --data is missing")


def test_only_likely_names_are_suggested(apr: Any) -> None:
    assert "did you mean" not in apr("update").stderr
    assert "did you mean" not in apr("inspect", "m", "--grep", "x").stderr
    assert "hint: apr quantize --list\n" in apr("quantze", "--list").stderr
    assert "did you mean --drop-layers or --keep-layers?" in apr("prune", "m", "--layers", "3", "-o", "x").stderr


def test_a_mistyped_path_names_the_nearest_beside_it(apr: Any, tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M.Q4_1.gguf").touch()
    typed = tmp_path / "SmolLM2-135M.gguf"
    assert apr("inspect", typed).stderr.endswith(f"hint: did you mean {tmp_path / 'SmolLM2-135M.Q4_1.gguf'}?\n")
    assert apr("inspect", "hf:org/repo").stderr.endswith("hint: write hf://org/repo\n")
    for path in (tmp_path / "qwen.apr", tmp_path / "nowhere" / "m.gguf"):
        assert apr("inspect", path).stderr.endswith("hint: check the path\n")


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
