"""`apr run`: the same text of every form, streams, stops, adapters, pictures, vectors, and what is refused."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import wave
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_models import FAMILIES, write_adapter, write_base
from arch_models import build, find_case, write_checkpoint, write_tokenizers
from demo_model import build as build_demo
from tower_models import all_tower_cases, build_tower
from turns import first_always

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import AprError, MissingDependencyError, NotFoundError, RefusedError, RunError, UsageError
from aprfmt.llama.client import Llama
from aprfmt.llama.engine import ENGINES, MEDIA_MARKER
from aprfmt.llama.text_stream import TextStream
from aprfmt.running.conversation import Conversation
from aprfmt.running.generate import Loading, Runner
from aprfmt.running.prepared import prepare, prepare_tower

pytestmark = pytest.mark.llama

Capture = pytest.CaptureFixture[str]
QUESTION = "What is 2+2?"


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An empty cache for this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=first_always(ENGINES))
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine in turn, for all that runs llama.cpp."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    defaults = Llama.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "engines", [request.param])
    return str(request.param)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """The model of the demo, without its chat template."""
    build_demo(tmp_path / "demo.gguf")
    aprfmt.stamp(tmp_path / "demo.gguf", tmp_path / "m.gguf", set={"tokenizer.chat_template": None})
    return tmp_path / "m.gguf"


def test_a_raw_text_starts_no_process_for_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr("aprfmt.tokenizer.chat.start", lambda: started.append(True))
    build_demo(tmp_path / "m.gguf")
    aprfmt.run(tmp_path / "m.gguf", "a", raw=True, max_tokens=1)
    assert started == []
    aprfmt.run(tmp_path / "m.gguf", "a", max_tokens=1)
    assert started == [True]


# --- forms ---


@pytest.mark.turns(first=False)
def test_every_form_of_smollm2_gives_the_same_text(smollm2_gguf: Path, tmp_path: Path, capsys: Capture) -> None:
    aprfmt.import_model(smollm2_gguf, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "hf", dtype="f16")
    texts = []
    for name in (smollm2_gguf, tmp_path / "m.apr", tmp_path / "hf"):
        assert run(["run", str(name), QUESTION, "-n", "16", "--json"]) == 0
        captured = capsys.readouterr()
        found = json.loads(captured.out)
        assert (found["exported"] is None) == (name == smollm2_gguf)
        assert ("exporting" in captured.err) == (name != smollm2_gguf)
        texts.append(found["text"])
    assert texts == ["The answer to this classic math problem is 4."] * 3
    assert run(["run", str(tmp_path / "m.apr"), QUESTION, "-n", "16"]) == 0
    captured = capsys.readouterr()
    assert captured.out == texts[0] + "\n"
    assert "exporting" not in captured.err
    assert " tokens" in captured.err


def test_what_an_answer_says_of_itself(smollm2_gguf: Path, engine: str) -> None:
    found = aprfmt.run(smollm2_gguf, QUESTION, max_tokens=40)
    assert found.ended == "end"
    assert found.engine.startswith(ENGINES[engine])
    assert found.prompt.endswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    assert "You are a helpful AI assistant" in found.prompt
    assert found.tokens[-1] == 2  # <|im_end|>
    assert found.tokens_per_second is not None
    told = aprfmt.run(smollm2_gguf, QUESTION, max_tokens=4, system="Be brief.")
    assert told.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert (told.ended, len(told.tokens)) == ("length", 4)
    raw = aprfmt.run(smollm2_gguf, "The capital of France is", raw=True, max_tokens=4)
    assert raw.prompt == "The capital of France is"
    assert raw.text.startswith(" Paris")


def test_another_template(smollm2_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("Q: {{ messages[-1].content }}\nA:")
    assert aprfmt.run(smollm2_gguf, "Hi", template=str(tmp_path / "t.jinja"), max_tokens=1).prompt == "Q: Hi\nA:"
    named = aprfmt.run(smollm2_gguf, "Hi", template="gemma", max_tokens=1).prompt
    assert named == "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(RunError, match="no chat template 'nobody'"):
        aprfmt.run(smollm2_gguf, "Hi", template="nobody")
    with pytest.raises(NotFoundError, match="unknown chat template"):
        aprfmt.run(smollm2_gguf, "Hi", template=str(tmp_path / "absent.jinja"))


def test_templates_by_name(tmp_path: Path) -> None:
    build_demo(tmp_path / "demo.gguf")
    keys = {"tokenizer.chat_template": "rwkv-world", "tokenizer.chat_template.tool": "T {{ messages[0].content }}"}
    aprfmt.stamp(tmp_path / "demo.gguf", tmp_path / "m.gguf", set=keys, check_template=False)
    assert aprfmt.run(tmp_path / "m.gguf", "Hi", max_tokens=1).prompt == "User: Hi\n\nAssistant:"
    assert aprfmt.run(tmp_path / "m.gguf", "Hi", max_tokens=1, template="tool").prompt == "T Hi"


@pytest.mark.parametrize("writes", ["", "{{ bos_token }}"])
@pytest.mark.parametrize("adds", [True, False])
def test_the_begin_token_is_there_once(tmp_path: Path, writes: str, adds: bool) -> None:
    """The template may write it, and the vocabulary may add it."""
    build_demo(tmp_path / "demo.gguf")
    keys = {
        "tokenizer.chat_template": writes + "{% for m in messages %}{{ m.content }}{% endfor %}",
        "tokenizer.ggml.add_bos_token": adds,
    }
    aprfmt.stamp(tmp_path / "demo.gguf", tmp_path / "m.gguf", set=keys)
    with Runner(tmp_path / "m.gguf", Loading()) as runner:
        bos = runner.llama.facts.bos
        assert bos == 1
        ids = runner.ids(runner.chat_text([{"role": "user", "content": "abc"}]))
        assert ids.count(bos) == (1 if writes or adds else 0)
        assert ids[:1] == [bos] or not (writes or adds)
        assert runner.ids("abc", raw=True).count(bos) == (1 if adds else 0)


def test_weights_of_another_type(adapted: Path, capsys: Capture) -> None:
    plain = aprfmt.run(adapted / "base", "Hello", raw=True, max_tokens=2)
    lines: list[str] = []
    small = aprfmt.run(adapted / "base", "Hello", raw=True, max_tokens=2, dtype="q8_0", log=lines.append)
    assert small.exported is not None
    with aprfmt.open(small.exported) as model:
        assert model.tensors["token_embd.weight"].dtype == "Q8_0"
    assert len(lines) == 1
    aprfmt.export_model(adapted / "base", adapted / "f32.gguf", force=True)
    words = ("--raw", "Hello", "-n", "2", "--quantize", "q8_0", "--json")
    assert run(["run", str(adapted / "f32.gguf"), *words]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == small.tokens
    assert plain.prompt_tokens == small.prompt_tokens
    assert run(["run", str(adapted / "f32.gguf"), "Hi", "--quantize", "q9"]) == 2
    capsys.readouterr()
    assert run(["run", str(small.exported), "Hi", "--quantize", "q4_0"]) == 5
    hint = f"apr convert {small.exported} -o OUT --dtype q4_0 --allow-requantize"
    assert capsys.readouterr().err.endswith(f"hint: run it unchanged, or: {hint}\n")
    assert run(["run", str(adapted / "base"), "--embed", "Hi", "--quantize", "q8_0"]) == 0
    capsys.readouterr()


# --- streams and stops ---


def test_pieces_are_whole_characters_and_stop_before_words() -> None:
    words = TextStream(["end"])
    given = [words.add(piece) for piece in ("ü".encode()[:1], "ü".encode()[1:], b"a e", b"n", b"x e", b"nd b")]
    assert given == ["", "ü", "a ", "", "enx ", ""]
    assert words.stopped
    assert words.text == "üa enx "
    cut = TextStream([])
    assert cut.add("😀".encode()[:3]) == ""
    assert cut.end() == "�"
    held = TextStream(["zz"])
    assert (held.add(b"az"), held.end(), held.text) == ("a", "z", "az")


def test_characters_of_several_tokens_come_whole(smollm2_gguf: Path, engine: str) -> None:
    pieces: list[str] = []
    found = aprfmt.run(smollm2_gguf, "😀😂😀😂😀😂😀😂", raw=True, max_tokens=12, on_text=pieces.append)
    assert "".join(pieces) == found.text
    assert any(len(piece.encode()) > 2 for piece in pieces)
    assert "�" not in "".join(pieces[:-1])
    assert len(pieces) < len(found.tokens)


def test_standard_input_and_pieces_on_standard_output(
    smollm2_gguf: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin(io.TextIOWrapper):
        def isatty(self) -> bool:
            return False

    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", Stdin(io.BytesIO(text.encode())))

    give(f"{QUESTION}\n")
    assert run(["run", str(smollm2_gguf), "-n", "16", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The answer to this classic math problem is 4.\n"
    assert captured.err == ""
    give("2+2?\n")
    assert run(["run", str(smollm2_gguf), "What is", "-", "-n", "1", "--json"]) == 0
    assert "user\nWhat is\n2+2?<|im_end|>" in json.loads(capsys.readouterr().out)["prompt"]
    give("  \n")
    assert run(["run", str(smollm2_gguf)]) == 2
    assert "the prompt is empty" in capsys.readouterr().err
    for text in ("", "/bye\n"):  # a chat that ends at once
        give(text)
        assert run(["chat", str(smollm2_gguf)]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "error" not in captured.err
    monkeypatch.setattr("aprfmt.cli.chat._PIPED_TOKENS", 5)
    give(f"{QUESTION}\n  /bye \n")  # a conversation that ends, with answers that end
    assert run(["chat", str(smollm2_gguf)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The answer to this classic\n"
    assert "cut at 5 tokens (--max-tokens)" in captured.err
    give(f"{QUESTION}\n/bye\n")
    assert run(["run", str(smollm2_gguf), "-n", "16", "--json"]) == 0
    assert "/bye" not in json.loads(capsys.readouterr().out)["prompt"]


def test_the_same_seed_and_another(smollm2_gguf: Path, capsys: Capture) -> None:
    texts = []
    for seed in (1, 1, 2):
        words = ["Tell me a story.", "-n", "8", "--temperature", "1.5", "--top-k", "0", "--top-p", "1", "--json"]
        assert run(["run", str(smollm2_gguf), *words, "--min-p", "0", "--seed", str(seed)]) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1] != texts[2]


# --- conversations ---


def test_a_conversation_computes_what_is_new(smollm2_gguf: Path, engine: str) -> None:
    with Runner(smollm2_gguf, Loading()) as runner:
        talk = Conversation(runner, "Be brief.", max_tokens=12)
        first = talk.ask("My name is Bob.")
        second = talk.ask("What is 2+2?")
        assert first.text in second.prompt
        alone = runner.answer(second.prompt, max_tokens=12)
        assert alone.tokens == second.tokens
        with pytest.raises(RunError, match="the context has room for"):
            talk.ask("word " * 5000)
        assert not talk.turns or talk.turns[-1]["role"] == "assistant"


# --- failures ---


def test_it_says_what_it_had_before_llama_cpp_died(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for package in ENGINES:
        folder = tmp_path / "fake" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(
            "import importlib, os, signal, sys\n"
            f"sys.path.remove({str(tmp_path / 'fake')!r})\n"
            "del sys.modules[__name__]\n"
            "package = importlib.import_module(__name__)\n"
            "from aprfmt.llama.session import Session\n"
            "compute = Session._compute\n"
            "def computing(self, ids, every=False):\n"
            "    if len(ids) == 1 and len(self._past) > 45:\n"
            "        os.kill(os.getpid(), signal.SIGSEGV)\n"
            "    compute(self, ids, every)\n"
            "Session._compute = computing\n"
            "sys.modules[__name__] = package\n"
        )
    monkeypatch.syspath_prepend(tmp_path / "fake")
    assert run(["run", str(smollm2_gguf), QUESTION]) == 8
    captured = capsys.readouterr()
    assert captured.out.startswith("The answer to")
    assert "SIGSEGV" in captured.err
    assert run(["run", str(smollm2_gguf), QUESTION, "--json"]) == 8
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "run"


def test_no_package(gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("aprfmt.llama.client.find_spec", lambda name: None)
    assert run(["run", str(gguf), "Hello"]) == 6
    assert "pip install xllamacpp" in capsys.readouterr().err
    with pytest.raises(MissingDependencyError):
        aprfmt.embed(gguf, "Hello")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("Hi", "--system", "x"), 2, "no chat template"),
        (("Hi", "--raw", "--system", "x"), 2, "a system message needs a chat template"),
        (("Hi", "--top-p", "0.5"), 2, "--top-p has no effect at temperature 0"),
        (("Hi", "--temperature", "nan"), 2, "--temperature must be a number from 0 to 100"),
        (("Hi", "-n", "0"), 2, "max-tokens"),
        (("Hi", "--image", "absent.png"), 3, "absent.png: no such file"),
        (("Hi", "--lora", "absent"), 3, "absent"),
        (("Hi", "--lora", "{gguf}"), 5, "this is not an adapter"),
        (("Hi", "--mmproj", "{gguf}"), 5, "without vision or audio towers"),
        (("Hi", "--embed", "x"), 2, "a prompt has no effect"),
        (("a\udcffb",), 2, "not valid Unicode"),
        (("--embed", "a\udcffb"), 2, "not valid Unicode"),
        (("Hi", "--threads", "100000"), 2, "--threads must be a number from 0 to 512"),
        (("Hi", "--ctx", "5000000000"), 2, "--ctx must be an integer from 0 to"),
        (("--embed", "x", "--max-tokens", "3"), 2, "--max-tokens has no effect"),
        (("--embed", "x", "--top-k", "3"), 2, "--top-k has no effect"),
        (("--embed", "x", "--temperature", "0.5"), 2, "--temperature has no effect"),
        (("Hi", "--gpu-layers", str(2**32)), 2, "--gpu-layers must be"),
        (("Hi", "--lora", "absent:nan"), 2, "the scale of an adapter must be a number, not nan"),
        (("-", "-"), 2, "standard input can be read only once"),
        (("x " * 400,), 8, "the context has room for"),
        (("x " * 400,), 8, "a longer context (--ctx)"),
    ],
)
def test_what_makes_no_sense(gguf: Path, capsys: Capture, words: tuple[str, ...], code: int, message: str) -> None:
    assert run(["run", str(gguf), *(word.replace("{gguf}", str(gguf)) for word in words)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.turns(first=False)
def test_a_context_that_no_memory_holds(smollm2_gguf: Path) -> None:
    """46 TB, which are refused at once."""
    with pytest.raises(RunError) as caught:
        aprfmt.run(smollm2_gguf, "Hi", ctx=2**31 - 1)
    assert "a shorter context (--ctx)" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("data", "message"), [(b"", "is empty"), (b" \n", "is empty"), (b"{{ \xff }}", "is not UTF-8 text")]
)
def test_a_file_that_is_no_template(gguf: Path, data: bytes, message: str) -> None:
    path = gguf.with_name("t.jinja")
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        aprfmt.run(gguf, "Hi", template=str(path))


def test_a_template_of_words_alone(gguf: Path) -> None:
    gguf.with_name("t.jinja").write_text("plain words")
    assert aprfmt.run(gguf, "Hi", template=str(gguf.with_name("t.jinja")), max_tokens=1).prompt == "plain words"


def test_what_no_file_is(tmp_path: Path, capsys: Capture) -> None:
    assert run(["run", str(tmp_path / "absent.gguf"), "Hi"]) == 3
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    assert run(["run", str(tmp_path / "bad.gguf"), "Hi"]) == 4
    capsys.readouterr()


@pytest.mark.parametrize("value", [0, True, "x"])
def test_values_of_the_function(gguf: Path, value: Any) -> None:
    with pytest.raises(UsageError, match="--max-tokens must be"):
        aprfmt.run(gguf, "Hi", max_tokens=value)
    with pytest.raises(UsageError, match="--seed must be"):
        aprfmt.run(gguf, "Hi", temperature=1.0, seed=-1)


@pytest.mark.parametrize("case", ["t5", "mamba"])
def test_other_kinds_of_decoders(tmp_path: Path, engine: str, case: str) -> None:
    """One whose encoder reads the prompt at once, and one whose state cannot be cut."""
    folder, found = tmp_path / "m", find_case(case)
    build(found, folder, write_tokenizers(tmp_path / "tokenizers", [found.tokenizer], 512))
    with Runner(folder, Loading(ctx=1024)) as runner:
        first = runner.answer("Hello there", raw=True, max_tokens=6)
        assert runner.answer("Hello there", raw=True, max_tokens=6, reuse=True).tokens == first.tokens
        assert runner.answer("Hello where", raw=True, max_tokens=6, reuse=True).tokens
        long = runner.answer("word " * 400, raw=True, max_tokens=2)
        assert long.prompt_tokens > 512  # more than are computed at once
        with pytest.raises(RunError, match="the context has room for"):
            runner.answer("word " * 2000, raw=True)
        assert runner.answer("Hello there", raw=True, max_tokens=6).tokens == first.tokens


def test_a_diffusion_model_is_refused_by_its_kind(tmp_path: Path) -> None:
    case = find_case("llada")
    write_checkpoint(case, tmp_path / "m", write_tokenizers(tmp_path / "tokenizers", [case.tokenizer], 512))
    with pytest.raises(RefusedError, match="diffusion language model"):
        aprfmt.run(tmp_path / "m", "Hello")


# --- adapters ---


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Path:
    """A folder with a model (base), an adapter of it (lora) and a wider model (wide)."""
    folder = tmp_path_factory.mktemp("adapted")
    model = write_base("llama", folder / "base")
    write_adapter(model, folder / "lora", FAMILIES["llama"], folder / "base")
    write_base("llama/head_dim", folder / "wide")
    write_base("qwen2", folder / "qwen2")
    return folder


def test_an_adapter_of_every_form_is_what_merging_gives(adapted: Path, tmp_path: Path, engine: str) -> None:
    aprfmt.merge_adapter(adapted / "base", adapted / "lora", tmp_path / "merged.gguf", dtype="f32")
    aprfmt.merge_adapter(adapted / "base", adapted / "lora", tmp_path / "half.gguf", dtype="f32", weight=0.5)
    aprfmt.convert_model(adapted / "lora", tmp_path / "lora.apr", base=adapted / "base")
    aprfmt.convert_model(adapted / "lora", tmp_path / "lora.gguf", base=adapted / "base")

    def tokens(model: Path, **options: Any) -> list[int]:
        return aprfmt.run(model, "Hello", raw=True, max_tokens=6, **options).tokens

    merged, plain = tokens(tmp_path / "merged.gguf"), tokens(adapted / "base")
    assert merged != plain
    for adapter in (adapted / "lora", tmp_path / "lora.apr", tmp_path / "lora.gguf"):
        assert tokens(adapted / "base", lora=adapter) == merged
    assert tokens(adapted / "base", lora=[(adapted / "lora", 0.5)]) == tokens(tmp_path / "half.gguf")
    assert tokens(adapted / "base", lora=[(adapted / "lora", 0.0)]) == plain


def test_scales_on_the_command_line(adapted: Path, capsys: Capture) -> None:
    texts = []
    for lora in (f"{adapted / 'lora'}:0", f"{adapted / 'lora'}"):
        words = ("--raw", "Hello", "-n", "6", "--json", "--lora", lora)
        assert run(["run", str(adapted / "base"), *words]) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    plain = aprfmt.run(adapted / "base", "Hello", raw=True, max_tokens=6).tokens
    assert texts[0] == plain != texts[1]


@pytest.mark.parametrize("base", ["wide", "qwen2"])
@pytest.mark.parametrize("form", ["lora", "lora.apr", "lora.gguf"])
def test_an_adapter_of_another_model_is_refused(adapted: Path, base: str, form: str) -> None:
    if form != "lora" and not (adapted / form).exists():
        aprfmt.convert_model(adapted / "lora", adapted / form, base=adapted / "base")
    with pytest.raises(AprError) as caught:
        aprfmt.run(adapted / base, "Hello", raw=True, lora=adapted / form)
    assert caught.value.exit_code in (4, 5)
    assert not isinstance(caught.value, RunError)  # before anything is loaded


def test_an_adapter_alone_is_no_model(adapted: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(adapted / "lora", tmp_path / "a.gguf", base=adapted / "base")
    with pytest.raises(RefusedError, match="this is an adapter") as caught:
        aprfmt.run(tmp_path / "a.gguf", "Hello")
    assert caught.value.hint is not None
    assert "--lora" in caught.value.hint


# --- pictures and sound ---


def write_png(path: Path, pixels: Any) -> Path:
    """[height, width, 3] bytes as a PNG."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    return path


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 0.png, 1.png and a.wav, a second of noise."""
    folder, rng = tmp_path_factory.mktemp("media"), np.random.default_rng(0)
    for i in range(2):
        write_png(folder / f"{i}.png", rng.integers(0, 256, (56, 56, 3), dtype=np.uint8))
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((rng.standard_normal(16000) * 3000).astype(np.int16).tobytes())
    return folder


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a case of tower_models."""
    home = tmp_path_factory.mktemp("towers")

    def make(name: str) -> Path:
        if not (home / name).exists():
            tokenizer = write_tokenizers(home / "tokenizers", ["smollm2"], 512)["smollm2"]
            build_tower(next(case for case in all_tower_cases() if case.id == name), home / name, tokenizer)
        return home / name

    return make


@pytest.mark.turns
@pytest.mark.parametrize("case", ["qwen2_vl_vision", "gemma3_vision"])
def test_pictures(towers: Callable[[str], Path], media: Path, tmp_path: Path, engine: str, case: str) -> None:
    folder = towers(case)

    def tokens(model: Path, *images: str, text: str = "What is this?", **options: Any) -> list[int]:
        files = [media / image for image in images]
        return aprfmt.run(model, text, raw=True, max_tokens=8, image=files, **options).tokens

    first, second, both = tokens(folder, "0.png"), tokens(folder, "1.png"), tokens(folder, "0.png", "1.png")
    assert len({tuple(found) for found in (first, second, both)}) == 3
    assert tokens(folder, "0.png") == first
    aprfmt.export_model(folder, tmp_path / "text.gguf")
    aprfmt.export_model(folder, tmp_path / "mmproj.gguf", mmproj=True)
    assert tokens(tmp_path / "text.gguf", "0.png", mmproj=tmp_path / "mmproj.gguf") == first
    assert tokens(tmp_path / "text.gguf", "0.png", mmproj=folder) == first
    assert tokens(folder, "0.png", text=f"{MEDIA_MARKER}\nWhat is this?") == first
    with pytest.raises(RefusedError, match="without vision or audio towers"):
        tokens(tmp_path / "text.gguf", "0.png")
    with pytest.raises(UsageError, match="2 times, but 1 files"):
        tokens(folder, "0.png", text=MEDIA_MARKER * 2)
    with pytest.raises(RunError, match="accepts images"):
        aprfmt.run(folder, "What?", audio=media / "a.wav")


def test_positions_behind_a_picture(towers: Callable[[str], Path], media: Path, tmp_path: Path, engine: str) -> None:
    """Tokens that are computed one by one stand where mtmd puts those of a longer prompt, also with M-RoPE."""
    folder = towers("qwen2_vl_vision")
    text, tower = prepare(folder), prepare_tower(folder)
    prompt = f"{MEDIA_MARKER}\nWhat is"
    with Llama(text.path, n_ctx=256, tower=tower.path) as llama:
        path = tmp_path / "logits"
        rows = []
        more = llama.tokenize(" this thing?", add_special=False)
        for whole in (True, False):
            llama.generate(prompt + (" this thing?" if whole else ""), 1, media=[media / "0.png"])
            ids = [7] if whole else [*more, 7]
            path.write_bytes(bytes(4 * llama.n_vocab * len(ids)))
            llama.logits(ids, path, follow=True)
            rows.append(np.fromfile(path, np.float32).reshape(len(ids), -1)[-1])
        # The prompt is cut into the same tokens with and without its end.
        assert np.abs(rows[0] - rows[1]).max() < 1e-3 * np.abs(rows[0]).max()
        assert np.abs(rows[0]).max() > 0


def test_sound(towers: Callable[[str], Path], media: Path, engine: str) -> None:
    folder = towers("qwen2_audio_tower")
    found = aprfmt.run(folder, "What is this?", raw=True, max_tokens=4, audio=media / "a.wav", ctx=1024)
    assert found.prompt_tokens > 700
    with pytest.raises(RunError, match="does not accept images"):
        aprfmt.run(folder, "What is this?", raw=True, image=media / "0.png", ctx=1024)
    with pytest.raises(RunError, match="the context has room for"):
        aprfmt.run(folder, "What is this?", raw=True, audio=media / "a.wav", ctx=256)


def test_a_conversation_about_a_picture(
    towers: Callable[[str], Path], media: Path, tmp_path: Path, engine: str
) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    loading = Loading(media=True, template=str(tmp_path / "t.jinja"))
    with Runner(towers("qwen2_vl_vision"), loading) as runner:
        talk = Conversation(runner, max_tokens=4)
        talk.ask("What is this?", media=[media / "0.png"])
        second = talk.ask("And what else?")
        assert second.prompt.startswith(f"user: {MEDIA_MARKER}\nWhat is this?\nassistant:")
        assert second.prompt_tokens > len(runner.ids(second.prompt.replace(MEDIA_MARKER, "")))
        # The picture is a picture, and not text, also where the context holds it from before.
        alone = runner.answer(second.prompt, max_tokens=4, media=[media / "0.png"])
        assert alone.tokens == second.tokens
        other = runner.answer(second.prompt, max_tokens=4, media=[media / "1.png"], reuse=True)
        assert other.tokens == runner.answer(second.prompt, max_tokens=4, media=[media / "1.png"]).tokens
        long = talk.ask("word " * 100 + "?")
        assert long.prompt_tokens > 100
        dropped: list[int] = []
        talk.ask("word " * 60 + "?", on_drop=dropped.append)
        assert sum(dropped) >= 2
        assert MEDIA_MARKER not in talk.turns[0]["content"]


def test_a_picture_is_computed_once(towers: Callable[[str], Path], media: Path, tmp_path: Path, engine: str) -> None:
    folder, picture = towers("qwen2_vl_vision"), tmp_path / "0.png"
    picture.write_bytes((media / "0.png").read_bytes())
    text, tower = prepare(folder), prepare_tower(folder)
    first, second = f"{MEDIA_MARKER}\nWhat is this? ", f"{MEDIA_MARKER}\nWhat is this? And that?"
    with Llama(text.path, n_ctx=256, tower=tower.path) as llama:
        whole = llama.generate(second, 6, media=[picture])
        llama.generate(first, 1, media=[picture])
        other = llama.generate(second, 6, media=[media / "1.png"], reuse=True)
        assert other == llama.generate(second, 6, media=[media / "1.png"])
        llama.generate(first, 1, media=[picture])
        picture.unlink()
        again = llama.generate(second, 6, media=[picture], reuse=True)
        assert again.prompt_tokens == pytest.approx(whole.prompt_tokens, abs=2)
        with pytest.raises(RunError, match="cannot read"):
            llama.generate(second, 6, media=[picture])


# --- vectors ---


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BertModel."""
    folder = tmp_path_factory.mktemp("bert")
    build(find_case("bert"), folder / "m", write_tokenizers(folder / "tokenizers", ["bert"]))
    return folder / "m"


def test_vectors_of_texts(bert: Path, capsys: Capture, engine: str) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["a cat", "a kitten sleeps"]
    found = aprfmt.embed(bert, texts)
    assert (found.pooling, found.size) == ("mean", 64)
    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert).eval()
    wanted = []
    for text, item in zip(texts, found.items, strict=True):
        with torch.no_grad():
            wanted.append(model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy())
        assert np.linalg.norm(np.array(item.vector) - wanted[-1]) < 2e-2 * np.linalg.norm(wanted[-1])
    cosine = wanted[0] @ wanted[1] / np.linalg.norm(wanted[0]) / np.linalg.norm(wanted[1])
    assert found.similarities is not None
    assert found.similarities[0][1] == pytest.approx(cosine, abs=1e-2)
    assert found.similarities[0][0] == pytest.approx(1)
    assert run(["run", str(bert), "--embed", texts[0], "--embed", texts[1], "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["items"][0]["vector"] == pytest.approx(found.items[0].vector, rel=1e-4)
    assert body["items"][0]["norm"] == pytest.approx(found.items[0].norm, rel=1e-4)
    assert run(["run", str(bert), "--embed", texts[0], "--embed", texts[1]]) == 0
    shown = capsys.readouterr().out
    assert "64 values, pooling: mean, not normalized: divide by the norm" in shown
    vectors = [line.split() for line in shown.splitlines() if len(line.split()) == found.size]
    assert [[*map(float, line)] for line in vectors] == [pytest.approx(item.vector, rel=1e-4) for item in found.items]
    assert f"{found.similarities[0][1]:.4f}" in shown


def test_an_encoder_writes_no_text(bert: Path, capsys: Capture) -> None:
    assert run(["run", str(bert), "Hello"]) == 5
    assert "--embed" in capsys.readouterr().err
    assert run(["run", str(bert), "--embed", "x " * 3000]) == 8
    assert "the context has room for" in capsys.readouterr().err


def test_a_decoder_gives_its_last_state(gguf: Path, engine: str) -> None:
    found = aprfmt.embed(gguf, ["Hello", "Hello", "Good bye"])
    assert found.pooling == "last"
    assert found.items[0].vector == found.items[1].vector != found.items[2].vector


def test_scores_of_a_reranker_and_a_classifier(tmp_path: Path, capsys: Capture, engine: str) -> None:
    """As those of transformers."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    def scores(folder: Path, *texts: str) -> Any:
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        with torch.no_grad():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            first, *rest = [tokenizer(text)["input_ids"] for text in texts]
            # [CLS] a [SEP] b [SEP], all of one segment: llama.cpp knows no second one.
            ids = torch.tensor([first + [token for more in rest for token in more[1:]]])
            return model(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits[0].numpy()

    def near(values: Any) -> Any:
        return pytest.approx(values, rel=2e-2, abs=2e-2)

    for name in ("one", "two"):
        build(find_case(f"bert_classifier/{name}"), tmp_path / name, write_tokenizers(tmp_path / "t", ["bert"]))
    found = aprfmt.embed(tmp_path / "one", ["a cat", "a dog", "the law of taxes"])
    assert (found.pooling, found.query, len(found.items)) == ("rank", "a cat", 2)
    for item in found.items:
        assert item.scores is not None
        assert item.vector is None
        assert item.scores == {"score": near(scores(tmp_path / "one", "a cat", item.text)[0])}
    classes = aprfmt.embed(tmp_path / "two", ["a cat", "a dog"])
    assert classes.query is None
    for item in classes.items:
        assert list((item.scores or {}).values()) == pytest.approx(
            scores(tmp_path / "two", item.text), rel=2e-2, abs=2e-2
        )
    assert run(["run", str(tmp_path / "one"), "--embed", "a cat", "--embed", "a dog"]) == 0
    shown = capsys.readouterr().out
    assert "query: a cat" in shown
    assert f"{next(iter((found.items[0].scores or {}).values())):.4f}" in shown


def test_the_command_of_the_page_runs_in_a_process_of_its_own(gguf: Path) -> None:
    """Without a terminal and without a prompt there is nothing to do."""
    done = subprocess.run(
        [sys.executable, "-m", "aprfmt", "run", str(gguf)], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"the prompt is empty" in done.stderr
