"""Command lines of other programs that no row of `foreign_commands` answers: they depend on the files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from aprfmt.cli.foreign_commands import FOREIGN, Foreign
from aprfmt.cli.foreign_line import OtherLine, Suggestion, free, option_of, stem
from aprfmt.cli.foreign_options import CHECKSUMS, TENSOR_OPTIONS, model_of_modelfile
from aprfmt.cli.output import out
from aprfmt.io.source import exists

_OUTPUTS = ("-o", "--output", "--out", "--outfile")
_MODELS = ("-m", "--model", "--model-id")
_SUFFIXES = (".gguf", ".apr", ".safetensors")

PART = re.compile(r"-(\d{5})-of-\d{5}\.\w+$")
"""Of the name of a shard: its number."""


def _where(program: str) -> str:
    path = shutil.which(program)
    return f"is another program, installed here as {path}" if path else "is another program, not installed here"


def _serve(rest: Sequence[str]) -> Suggestion:
    """llama-server reads a GGUF as it is."""
    model, options = _model_of(rest)
    server, because = ["llama-server", "-m"], f"apr has no server; llama-server {_where('llama-server')}"
    if not model or model.endswith(".gguf"):
        line = shlex.join([*server, model or "MODEL.gguf", *options])
        return Suggestion([], complete=False, shell=line, because=because)
    made = free(f"{stem(model)}.gguf") or "model.gguf"
    return Suggestion(
        ["convert", model, "-o", made], shell=f"&& {shlex.join([*server, made, *options])}", because=because
    )


def _serve_by_vllm(rest: Sequence[str]) -> Suggestion:
    """vLLM reads a folder as it is."""
    model, options = _model_of(rest)
    because = f"apr has no server; vllm {_where('vllm')}"
    if os.path.isfile(os.path.join(model, "config.json")) or not model:
        return Suggestion(
            [], complete=False, shell=shlex.join(["vllm", "serve", model or "FOLDER", *options]), because=because
        )
    made = free(f"{stem(model)}-hf") or "model-hf"
    line = f"&& {shlex.join(['vllm', 'serve', made, *options])}"
    return Suggestion(["convert", model, "-o", made, "--format", "hf"], shell=line, because=because)


_OF_SERVING = ("--serve", "--server", "--api", "--http")


def _model_of(rest: Sequence[str]) -> tuple[str, list[str]]:
    """The model of a line for a server, and the options of the server; a number by itself is the port."""
    words = [
        word for whole in rest for word in (whole.split("=", 1) if whole.startswith(("--model=", "-m=")) else [whole])
    ]
    words = [word for word in words if word not in _OF_SERVING]
    places = [word for before, word in zip(["", *words], words, strict=False) if word[:1] != "-" and before[:2] != "--"]
    model = _value_of(words, _MODELS) or next(filter(is_model, words), "")
    model = model or next((word for word in places if not word.isdecimal()), "")
    options = [word for word in words if word not in (*_MODELS, model)]
    if options[:1] and options[0].isdecimal():
        options[:1] = ["--port", options[0]]
    return model, options


def _create(rest: Sequence[str]) -> Suggestion | None:
    """Ollama reads a Modelfile of a GGUF itself."""
    if (files := [word for word in rest if _is_modelfile(word)]) and not {"-f", "--file"} & {*rest}:
        rest = [*(word for word in rest if word not in files), "-f", files[0]]
    if not {"-f", "--file", "--from"} & {word.partition("=")[0] for word in rest}:
        if len([word for word in rest if not word.startswith("-")]) > 1 or not os.path.isfile("Modelfile"):
            return None
        rest = [*rest, "-f", "Modelfile"]  # its default
    found = OtherLine("ollama create -f", FOREIGN["ollama create -f"]).read(rest)
    model, name = found.words[1], os.path.splitext(found.words[3])[0]
    file = _value_of(rest, ("-f", "--file")) or "Modelfile"
    found.because = f"apr does not create Ollama models; ollama {_where('ollama')}"
    if model.endswith(".gguf") and "--dtype" not in found.words:
        line = shlex.join(["ollama", "create", name, "-f", file])
        return Suggestion(
            [],
            then=f"Ollama reads {model} directly: no conversion is needed",
            complete=False,
            shell=line,
            because=found.because,
        )
    if not model_of_modelfile(file):
        return None
    made = found.words[3] = free(found.words[3]) or found.words[3]
    own = shlex.quote(free(f"{name}.Modelfile") or f"{name}.Modelfile")
    found.shell = (
        f"&& sed 's|^FROM .*|FROM ./{made}|' {shlex.quote(file)} > {own} && ollama create {shlex.quote(name)} -f {own}"
    )
    found.then = ""
    return found


def _is_modelfile(word: str) -> bool:
    return os.path.basename(word).lower().startswith("modelfile") and os.path.isfile(word)


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


_OF_TENSORS = {"--filter"} | {name for name, meaning in TENSOR_OPTIONS.items() if meaning != "" and name[:2] == "--"}


def _list(rest: Sequence[str]) -> Suggestion | None:
    """The tensors of a file, or of a model with a name of tensors."""
    places = [word for word in rest if not word.startswith("-")]
    model = next(filter(is_model, places), "")
    if not model or (
        os.path.isdir(model) and len(places) == 1 and not {option_of(word) for word in rest} & _OF_TENSORS
    ):
        return None
    found = OtherLine("tensors", FOREIGN["tensors"]).read([word for word in rest if not re.fullmatch("-[la]+", word)])
    found.dropped = [option for option in found.dropped if option != "--models"]
    return found


def _inspect(rest: Sequence[str]) -> Suggestion | None:
    """One model at a time, a key of its metadata, or a page about it."""
    places = [word for word in rest if not word.startswith("-")]
    if any(word.endswith(".html") for word in places) and len(places) == 2:
        return Suggestion(["report", *sorted(places, key=lambda word: word.endswith(".html"))[:1], "-o", places[1]])
    if {option_of(word) for word in rest} & _OF_TENSORS:
        return OtherLine("tensors", FOREIGN["tensors"]).read(rest)
    if len(places) < 2:
        return None
    if len(rest) == 2 and is_model(rest[0]) and not os.path.exists(rest[1]) and "." in rest[1]:
        return Suggestion(["meta", "get", *rest])
    models = [word for word in rest if is_model(word)]
    if len(models) < 2 and len(places) < len(rest):
        return None  # the second word is the value of an unknown option
    skipped = all(map(os.path.exists, rest)) and len(models) > 1  # inspect *
    return _each("inspect")(models if skipped else rest) or Suggestion(
        ["inspect", places[0]], then="inspect shows one model at a time", complete=False
    )


def _each(*ours: str) -> Callable[[Sequence[str]], Suggestion | None]:
    """The command for each of several models."""

    def lines(rest: Sequence[str]) -> Suggestion | None:
        if len(rest) < 2 or not all(map(is_model, rest)):
            return None
        first, *more = ([*ours, word] for word in rest)
        return Suggestion(first, more=more)

    return lines


def each_of_folder(command: str, folder: str) -> Suggestion | None:
    """The command for each model of a folder with several models."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in names if not name.startswith(".")]
    models = [path for path in paths if is_model(path)]
    if len(models) < 2 or "config.json" in names:
        return None
    first, *more = ([command, path] for path in models)
    return Suggestion(first, more=more)


def is_model(word: str) -> bool:
    """Whether a word is a folder, or a file with the suffix of a model."""
    return os.path.isdir(word) or (word.endswith(_SUFFIXES) and os.path.isfile(word))


def _embed(rest: Sequence[str]) -> Suggestion | None:
    """The whole vector, to a file."""
    output = _value_of(rest, _OUTPUTS)
    if len(rest) > 1 and is_model(rest[1]) and not rest[0].startswith("-") and not exists(rest[0]):
        rest = [rest[1], rest[0], *rest[2:]]
        if not output:
            return OtherLine("embed", FOREIGN["embed"]).read(rest)
    if not output:
        return None
    at = next(at for at, word in enumerate(rest) if word in _OUTPUTS)
    found = OtherLine("embed", FOREIGN["embed"]).read([*rest[:at], *rest[at + 2 :]])
    found.words.append("--json")
    found.shell = f"> {shlex.quote(output)}"
    return found


def _kl(key: str) -> Callable[[Sequence[str]], Suggestion | None]:
    """In whichever order two models are named, the larger one is the reference; of equal ones by the row."""

    def line(rest: Sequence[str]) -> Suggestion | None:
        found = OtherLine(key, FOREIGN[key]).read(rest)
        words, models = found.words, [word for word in rest[:2] if is_model(word)]
        if len(models) == 2 and "--against" in words and _differ(*map(size_of, models)):
            words[words.index("--against") + 1], words[1] = sorted(models, key=size_of, reverse=True)
        return found

    return line


def _differ(one: int, other: int) -> bool:
    """Whether two sizes are those of different precisions."""
    return max(one, other) > 1.1 * min(one, other)


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
    return OtherLine(key, FOREIGN[key]).read(rest)


def _adapter(rest: Sequence[str]) -> Suggestion | None:
    """An adapter without its base: the model whose name the adapter's begins with, to be suggested."""
    adapter = next(filter(is_adapter, rest), "").rstrip("/")
    if not adapter or any(is_model(word) and word.rstrip("/") != adapter for word in rest):
        return None
    row = OtherLine("convert-lora-to-gguf", FOREIGN["convert-lora-to-gguf"])
    if len(rest) == 2 and not exists(rest[1]) and rest[1].endswith(".gguf"):
        rest = [rest[0], "-o", rest[1]]
    if exists(os.path.join(adapter, "config.json")):  # it describes the base
        return row.read(rest)
    folder, name = os.path.split(adapter)
    with os.scandir(folder or ".") as entries:
        names = [
            entry.name for entry in entries if entry.is_dir() and name.startswith(entry.name) and entry.name != name
        ]
    if not names:
        return None
    base = os.path.join(folder, max(names, key=len))
    found = row.read([*rest, "--base", base])
    found.then, found.complete = f"{base} is taken as the base model because of its name", False
    return found


def is_adapter(path: str) -> bool:
    """Whether a folder is an adapter of PEFT."""
    return os.path.isfile(os.path.join(path, "adapter_config.json"))


def first_part(words: Sequence[str]) -> str | None:
    """The first of the shards of one file, or of those in a folder; None for anything else."""
    parts = [*words]
    if len(parts) == 1 and os.path.isdir(parts[0]):
        parts = [os.path.join(parts[0], name) for name in sorted(os.listdir(parts[0]))]
    is_one = len({PART.sub("", name) for name in parts}) == 1 and all(map(PART.search, parts))
    return min(parts) if is_one else None


def _merge(rest: Sequence[str]) -> Suggestion | None:
    """The shards of a file, or a folder of them, and perhaps a file that is not there: joins them."""
    words = [word for word in rest if word not in _OUTPUTS]
    *parts, output = words if words and not os.path.exists(words[-1]) else [*words, ""]
    first = first_part(parts)
    if first is None or output.startswith("-"):
        return _merge_of_many(rest)
    return OtherLine("join", FOREIGN["join"]).read([first, *(["-o", output] if output else [])])


def _merge_of_many(rest: Sequence[str]) -> Suggestion | None:
    """Models behind `--models`, or each behind `--model`; weights as several words; `-m METHOD`."""
    words: list[str] = []
    for at, word in enumerate(rest):
        after = rest[at + 1] if at + 1 < len(rest) else ""
        if word == "-m" and not os.path.exists(after):
            words.append("--method")
        elif word in ("-m", "--model", "--models") and os.path.exists(after):
            continue
        elif words[-2:-1] == ["--weights"] and re.fullmatch(r"[\d.]+", word):
            words[-1] += f",{word}"
        else:
            words.append(word)
    return OtherLine("merge", Foreign("[MODEL...]", "merge MODEL...")).read(words) if words != [*rest] else None


def _set(rest: Sequence[str]) -> Suggestion | None:
    """A chat template is the text of a file."""
    words = [word for word in rest if word not in ("--force", "-s", "--set")]
    if len(words) > 1 and all("=" in word for word in words[1:]) and "template" not in words[1]:
        return Suggestion(["meta", "set", *words])
    if len(words) == 2 and "=" in words[1]:
        words[1:] = words[1].split("=", 1)
    if len(words) != 3 or words[1] not in ("chat_template", "chat-template", "tokenizer.chat_template"):
        return None
    path = words[2].removeprefix("@")
    return Suggestion(["meta", "template", "set", words[0], path]) if os.path.isfile(path) else None


def _metadata(rest: Sequence[str]) -> Suggestion | None:
    """`metadata ACTION FILE ...`, in either order."""
    from aprfmt.cli.meta import ACTIONS

    if len(rest) == 2 and is_model(rest[0]) and re.fullmatch(r"[\w.]+\.\w+", rest[1]) and not exists(rest[1]):
        return Suggestion(["meta", "get", *rest])
    at = next((at for at, word in enumerate(rest[:2]) if word in ACTIONS and not os.path.exists(word)), None)
    if at is None:
        return None
    return Suggestion(["meta", ACTIONS[rest[at]], *rest[:at], *rest[at + 1 :]])


def _download(rest: Sequence[str]) -> Suggestion | None:
    """`get MODEL KEY`: of a file that is there."""
    return Suggestion(["meta", "get", *rest]) if len(rest) == 2 and is_model(rest[0]) else None


def _upload(rest: Sequence[str]) -> Suggestion | None:
    """`hf upload REPO FOLDER .`: the last word is the folder in the repository, its root."""
    if len(rest) < 3 or rest[2] not in (".", "./", "/"):
        return None
    return OtherLine("hf upload", FOREIGN["hf upload"]).read([*rest[:2], *rest[3:]])


def _template(rest: Sequence[str]) -> Suggestion | None:
    """A template is set, a conversation rendered."""
    rest = [word for word in rest if word not in ("--file", "--from", "-f")]
    is_template = len(rest) == 2 and rest[1].endswith((".jinja", ".jinja2", ".j2"))
    return Suggestion(["meta", "template", "set", *rest]) if is_template else None


def _meta(rest: Sequence[str]) -> Suggestion | None:
    """`meta template FILE` with an option that says what to do, and `meta FILE --template` alone."""
    if rest[:1] == ["template"] and len(rest) > 3:
        verb = {"--set": "set", **dict.fromkeys(("--render", "--messages", "--chat"), "render")}.get(rest[2], "")
        return Suggestion(["meta", "template", verb, rest[1], *rest[3:]]) if verb else None
    if {*rest} & {"--value", "-v"} and {*rest} & {"--key", "-k"}:
        words = [word for word in rest if word != "set"]
        return OtherLine("gguf-set-metadata", FOREIGN["gguf-set-metadata"]).read(words)
    if len(rest) == 2 and rest[1] in ("--template", "--chat-template"):
        return Suggestion(["meta", "template", rest[0]])
    if len(rest) == 3 and rest[1] in ("--template", "--chat-template", "--chat-template-file"):
        return Suggestion(["meta", "set", rest[0], "--template", rest[2]])
    return None


def _lora(rest: Sequence[str]) -> Suggestion | None:
    """A model and data: trains an adapter."""
    if any(word.endswith((".jsonl", ".json", ".txt", ".parquet")) for word in rest) or "--data" in rest:
        return OtherLine("train lora", FOREIGN["train lora"]).read(rest)
    return None


def _run(rest: Sequence[str]) -> Suggestion | None:
    """`--embed` as a switch: the text is elsewhere."""
    for at, word in enumerate(rest):
        if word in ("--embed", "--embedding", "--embeddings") and (at + 1 == len(rest) or rest[at + 1][:1] == "-"):
            return OtherLine("embed", FOREIGN["embed"]).read([*rest[:at], *rest[at + 1 :]])
    return None


def _eval(rest: Sequence[str]) -> Suggestion | None:
    """Two models and data: the second one is the reference."""
    places, text = [word for word in rest[:2] if is_model(word)], rest[2:3]
    if len(places) == 2 and text and os.path.isfile(text[0]):
        rest = [*rest[:2], "--data", *rest[2:]]
    elif len(places) == 2 and len(rest) > 3 and rest[2] in ("--kl", "--kld") and os.path.isfile(rest[3]):
        rest = [*rest[:2], "--data", *rest[3:]]
    if len(places) != 2 or not {"--data", "-d", "-f"} & {*rest}:
        return None
    return OtherLine("eval", FOREIGN["eval"]).read([rest[0], "--against", *rest[1:]])


def _split(rest: Sequence[str]) -> Suggestion | None:
    """A size without an option, or behind that of split(1)."""
    words = ["--shard-size" if word in ("-b", "-s", "--bytes") else word for word in rest]
    sizes = [
        at
        for at, word in enumerate(words)
        if re.fullmatch(r"\d+([kKMG]i?)?B?", word) and not words[at - 1].startswith("-") and not os.path.exists(word)
    ]
    for at in reversed(sizes):
        words.insert(at, "--shard-size")
    return OtherLine("split", FOREIGN["split"]).read(words) if words != [*rest] else None


def _shard(rest: Sequence[str]) -> Suggestion | None:
    """`apr shard` with options of llama-gguf-split."""
    found = _split(rest)
    if found is None:
        return None
    words = found.words[1:]
    if "-o" in words and words[words.index("-o") + 1] == f"{stem(rest[0])}-split.gguf":
        del words[words.index("-o") : words.index("-o") + 2]
    return Suggestion(["shard", *words])


def _for_ollama(key: str) -> Callable[[Sequence[str]], Suggestion | None]:
    """A Modelfile that starts from this model is there already."""

    def line(rest: Sequence[str]) -> Suggestion | None:
        if any(map(_is_modelfile, rest)) or (not rest and os.path.isfile("Modelfile")):
            return _create(rest)
        found = OtherLine(key, FOREIGN[key]).read(rest)
        own = model_of_modelfile("Modelfile").get("MODEL", "")
        if not own or os.path.normpath(own) != os.path.normpath(found.words[1]):
            return None
        return _create([stem(own), "-f", "Modelfile"])

    return line


def _convert(rest: Sequence[str]) -> Suggestion | None:
    """A page, or the model of an Ollama Modelfile."""
    places = [word for word in rest if not word.startswith("-")]
    if len(places) == 2 and places[1].endswith(".html") and is_model(places[0]):
        return Suggestion(["report", places[0], "-o", places[1]])
    files = [word for word in places if _is_modelfile(word)]
    return _create(["model", "-f", files[0]]) if files and len(places) < 3 else None


def page_of(rest: Sequence[str]) -> Suggestion | None:
    """`MODEL -o PAGE.html`."""
    page = _value_of(rest, _OUTPUTS)
    model = next(filter(is_model, rest), "")
    return Suggestion(["report", model, "-o", page]) if model and page.endswith(".html") and len(rest) == 3 else None


def _rename(rest: Sequence[str]) -> Suggestion | None:
    """A name that cannot be one of a file."""
    is_name = len(rest) == 2 and not re.search(r"[/\\]|\.\w+$", rest[1]) and is_model(rest[0])
    return Suggestion(["meta", "set", rest[0], f"general.name={rest[1]}"]) if is_name else None


def _sums(rest: Sequence[str]) -> Suggestion | None:
    """A list of sha256sum by itself: the files that it names."""
    files = [word for word in rest if not word.startswith("-")]
    if len(files) != 1 or is_model(files[0]) or not os.path.isfile(files[0]):
        return _each("validate")(rest)
    with open(files[0], encoding="utf-8", errors="replace") as file:
        found = [re.fullmatch(r"[0-9a-fA-F]{64} [ *](.+)", line.rstrip("\n")) for line in file.readlines(1 << 16)]
    folder = os.path.dirname(files[0])
    lines = [["validate", os.path.join(folder, sum_[1]), "--sha256", files[0]] for sum_ in found if sum_ is not None]
    return Suggestion(lines[0], more=lines[1:]) if lines and len(lines) == len(found) else None


_UNSIGNED = "apr validate checks the file itself; apr verify FILE --key KEY checks a signature"


_KEYS = (".pub", ".pem", ".crt", ".cer")
"""Suffixes of public keys and certificates."""


def _verify(rest: Sequence[str]) -> Suggestion | None:
    """A key without its option; models without a key: their integrity, if no signature lies next to them."""
    words = [word for word in rest if word not in ("-m", "--model", "--integrity")]
    models = [word for word in words if not word.startswith("-")]
    keys = [word for word in models if word.endswith(_KEYS) and os.path.isfile(word)]
    if len(keys) == 1 and len(words) == 2:
        return Suggestion(["verify", *(word for word in words if word not in keys), "--key", *keys])
    found = Suggestion(["validate", *models]) if len(models) == 1 and is_model(models[0]) else _sums(words)
    if found is None or len(models) != len(words):
        return None
    if any(exists(f"{word}.sig") or exists(os.path.join(word, "model.sig")) for word in models):
        return Suggestion(["verify", models[0], "--key", "KEY"], complete=False)
    if "--sha256" not in found.words:
        found.note = _UNSIGNED
        found.complete = out.data_stream.isatty()  # a script that forgets the key must not pass
    return found


def _transplant(rest: Sequence[str]) -> Suggestion | None:
    """A second model without its option: the one with the tokenizer."""
    models = [word for word in rest[:2] if is_model(word) or os.path.basename(word) == "tokenizer.json"]
    if len(models) != 2 or {"--tokenizer", "--donor"} & set(map(option_of, rest)):
        return None
    return Suggestion(["transplant", models[0], "--tokenizer", models[1], *rest[2:]], complete=False)


def _distill(rest: Sequence[str]) -> Suggestion | None:
    """A second model that is larger than the first one: which of them teaches is unclear."""
    models = [word for word in rest[:2] if is_model(word)]
    if len(models) != 2 or 2 * size_of(models[0]) >= size_of(models[1]):
        return None
    found = OtherLine("distill", FOREIGN["distill"]).read([*reversed(models), *rest[2:]])
    found.then = "the larger model is the teacher"
    return found


def _extract(rest: Sequence[str]) -> Suggestion | None:
    """Two models in either order: the one whose name goes on from that of the other is the fine-tuned one."""
    places = [word.rstrip("/") for word in rest[:2] if not word.startswith("-") and is_model(word)]
    if len(places) != 2:
        return None
    base, tuned = sorted(places, key=len)
    if not stem(tuned).startswith(stem(base)) or stem(tuned) == stem(base):
        return None
    found = OtherLine("extract-lora", FOREIGN["extract-lora"]).read(["--base", base, "--tuned", tuned, *rest[2:]])
    found.note = f"{base} is taken as the base and {tuned} as its fine-tune"
    return found


def _stamp(key: str) -> Callable[[Sequence[str]], Suggestion | None]:
    """A line that names no output: the key is set in place, as `apr meta` does."""

    def line(rest: Sequence[str]) -> Suggestion | None:
        found = OtherLine(key, FOREIGN[key]).read(rest)
        if {"-o", "--output", "--in-place"} & {*found.words} or found.words[2:3] != ["--set"] or found.dropped:
            return None
        return Suggestion(["meta", "set", found.words[1], *(word for word in found.words[3:] if word != "--set")])

    return line


_TYPES_OF_BITS = {"2": "q2_k", "3": "q3_k_m", "4": "q4_k_m", "5": "q5_k_m", "6": "q6_k", "8": "q8_0"}


def _bits(rest: Sequence[str]) -> Suggestion | None:
    """A number of bits of a GGUF is one of llama.cpp's types; MLX takes the number."""
    bits = _value_of(rest, ("--bits",))
    output = _value_of(rest, _OUTPUTS)
    if bits not in _TYPES_OF_BITS or {"mlx", "--mlx"} & {*rest} or (output and not output.endswith(".gguf")):
        return None
    at = rest.index("--bits")
    return OtherLine("quantize", FOREIGN["quantize"]).read(
        [*rest[:at], "--type", _TYPES_OF_BITS[bits], *rest[at + 2 :]]
    )


SPECIAL: dict[str, Callable[[Sequence[str]], Suggestion | None]] = {
    **dict.fromkeys(("llama-server", "mlx-lm server", "ollama serve", "transformers serve"), _serve),
    **dict.fromkeys(("ollama create", "ollama create -f"), _create), "ollama pull": _pull, "inspect": _inspect,
    **dict.fromkeys(("check", "validate", "checksum", "checksum+1"), _sums), "verify": _verify,
    **{f"{name} {option}": _sums for name in ("verify", "checksum") for option in ("-c", *CHECKSUMS, "--sha256")},
    **dict.fromkeys(("ollama list",), _list), "vllm serve": _serve_by_vllm, "doctor": _each("validate"),
    "qa": _each("qa"), "convert-lora-to-gguf": _adapter, "metadata": _metadata, "hf download": _download,
    **dict.fromkeys(("hf upload", "upload"), _upload), "template": _template,
    **dict.fromkeys(("meta", "meta --set", "meta --key"), _meta), **dict.fromkeys(("join-lora", "lora"), _lora),
    "run": _run, "llama-cli": _run, **dict.fromkeys(("eval", "llama-perplexity", "evaluate"), _eval),
    **dict.fromkeys(("split", "llama-gguf-split"), _split), "shard": _shard,
    **dict.fromkeys(("convert", "export"), _convert), "rename": _rename,
    **{key: _for_ollama(key) for key in ("export --ollama", "modelfile")},
    **{key: _stamp(key) for key in ("stamp --name", "stamp --chat-template")}, "quantize --bits": _bits,
    "extract-lora": _extract, "run --serve": _serve, "distill": _distill, "transplant": _transplant, "embed": _embed,
    **{key: _kl(key) for key in ("kl", "compare --data", "diff --data", "parity --data")},
    "llama-export-lora": _export_lora, "merge": _merge, "gguf-set-metadata": _set,
}  # fmt: skip
"""By row of FOREIGN, which applies where these return None."""
