"""Answers command lines of other programs, or of ours with something in another place, with our command line."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.foreign_commands import FOREIGN, Foreign
from aprfmt.cli.foreign_line import OtherLine, Suggestion, command_of, free, option_of, stem
from aprfmt.cli.many_models import loop_over
from aprfmt.cli.other_names import SAME, named, nearest
from aprfmt.cli.output import is_of_mlx, out, quantizes
from aprfmt.cli.special_lines import PART, SPECIAL, each_of_folder, is_adapter, is_model, page_of
from aprfmt.io.source import exists

if TYPE_CHECKING:
    from typer._click import Parameter


def suggest(arguments: Sequence[str], error: Exception) -> Suggestion | None:
    """The command line to suggest for `arguments`, which typer rejected with `error`; None if none fits."""
    if _misses(error) and (loop := loop_over(arguments)) is not None:
        return loop
    found = rephrase(arguments)
    if found is None and _misses(error):
        found = Suggestion([*arguments])
    elif found is None and arguments and (word := arguments[0]) not in COMMANDS and _is_model(word):
        found = Suggestion(["inspect", *arguments])
    elif found is None and arguments and word not in COMMANDS and (near := nearest(word)) is not None:
        found = _of_typo([near, *arguments[1:]])
    for _ in range(2):
        if (
            found is None
            or not found.words
            or found.words[0] not in COMMANDS
            or (problem := parse(found.words)) is None
        ):
            break
        completed = _completed(found, problem)
        if completed is None:
            return None if found.complete else found
        found = completed
    return found if found is not None and found.words != [*arguments] else None


def _of_typo(words: list[str]) -> Suggestion | None:
    """Our line for one whose command was corrected, to be suggested only."""
    found = rephrase(words) or Suggestion(words)
    found.complete = False
    return found if not found.words or found.words[0] not in COMMANDS or parse(found.words) is None else None


def of_missing(arguments: Sequence[str], path: str) -> Suggestion | None:
    """The command line to suggest if the model `path` of a command does not exist."""
    if len(arguments) < 2 or arguments[1] != path or arguments[0] not in COMMANDS:
        return None
    found = rephrase(arguments)
    if found is None:
        found = Suggestion([*arguments])
        _put_model_first(found.words)
    return found if found.words[1:2] not in ([], [path]) and parse(found.words) is None else None


def of_refused(arguments: Sequence[str]) -> Suggestion | None:
    """The command line to suggest for a hub address, a list of checksums or a folder of models."""
    command, *rest = arguments
    if command in ("convert", "export"):
        return page_of(rest)
    if len(rest) != 1:
        return None
    if command == "pull":
        return SPECIAL["ollama pull"](rest)
    return SPECIAL["validate"](rest) or each_of_folder(command, rest[0])


def of_folder(arguments: Sequence[str], folder: str, file: str) -> Suggestion | None:
    """The command line with a folder replaced by the only model in it."""
    words = [file if word.rstrip("/") == folder else word for word in arguments]
    return Suggestion(words) if words != [*arguments] else None


_TRAINS = ("distill", "pretrain")
_RUN = "run"
"""The output folder of a training that names none."""

_EPOCHS = ["--epochs", "3"]
"""The default of transformers and TRL."""


def _complete_training(words: list[str]) -> None:
    """Adds the output folder, and the epochs where no length is given, to a line of training that names its data."""
    if "STEPS" in words:
        at = words.index("STEPS")
        words[at - 1 : at + 1] = [] if "--epochs" in words else _EPOCHS
    at = next((at for at in range(1, len(words)) if words[at - 1 : at + 1] == ["--lora", "r=16"]), 0)
    if words.count("--lora") > 1 and at:  # `--lora --rank 8`
        del words[at - 1 : at + 1]
    elif words.count("--lora") and "--lora=r=16" in words:
        words.remove("--lora=r=16")
    names = {word.partition("=")[0] for word in words}
    if "--data" in names and not names & {"--resume", "--config", "--help"}:
        words += [] if names & {"-o", "--output"} else ["-o", _RUN]
        words += [] if names & {"--steps", "--epochs", "--smoke"} else _EPOCHS


_SAMPLING = ("--top-k", "--top-p", "--min-p")


def rephrase(arguments: Sequence[str]) -> Suggestion | None:
    """The apr command line by the table FOREIGN; None if it has no row, or the row changes nothing."""
    name, rest = named(arguments)
    names, options = (name, SAME.get(name, name)), [option_of(word) for word in rest if word.startswith("-")]
    keys = (f"{one} {option}" for one in names for option in options)
    key = next((key for key in keys if key in FOREIGN or key in SAME), name)
    key = SAME.get(key, key)
    rest = _normalized(key, [*_without_true(rest)])
    foreign = FOREIGN.get(key)
    if foreign is None and key in COMMANDS:
        foreign = Foreign("[MODEL]", f"{key} MODEL")
    if foreign is None:
        return None
    if (special := SPECIAL.get(key)) is not None and (found := special(rest)) is not None:
        if key in _SPLITS:
            _keep_gguf(found.words)
        _join_filters(found.words)
        return found
    if not foreign.ours:
        return Suggestion([], then=foreign.then, complete=False)
    found = _read(key, foreign, rest, is_of_mlx(arguments) or key == "mlx-lm convert")
    had_epochs = "--epochs" in found.words
    _put_model_first(found.words)
    _complete_values(found.words)
    if found.words[0] in _TRAINS and had_epochs and not {"MODEL", "DATA", "TEACHER", "OUT"} & {*found.words}:
        found.complete = True  # of the names only that of the steps was missing
    for at, word in enumerate(found.words[1:], 1):
        if word == _RUN and found.words[at - 1] in ("-o", "--output") and word not in rest:
            found.words[at] = free(word) or word
    steps = dict(pairwise(found.words)).get("--steps")
    if found.words[0] in _TRAINS and (
        ("--epochs" in found.words and not had_epochs) or steps not in (None, *_values(rest))
    ):
        found.complete = False  # nobody asked for this length
    is_ours = arguments[0] == found.words[0]
    if is_ours and found.dropped and sorted(found.words) == sorted({*arguments} & {*found.words}):
        return None  # only an unknown option, which the error names
    return (
        None if sorted(found.words) == sorted(arguments) and is_ours and not _moved(found.words, arguments) else found
    )


def _values(rest: Sequence[str]) -> Iterator[str]:
    for word in rest:
        yield from {word, word.partition("=")[2]}


def _read(key: str, foreign: Foreign, rest: list[str], is_mlx: bool) -> Suggestion:
    """Our line by a row, from its arguments `rest`."""
    if key in _JOINS:
        rest = _first_part(rest)
    if is_mlx:
        found = OtherLine(key, foreign).read([word for word in rest if word not in _QUANTIZE])
        _of_mlx(found.words, asked=bool({*_QUANTIZE} & {*rest}))
    else:
        found = OtherLine(key, foreign).read(rest)
    if key in _SPLITS:
        _keep_gguf(found.words)
    found.words[1:] = _in_order(found.words)
    return found


def _complete_values(words: list[str]) -> None:
    """Corrects a line by what its files are, and adds what other programs have as defaults."""
    _join_filters(words)
    if words[0] == "merge" and any(map(is_adapter, words[1:])) and "--method" not in words:
        words[0] = "merge-adapter"
    elif words[0] == "run" and {*words} & {*_SAMPLING} and "--temperature" not in words:
        words += ["--temperature", "0.8"]  # the default of llama.cpp and Ollama
    elif words[0] == "merge-adapter" and is_adapter(words[1]) and exists(words[2]) and not is_adapter(words[2]):
        words[1:3] = words[2:0:-1]
    elif words[0] in _TRAINS:
        _complete_training(words)
    elif words[0] == "push" and len(words) > 2 and not exists(words[1]) and exists(words[2]):
        words[1:3] = words[2:0:-1]  # `hf upload` names the repository first


def _join_filters(words: list[str]) -> None:
    """One pattern for a layer and a name: the option takes one, and the last one counts."""
    places = [at for at, word in enumerate(words) if word == "--filter"]
    if len(places) < 2:
        return
    values = [words[at + 1] for at in places]
    layers = [value for value in values if re.fullmatch(r"\*\.\w+\.\*", value)]
    names = [
        value.strip("*") for value in values if value not in layers and not any(one[1:-1] in value for one in layers)
    ]
    whole = "*".join([*(one.strip("*") for one in layers), *names]) if names else ""
    pattern = f"*{whole}*" if whole else next((value for value in values if value not in layers), values[0])
    for at in reversed(places):
        del words[at : at + 2]
    words[2:2] = ["--filter", pattern]


_TAKE_A_MODEL = ("imatrix", "run", "vocab", "eval", "tensors", "tree", "hex", "bench")


def _put_model_first(words: list[str]) -> None:
    """Exchanges the text and the model: `tokenize TEXT MODEL`."""
    if words[0] not in _TAKE_A_MODEL or len(words) < 3 or is_model(words[1]) or "://" in words[1]:
        return
    at = next((at for at, word in enumerate(words[2:], 2) if is_model(word)), 0)
    if at and (not words[at - 1].startswith("-") or words[at - 1] == "--data"):
        words[1], words[at] = words[at], words[1]


def _moved(words: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether the arguments that are not options have another order."""
    return _apart([*words[1:]], _SWITCHES)[1] != _apart([*arguments[1:]], _SWITCHES)[1]


def parse(words: Sequence[str]) -> Exception | None:
    """Why typer rejects the command line `words`; None if it accepts it."""
    import typer

    try:
        with command_of(words[0]).make_context(words[0], [*words[1:]]):
            return None
    except typer.TyperException as error:
        return error
    except typer.Exit:  # --help
        return None


# --- reading the other line ---


def _without_true(rest: Sequence[str]) -> Iterator[str]:
    """Switches in the form of transformers' parser, `--use_cpu True` or `--use_cpu=true`, as switches."""
    before = ""
    for word in rest:
        if word.lower() != "true" or not before.startswith("--"):
            yield re.sub(r"^(--[\w-]+)=[Tt]rue$", r"\1", word)
        before = word


_CONVERTS = ("convert", "export", "import")
_FORMATS = {"gguf": "gguf", "hf": "hf", "huggingface": "hf", "transformers": "hf", "mlx": "mlx", "apr": "apr"}
_BITS = re.compile(r"(?:int)?([2-8])(?:-?bits?)?", re.IGNORECASE)
_OF_A_TYPE = ("-q", "--quantize", "--dtype", "--quant", "--outtype", "--type")


def _normalized(key: str, rest: list[str]) -> list[str]:
    """`rest` with values in the form that their meaning needs, whatever the row."""
    command = FOREIGN[key].ours.partition(" ")[0] if key in FOREIGN else key
    if key == "to-mlx" and "-q" in rest:
        return [*(word for word in rest if word != "-q"), *([] if "--bits" in rest else ["--bits", "4"])]
    if command in (*_CONVERTS, "quantize"):
        rest = [word[2:] if word.startswith("--") and _is_type(word[2:]) else word for word in rest]
    if command in _CONVERTS:
        return list(_of_conversion(rest, is_mlx=is_of_mlx([key.replace(" ", "."), *rest])))
    if command == "pretrain" or key in ("lora", "mlx-lm lora"):
        return _with_rank(rest)
    if command == "quantize" and quantizes(rest):
        return [word for word in rest if word != "-q"]
    if command == "quantize" and "-i" in rest and len([word for word in rest if exists(word)]) > 1:
        return ["--imatrix" if word == "-i" else word for word in rest]
    return rest


def _of_conversion(rest: Sequence[str], *, is_mlx: bool) -> Iterator[str]:
    """A type or a format behind an option that has another meaning here, or behind none."""
    to_mlx = is_mlx or "mlx" in rest or "--mlx" in rest or "--format=mlx" in rest
    before = ""
    for at, word in enumerate(rest):
        after = rest[at + 1] if at + 1 < len(rest) else ""
        if word in _OF_A_TYPE and to_mlx and (bits := _BITS.fullmatch(after)):
            yield f"--bits={bits[1]}"
        elif before in _OF_A_TYPE and to_mlx and _BITS.fullmatch(word):
            pass
        elif word == "-q" and quantizes(rest[at:]):
            yield "--dtype"
        elif word == "-q" and _BITS.fullmatch(after):
            yield "--bits"
        elif word in ("-f", "--format", "--to") and after.lower() in _FORMATS:
            yield from ("--format", _FORMATS[after.lower()])
        elif word in ("-f", "--format", "--to") and after.lower() == "ollama":
            yield from ("--format", "gguf", "--modelfile")
        elif before in ("-f", "--format", "--to") and word.lower() in (*_FORMATS, "ollama"):
            pass
        elif not before.startswith("-") and before and not exists(word):
            yield from _of_word(word, to_mlx=to_mlx)
        else:
            yield word
        before = word


def _of_word(word: str, *, to_mlx: bool) -> tuple[str, ...]:
    """A type, a format or a number of bits without an option."""
    if is_float(word) or _is_type(word):
        return ("--dtype", word)
    if word.lower() in _FORMATS:
        return ("--format", _FORMATS[word.lower()])
    return (f"--bits={bits[1]}",) if to_mlx and (bits := _BITS.fullmatch(word)) else (word,)


def _is_type(word: str) -> bool:
    from aprfmt.convert.presets import find_preset

    return find_preset(word) is not None


def is_float(word: str) -> bool:
    """Whether a word names a float type by itself."""
    return re.fullmatch(r"b?f(p|loat)?(16|32)", word, re.IGNORECASE) is not None


def _with_rank(rest: Sequence[str]) -> list[str]:
    """`--lora` with a rank where it has none: in other programs it is a switch."""
    words: list[str] = []
    for at, word in enumerate(rest):
        after = rest[at + 1] if at + 1 < len(rest) else "-"
        is_value = "=" in after and not after.startswith("-")
        words.append("--lora=r=16" if word == "--lora" and not is_value else word)
    return words


_SPLITS = ("split", "llama-gguf-split")
_JOINS = ("join", "llama-gguf-split --merge")


def _first_part(rest: Sequence[str]) -> list[str]:
    """`rest` with the first of several shards only, also of those in a folder."""
    words: list[str] = []
    for word in rest:
        if os.path.isdir(word):
            names = sorted(name for name in os.listdir(word) if (part := PART.search(name)) and int(part[1]) == 1)
            word = os.path.join(word, names[0]) if len(names) == 1 else word
        part = PART.search(word)
        words += [] if part is not None and int(part[1]) > 1 else [word]
    return words


def _keep_gguf(words: list[str]) -> None:
    """Names the shards of a GGUF as GGUFs: `split model.gguf part` writes part-00001-of-..."""
    output = words.index("-o") + 1 if "-o" in words else words.index("--output") + 1 if "--output" in words else 0
    if output and words[1].endswith(".gguf") and not os.path.splitext(words[output])[1]:
        name = words[output].rstrip("/")
        if os.path.isdir(name):
            is_beside = os.path.realpath(name) == os.path.realpath(os.path.dirname(words[1]))
            name = os.path.join(name, stem(words[1]) + "-split" * is_beside)
        words[output] = f"{name}.gguf"


_QUANTIZE = ("-q", "--quantize")


def _of_mlx(words: list[str], *, asked: bool) -> None:
    """Adds the defaults of mlx_lm.convert: four bits if `asked` to quantize, the output folder, the format."""
    names = {word.partition("=")[0] for word in words}
    words += ["--bits", "4"] if asked and not {"--bits", "--recipe"} & names else []
    words += [] if {"--output", "-o"} & names or words[0] != "convert" else ["--output", "mlx_model"]
    words += ["--format", "mlx"] if words[0] == "convert" else []


# Options that take no value; in llama-quantize's order they stand before the files.
_SWITCHES = (
    *("--allow-requantize", "--leave-output", "--pure", "--plan", "--verify", "--no-tokenizer"),
    *("--force", "-f", "--json", "--quiet", "-q"),
)


def _in_order(words: list[str]) -> list[str]:
    """The arguments of `quantize`, and of mergekit's `CONFIG OUT`, in our order; others unchanged."""
    options, files = _apart(words[1:], _SWITCHES)
    if words[0] == "quantize" and (ours := _files_of_quantize([*files])):
        return [*ours, *options]
    if words[0] == "merge" and len(files) == 2 and files[0].endswith((".yml", ".yaml")):
        return ["--config", files[0], "-o", files[1], *options]
    return words[1:]


def _files_of_quantize(files: list[str]) -> list[str] | None:
    """IN TYPE -o OUT --threads N of llama-quantize's words; None where they are in our order, or unclear."""
    from aprfmt.convert.presets import find_preset

    threads = ["--threads", files.pop()] if len(files) > 2 and files[-1].isdecimal() else []
    presets = [name for name in files if find_preset(name)]
    others = [name for name in files if name not in presets]
    if len(presets) == 1 and len(others) == 2:
        return [others[0], *presets, "-o", others[1], *threads]
    if len(files) == 2 and files == [*presets, *others]:
        return [*others, *presets, *threads]
    if len(files) == 2 and threads and files == [*others, *presets]:  # it has a name for the output then
        return [*files, "-o", f"ggml-model-{files[1]}.gguf", *threads]
    return None


# --- our own line, incomplete ---


def _misses(error: Exception) -> bool:
    """Whether typer misses a parameter or has a word too many."""
    return type(error).__name__ == "MissingParameter" or "extra argument" in str(getattr(error, "message", ""))


def missing_of(error: Exception, arguments: Sequence[str]) -> tuple[list[Parameter], list[Parameter]]:
    """(the command's parameters, the missing required ones); typer reports only the first."""
    context, first = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or first is None or type(error).__name__ != "MissingParameter":
        return [], []
    given = {word.partition("=")[0] for word in arguments}
    known = context.command.params
    options = [p for p in known if p.required and p.param_type_name == "option" and p is not first]
    return known, [first, *(option for option in options if not given & {*option.opts})]


def _completed(found: Suggestion, error: Exception) -> Suggestion | None:
    """`found` with placeholders for what typer misses. As with `cp`, an extra last argument is the output."""
    known, missing = missing_of(error, found.words)
    if not missing:
        return None
    words, places = [*found.words], [p for p in known if p.param_type_name == "argument"]
    switches = [name for p in known if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)]
    rest = _apart(words[1:], switches)[1]
    extra = rest[len(places) :]
    if any(p.nargs < 0 for p in places):  # files that are there are inputs, and the last one is not there
        extra = (
            rest[-1:] if len(rest) > 2 and [exists(word) for word in rest] == [True] * (len(rest) - 1) + [False] else []
        )
    added, complete = [], found.complete
    for p in missing:
        value = (p.metavar or p.human_readable_name).partition("[")[0].partition("|")[0]  # of alternatives the first
        if "--output" in p.opts and extra:
            value = extra[-1]
            del words[len(words) - 1 - words[::-1].index(value)]
        else:
            named = _output_of(words, rest) if "--output" in p.opts else None
            # A script, which asks for JSON, names its output.
            complete = complete and named is not None and not _is_unclear(words) and out.mode != "json"
            value = named or value
        added += [value] if p in places else [min(p.opts, key=len), value]
    return Suggestion([*words, *added], found.dropped, found.then, complete)


def _is_unclear(words: Sequence[str]) -> bool:
    """Whether a conversion names neither the format nor the type of its output."""
    names = {word.partition("=")[0] for word in words}
    if is_adapter(words[1]):
        return False
    return words[0] in ("convert", "export") and not names & {"--format", "--dtype", "--quantize", "--bits"}


_OUTPUTS_OF = {
    "import": "{}.apr", "merge": "merged", "merge-adapter": "merged", "prune": "{}-pruned", "shard": "{}-shards",
    "transplant": "{}-transplanted", "imatrix": "{}.imatrix.gguf", "teacher": "{}-logprobs",
}  # fmt: skip
_SUFFIXES = {"gguf": ".gguf", "apr": ".apr", "safetensors": ".safetensors", "hf": "-hf", "mlx": "-mlx"}


def _output_of(words: Sequence[str], places: Sequence[str]) -> str | None:
    """A name for the output of our line `words`, which names none; None if it is unclear or taken."""
    if words[0] == "merge" and any(word.partition("=")[0] == "--config" for word in words):
        return free("merged")
    if not places:
        return None
    name, given = stem(places[0]), dict(pairwise(words)) | dict(word.split("=", 1) for word in words if "=" in word)
    found = _OUTPUTS_OF.get(words[0], "").format(name)
    if words[0] in ("convert", "export"):
        dtype = given.get("--dtype") or given.get("--quantize") or ""
        dtype = dtype or (f"{bits}bit" if (bits := given.get("--bits")) else "")
        kind = _SUFFIXES.get(given.get("--format", "gguf"), f"-{given.get('--format')}")
        found = f"{name}{f'-{dtype}' * bool(dtype)}{kind}"
    return free(found) if found else None


_FILES = (".gguf", ".apr", ".safetensors")


def _is_model(word: str) -> bool:
    return word.endswith(_FILES) or bool(word and exists(word))


def _apart(words: list[str], switches: Collection[str]) -> tuple[list[str], list[str]]:
    """(options with their values, the rest)."""
    options: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        if not word.startswith("-") or word == "-":
            rest.append(word)
        elif word in switches or "=" in word:
            options.append(word)
        else:
            options += [word, *([value] if (value := next(left, None)) is not None else [])]
    return options, rest
