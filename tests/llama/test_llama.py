"""llama.cpp in a process of its own: what it computes, and what happens when it refuses, dies or hangs."""

from __future__ import annotations

import json
import struct
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from demo_model import HIDDEN, N_TOKENS, build
from turns import first_always

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import MissingDependencyError, RunError, UsageError
from aprfmt.llama import client
from aprfmt.llama.client import PROMPT, Llama, LlamaDiedError, reason_in, verify_gguf
from aprfmt.llama.engine import ENGINES, Sampling

pytestmark = pytest.mark.llama

Fake = Callable[[str], None]


@pytest.fixture(params=first_always(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine in turn."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """The model of the demo."""
    path = tmp_path / "m.gguf"
    build(path)
    return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Puts stand-ins for both packages first on the worker's path; their code runs after `real` is imported."""
    monkeypatch.syspath_prepend(tmp_path / "fake")

    def make(code: str) -> None:
        for package in ENGINES:
            folder = tmp_path / "fake" / package
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text(
                textwrap.dedent(
                    f"""\
                    import importlib, os, signal, sys, time
                    def die(*_):
                        print("ggml: these are my last words", file=sys.stderr, flush=True)
                        os.kill(os.getpid(), signal.SIGSEGV)
                    def real():
                        sys.path.remove({str(tmp_path / "fake")!r})
                        del sys.modules[__name__]
                        return importlib.import_module(__name__)
                    """
                )
                + textwrap.dedent(code)
            )

    return make


def test_it_generates_what_the_demo_model_says(gguf: Path, engine: str) -> None:
    with Llama(gguf, engines=[engine]) as llama:
        assert llama.engine.startswith(ENGINES[engine])
        assert llama.n_vocab == N_TOKENS
        first = llama.generate(PROMPT)
        assert 0 < len(first.ids) <= 16
        assert llama.generate(PROMPT) == first  # nothing is left of the request before
        assert llama.generate(PROMPT, 3).ids == first.ids[:3]


def test_both_engines_agree(smollm2_gguf: Path) -> None:
    """On the first tokens; Q4_1 is computed by other instructions in each."""
    texts = []
    for engine in ENGINES:
        if find_spec(engine) is None:
            pytest.skip(f"{engine} is not installed")
        with Llama(smollm2_gguf, engines=[engine]) as llama:
            texts.append(llama.generate(PROMPT, 8).text)
    assert texts == [" Paris.\n\nThe United States has"] * 2


def test_a_seed_draws_the_same_tokens(gguf: Path, engine: str) -> None:
    with Llama(gguf, engines=[engine]) as llama:
        first, again, other = (llama.generate(PROMPT, sampling=Sampling(1.5, seed=n)).ids for n in (7, 7, 8))
        assert first == again != other
        assert llama.generate(PROMPT, sampling=Sampling(1.5, top_k=1)) == llama.generate(PROMPT)


def test_pieces_make_the_text_and_words_end_it(smollm2_gguf: Path, engine: str) -> None:
    with Llama(smollm2_gguf, engines=[engine]) as llama:
        whole = llama.generate(PROMPT, 12)
        assert whole.ended == "length"
        assert whole.text.startswith(" Paris.\n\nThe United")
        pieces: list[str] = []
        ended = llama.generate(PROMPT, 12, stop=["nowhere", "\n\nThe U"], on_text=pieces.append)
        assert (ended.text, ended.ended) == (" Paris.", "stop")
        assert pieces == [" Paris", "."]
        assert ended.ids == whole.ids[: len(ended.ids)]


def test_logits_are_those_that_tokens_are_taken_by(gguf: Path, engine: str, tmp_path: Path) -> None:
    with Llama(gguf, engines=[engine]) as llama:
        prompt = llama.tokenize(PROMPT)
        made = llama.generate(prompt, 3).ids
        path = tmp_path / "logits"
        ids = [*prompt, *made]
        path.write_bytes(bytes(4 * llama.n_vocab * len(ids)))
        llama.logits(ids, path)
        together = np.fromfile(path, np.float32).reshape(len(ids), -1)
        assert together.argmax(1)[-4:-1].tolist() == made
        apart = []
        for start in range(0, len(ids), 5):
            llama.logits(ids[start : start + 5], path, follow=start > 0)
            apart.append(np.fromfile(path, np.float32).reshape(len(ids), -1)[: len(ids[start : start + 5])].copy())
        assert np.allclose(np.concatenate(apart), together, atol=1e-3)
        again = llama.generate(ids[:-1], 1, reuse=True)  # the context holds all of it
        assert again.ids == made[-1:]
        for n in (len(ids), 4, len(ids), 1):  # the context holds all, or the beginning
            llama.last_logits(ids[:n], path)
            assert np.allclose(np.fromfile(path, np.float32), together[n - 1], atol=1e-2)


def test_more_tokens_than_the_context_has_room_for(gguf: Path, engine: str) -> None:
    with Llama(gguf, engines=[engine], n_ctx=128) as llama:
        with pytest.raises(RunError, match="has 1,000 tokens, but the context has room for"):
            llama.generate([5] * 1000)
        assert llama.generate([5] * 120, 1000).ended in ("context", "end")


def test_text_and_tokens(smollm2_gguf: Path, engine: str) -> None:
    with Llama(smollm2_gguf, engines=[engine]) as llama:
        ids = llama.tokenize("<|im_start|>über", add_special=False)
        assert ids[0] == llama.facts.bos == 1
        assert llama.tokenize("<|im_start|>", add_special=False, parse_special=False) != [1]
        assert llama.detokenize(ids) == "über"
        assert llama.detokenize(ids, special=True) == "<|im_start|>über"


def test_a_build_with_other_structures_is_not_called(gguf: Path, monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    fake(
        """
        package = real()
        from aprfmt.llama import capi
        capi._KNOWN["llama_context_default_params"]["n_batch"] = 2047
        sys.modules[__name__] = package
        """
    )
    with pytest.raises(MissingDependencyError, match="different llama_context_params"):
        Llama(gguf)


def test_a_file_without_tokenizer_is_refused_with_llama_cpps_reason(tmp_path: Path, engine: str) -> None:
    import gguf as peer

    path = tmp_path / "bare.gguf"
    writer = peer.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(RunError) as caught:
        Llama(path, engines=[engine], name="out.gguf")
    assert "key not found in model: " in caught.value.message
    assert caught.value.path == "out.gguf"
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers(gguf: Path, engine: str, bad: float) -> None:
    data = bytearray(gguf.read_bytes())
    with aprfmt.open(gguf) as model:
        norm = model.tensors["output_norm.weight"]
        assert norm.shape == (HIDDEN,)
        at = norm.offset
    data[at : at + 4] = struct.pack("<f", bad)
    gguf.write_bytes(data)
    with pytest.raises(RunError, match="NaN or infinite logits"), Llama(gguf, engines=[engine]) as llama:
        llama.generate(PROMPT)


def test_the_vocabulary_must_have_the_rows_of_the_embedding(gguf: Path) -> None:
    assert verify_gguf(gguf, N_TOKENS)["tokens"]
    with pytest.raises(RunError, match=r"300 tokens, the embedding 301 rows"):
        verify_gguf(gguf, N_TOKENS + 1)


def test_an_embedding_of_zeros_is_no_result(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "encoder_pooling", lambda path: ("mean", gguf.stat().st_size))
    monkeypatch.setattr(Llama, "embed", lambda self, text: [0.0, 0.0])
    with pytest.raises(RunError, match="embedding of all zeros"):
        verify_gguf(gguf, None)


# --- death ---


def test_a_worker_that_dies_is_started_once_more_without_extra_buffers(gguf: Path, fake: Fake, engine: str) -> None:
    fake(
        """
        package = real()
        from aprfmt.llama.session import Session
        init = Session.__init__
        Session.__init__ = lambda *a: init(*a) if not a[2].extra_buffers else die()
        sys.modules[__name__] = package
        """
    )
    with Llama(gguf, engines=[engine]) as llama:
        assert llama.generate(PROMPT).ids
        assert llama.engine.endswith(", extra buffers off")


_DIES_COMPUTING = """
    package = real()
    from aprfmt.llama.session import Session
    init, compute = Session.__init__, Session._compute
    def begin(self, library, request, stopped):
        init(self, library, request, stopped)
        self.fragile = request.extra_buffers
    def computing(self, ids, every=False):
        if self.fragile and self._past:
            die()
        compute(self, ids, every)
    Session.__init__, Session._compute = begin, computing
    sys.modules[__name__] = package
    """


def test_a_worker_that_dies_in_a_request_too(gguf: Path, fake: Fake, engine: str) -> None:
    fake(_DIES_COMPUTING)
    with Llama(gguf, engines=[engine]) as llama:
        assert "extra" not in llama.engine
        assert llama.generate(PROMPT, 1).ids  # the prompt alone
        assert "extra" not in llama.engine
        assert llama.generate(PROMPT, 3).ids
        assert llama.engine.endswith(", extra buffers off")


def test_what_was_given_is_not_given_twice(gguf: Path, fake: Fake, engine: str) -> None:
    fake(_DIES_COMPUTING)
    pieces: list[str] = []
    with Llama(gguf, engines=[engine]) as llama, pytest.raises(LlamaDiedError, match="SIGSEGV"):
        llama.generate(PROMPT, 8, on_text=pieces.append)
    assert len(pieces) == 1


def test_weights_that_were_replaced_are_not_lost_in_silence(
    gguf: Path, fake: Fake, engine: str, tmp_path: Path
) -> None:
    """A new worker would compute with the file's own weights."""
    fake(
        """
        package = real()
        from aprfmt.llama.session import Session
        init, last = Session.__init__, Session.last_logits
        def begin(self, library, request, stopped):
            init(self, library, request, stopped)
            self.fragile = request.extra_buffers
        Session.__init__ = begin
        Session.last_logits = lambda self, *a, **b: die() if self.fragile else last(self, *a, **b)
        sys.modules[__name__] = package
        """
    )
    with aprfmt.open(gguf) as model:
        name = next(name for name in model.tensors if name.endswith("ffn_up.weight"))
        (tmp_path / "weight").write_bytes(model.tensors[name].raw())
    with Llama(gguf, engines=[engine], watched=True) as llama:
        llama.effects([1, 2])
        llama.replace(name, tmp_path / "weight")
        with pytest.raises(LlamaDiedError):
            llama.last_logits([1, 2], tmp_path / "out")
    (tmp_path / "weight").write_bytes(bytes(8))
    with Llama(gguf, engines=[engine], watched=True) as llama:
        llama.effects([1, 2])
        with pytest.raises(RunError, match="bytes"):
            llama.replace(name, tmp_path / "weight")


def test_a_second_death_is_an_error_and_leaves_no_file(
    gguf: Path, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("die()")
    before = {*tmp_path.iterdir()}
    assert run(["export", str(gguf), "-o", str(tmp_path / "out.gguf"), "--verify", "--json"]) == 8
    text = capsys.readouterr().out
    error = json.loads(text)["error"]
    assert error["code"] == "run"
    assert error["message"] == "llama.cpp died (SIGSEGV): ggml: these are my last words"
    assert error["path"] == str(tmp_path / "out.gguf")
    assert {*tmp_path.iterdir()} == before


def test_the_demo_passes_the_rest(gguf: Path, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake("die()")
    assert run(["demo", str(gguf), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in body["steps"]] == ["import", "inspect", "validate", "export", "compare"]
    assert [step["name"] for step in body["skipped"]] == ["generate"]
    assert "SIGSEGV" in body["skipped"][0]["reason"]


def test_one_that_hangs_is_ended(
    gguf: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake("time.sleep(600)")
    monkeypatch.setenv("APR_LLAMA_TIMEOUT", "1.5")
    before = {*tmp_path.iterdir()}
    assert run(["export", str(gguf), "-o", str(tmp_path / "out.gguf"), "--verify", "--json"]) == 8
    error = json.loads(capsys.readouterr().out)["error"]
    assert "after 1.5 s" in error["message"]
    assert "APR_LLAMA_TIMEOUT" in error["hint"]
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "1e400"])
def test_time_limits_that_are_not_numbers(gguf: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("APR_LLAMA_TIMEOUT", text)
    with pytest.raises(UsageError, match="APR_LLAMA_TIMEOUT"):
        Llama(gguf)


def test_packages_that_cannot_be_imported(gguf: Path, fake: Fake) -> None:
    fake("raise ImportError('libc.so.6: too old')")
    with pytest.raises(MissingDependencyError, match=r"llama-cpp-python: libc.so.6: too old"):
        Llama(gguf)


def test_what_lies_in_the_current_folder_is_not_imported(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    for name in ("queue", *ENGINES):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('not me')\n")
    monkeypatch.chdir(tmp_path / "here")
    with Llama(gguf) as llama:
        assert llama.n_vocab == N_TOKENS


def test_no_package(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprfmt.llama.client.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="xllamacpp, llama-cpp-python") as caught:
        verify_gguf(gguf, None)
    assert caught.value.hint == "pip install xllamacpp, or where it has no wheel: pip install llama-cpp-python"


def test_the_reason_is_found_in_the_log() -> None:
    log = (
        "0.00.004.1 I load\n0.00.877.806 E llama_model_load: error loading model: error loading model vocabulary: "
        "key not found in model: tokenizer.ggml.model\n0.00.882.661 E llama_model_load_from_file_impl:\n"
    )
    assert reason_in(log) == "key not found in model: tokenizer.ggml.model"
    assert reason_in("a\n\nb\nc\n0.00.882.661 E d\n") == "b; c; d"
    assert reason_in("x\nggml.c:1: GGML_ASSERT(n > 0) failed\nAborted\n") == "GGML_ASSERT(n > 0) failed"
    assert reason_in("") == ""


@pytest.mark.llama
def test_a_request_that_was_given_up_answers_no_other(tmp_path: Path) -> None:
    def give_up(text: str) -> None:
        raise KeyboardInterrupt

    build(tmp_path / "m.gguf")
    with Llama(tmp_path / "m.gguf") as llama:
        expected = llama.generate(PROMPT, 8)
        with pytest.raises(KeyboardInterrupt):
            llama.generate(PROMPT, 64, on_text=give_up)
        assert llama.generate(PROMPT, 8) == expected
