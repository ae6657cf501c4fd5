"""The options of the command line are the parameters of the Python functions: one schema for both."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

import aprfmt
from aprfmt.cli import convert as commands
from aprfmt.cli import data, imatrix, merge, merge_adapter, prune, quantize, teacher, transplant
from aprfmt.cli.options import Common
from aprfmt.convert.report import Report
from aprfmt.light_dataclass import light_dataclass
from aprfmt.schema import OptionRow, option, rows
from aprfmt.types import PathLike

PAIRS: dict[str, tuple[type[Common], Callable[..., Report]]] = {
    "import": (commands.Import, aprfmt.import_model),
    "export": (commands.Export, aprfmt.export_model),
    "convert": (commands.Convert, aprfmt.convert_model),
    "quantize": (quantize.Quantize, aprfmt.quantize_model),
    "merge": (merge.Merge, aprfmt.merge_models),
    "prune": (prune.Prune, aprfmt.prune_model),
    "transplant": (transplant.Transplant, aprfmt.transplant_model),
}
OF_THE_COMMAND = {"file", "models", "output", "mix", "list_presets"}
OF_THE_FUNCTION = {"src", "dst", "mix", "models", "progress", "log"}


@pytest.mark.parametrize("name", PAIRS)
def test_a_command_and_its_function_have_the_options_of_one_schema(name: str) -> None:
    command, function = PAIRS[name]
    parameters = inspect.signature(function).parameters
    assert {f.name for f in fields(command)} - OF_THE_COMMAND == {*parameters} - OF_THE_FUNCTION == {*command.options}
    for key, row in command.options.items():
        assert parameters[key].default == row.default
        assert row.help in " ".join((inspect.getdoc(function) or "").split())


@pytest.mark.parametrize("name", PAIRS)
def test_annotations_of_a_command_are_evaluated_in_its_own_module(name: str) -> None:
    """typer evaluates them; `make_dataclass` of Python 3.12 would move the command to another module."""
    command, _ = PAIRS[name]
    assert inspect.signature(command, eval_str=True).parameters.keys() >= command.options.keys()
    assert vars(sys.modules[command.__module__])[command.__name__] is command


def test_a_command_passes_on_what_is_set_alone() -> None:
    command = commands.Convert(file="a", output=Path("b"), tensor_type=["x=q8_0"], plan=True)  # type: ignore[call-arg]
    assert command.given() == {"tensor_type": ["x=q8_0"], "plan": True}


@light_dataclass(frozen=True, kw_only=True)
class Example:
    path: PathLike | None = option(None, "A path.")
    both: int | str | None = option(None, "A size.")
    switch: PathLike | bool | None = option(None, "A switch.")
    texts: str | Sequence[str] = option((), "Texts.")
    names: tuple[str, ...] = option((), "Names.")
    factors: float | Sequence[float] | None = option(None, "Numbers.")
    numbers: str | Sequence[int] | None = option(None, "A list.")
    said: str | bool | None = option(None, "Stated.", kind=str)
    callback: object = None


def test_annotations_tell_the_types_of_a_command_line() -> None:
    kinds = {name: (row.kind, row.many) for name, row in rows(Example, OptionRow).items()}
    assert kinds == {
        "path": (Path, False),
        "both": (str, False),
        "switch": (bool, False),
        "texts": (str, True),
        "names": (str, True),
        "factors": (float, True),
        "numbers": (str, False),
        "said": (str, False),
    }


NAMES_ALONE: dict[str, tuple[type[Common], Callable[..., object], set[str]]] = {
    "merge-adapter": (
        merge_adapter.MergeAdapter, aprfmt.merge_adapter, {"adapters", "adapter", "base", "rank", "unmerge"},
    ),
    "imatrix": (imatrix.ImatrixCommand, aprfmt.imatrix, {"files", "merge"}),
    "teacher": (teacher.TeacherCommand, aprfmt.teacher, set()),
    "data": (data.Data, aprfmt.data, set()),
}  # fmt: skip
"""Command -> (its options, its function, what one of the two has alone)."""


@pytest.mark.parametrize("name", NAMES_ALONE)
def test_other_commands_pass_on_every_option(name: str) -> None:
    command, function, alone = NAMES_ALONE[name]
    options, parameters = {f.name for f in fields(command)}, {*inspect.signature(function).parameters}
    assert options - OF_THE_COMMAND - alone <= parameters
    assert parameters - OF_THE_FUNCTION - OF_THE_COMMAND - alone <= options
