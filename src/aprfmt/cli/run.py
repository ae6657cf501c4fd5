"""`apr run`: generate text, chat or compute embeddings."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

import aprfmt
from aprfmt.cli.options import Common, LlamaMachine, ModelArgument
from aprfmt.cli.output import out, printable, shorten, table, width
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.running.embeddings import Embeddings

_SCALE = ":"
_OF_VECTORS = ("file", "embed", "lora", "ctx", "threads", "gpu_layers", "dtype")
"""Options that apply to --embed."""


@dataclass(kw_only=True)
class RunCommand(Common, LlamaMachine):
    """Generate text, chat or compute embeddings with llama.cpp; other formats are exported to GGUF once and cached.

    Without a prompt, `apr run` chats on a terminal (/help lists commands, Ctrl-C stops an answer, Ctrl-D exits);
    otherwise it reads the prompt from standard input. Generated text goes to standard output, everything else to
    standard error.

    \b
    apr run model.apr "What is the capital of France?"
    apr run ./Qwen3-0.6B --system "Answer in French." --temperature 0.7 --seed 1
    git diff | apr run model.gguf "Summarise this change:" -
    apr run base.gguf --raw "Once upon a time" -n 50 --stop "The end"
    apr run model.gguf --lora ./adapter:0.5 "Hello"
    apr run gemma.gguf --mmproj mmproj.gguf --image cat.png "What is this?"
    apr run bge-m3.gguf --embed "a cat" --embed "a kitten" --json
    """

    file: ModelArgument
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]", help="The prompt; several are joined by newlines, - is standard input."),
    ] = None
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None
    raw: Annotated[
        bool | None,
        typer.Option("--raw", help="Continue the prompt without a chat template; default if the model has none."),
    ] = None
    template: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="Chat template: a Jinja file, or a named template of the model."),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", metavar="N", min=1, help="Generate at most N tokens; with --raw, default 256."
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0, help="Sampling temperature; 0: greedy decoding.")
    ] = 0.0
    top_k: Annotated[int, typer.Option(metavar="K", min=0, help="Sample from the K most likely tokens; 0: all.")] = 40
    top_p: Annotated[
        float,
        typer.Option(metavar="P", min=0, max=1, help="Nucleus sampling: keep tokens up to cumulative probability P."),
    ] = 0.95
    min_p: Annotated[
        float, typer.Option(metavar="P", min=0, max=1, help="Keep tokens with at least P times the top probability.")
    ] = 0.05
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of sampling.")] = 0
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; repeatable.")] = None
    ctx: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Context size; 0: training context. [default: training context, at most 4096]"
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="ADAPTER[:SCALE]", help="Apply a LoRA adapter, in any format; repeatable."),
    ] = None
    image: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Image for the prompt; repeatable.")] = None
    audio: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Audio for the prompt; repeatable.")] = None
    mmproj: Annotated[
        str | None, typer.Option(metavar="FILE", help="The mmproj GGUF (towers), if not part of the model.")
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", "--quantize", metavar="TYPE", help="Quantize to TYPE before running, such as q8_0 or q4_k_m."
        ),
    ] = "keep"
    embed: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text to embed; repeatable. A reranker scores the others against the first."),
    ] = None

    def __call__(self) -> None:
        """Runs the command."""
        if self.embed:
            self._embed(self.embed)
            return
        from aprfmt.cli.chat import statistics

        text = self._text()
        if self.seed and not self.temperature:
            out.note("--seed has no effect at temperature 0; --temperature 0.8 samples")
        if text is None:
            self._chat()
            return
        json = out.mode == "json"
        found = aprfmt.run(
            self.file, text, system=self.system, raw=self.raw, template=self.template, max_tokens=self.max_tokens,
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed,
            stop=self.stop or (), lora=self.adapters(), image=self.image or (), audio=self.audio or (),
            mmproj=self.mmproj, ctx=self.ctx, threads=self.threads, gpu_layers=self.gpu_layers, dtype=self.dtype,
            on_text=None if json else out.stream, log=out.progress_line,
        )  # fmt: skip
        if json:
            out.result(found.to_json())
            return
        out.stream("\n")
        out.progress_line(statistics(found))

    def _text(self) -> str | None:
        """The prompt; None for a conversation."""
        words = self.prompt or []
        if words.count("-") > 1:
            raise UsageError("standard input can be read only once: pass only one -")
        if words and "-" not in words:
            return "\n".join(words)
        if not words and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty() and out.mode == "human":
            return None
        if sys.stdin is None or (not words and sys.stdin.isatty()):
            raise UsageError("no prompt given", hint=f'apr run {self.file} "Hello"')
        given = sys.stdin.buffer.read().decode(errors="replace").rstrip("\n")
        from aprfmt.cli.chat import ENDINGS

        lines = given.splitlines() if not words and not self.raw else []
        if lines and lines[-1].strip() in ENDINGS:
            if len(lines) == 1:  # a chat that ends at once
                raise typer.Exit
            if out.mode == "human":
                sys.stdin = io.StringIO(given)
                return None
            given = "\n".join(lines[:-1])
        text = "\n".join(given if word == "-" else word for word in words or ["-"])
        if not given and not words and out.mode == "human" and out.typed[:1] != ["run"]:
            raise typer.Exit  # `apr chat MODEL </dev/null`: the end of input ends a chat
        if not text.strip():
            raise UsageError("the prompt is empty", hint=f'apr run {self.file} "Hello"')
        return text

    def adapters(self) -> list[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]]:
        """Each --lora with its scale. Raises UsageError."""
        found: list[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]] = []
        for text in self.lora or ():
            path, colon, scale = text.rpartition(_SCALE)
            if not colon or os.path.exists(text):
                found.append(text)
                continue
            try:
                found.append((path, float(scale)))
            except ValueError:
                found.append(text)  # a name with a colon, such as C:\adapter or hf://
        return found

    def _chat(self) -> None:
        from aprfmt.cli.chat import chat
        from aprfmt.running.generate import Loading, sampling_of

        if self.raw:
            raise UsageError(
                "a conversation needs a chat template, which --raw disables", hint="pass a text to continue"
            )
        media = [*(self.image or ()), *(self.audio or ())]
        loading = Loading(
            ctx=self.ctx, threads=self.threads, gpu_layers=self.gpu_layers,
            lora=[one if isinstance(one, tuple) else (one, 1.0) for one in self.adapters()], mmproj=self.mmproj,
            media=bool(media), template=self.template, dtype=self.dtype,
        )  # fmt: skip
        sampling = sampling_of(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
        )
        chat(
            self.file, loading, media=media, sampling=sampling, system=self.system, max_tokens=self.max_tokens,
            stop=self.stop or (),
        )  # fmt: skip

    def _embed(self, texts: list[str]) -> None:
        for field in fields(self):
            name = field.name
            if name not in _OF_VECTORS and getattr(self, name) not in (field.default, []):
                word = "a prompt" if name == "prompt" else f"--{name.replace('_', '-')}"
                raise UsageError(f"--embed generates no text, so {word} has no effect")
        found = aprfmt.embed(
            self.file, texts, lora=self.adapters(), ctx=self.ctx, threads=self.threads, gpu_layers=self.gpu_layers,
            dtype=self.dtype, log=out.progress_line,
        )  # fmt: skip
        out.result(found.to_json(), _vectors(found))
        if found.items[0].scores is None and found.size > _SHOWN and out.data_stream.isatty():
            out.hint(f"{shlex.join(['apr', *out.arguments, '--json'])}\nprints all {found.size:,} values")


_SHOWN = 6
_UNIT = 1e-3


def _vectors(found: Embeddings) -> Iterator[str]:
    room = max(16, width() // 3)
    names = [shorten(printable(item.text), room) for item in found.items]
    if found.items[0].scores is not None:
        if found.query is not None:
            yield f"query: {printable(found.query)}"
        labels = list(found.items[0].scores)
        rows = [
            [name, *(f"{value:.4f}" for value in (item.scores or {}).values())]
            for name, item in zip(names, found.items, strict=True)
        ]
        yield from table(["text", *labels], rows, right=" ".join(labels), indent=0)
        return
    is_unit = all(item.norm is not None and abs(item.norm - 1) < _UNIT for item in found.items)
    norm = "normalized" if is_unit else "not normalized: divide by the norm for the vectors of llama-embedding"
    yield f"{found.size:,} values, pooling: {found.pooling}, {norm}"
    if out.data_stream.isatty():
        rows = [
            [name, f"{item.norm:.4f}", " ".join(f"{value:.4f}" for value in (item.vector or [])[:_SHOWN]) + " …"]
            for name, item in zip(names, found.items, strict=True)
        ]
        yield from table(["text", "norm", "first values"], rows, right="norm", indent=0)
    else:
        for name, item in zip(names, found.items, strict=True):
            yield f"{name}  norm {item.norm:.4f}"
            yield " ".join(f"{value:.6g}" for value in item.vector or ())
    if len(names) > 1:
        numbers = [str(i) for i in range(1, len(names) + 1)]
        cells = [
            [f"{number} {name}", *("-" if x is None else f"{x:.4f}" for x in row)]
            for number, name, row in zip(numbers, names, found.similarities or [], strict=True)
        ]
        yield ""
        yield from table(["cosine", *numbers], cells, right=" ".join(numbers), indent=0)
