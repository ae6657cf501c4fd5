"""llama.cpp's convert_hf_to_gguf.py and convert_lora_to_gguf.py.

One process imports torch and transformers, each conversion is a fork of it.

    python converter_peer.py FOLDER    reads {"script", "source", "out", "type", "options", "plain_vocabulary",
                                       "patches"} a line, writes {"code", "log"} a line

Where the script fails it gets further chances, so that what is compared is weights and keys: `--no-mtp`, which it
offers for models without the extra layers that it expects, and a plain byte-level vocabulary, because the cases'
tokenizer is not always that of the family.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from arch_models import CACHE

CONVERTER = CACHE / "llama.cpp-converter"
MODELS, ADAPTERS = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
ATTEMPTS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("", (), False),
    ("--no-mtp", ("--no-mtp",), False),
    ("plain vocabulary", (), True),
    ("--no-mtp, plain vocabulary", ("--no-mtp",), True),
)
"""(what is said of it, options, whether the vocabulary step is replaced)."""

Patch = tuple[str, str, str]
"""Module of the converter's package `conversion`, a text of it, and what stands there instead."""

_IMPORTED = (
    *("torch", "torch._dynamo", "gguf", "safetensors", "conversion"),
    *("transformers.models.llama.configuration_llama", "transformers.models.auto.tokenization_auto"),
)
"""What conversions need; the two of transformers import most of what the others do."""

_TIMEOUT = 120


def unchanged_output(folder: Path, copy: Path) -> Path:
    """A copy of the folder whose config.json transformers cannot read, so that the converter takes it as it is.

    Its path must not hold a model type: transformers looks for one there too.
    """
    if not copy.is_dir():
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "model_type": "unknown"}))
    return copy


class ConverterError(Exception):
    """The converter does not convert a folder; the message is the last line that it said."""


_running: dict[Path, subprocess.Popen[str]] = {}


@atexit.register
def _end() -> None:
    for process in _running.values():
        process.communicate()


class ConverterPeer:
    """The converter, in a process that starts with the first question and is that of every other peer of a folder."""

    def __init__(self, folder: Path = CONVERTER) -> None:
        self._folder = folder

    @property
    def version(self) -> str:
        """What the converter was unpacked from."""
        path = self._folder / "VERSION"
        return path.read_text().strip() if path.exists() else "unknown"

    def convert(self, source: Path, out: Path, out_type: str, more: Sequence[str] = ()) -> str:
        """Writes `out` with `--outtype out_type` and `more` options; returns which attempt did it.

        Raises ConverterError.
        """
        reasons: list[str] = []
        for said, options, plain_vocabulary in ATTEMPTS:
            try:
                self.convert_once(source, out, out_type, (*options, *more), plain_vocabulary=plain_vocabulary)
            except ConverterError as error:
                reasons.append(str(error))
            else:
                return said
        raise ConverterError(reasons[2])

    def convert_once(
        self,
        source: Path,
        out: Path,
        out_type: str,
        options: Sequence[str] = (),
        *,
        plain_vocabulary: bool = False,
        patches: Sequence[Patch] = (),
    ) -> None:
        """Writes `out` with these options, by a converter edited by `patches`, without a second chance.

        Raises ConverterError, also for a patch whose text its module does not have exactly once.
        """
        out.unlink(missing_ok=True)
        question = {
            "source": str(source.absolute()),
            "out": str(out.absolute()),
            "type": out_type,
            "patches": list(patches),
        }
        answer = self._ask({**question, "options": list(options), "plain_vocabulary": plain_vocabulary})
        if answer["code"] or not out.exists():
            out.unlink(missing_ok=True)
            raise ConverterError(_reason(answer["log"]))

    def convert_adapter(self, adapter: Path, base: Path, out: Path) -> None:
        """Writes `out` as convert_lora_to_gguf.py does, in F32. Raises ConverterError."""
        options = ["--base", str(base.absolute())]
        question = {"script": ADAPTERS, "source": str(adapter.absolute()), "out": str(out.absolute()), "type": "f32"}
        answer = self._ask({**question, "options": options, "plain_vocabulary": False, "patches": []})
        if answer["code"]:
            raise ConverterError(_reason(answer["log"]))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if not (self._folder / MODELS).exists():
            raise ConverterError("not in the material cache: run tools/fetch_material.py llama.cpp-converter")
        process = _running.get(self._folder)
        if process is None or process.poll() is not None:
            environment = {**os.environ, "PYTHONPATH": str(self._folder / "gguf-py"), "HF_HUB_OFFLINE": "1"}
            process = _running[self._folder] = subprocess.Popen(
                [sys.executable, __file__, str(self._folder)],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=self._folder,
                env=environment,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(question), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"code": 1, "log": "the converter process died"}
        return answer


def _reason(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("ERROR")]
    return (errors or lines or ["it says nothing"])[-1][:300]


def _serve(folder: Path) -> None:
    sys.path[:1] = [str(folder), str(folder / "gguf-py")]
    for module in _IMPORTED:
        __import__(module)
    _without_sentencepiece()
    reply = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        question = json.loads(line)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            child = os.fork()
            if child == 0:
                _convert(folder, question, log.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            log.seek(0)
            print(json.dumps({"code": code, "log": log.read()}), file=reply, flush=True)


def _without_sentencepiece() -> None:
    """The converter imports it before it looks whether there is a tokenizer.model; the cases' folders have none."""
    from transformers.utils import is_sentencepiece_available

    if not is_sentencepiece_available():  # transformers remembers the answer
        stub = ModuleType("sentencepiece")
        stub.SentencePieceProcessor = stub.sentencepiece_model_pb2 = None  # type: ignore[attr-defined]
        sys.modules["sentencepiece"] = stub


def _plain_vocabulary() -> None:
    """Every class of the converter writes its vocabulary as a byte-level BPE of SmolLM2's kind."""
    import conversion

    find = conversion.get_model_class

    def patched(*args: Any, **options: Any) -> Any:
        found = find(*args, **options)
        found.get_vocab_base_pre = lambda *_: "smollm"
        found.set_vocab = found._set_vocab_gpt2
        found._get_suppress_tokens = lambda *_: []  # of MiniMax, which looks into the shards for it
        return found

    conversion.get_model_class = patched


def _patch(folder: Path, patches: Sequence[Patch]) -> None:
    """Has this process import the modules as the patches make them; the files stay as they are."""
    from importlib.util import find_spec, module_from_spec

    sources: dict[str, str] = {}
    for name, text, instead in patches:
        source = sources.get(name) or (folder / "conversion" / f"{name}.py").read_text()
        if source.count(text) != 1:
            raise ValueError(f"ERROR: the converter's {name}.py has {source.count(text)} times: {text}")
        sources[name] = source.replace(text, instead)
    for name, source in sources.items():
        spec = find_spec(f"conversion.{name}")
        assert spec is not None
        module = sys.modules[spec.name] = module_from_spec(spec)
        exec(compile(source, str(spec.origin), "exec"), module.__dict__)


def _convert(folder: Path, question: dict[str, Any], log: int) -> None:
    """Runs the script in this (forked) process, which ends here."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        import signal

        signal.alarm(_TIMEOUT)
        script = folder / question.get("script", MODELS)
        options = ["--outtype", question["type"], "--outfile", question["out"], *question["options"]]
        sys.argv = [str(script), question["source"], *options]
        _patch(folder, question["patches"])
        if question["plain_vocabulary"]:
            _plain_vocabulary()
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
