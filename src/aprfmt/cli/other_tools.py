"""Answers command lines of other programs, or of ours with something in another place, with our command line."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.foreign_options import OPTIONS, OPTIONS_OF, Meaning
from aprfmt.cli.habits import HABITS, PROGRAMS, SAME, Habit
from aprfmt.cli.output import is_of_mlx, quantizes
from aprfmt.io.source import exists
from aprfmt.text import first_few

_NAME = re.compile(r"\b[A-Z]+\b")
_NOT_RUN = ("push", "distill", "pretrain", "resume", "teacher")
"""Commands that publish or take hours: they are suggested, never run on a guess."""

_SPELLINGS = {"huggingface-cli": "hf", "mlx-lm-convert": "mlx-lm convert", "gguf-split": "llama-gguf-split"}


@dataclass(slots=True)
class Suggestion:
    """Our command line for another one.

    Attributes:
        words: the arguments of `apr`.
        dropped: options for which apr has no counterpart.
        then: what else the user should know.
        complete: whether it contains no placeholders.
    """

    words: list[str]
    dropped: list[str] = field(default_factory=list)
    then: str = ""
    complete: bool = True

    def line(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(["apr", *self.words])

    def hint(self) -> str:
        """The line with what it leaves out."""
        without = f"without {', '.join(self.dropped)}" if self.dropped else ""
        return "; ".join(filter(None, (self.line() if self.words else "", without, self.then)))

    def runs(self, typed: Sequence[str]) -> bool:
        """Whether it means the same as what was `typed`, and may run: it overwrites and publishes nothing unasked."""
        same = self.complete and not self.dropped and not self.then
        asked = "--force" not in self.words or bool({"--force", "-f"} & {*typed})
        return bool(self.words) and same and asked and self.words[0] not in _NOT_RUN


def suggest(arguments: Sequence[str], error: Exception) -> Suggestion | None:
    """Our command line for `arguments`, which typer refused with `error`; None if there is nothing to suggest."""
    found = rephrase(arguments)
    if found is None and _misses(error):
        found = Suggestion([*arguments])
    elif found is None and arguments and (word := arguments[0]) not in COMMANDS and _is_model(word):
        found = Suggestion(["inspect", *arguments])
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


_TRAINS = ("distill", "pretrain")
_EPOCHS = ["--epochs", "3"]
"""The default of transformers and TRL."""


def _complete_training(words: list[str]) -> None:
    """Adds the output folder, and the epochs where no length is given, to a line of training that names its data."""
    if "STEPS" in words:
        at = words.index("STEPS")
        words[at - 1 : at + 1] = [] if "--epochs" in words else _EPOCHS
    if words.count("--lora") and "--lora=r=16" in words:  # `--lora --rank 8`
        words.remove("--lora=r=16")
    names = {word.partition("=")[0] for word in words}
    if "--data" in names and not names & {"--resume", "--config", "--help"}:
        words += [] if names & {"-o", "--output"} else ["-o", "run"]
        words += [] if names & {"--steps", "--epochs", "--smoke"} else _EPOCHS


_SAMPLING = ("--top-k", "--top-p", "--min-p")


def rephrase(arguments: Sequence[str]) -> Suggestion | None:
    """Our command line by the table of habits; None if it has no row, or the row changes nothing."""
    name, rest = _named(arguments)
    key = next((key for word in rest if (key := f"{name} {_option(word)}") in HABITS or key in SAME), name)
    key = SAME.get(key, key)
    habit = HABITS.get(key)
    if habit is None and name in COMMANDS:
        habit = Habit("[MODEL]", f"{name} MODEL")
    if habit is None:
        return None
    if (special := _SPECIAL.get(key)) is not None and (found := special(rest)) is not None:
        return found
    if not habit.ours:
        return Suggestion([], then=habit.then, complete=False)
    found = _read(key, habit, rest, is_of_mlx(arguments))
    _complete_values(found.words)
    is_ours = arguments[0] == found.words[0]
    if is_ours and found.dropped and sorted(found.words) == sorted({*arguments} & {*found.words}):
        return None  # only an unknown option, which the error names
    return (
        None if sorted(found.words) == sorted(arguments) and is_ours and not _moved(found.words, arguments) else found
    )


def _read(key: str, habit: Habit, rest: list[str], is_mlx: bool) -> Suggestion:
    """Our line by a row, from its arguments `rest`."""
    if key in _JOINS:
        rest = _first_part(rest)
    if is_mlx:
        found = _OtherLine(key, habit).read([word for word in rest if word not in _QUANTIZE])
        _of_mlx(found.words, asked=bool({*_QUANTIZE} & {*rest}))
    else:
        types = habit.ours.startswith(_CONVERTS)
        rest = ["--dtype" if types and word == "-q" and quantizes(rest[at:]) else word for at, word in enumerate(rest)]
        found = _OtherLine(key, habit).read(rest)
    if key == "split":
        _keep_gguf(found.words)
    found.words[1:] = _in_order(found.words)
    return found


def _complete_values(words: list[str]) -> None:
    """Corrects a line by what its files are, and adds what other programs have as defaults."""
    if words[0] == "merge" and any(map(_is_adapter, words[1:])) and "--method" not in words:
        words[0] = "merge-adapter"
    elif words[0] == "run" and {*words} & {*_SAMPLING} and "--temperature" not in words:
        words += ["--temperature", "0.8"]  # the default of llama.cpp and Ollama
    elif words[0] in _TRAINS:
        _complete_training(words)
    elif words[0] == "push" and len(words) > 2 and not exists(words[1]) and exists(words[2]):
        words[1:3] = words[2:0:-1]  # `hf upload` names the repository first


def _moved(words: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether the arguments that are not options have another order."""
    return _apart([*words[1:]], _SWITCHES)[1] != _apart([*arguments[1:]], _SWITCHES)[1]


def parse(words: Sequence[str]) -> Exception | None:
    """Why typer refuses our command line `words`; None if it takes it."""
    import typer

    try:
        with _command(words[0]).make_context(words[0], [*words[1:]]):
            return None
    except typer.TyperException as error:
        return error
    except typer.Exit:  # --help
        return None


@cache
def _command(name: str) -> Any:
    import typer

    from aprfmt.cli.group import build

    group: Any = typer.main.get_command(build(name))
    return group.commands[name]


# --- reading the other line ---


def _named(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The command of another program, of one or two words as HABITS has them, and its arguments."""
    words = [*arguments]
    while len(words) > 1 and (re.fullmatch(r"python[\d.]*|-m|apr", words[0])):
        words.pop(0)
    if not words:
        return "", []
    first = words[0]
    if first in COMMANDS:
        return first, words[1:]
    name = re.sub(r"\.(py|exe|sh)$", "", os.path.basename(first)).replace("_", "-").lower()
    name = name.removeprefix("gguf.scripts.")
    name = _SPELLINGS.get(name, name)
    program, dot, command = name.partition(".")
    if dot and program in PROGRAMS:
        name = f"{program} {command}"
    elif name in PROGRAMS and len(words) > 1 and not words[1].startswith("-"):
        name = f"{name} {words.pop(1)}".replace("_", "-")
    return name, words[1:]


def _option(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


_OUTPUTS = ("--output", *(name for name, meaning in OPTIONS.items() if meaning == "--output"))


class _OtherLine:
    """One pass over the arguments of another program."""

    def __init__(self, key: str, habit: Habit) -> None:
        self._key, self._habit = key, habit
        command = habit.ours.split()[0]
        self._params = {name: p for p in _command(command).params for name in (*p.opts, *p.secondary_opts)}
        output = dict.fromkeys(("-o", *_OUTPUTS), "OUT") if re.search(r"\bOUT\b", habit.takes) else {}
        self._tables: list[Mapping[str, Meaning]] = [habit.options, output]
        self._tables += [] if habit.alone else [OPTIONS_OF.get(command, {})]
        self._bound: dict[str, str] = {}
        self._many: dict[str, list[str]] = {}
        self._options: list[str] = []
        self._places: list[str] = []
        self._dropped: list[str] = []

    def read(self, arguments: Sequence[str]) -> Suggestion:
        """Our command line."""
        left = iter(arguments)
        for word in left:
            if word == "--" or not word.startswith("-") or word == "-":
                self._places += [*left] if word == "--" else [word]
            else:
                self._take(word, left, arguments)
        counted = HABITS.get(f"{self._key}+{len(self._places)}")
        if counted is not None:
            self._habit = counted
        words, complete = self._filled()
        return Suggestion(words, self._dropped, self._put_names(self._habit.then), complete)

    def _take(self, word: str, left: Iterator[str], arguments: Sequence[str]) -> None:
        raw, equals, value = word.partition("=")
        name, meaning = self._meaning(raw)
        if meaning is None:
            if name in self._params and not self._habit.alone:
                self._options += [name + equals + value]
                if not equals and not self._is_switch(name) and (value := next(left, "")):
                    self._options.append(value)
                return
            self._dropped += [] if self._habit.alone else [raw]
            if not equals and _looks_like_a_value(self._after(word, arguments)):
                next(left, None)
            return
        if isinstance(meaning, str) and (meaning == "" or "=" in meaning[1:]):
            self._options += [meaning] if meaning else []
            return
        if isinstance(meaning, str) and meaning.startswith("-") and self._is_switch(meaning):
            self._options.append(meaning)
            return
        value = value if equals else next(left, "")
        if callable(meaning):
            words = meaning(value)
            if isinstance(words, dict):
                for bound, given in words.items():
                    self._many.setdefault(bound, []).append(given)
                return
            self._places += words[:1] if words and not words[0].startswith("-") else []
            words = words if words and words[0].startswith("-") else words[1:]
            self._options += words if len(words) != 1 or words[0] not in self._options else []
        elif meaning.startswith("-"):
            self._options += [meaning, value]
        elif meaning != "=":
            self._many.setdefault(meaning, []).append(value)

    def _meaning(self, raw: str) -> tuple[str, Meaning | None]:
        """The option's name, and its meaning by the tables; None if it is ours or unknown."""
        name = raw.replace("_", "-")
        for table in self._tables:
            for spelling in (raw, name):
                if spelling in table:
                    return spelling, table[spelling]
        if self._habit.alone:
            return name, {"-m": "MODEL", "--model": "MODEL"}.get(raw)
        own = raw if raw in self._params else name
        meaning = None if own in self._params else OPTIONS.get(raw, OPTIONS.get(name))
        if isinstance(meaning, str) and meaning.startswith("-") and meaning not in self._params:
            meaning = None
        return own, meaning

    def _is_switch(self, option: str) -> bool:
        param = self._params.get(option)
        return param is not None and (bool(getattr(param, "is_flag", False)) or (param.metavar or "").startswith("[="))

    @staticmethod
    def _after(word: str, arguments: Sequence[str]) -> str:
        at = arguments.index(word) + 1
        return arguments[at] if at < len(arguments) else "-"

    def _put_names(self, text: str) -> str:
        return _NAME.sub(lambda match: self._bound.get(match[0], match[0]), text)

    def _filled(self) -> tuple[list[str], bool]:
        """Our line with the names replaced, and whether all of them were given."""
        places, missing, optional = self._places, set[str](), set[str]()
        rest: dict[str, list[str]] = {}
        for item in self._habit.takes.split():
            is_optional, item = item.startswith("["), item.strip("[]")
            name, has_default, default = item.removesuffix("...").partition("=")
            given = self._many.get(name, [])
            if item.endswith("..."):
                rest[name], places = [*given, *places], []
                missing |= set() if rest[name] or is_optional or name == "PROMPT" else {name}
            elif given or places:
                self._bound[name] = given[-1] if given else places[0]
                places = places if given else places[1:]
            elif has_default:
                value = _STEM.sub(lambda match: _stem(self._bound.get(match[1], match[1])), default)
                value = self._put_names(value) if value == default else value
                self._bound[name] = value.rpartition("/")[2] if default.startswith("/") else value
            else:
                (optional if is_optional else missing).add(name)
        words: list[str] = []
        unnamed = [v for n, values in self._many.items() if n not in {*self._bound, *rest} for v in values]
        for token in self._habit.ours.split():
            names = set(_NAME.findall(token))
            if token.endswith("...") and (name := token[:-3]) in rest:
                words += rest[name] if rest[name] or name not in missing else [name]
            elif not names & optional:
                text = self._put_names(token)
                option, equals, value = text.partition("=")
                split = equals and option.startswith("--") and names
                words += [option, value] if split else [_once(text)]
        return [*words, *([] if self._habit.alone else [*unnamed, *places]), *self._options], not missing


_STEM = re.compile(r"<([A-Z]+)>")


def _stem(path: str) -> str:
    """The last part of a path without a model's suffix."""
    name = os.path.basename(path.rstrip("/")) or "model"
    return re.sub(r"(-00001-of-\d{5})?\.(gguf|apr|safetensors|bin|pth?)$", "", name)


_CONVERTS = ("convert", "export", "import")
_JOINS = ("join", "llama-gguf-split --merge")
_PART = re.compile(r"-(\d{5})-of-\d{5}\.\w+$")


def _first_part(rest: Sequence[str]) -> list[str]:
    """`rest` with the first of several shards only, also of those in a folder."""
    words: list[str] = []
    for word in rest:
        if os.path.isdir(word):
            names = sorted(name for name in os.listdir(word) if (part := _PART.search(name)) and int(part[1]) == 1)
            word = os.path.join(word, names[0]) if len(names) == 1 else word
        part = _PART.search(word)
        words += [] if part is not None and int(part[1]) > 1 else [word]
    return words


def _keep_gguf(words: list[str]) -> None:
    """Names the shards of a GGUF as GGUFs: `split model.gguf part` writes part-00001-of-..."""
    output = words.index("-o") + 1 if "-o" in words else words.index("--output") + 1 if "--output" in words else 0
    if output and words[1].endswith(".gguf") and not os.path.splitext(words[output])[1]:
        words[output] = f"{words[output].rstrip('/')}.gguf"


def _is_adapter(word: str) -> bool:
    return os.path.isfile(os.path.join(word, "adapter_config.json"))


# --- lines that no row can answer ---

_MOST_NAMED = 6


def _serve(rest: Sequence[str]) -> Suggestion | None:
    """llama-server reads a GGUF as it is."""
    model = next((word for word in rest if word.endswith(".gguf")), None)
    if model is None:
        return None
    return Suggestion([], then=f"llama-server -m {shlex.quote(model)} serves it; apr has no server", complete=False)


def _create(rest: Sequence[str]) -> Suggestion | None:
    """Ollama reads a Modelfile of a GGUF itself."""
    if not {"-f", "--file", "--from"} & {word.partition("=")[0] for word in rest}:
        if len([word for word in rest if not word.startswith("-")]) != 1 or not os.path.isfile("Modelfile"):
            return None
        rest = [*rest, "-f", "Modelfile"]  # its default
    found = _OtherLine("ollama create -f", HABITS["ollama create -f"]).read(rest)
    model, name = found.words[1], os.path.splitext(found.words[3])[0]
    if not model.endswith(".gguf") or "--dtype" in found.words:
        return None
    line = shlex.join(["ollama", "create", name, "-f", _value_of(rest, ("-f", "--file"))])
    return Suggestion([], then=f"{line}: Ollama reads {model} as it is", complete=False)


def _value_of(rest: Sequence[str], options: Collection[str]) -> str:
    return next((value for option, value in pairwise(rest) if option in options), "Modelfile")


def _pull(rest: Sequence[str]) -> Suggestion | None:
    """A repository of the hub: Ollama's own registry is not read."""
    address = next((word for word in rest if not word.startswith("-")), "")
    address = re.sub(r"^(hf://|(https?://)?(hf\.co|huggingface\.co)/)", "", address)
    repository, _, quant = address.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        return None
    name = repository.rpartition("/")[2]
    if quant:
        return Suggestion(["convert", f"hf://{address}", "-o", f"{name}-{quant}.gguf"])
    return Suggestion(["convert", f"hf://{repository}", "-o", name, "--format", "hf"])


def _list(rest: Sequence[str]) -> Suggestion | None:
    """The models of a folder."""
    folder = next((word for word in rest if os.path.isdir(word)), ".")
    if next((word for word in rest if os.path.isfile(word)), None) is not None:
        return None
    paths = sorted(os.path.normpath(os.path.join(folder, name)) for name in os.listdir(folder))
    found = [path for path in paths if path.endswith((".gguf", ".apr", ".safetensors")) or _is_model_folder(path)]
    if not found:
        return None
    then = f"models here: {first_few(found, _MOST_NAMED)}"
    return Suggestion(["inspect", found[0]], then=then, complete=False)


def _is_model_folder(path: str) -> bool:
    return os.path.isfile(os.path.join(path, "config.json"))


def _inspect(rest: Sequence[str]) -> Suggestion | None:
    """One model at a time."""
    places = [word for word in rest if not word.startswith("-")]
    return Suggestion(["inspect", places[0]], then="one model at a time", complete=False) if len(places) > 1 else None


_SPECIAL: dict[str, Callable[[Sequence[str]], Suggestion | None]] = {
    **dict.fromkeys(("llama-server", "mlx-lm server", "ollama serve", "transformers serve"), _serve),
    **dict.fromkeys(("ollama create", "ollama create -f"), _create),
    "ollama pull": _pull,
    "ollama list": _list,
    "inspect": _inspect,
}
"""By row of HABITS, which applies where these return None."""


def _once(text: str) -> str:
    """`text` without a suffix or an address that was in the value already."""
    return text.replace(".gguf.gguf", ".gguf").replace("hf://hf://", "hf://")


def _looks_like_a_value(word: str) -> bool:
    """Whether a word behind an unknown option is its value rather than a file."""
    return not word.startswith("-") and (bool(re.fullmatch(r"[\d.,:]+", word)) or not re.search(r"[./ ]", word))


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


def missing_of(error: Exception, arguments: Sequence[str]) -> tuple[list[Any], list[Any]]:
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
        value = (p.metavar or p.human_readable_name).partition("[")[0]
        if "--output" in p.opts and extra:
            value = extra[-1]
            del words[len(words) - 1 - words[::-1].index(value)]
        else:
            complete = False
            value = (_output_of(words, rest) or value) if "--output" in p.opts else value
        added += [value] if p in places else [min(p.opts, key=len), value]
    return Suggestion([*words, *added], found.dropped, found.then, complete)


_OUTPUTS_OF = {
    "import": "{}.apr",
    "merge": "merged",
    "merge-adapter": "merged",
    "prune": "{}-pruned",
    "shard": "{}-shards",
    "imatrix": "{}.imatrix.gguf",
    "teacher": "{}-logprobs",
}
_SUFFIXES = {"gguf": ".gguf", "apr": ".apr", "safetensors": ".safetensors", "hf": "-hf", "mlx": "-mlx"}


def _output_of(words: Sequence[str], places: Sequence[str]) -> str | None:
    """A name for the output of our line `words`, which names none; None if it is unclear or taken."""
    if not places:
        return None
    stem, given = _stem(places[0]), dict(pairwise(words))
    name = _OUTPUTS_OF.get(words[0], "").format(stem)
    if words[0] in ("convert", "export"):
        dtype = given.get("--dtype") or given.get("--quantize") or ""
        kind = _SUFFIXES.get(given.get("--format", "gguf"), f"-{given.get('--format')}")
        name = f"{stem}{f'-{dtype}' * bool(dtype)}{kind}"
    return name if name and not exists(name) else None


def _is_model(word: str) -> bool:
    return word.endswith((".gguf", ".apr", ".safetensors")) or bool(word and exists(word))


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
