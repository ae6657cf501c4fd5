"""Reads a command line of another program by a row of `foreign_commands`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from aprfmt.cli.foreign_commands import FOREIGN, Foreign
from aprfmt.cli.foreign_options import OPTIONS, OPTIONS_OF, Meaning
from aprfmt.io.source import exists

if TYPE_CHECKING:
    from typer._click import Command, Parameter

_NAME = re.compile(r"\b[A-Z]+\b")
_UPLOADS = ("push", "upload", "upload-folder", "upload-model", "push-to-hub", "publish")
"""Words that ask for an upload. Nothing else publishes; `hf upload` and `mlx_lm.upload` have two words."""


@dataclass(slots=True)
class Suggestion:
    """The apr command line that replaces one of another program.

    Attributes:
        words: the arguments of `apr`.
        dropped: options for which apr has no counterpart.
        then: what else the user should know.
        complete: whether it contains no placeholders.
        more: arguments of further lines, one for each other model.
        note: what the note of a line that is run adds to it.
        because: why no command of ours does it, in place of "no such command".
        shell: what the shell does with the output or afterwards, such as `> FILE`.
    """

    words: list[str]
    dropped: list[str] = field(default_factory=list)
    then: str = ""
    complete: bool = True
    more: list[list[str]] = field(default_factory=list)
    shell: str = ""
    note: str = ""
    because: str = ""

    def line(self) -> str:
        """The command line, quoted for a shell."""
        lines = "; ".join(shlex.join(["apr", *words]) for words in (self.words, *self.more))
        return f"{lines} {self.shell}".rstrip() if self.words else self.shell

    def hint(self) -> str:
        """The line to type; on further lines, what it leaves out."""
        without = f"without {', '.join(self.dropped)}" if self.dropped else ""
        return "\n".join(filter(None, (self.line(), without, self.then, self.note)))

    def runs(self, typed: Sequence[str]) -> bool:
        """Whether it means the same as what was `typed`, and may run: it overwrites and publishes nothing unasked."""
        same = self.complete and not self.dropped and not self.then and not self.shell
        asked = "--force" not in self.words or bool({"--force", "-f"} & {*typed})
        return bool(self.words) and same and asked and (self.words[0] != "push" or self._is_upload(typed))

    def _is_upload(self, typed: Sequence[str]) -> bool:
        """Whether the user asked for an upload, and of something that is there."""
        words = " ".join(typed[:2]).replace("_", "-").replace("mlx-lm.", "").split()
        return bool({*_UPLOADS} & {*words}) and os.path.exists(self.words[1])


@cache
def command_of(name: str) -> Command:
    """typer's object of our command."""
    import typer

    from aprfmt.cli.group import build

    group = typer.main.get_command(build(name))
    assert isinstance(group, typer.core.TyperGroup)
    return group.commands[name]


def is_switch(param: Parameter) -> bool:
    """Whether an option may stand without a value, as `--resume [STEP|auto]`."""
    return bool(getattr(param, "is_flag", False)) or (param.metavar or "").startswith("[")


def option_of(word: str) -> str:
    """The name of an option, with dashes."""
    return word.partition("=")[0].replace("_", "-")


_OUTPUTS = ("--output", *(name for name, meaning in OPTIONS.items() if meaning == "--output"))


class OtherLine:
    """One pass over the arguments of another program."""

    def __init__(self, key: str, foreign: Foreign) -> None:
        self._key, self._foreign = key, foreign
        command = foreign.ours.split()[0]
        self._params = {name: p for p in command_of(command).params for name in (*p.opts, *p.secondary_opts)}
        output = dict.fromkeys(("-o", *_OUTPUTS), "OUT") if re.search(r"\bOUT\b", foreign.takes) else {}
        self._tables: list[Mapping[str, Meaning]] = [foreign.options, output]
        self._tables += [] if foreign.alone else [OPTIONS_OF.get(command, {})]
        self._bound: dict[str, str] = {}
        self._many: dict[str, list[str]] = {}
        self._options: list[str] = []
        self._places: list[str] = []
        self._dropped: list[str] = []

    def read(self, arguments: Sequence[str]) -> Suggestion:
        """The apr command line."""
        left = iter(arguments)
        for word in left:
            if word == "--" or not word.startswith("-") or word == "-":
                self._places += [*left] if word == "--" else [word]
            else:
                self._take(word, left, arguments)
        counted = FOREIGN.get(f"{self._key}+{len(self._places)}")
        if counted is not None:
            self._foreign = counted
        if "MODEL" in self._many and (name := self._foreign.takes.partition(" ")[0]) in ("FILE", "SRC", "RUN"):
            self._many.setdefault(name, []).extend(self._many.pop("MODEL"))
        words, complete = self._filled()
        return Suggestion(words, self._dropped, self._put_names(self._foreign.then), complete)

    def _take(self, word: str, left: Iterator[str], arguments: Sequence[str]) -> None:
        raw, equals, value = word.partition("=")
        name, meaning = self._meaning(raw)
        if meaning is None:
            if name in self._params and not self._foreign.alone:
                self._options += [name + equals + value]
                if not equals and not self._is_switch(name) and (value := next(left, "")):
                    self._options.append(value)
                return
            self._dropped += [] if self._foreign.alone else [raw]
            if not equals and _looks_like_a_value(self._after(word, arguments)):
                next(left, None)
            return
        if isinstance(meaning, str) and (meaning == "" or "=" in meaning[1:]):
            self._options += [meaning] if meaning else []
            return
        if isinstance(meaning, str) and meaning.startswith("-") and self._is_switch(meaning):
            self._options.append(meaning)
            return
        if callable(meaning) and not equals and re.match(r"-[-a-zA-Z]", self._after(word, arguments)):
            value, equals = "", "="  # a switch
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
        if self._foreign.alone:
            return name, {"-m": "MODEL", "--model": "MODEL"}.get(raw)
        own = raw if raw in self._params else name
        meaning = None if own in self._params else OPTIONS.get(raw, OPTIONS.get(name))
        if isinstance(meaning, str) and meaning.startswith("-") and meaning not in self._params:
            meaning = None
        return own, meaning

    def _is_switch(self, option: str) -> bool:
        param = self._params.get(option)
        return param is not None and is_switch(param)

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
        for item in self._foreign.takes.split():
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
                value = _STEM.sub(lambda match: stem(self._bound.get(match[1], match[1])), default)
                value = self._put_names(value) if value == default else value
                if name == "OUT" and value != "." and not value.endswith(".html"):
                    value = self._of_type(value)
                    value = free(value) or value
                self._bound[name] = value.rpartition("/")[2] if default.startswith("/") else value
            else:
                (optional if is_optional else missing).add(name)
        words: list[str] = []
        unnamed = [v for n, values in self._many.items() if n not in {*self._bound, *rest} for v in values]
        for token in self._foreign.ours.split():
            names = set(_NAME.findall(token))
            if token.endswith("...") and (name := token[:-3]) in rest:
                words += rest[name] if rest[name] or name not in missing else [name]
            elif not names & optional:
                text = self._put_names(token)
                option, equals, value = text.partition("=")
                split = equals and option.startswith("--") and names
                words += [option, value] if split else [_once(text)]
        return [*words, *([] if self._foreign.alone else [*unnamed, *places]), *self._options], not missing

    def _of_type(self, output: str) -> str:
        """A default name with the type that was asked for: lines for two types write two files."""
        given = dict(pairwise(self._options)) | dict(word.split("=", 1) for word in self._options if "=" in word)
        dtype = given.get("--dtype") or (f"{given['--bits']}bit" if "--bits" in given else "")
        match = re.fullmatch(r"(.+?)(-(?:hf|mlx|split)|(?:-split)?\.\w+)?", output)
        return f"{match[1]}-{dtype}{match[2] or ''}" if match is not None and dtype else output


_FILES = (".gguf", ".apr", ".safetensors", ".html", ".png", ".jsonl", ".yaml", ".toml", ".txt", ".kld")
_STEM = re.compile(r"<([A-Z]+)>")


def stem(path: str) -> str:
    """The last part of a path without a model's suffix."""
    name = os.path.basename(path.rstrip("/")) or "model"
    return re.sub(r"(-00001-of-\d{5})?\.(gguf|apr|safetensors|bin|pth?)$", "", name)


def free(name: str) -> str | None:
    """`name`, or `name-2` to `name-9`, whichever does not exist yet; None if all exist."""
    begin, suffix = os.path.splitext(name) if name.endswith(_FILES) else (name, "")
    names = (name, *(f"{begin}-{n}{suffix}" for n in range(2, 10)))
    return next((name for name in names if not exists(name)), None)


def _once(text: str) -> str:
    """`text` without a suffix or an address that was in the value already."""
    return text.replace(".gguf.gguf", ".gguf").replace("hf://hf://", "hf://")


def _looks_like_a_value(word: str) -> bool:
    """Whether a word behind an unknown option is its value rather than a file."""
    return not word.startswith("-") and (bool(re.fullmatch(r"[\d.,:]+", word)) or not re.search(r"[./ ]", word))
