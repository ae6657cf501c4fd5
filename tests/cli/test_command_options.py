"""The options of the command line are the parameters of the Python functions: same names, defaults, types."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

import pytest

import aprfmt
from aprfmt.cli import convert as commands
from aprfmt.cli import data, imatrix, merge, merge_models, prune, teacher
from aprfmt.cli.options import Common
from aprfmt.convert import api
from aprfmt.convert.api import Report
from aprfmt.convert.targets.base import parse_size

PAIRS: dict[str, tuple[type[Common], Callable[..., Report]]] = {
    "import": (commands.Import, api.import_model),
    "export": (commands.Export, api.export_model),
    "convert": (commands.Convert, api.convert_model),
    "quantize": (commands.Quantize, aprfmt.quantize_model),
}
OF_THE_COMMAND = {"file", "output", "list_mixes", "as_json", "quiet"}
OF_THE_FUNCTION = {"src", "dst", "progress", "log"}


def types_of(hint: object) -> set[object]:
    """The members of a union, with the Python type that a command line gives for each."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    known = {Path: os.PathLike[str], list[str]: Sequence[str]}
    return {known.get(member, member) for member in members}


@pytest.mark.parametrize("name", PAIRS)
def test_a_command_has_the_options_of_its_function(name: str) -> None:
    command, function = PAIRS[name]
    options = {f.name: f.default or None for f in fields(command) if f.name not in OF_THE_COMMAND}
    parameters = inspect.signature(function).parameters.values()
    found = {p.name: p.default or None for p in parameters if p.name not in OF_THE_FUNCTION}
    if name == "quantize":
        found["mix"] = None  # --list needs none
    options["carry"] = parse_size(options["carry"])  # people write it with a unit
    assert options == found


@pytest.mark.parametrize("name", PAIRS)
def test_the_types_of_options_are_those_of_the_parameters(name: str) -> None:
    command, function = PAIRS[name]
    wanted, given = get_type_hints(function, localns={"Report": Report}), get_type_hints(command)
    for option in (f.name for f in fields(command) if f.name not in OF_THE_COMMAND | {"mix", "tensor_type", "data"}):
        assert types_of(given[option]) <= types_of(wanted[option]), option
    assert types_of(given["tensor_type"]) - {type(None)} <= types_of(wanted["tensor_type"])


NAMES_ALONE: dict[str, tuple[type[Common], Callable[..., object], set[str]]] = {
    "merge": (merge_models.Merge, aprfmt.merge_models, {"allow_requantize"}),
    "merge-adapter": (
        merge.MergeAdapter, aprfmt.merge_adapter, {"adapters", "adapter", "base", "allow_requantize", "rank", "unmerge"}
    ),
    "prune": (prune.Prune, aprfmt.prune_model, set()),
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
