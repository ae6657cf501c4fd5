"""Answers a line with more models than its command takes, such as one with a glob, with a loop of the shell."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Sequence
from glob import escape, glob

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.foreign_line import Suggestion, command_of, option_of
from aprfmt.cli.special_lines import is_model

_NAMES = ("FILE", "SRC", "A", "B")
"""How help calls a model that is one argument."""
_HAVE_MEANINGS = ("eval", "inspect", "validate", "verify", "qa")
"""Commands whose lines with several models mean something: a comparison, or one model after the other."""
_WRITE_MODELS = ("quantize", "stamp")
"""Commands that may name their output themselves."""
_ENDINGS = {"import": ".apr", "prune": "-pruned", "transplant": "-transplanted", "shard": "-shards"}
_SUFFIX = re.compile(r"\.(?:gguf|apr|safetensors)$")
_COUNTS = {1: "one model", 2: "two models"}


def loop_over(arguments: Sequence[str]) -> Suggestion | None:
    """The loop that runs the command of `arguments` for each of its models; None if it takes as many as there are."""
    if not arguments or arguments[0] not in COMMANDS or arguments[0] in _HAVE_MEANINGS:
        return None
    if arguments[0] == "transplant" and not {"--tokenizer", "--donor"} & set(map(option_of, arguments)):
        return None  # the second model is the one with the tokenizer
    params = command_of(arguments[0]).params
    places = [p for p in params if p.param_type_name == "argument"]
    n = sum((p.metavar or "").strip("[]") in _NAMES for p in places)
    if n == 0 or any(p.nargs < 0 for p in places):
        return None
    switches = {name for p in params if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)}
    values = _values_of_options(arguments, switches)
    models = [i for i, word in enumerate(arguments) if i and i not in values and is_model(word)]
    outputs = next((p.opts for p in params if "--output" in p.opts), [])
    given = [i for i, word in enumerate(arguments) if word.partition("=")[0] in outputs]
    needs_output = any(p.required for p in params if "--output" in p.opts)
    as_with_cp = (needs_output or arguments[0] in _WRITE_MODELS) and not given  # the last one is the output
    if len(models) <= n + as_with_cp:
        return None
    kept, each = models[: n - 1], [arguments[i] for i in models[n - 1 :]]
    dropped = {*models[n - 1 :], *given, *(i + 1 for i in given if "=" not in arguments[i])}
    words = [shlex.join(["apr", *(arguments[i] for i in (0, *kept))]), '"$f"']
    words += [shlex.quote(word) for i, word in enumerate(arguments) if i and i not in {*kept, *dropped}]
    if given or needs_output:
        words += ["-o", _output(arguments, each)]
    line = f"for f in {_pattern(each)}; do {' '.join(words)}; done"
    takes = f"apr {arguments[0]} takes {_COUNTS[n]}, not {len(models)}"
    return Suggestion([], complete=False, shell=line, because=takes)


def _values_of_options(words: Sequence[str], switches: Collection[str]) -> set[int]:
    """Places of the words that are options or their values."""
    found: set[int] = set()
    for i, word in enumerate(words):
        if i and i not in found and word.startswith("-") and word != "-":
            found |= {i} if "=" in word or word in switches else {i, i + 1}
    return found


def _output(arguments: Sequence[str], models: Sequence[str]) -> str:
    """The output of the model `$f`, quoted: its name with another ending, that of the type where one is given."""
    suffixes = {match[0] if (match := _SUFFIX.search(model)) else "/" for model in models}
    begin = "${f%" + (suffixes.pop() if len(suffixes) == 1 else "/") + "}"
    given = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    given |= dict(word.split("=", 1) for word in arguments if "=" in word)
    output = given.get("-o") or given.get("--output") or ""
    form, dtype = given.get("--format", ""), given.get("--dtype") or given.get("--quantize") or ""
    ending = _ENDINGS.get(arguments[0]) or (match[0] if (match := _SUFFIX.search(output)) else "")
    if not ending:
        ending = f"-{form}" if form in ("hf", "mlx", "awq", "gptq", "modelopt") else f".{form or 'gguf'}"
        if not dtype and not form and any(model.endswith(".gguf") for model in models):
            ending = ".apr"
    type_name = f"-{re.sub(r'[^A-Za-z0-9_]', '-', dtype)}" if dtype else ""
    return f'"{begin}{type_name}{ending}"'


def _pattern(models: Sequence[str]) -> str:
    """The models as words of a shell: a pattern where it matches them and nothing else."""
    folder, name = os.path.split(models[0])
    pattern = f"*{os.path.splitext(name)[1]}"
    if len(pattern) > 1 and sorted(glob(os.path.join(escape(folder), pattern))) == sorted(models):
        return os.path.join(shlex.quote(folder) if folder else "", pattern)
    return shlex.join(models)
