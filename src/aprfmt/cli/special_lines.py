"""Command lines of other programs that a row of `habits` cannot answer: what they mean depends on the files."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from aprfmt.cli.foreign_line import OtherLine, Suggestion, stem
from aprfmt.cli.habits import HABITS

_OUTPUTS = ("-o", "--output", "--out", "--outfile")
_MODELS = ("-m", "--model")
_SUFFIXES = (".gguf", ".apr", ".safetensors")

PART = re.compile(r"-(\d{5})-of-\d{5}\.\w+$")
"""Of the name of a shard: its number."""


def _serve(rest: Sequence[str]) -> Suggestion | None:
    """llama-server reads a GGUF as it is."""
    model = _value_of(rest, _MODELS) or next((word for word in rest if not word.startswith("-")), "")
    if not model:
        return None
    options = [word for word in rest if word not in (*_MODELS, model)]
    is_gguf = model.endswith(".gguf")
    server = shlex.join(["llama-server", "-m", model if is_gguf else f"{stem(model)}.gguf", *options])
    if is_gguf:
        return Suggestion([], complete=False, shell=server)
    return Suggestion(["convert", model, "-o", f"{stem(model)}.gguf"], shell=f"&& {server}")


def _create(rest: Sequence[str]) -> Suggestion | None:
    """Ollama reads a Modelfile of a GGUF itself."""
    if not {"-f", "--file", "--from"} & {word.partition("=")[0] for word in rest}:
        if len([word for word in rest if not word.startswith("-")]) != 1 or not os.path.isfile("Modelfile"):
            return None
        rest = [*rest, "-f", "Modelfile"]  # its default
    found = OtherLine("ollama create -f", HABITS["ollama create -f"]).read(rest)
    model, name = found.words[1], os.path.splitext(found.words[3])[0]
    if not model.endswith(".gguf") or "--dtype" in found.words:
        return None
    line = shlex.join(["ollama", "create", name, "-f", _value_of(rest, ("-f", "--file")) or "Modelfile"])
    return Suggestion([], then=f"Ollama reads {model} as it is", complete=False, shell=line)


def _value_of(rest: Sequence[str], options: Collection[str]) -> str:
    return next((value for option, value in pairwise(rest) if option in options), "")


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


def pulled(address: str) -> str:
    """What to type for an address that `apr pull` does not read."""
    host, slash, name = address.partition("/")
    if slash and name and (re.search(r"[.:]", host) or host == "localhost") and "hf.co" not in host:
        return shlex.join(["apr", "pull", f"oci://{address}"])
    found = _pull([address])
    return found.line() if found is not None else "apr convert hf://org/repo -o model.gguf"


def _inspect(rest: Sequence[str]) -> Suggestion | None:
    """One model at a time."""
    places = [word for word in rest if not word.startswith("-")]
    if len(places) < 2:
        return None
    return _each("inspect")(rest) or Suggestion(
        ["inspect", places[0]], then="inspect shows one model at a time", complete=False
    )


def _each(*ours: str) -> Callable[[Sequence[str]], Suggestion | None]:
    """Our command on each of several models."""

    def lines(rest: Sequence[str]) -> Suggestion | None:
        if len(rest) < 2 or not all(map(_is_model, rest)):
            return None
        first, *more = ([*ours, word] for word in rest)
        return Suggestion(first, more=more)

    return lines


def _is_model(word: str) -> bool:
    return os.path.isdir(word) or (word.endswith(_SUFFIXES) and os.path.isfile(word))


def _embed(rest: Sequence[str]) -> Suggestion | None:
    """The whole vector, to a file."""
    output = _value_of(rest, _OUTPUTS)
    if not output:
        return None
    at = next(at for at, word in enumerate(rest) if word in _OUTPUTS)
    found = OtherLine("embed", HABITS["embed"]).read([*rest[:at], *rest[at + 2 :]])
    found.words.append("--json")
    found.shell = f"> {shlex.quote(output)}"
    return found


def _kl(rest: Sequence[str]) -> Suggestion | None:
    """In whichever order two models are named, the larger one is the reference."""
    found = OtherLine("kl", HABITS["kl"]).read(rest)
    words, models = found.words, [word for word in rest[:2] if _is_model(word)]
    if len(models) == 2 and "--against" in words and size_of(models[0]) > size_of(models[1]):
        words[words.index("--against") + 1], words[1] = models
    return found


def size_of(path: str) -> int:
    """Bytes of a file, or of the files of a folder."""
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    return os.path.getsize(path)


def _export_lora(rest: Sequence[str]) -> Suggestion | None:
    """An adapter alone, or the base as `--base`: converts the adapter, where llama.cpp's program merges it."""
    models = [word for word in rest[1:2] if os.path.exists(word)]
    if not rest or not is_adapter(rest[0]) or models or {*_MODELS} & {*rest}:
        return None
    key = "convert-lora-to-gguf"
    return OtherLine(key, HABITS[key]).read(rest)


def is_adapter(path: str) -> bool:
    """Whether a folder is an adapter of PEFT."""
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def _merge(rest: Sequence[str]) -> Suggestion | None:
    """The shards of a file, or the first one, and a file that is not there: joins them."""
    *parts, output = rest or [""]
    if not parts or not all(map(PART.search, parts)) or output.startswith("-") or os.path.exists(output):
        return None
    return OtherLine("join", HABITS["join"]).read([min(parts), "-o", output])


def _set(rest: Sequence[str]) -> Suggestion | None:
    """A chat template is the text of a file."""
    words = [word for word in rest if word != "--force"]
    if len(words) == 2 and "=" in words[1]:
        words[1:] = words[1].split("=", 1)
    if len(words) != 3 or words[1] not in ("chat_template", "chat-template", "tokenizer.chat_template"):
        return None
    path = words[2].removeprefix("@")
    return Suggestion(["meta", "template", "set", words[0], path]) if os.path.isfile(path) else None


SPECIAL: dict[str, Callable[[Sequence[str]], Suggestion | None]] = {
    **dict.fromkeys(("llama-server", "mlx-lm server", "ollama serve", "transformers serve"), _serve),
    **dict.fromkeys(("ollama create", "ollama create -f"), _create),
    "ollama pull": _pull,
    "inspect": _inspect,
    **dict.fromkeys(("check", "validate", "verify"), _each("validate")),
    "embed": _embed,
    "kl": _kl,
    "llama-export-lora": _export_lora,
    "merge": _merge,
    "gguf-set-metadata": _set,
}
"""By row of HABITS, which applies where these return None."""
