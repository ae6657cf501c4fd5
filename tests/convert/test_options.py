"""Options of conversions: each checked in one place, whoever asks, and taken by the target or refused."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.convert import api
from aprfmt.convert.options import COMMON, Options
from aprfmt.convert.parsing import parse_size
from aprfmt.convert.targets.base import TARGETS
from aprfmt.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = [api.import_model, api.export_model, api.convert_model, aprfmt.quantize_model]
CONVERT: Callable[..., Any] = api.convert_model


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: str(f.__name__))
def test_every_function_names_its_options_with_the_defaults_of_all(function: Callable[..., Any]) -> None:
    defaults = {f.name: f.default for f in fields(Options)}
    if function is aprfmt.quantize_model:  # those of --imatrix auto and of targets
        defaults |= dict.fromkeys(("target_size", "target_bpw", "max_kl", "recipe_out", "report", "chunks"))
        defaults |= {
            "data": (),
            "eval_data": (),
            "eval_tokens": 2048,
            "measure": False,
            "text_field": "text",
            "log": inspect.signature(function).parameters["log"].default,
        }
    elif function is CONVERT:
        defaults |= {"pad_vocab": None}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert parameter.default == defaults[name], name
        else:
            assert name in ("src", "dst", "mix")


def test_convert_model_takes_every_option() -> None:
    names = {"src", "dst", "pad_vocab", *(f.name for f in fields(Options))}
    assert set(inspect.signature(api.convert_model).parameters) == names


def test_a_type_checker_refuses_wrong_names_and_types(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        "import aprfmt\n"
        'aprfmt.convert_model("a", "b", dtype="q8_0", plan=True, shard_size="5GB")\n'
        'aprfmt.convert_model("a", "b", dtyp="q8_0", plan="yes")\n'
        'aprfmt.import_model("a", "b", threads="four")\n'
    )
    # With the configuration and the cache of the repository, so that only the snippet is new.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(snippet)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [line.split(":")[1] for line in lines] == ["3", "3", "4"], done.stdout + done.stderr
    assert any("dtyp" in line for line in lines)


@pytest.mark.parametrize(
    "option",
    [
        {"plan": "yes"},
        {"force": 1},
        {"threads": 0},
        {"threads": True},
        {"threads": "four"},
        {"threads": 100_000},
        {"shard_size": "5 parsecs"},
        {"shard_size": -1},
        {"shard_size": 1.5},
        {"max_memory": "lots"},
        {"max_memory": 0},
        {"bits": "4"},
        {"group_size": True},
        {"recipe": 4},
        {"dtype": None},
        {"dtype": "q9"},
        {"format": "gguuf"},
        {"arch": 7},
        {"arch": "nonesuch"},
        {"tensor_type": 7},
        {"tensor_type": [7]},
        {"imatrix": 7},
        {"tokenizer": b"folder"},
        {"pad_style": "mine"},
        {"pre": "nonsense"},
        {"license": "no such licence"},
        {"data_source": " "},
        {"progress": "yes"},
    ],
    ids=str,
)
def test_each_wrong_value_is_a_usage_error(option: dict[str, Any], tiny_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        CONVERT(tiny_gguf, tmp_path / "o.gguf", **option)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("src", "dst"), [(5, "o.gguf"), ("m.gguf", None), (None, "o.gguf")])
def test_paths_are_checked_too(src: object, dst: object) -> None:
    for function in (CONVERT, api.import_model):
        with pytest.raises(UsageError, match="a path"):
            function(src, dst)  # type: ignore[arg-type]


# Option -> a value that is not its default.
VALUES: dict[str, Any] = {
    "dtype": "f16",
    "imatrix": "i.dat",
    "tensor_type": "a=q8_0",
    "output_type": "q8_0",
    "embedding_type": "q8_0",
    "pure": True,
    "leave_output": True,
    "search": True,
    "second_moments": "m.safetensors",
    "allow_requantize": True,
    "tokenizer": "folder",
    "no_tokenizer": True,
    "no_mtp": True,
    "mtp_only": True,
    "target_model": "folder",
    "mmproj": True,
    "license": "MIT",
    "data_source": "web",
    "data_license": "MIT",
    "pre": "nonsense",
    "pad_style": "apr",
    "shard_size": "1GB",
    "bits": 4,
    "group_size": 64,
    "recipe": "mixed_4_6",
    "verify": True,
    "modelfile": True,
    "allow_different": True,
    "hash": True,
}


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t.name))
def test_an_option_that_a_target_does_not_take_is_a_usage_error(target: Any, tiny_gguf: Path, tmp_path: Path) -> None:
    assert set(VALUES) == {f.name for f in fields(Options)} - COMMON
    for name in set(VALUES) - target.takes:
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} does not apply") as caught:
            CONVERT(tiny_gguf, tmp_path / "out", format=target.name, **{name: VALUES[name]})
        assert "it applies to" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())


def test_the_command_says_so_too(tiny_gguf: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aprfmt", "convert", str(tiny_gguf), "-o", str(tmp_path / "o.safetensors")]
    done = subprocess.run([*command, "--pre", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--pre does not apply to the format safetensors" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_other_functions_check_their_arguments_too(tiny_gguf: Path, tmp_path: Path) -> None:
    aprfmt.import_model(tiny_gguf, tmp_path / "m.apr")
    stamp: Callable[..., Any] = aprfmt.stamp
    evaluate: Callable[..., Any] = aprfmt.evaluate
    for call in (
        lambda: stamp(tmp_path / "m.apr", tmp_path / "s.apr", license=7),
        lambda: stamp(tmp_path / "m.apr", tmp_path / "s.apr", license="MIT", force="yes"),
        lambda: stamp(tmp_path / "m.apr", 7, license="MIT"),
        lambda: stamp(tmp_path / "m.apr", tmp_path / "s.apr", set=["license"]),
        lambda: stamp(7, in_place=True, license="MIT"),
        lambda: evaluate(tmp_path / "m.apr", tmp_path, limit="many"),
        lambda: evaluate(tmp_path / "m.apr", 7),
        lambda: aprfmt.report(tmp_path / "m.apr", tmp_path / "page.pdf"),
        lambda: aprfmt.open(7),  # type: ignore[arg-type]
        lambda: aprfmt.detect(b"m.apr"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.apr"]


def test_every_public_name_is_there() -> None:
    for name in aprfmt.__all__:
        assert getattr(aprfmt, name) is not None
    assert aprfmt.stamp.__module__ == "aprfmt.convert.stamp"
    assert sorted(aprfmt.__all__) == sorted({*aprfmt._LAZY, "AprError", "__version__"})


def test_import_writes_no_other_container(tiny_gguf: Path, tmp_path: Path) -> None:
    for name in ("m.gguf", "m.SafeTensors"):
        with pytest.raises(UsageError, match=r"import writes \.apr files"):
            aprfmt.import_model(tiny_gguf, tmp_path / name)


@pytest.mark.parametrize(
    ("text", "n"),
    [("5GB", 5_000_000_000), ("500MiB", 500 << 20), ("1234", 1234), ("1.5 kb", 1500), ("2g", 2_000_000_000)],
)
def test_sizes(text: str, n: int) -> None:
    assert parse_size(text) == n


@pytest.mark.parametrize(
    ("name", "text", "meant"),
    [
        ("target_size", "4.2", "4.2GB"),
        ("target_size", "0.5", "0.5GB"),
        ("target_size", "700", "700MB"),
        ("target_size", "999999", "999999KB"),
        ("shard_size", "5", "5GB"),
        ("shard_size", "4.2", "4.2GB"),
    ],
)
def test_a_number_that_lacks_its_unit(name: str, text: str, meant: str, tiny_gguf: Path, tmp_path: Path) -> None:
    convert: Any = aprfmt.quantize_model if name == "target_size" else api.convert_model
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: .* too small") as caught:
        convert(tiny_gguf, tmp_path / "x.gguf", **{name: text})
    assert caught.value.hint == f"did you mean {meant}?"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5XB", "nan", "inf", "1e400"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)
