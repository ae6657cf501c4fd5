"""Importance matrices: what llama.cpp's products see is what transformers' layers are given."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import build, find_case, write_tokenizers
from imatrix_files import new_imatrix, old_imatrix
from llama_peer import LlamaPeer
from turns import first_always

import aprfmt
from aprfmt.cli.main import run
from aprfmt.convert.presets import PRESETS
from aprfmt.errors import AprError, CorruptError, ExistsError, RefusedError, UsageError
from aprfmt.formats.imatrix import ImatrixSums, read_imatrix, read_sums
from aprfmt.formats.second_moments import read_second_moments
from aprfmt.llama import moments
from aprfmt.llama.client import Llama
from aprfmt.llama.engine import ENGINES
from aprfmt.running import importance
from aprfmt.schema import flag_of

pytestmark = pytest.mark.llama
torch = pytest.importorskip("torch")

CHUNK = 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Callable[[str], Path]:
    """Folder and GGUF of a case, made once."""
    home = tmp_path_factory.mktemp("importance")

    def make(case: str) -> Path:
        if not (home / case).is_dir():
            build(find_case(case), home / case, write_tokenizers(home / "tokenizers", ["smollm2"], 512))
            aprfmt.export_model(home / case, home / f"{case}.gguf", dtype="f32")
        return home / case

    return make


@pytest.fixture
def gguf(folders: Callable[[str], Path]) -> Path:
    """A small llama."""
    return folders("llama").with_suffix(".gguf")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some 300 tokens."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} green bottles hang on the wall, and {i * i % 97} fall.\n" for i in range(24)))
    return path


def chunks_of(gguf: Path, text: str) -> list[list[int]]:
    with Llama(gguf) as llama:
        ids, bos = llama.tokenize(text, parse_special=False), llama.facts.bos
        begins = llama.facts.adds_bos
    parts = [ids[i : i + CHUNK] for i in range(0, len(ids) - CHUNK + 1, CHUNK)]
    return [[bos, *part[1:]] if begins else part for part in parts]


def seen_by_transformers(folder: Path, chunks: Sequence[Sequence[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(sums of squares by the name of a Linear, of its inputs; by expert, of the inputs of a module `experts`)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    dense: dict[str, Any] = {}
    routed: dict[str, Any] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: Any, given: Any) -> None:
            x = given[0].detach().double().reshape(-1, given[0].shape[-1])
            dense[name] = dense.get(name, 0) + (x * x).sum(0).numpy()

        return hook

    def route(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            x, index = args[0].detach().double().reshape(-1, args[0].shape[-1]), args[1]
            sums, counts = routed.setdefault(
                name, (np.zeros((module.num_experts, x.shape[1])), np.zeros(module.num_experts))
            )
            for token, chosen in enumerate(index.reshape(len(x), -1).tolist()):
                for expert in chosen:
                    sums[expert] += (x[token] * x[token]).numpy()
                    counts[expert] += 1

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(look(name))
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(route(name))
    with torch.no_grad():
        for ids in chunks:
            model(torch.tensor([ids]))
    return dense, routed


@pytest.mark.parametrize("engine", first_always(ENGINES))
def test_sums_are_those_of_what_each_layer_is_given(
    folders: Callable[[str], Path], gguf: Path, text: Path, tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    monkeypatch.setattr(importance, "Llama", lambda *a, **options: Llama(*a, **options, engines=[engine]))
    report = aprfmt.imatrix(gguf, text, tmp_path / "m.gguf", chunk_size=CHUNK, process_output=True)
    chunks = chunks_of(gguf, text.read_text())
    assert (report.chunks, report.tokens, report.resumed) == (len(chunks), CHUNK * len(chunks), 0)
    dense, _ = seen_by_transformers(folders("llama"), chunks)
    found = read_sums(tmp_path / "m.gguf")
    wanted = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    wanted |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    wanted |= {"mlp.down_proj": "ffn_down"}
    names = {f"model.layers.{i}.{a}": f"blk.{i}.{b}.weight" for a, b in wanted.items() for i in range(100)}
    compared = 0
    for name, squares in dense.items():
        if name == "lm_head":
            continue
        entry = found.entries[names[name]]
        assert np.allclose(entry.sums[0], squares, rtol=2e-3, atol=1e-3 * squares.max()), name
        assert entry.counts.tolist() == [CHUNK * len(chunks)]
        compared += 1
    assert (
        compared
        == len(found.entries) - ("output.weight" in found.entries)
        == report.entries - ("output.weight" in found.entries)
    )
    assert compared >= 14


def test_second_moments_are_those_of_what_each_layer_is_given(
    folders: Callable[[str], Path], gguf: Path, text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    made = aprfmt.imatrix(gguf, text, tmp_path / "m.gguf", chunk_size=CHUNK, second_moments=tmp_path / "m.moments")
    assert made.second_moments == str(tmp_path / "m.moments")
    model = AutoModelForCausalLM.from_pretrained(folders("llama"), dtype=torch.float32, attn_implementation="eager")
    sums: dict[str, Any] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: Any, given: Any) -> None:
            x = given[0].detach().double().reshape(-1, given[0].shape[-1])
            sums[name] = sums.get(name, 0) + (x.T @ x).numpy()

        return hook

    names = {"self_attn.q_proj": "attn_q", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    names |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    for name in names:
        model.get_submodule(f"model.layers.1.{name}").register_forward_pre_hook(look(name))
    chunks = chunks_of(gguf, text.read_text())
    with torch.no_grad():
        for ids in chunks:
            model(torch.tensor([ids]))
    found = read_second_moments(tmp_path / "m.moments")
    diagonals = read_imatrix(tmp_path / "m.gguf").entries
    for name, own in names.items():
        weight, wanted = f"blk.1.{own}.weight", sums[name] / (CHUNK * len(chunks))
        owner = found.owner(weight, len(wanted))
        assert owner is not None
        (block,) = found.blocks(owner)
        assert np.allclose(block, wanted, rtol=2e-3, atol=2e-3 * wanted.max())
        assert np.allclose(block.diagonal(), diagonals[weight], rtol=1e-4)
    assert found.shared["blk.1.attn_v.weight"] == found.shared["blk.1.attn_k.weight"] == "blk.1.attn_q.weight"


def test_inputs_are_summed_in_blocks_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "MOMENT_COLUMNS", 5)
    sums = moments.MomentSums(str(tmp_path))
    parts = [np.random.default_rng(i).standard_normal((7, 12)).astype("f4") for i in range(3)]
    for part in parts:
        sums.add("other", part[:, :2], None)
        sums.add("q", part, None)
        sums.add("k", part, "q")
    assert sums.inputs == {"other": (0, 2), "q": (1, 12), "k": (1, 12)}
    assert sums.rows == [21, 21]
    whole = np.concatenate(parts)
    for block, (start, stop) in enumerate([(0, 5), (5, 10), (10, 12)]):
        found = np.fromfile(tmp_path / f"1.{block}", "<f4").reshape(stop - start, -1)
        assert np.allclose(found, whole[:, start:stop].T @ whole[:, start:stop], atol=1e-4)


def test_each_expert_counts_its_own_tokens(folders: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    folder = folders("qwen3_moe")
    gguf = folder.with_suffix(".gguf")
    aprfmt.imatrix(gguf, text, tmp_path / "m.gguf", chunk_size=CHUNK)
    _, routed = seen_by_transformers(folder, chunks_of(gguf, text.read_text()))
    found = read_sums(tmp_path / "m.gguf")
    assert routed
    for name, (squares, counts) in routed.items():
        layer = name.split(".")[2]
        for matrix in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            own = found.entries[f"blk.{layer}.{matrix}.weight"].counts
            assert own.sum() == counts.sum()
            assert np.abs(own - counts).max() <= 2  # a token between two experts may go either way
        sums = found.entries[f"blk.{layer}.ffn_up_exps.weight"].sums
        assert np.allclose(sums, squares, rtol=2e-2, atol=1e-2 * squares.max())


def test_experts_that_no_token_reaches_are_named(
    folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = folders("qwen3_moe").with_suffix(".gguf")
    (tmp_path / "t.txt").write_text("a" * 200)
    code = [
        "imatrix",
        str(gguf),
        "--data",
        str(tmp_path / "t.txt"),
        "-o",
        str(tmp_path / "m.gguf"),
        "--chunk-size",
        "32",
    ]
    assert run([*code, "--chunks", "1", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    counts = read_sums(tmp_path / "m.gguf").entries
    unused = {name: np.flatnonzero(entry.counts == 0).tolist() for name, entry in counts.items()}
    assert body["unused"] == {name: experts for name, experts in sorted(unused.items()) if experts}
    assert body["unused"]
    assert any("no token reached" in warning for warning in body["warnings"])


def test_a_mix_with_it_is_llama_cpps(gguf: Path, text: Path, tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    aprfmt.imatrix(gguf, text, tmp_path / "i.gguf", chunk_size=CHUNK)
    weights = read_imatrix(tmp_path / "i.gguf").entries
    llama_cpp.quantize(gguf, tmp_path / "theirs.gguf", PRESETS["q4_k_m"].file_type, imatrix=weights)
    aprfmt.quantize_model(gguf, tmp_path / "ours.gguf", "q4_k_m", imatrix=tmp_path / "i.gguf")
    with aprfmt.open(tmp_path / "theirs.gguf") as theirs, aprfmt.open(tmp_path / "ours.gguf") as ours:
        assert {n: bytes(t.raw()) for n, t in ours.tensors.items()} == {
            n: bytes(t.raw()) for n, t in theirs.tensors.items()
        }
        assert ours.metadata["quantize.imatrix.dataset"] == "text.txt"


# --- both forms, and their sum ---


def test_both_forms_mean_the_same(gguf: Path, text: Path, tmp_path: Path) -> None:
    aprfmt.imatrix(gguf, text, tmp_path / "m.gguf", chunk_size=CHUNK)
    aprfmt.imatrix(gguf, text, tmp_path / "m.dat", chunk_size=CHUNK)
    assert (tmp_path / "m.dat").read_bytes()[:4] != b"GGUF"
    new, old = read_imatrix(tmp_path / "m.gguf"), read_imatrix(tmp_path / "m.dat")
    assert new.entries.keys() == old.entries.keys()
    for name, values in new.entries.items():
        assert np.allclose(values, old.entries[name], rtol=1e-6)
    assert (new.chunks, new.datasets) == (old.chunks, old.datasets)


def test_the_sum_of_two_is_that_of_the_whole_text(gguf: Path, text: Path, tmp_path: Path) -> None:
    chunks = chunks_of(gguf, text.read_text())
    whole = aprfmt.imatrix(gguf, text, tmp_path / "whole.gguf", chunk_size=CHUNK)
    real, parts = importance._chunks, (chunks[:2], chunks[2:])
    with pytest.MonkeyPatch.context() as patch:
        for i, part in enumerate(parts):
            patch.setattr(importance, "_chunks", lambda *a, part=part: part)
            aprfmt.imatrix(gguf, text, tmp_path / f"{i}.gguf", chunk_size=CHUNK)
    assert importance._chunks is real
    merged = aprfmt.merge_imatrix([tmp_path / "0.gguf", tmp_path / "1.gguf"], tmp_path / "sum.gguf")
    assert (merged.chunks, merged.entries) == (whole.chunks, whole.entries)
    a, b = read_sums(tmp_path / "whole.gguf"), read_sums(tmp_path / "sum.gguf")
    for name, entry in a.entries.items():
        assert np.allclose(entry.sums, b.entries[name].sums, rtol=1e-6)
        assert np.array_equal(entry.counts, b.entries[name].counts)


def test_old_files_are_added_by_their_chunks(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(old_imatrix({"w": [1.0, 3.0]}, chunks=1))
    (tmp_path / "b.dat").write_bytes(old_imatrix({"w": [5.0, 7.0]}, chunks=3))
    aprfmt.merge_imatrix([tmp_path / "a.dat", tmp_path / "b.dat"], tmp_path / "c.gguf")
    assert read_imatrix(tmp_path / "c.gguf").entries["w"].tolist() == [4.0, 6.0]


def test_one_count_is_added_to_one_for_each_matrix(tmp_path: Path) -> None:
    new_imatrix(tmp_path / "a.gguf", {"w": [2.0, 4.0, 6.0, 8.0]}, {"w": [2.0]})
    new_imatrix(tmp_path / "b.gguf", {"w": [2.0, 2.0, 8.0, 8.0]}, {"w": [2.0, 6.0]})
    aprfmt.merge_imatrix([tmp_path / "a.gguf", tmp_path / "b.gguf"], tmp_path / "c.gguf")
    found = read_sums(tmp_path / "c.gguf").entries["w"]
    assert found.counts.tolist() == [4.0, 8.0]
    assert found.sums.tolist() == [[4.0, 6.0], [14.0, 16.0]]


def test_matrices_of_different_models_are_not_added(tmp_path: Path) -> None:
    new_imatrix(tmp_path / "a.gguf", {"w": [2.0, 4.0]}, {"w": [2.0]})
    new_imatrix(tmp_path / "b.gguf", {"w": [2.0, 4.0, 6.0]}, {"w": [2.0]})
    with pytest.raises(RefusedError, match="3 values against 2") as caught:
        aprfmt.merge_imatrix([tmp_path / "a.gguf", tmp_path / "b.gguf"], tmp_path / "c.gguf")
    assert (caught.value.path, caught.value.tensor) == (str(tmp_path / "b.gguf"), "w")
    assert not (tmp_path / "c.gguf").exists()


# --- interrupted ---


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Saves after each chunk, and is interrupted in the third."""
    collect, calls = Llama.collect, []

    def third(self: Llama, ids: Sequence[int]) -> dict[str, int]:
        calls.append(ids)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return collect(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(importance, "SAVE_SECONDS", 0.0)
        patch.setattr(Llama, "collect", third)
        yield


def test_a_run_that_goes_on_gives_the_same_bytes(
    gguf: Path, text: Path, tmp_path: Path, interrupted: None, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "m.gguf"
    with pytest.raises(KeyboardInterrupt):
        aprfmt.imatrix(gguf, text, out, chunk_size=CHUNK)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("m.")] == ["m.gguf.state"]
    report = aprfmt.imatrix(gguf, text, out, chunk_size=CHUNK, resume=True)
    assert report.resumed == 2
    assert not Path(f"{out}.state").exists()
    aprfmt.imatrix(gguf, text, tmp_path / "straight.gguf", chunk_size=CHUNK)
    assert out.read_bytes() == (tmp_path / "straight.gguf").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 40}, "its text differs|its chunk size differs"),
        ({"process_output": True}, "only one of the two includes the output head"),
        ({"chunks": 3}, "its text differs"),
    ],
)
def test_it_goes_on_only_with_the_same_work(
    gguf: Path, text: Path, tmp_path: Path, interrupted: None, change: dict[str, Any], message: str
) -> None:
    out = tmp_path / "m.gguf"
    with pytest.raises(KeyboardInterrupt):
        aprfmt.imatrix(gguf, text, out, chunk_size=CHUNK)
    with pytest.raises(RefusedError, match=message):
        aprfmt.imatrix(gguf, text, out, **{"chunk_size": CHUNK, "resume": True, **change})
    assert not out.exists()


def test_a_changed_model_or_a_damaged_state_is_refused(
    gguf: Path, text: Path, tmp_path: Path, interrupted: None
) -> None:
    out, copy = tmp_path / "m.gguf", tmp_path / "copy.gguf"
    copy.write_bytes(gguf.read_bytes())
    with pytest.raises(KeyboardInterrupt):
        aprfmt.imatrix(copy, text, out, chunk_size=CHUNK)
    os.utime(copy, (1, 1))
    with pytest.raises(RefusedError, match="the model has changed"):
        aprfmt.imatrix(copy, text, out, chunk_size=CHUNK, resume=True)
    state = Path(f"{out}.state")
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(CorruptError, match="the state of the earlier run"):
        aprfmt.imatrix(gguf, text, out, chunk_size=CHUNK, resume=True)


def test_there_is_nothing_to_go_on_from(gguf: Path, text: Path, tmp_path: Path) -> None:
    assert aprfmt.imatrix(gguf, text, tmp_path / "m.gguf", chunk_size=CHUNK, resume=True).resumed == 0


# --- refused ---


def test_text_that_is_too_short(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("three little words")
    with pytest.raises(RefusedError, match="too short for an importance matrix: fewer than 512 tokens") as caught:
        aprfmt.imatrix(gguf, tmp_path / "t.txt", tmp_path / "m.gguf")
    assert "--chunk-size" in (caught.value.hint or "")
    assert not (tmp_path / "m.gguf").exists()


def test_an_input_is_never_the_output(gguf: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with force, and not where the model that llama.cpp reads is an export of the input."""
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    aprfmt.convert_model(gguf, tmp_path / "m.apr")
    folder = tmp_path / "hf"
    aprfmt.convert_model(gguf, folder, format="hf")
    (tmp_path / "texts").mkdir()
    shutil.copy(text, tmp_path / "texts")
    for model, data, output in (
        (tmp_path / "m.apr", text, tmp_path / "m.apr"),
        (folder, text, folder / "config.json"),
        (gguf, text, text),
        (gguf, tmp_path / "texts", tmp_path / "texts" / text.name),
    ):
        before = output.read_bytes()
        with pytest.raises(RefusedError, match="the output is the input"):
            aprfmt.imatrix(model, data, output, chunk_size=CHUNK, force=True)
        assert output.read_bytes() == before


def test_a_matrix_beside_the_weights_does_not_change_the_model(
    gguf: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    aprfmt.convert_model(gguf, tmp_path / "hf", format="hf")
    lines: list[str] = []
    for _ in range(2):
        aprfmt.imatrix(
            tmp_path / "hf", text, tmp_path / "hf" / "m.gguf", chunk_size=CHUNK, force=True, log=lines.append
        )
        (tmp_path / "hf" / "m.gguf.state").write_text("of a run")
    assert len(lines) == 1, "the model was exported again"


@pytest.mark.parametrize("what", ["adapter", "imatrix", "mmproj"])
def test_what_is_no_model(gguf: Path, text: Path, tmp_path: Path, what: str) -> None:
    aprfmt.stamp(gguf, tmp_path / "x.gguf", set={"general.type": what})
    with pytest.raises(RefusedError, match="this is a"):
        aprfmt.imatrix(tmp_path / "x.gguf", text, tmp_path / "m.gguf", chunk_size=CHUNK)
    with pytest.raises(RefusedError, match="this is a"):
        aprfmt.bench(tmp_path / "x.gguf", prompt_tokens=2, tokens=2, runs=1)


def test_merging_heeds_no_options_of_computing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--chunks", "3"], ["--process-output"], ["--threads", "2"], ["--data", "x"]):
        assert run(["imatrix", "a.gguf", "b.gguf", "--merge", "-o", str(tmp_path / "c.gguf"), *words]) == 2
        assert f"{words[0]} does not apply to --merge" in capsys.readouterr().err
    assert run(["imatrix", "a.gguf", str(tmp_path), "--merge", "-o", str(tmp_path / "c.gguf")]) == 2
    assert f"hint: apr imatrix {tmp_path} --data" in capsys.readouterr().err


def test_an_output_that_exists(gguf: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"mine")
    with pytest.raises(ExistsError):
        aprfmt.imatrix(gguf, text, tmp_path / "m.gguf", chunk_size=CHUNK)
    with pytest.raises(RefusedError, match="is the input"):
        aprfmt.imatrix(gguf, text, gguf, chunk_size=CHUNK, force=True)
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"


@pytest.mark.parametrize("options", [{"chunks": 0}, {"chunk_size": 8}, {"threads": -1}, {"chunks": 1.5}])
def test_numbers_that_are_none(gguf: Path, text: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=flag_of(next(iter(options)))):
        aprfmt.imatrix(gguf, text, tmp_path / "m.gguf", **options)


def test_nan_activations(gguf: Path, text: Path, tmp_path: Path) -> None:
    data = bytearray(gguf.read_bytes())
    with aprfmt.open(gguf) as model:
        at = model.tensors["blk.0.attn_norm.weight"].offset
    data[at : at + 4] = np.float32(np.nan).tobytes()
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(AprError) as caught:
        aprfmt.imatrix(tmp_path / "bad.gguf", text, tmp_path / "m.gguf", chunk_size=CHUNK)
    assert caught.value.code == "run"
    assert "NaN or infinite" in str(caught.value)
    assert not (tmp_path / "m.gguf").exists()


def test_the_plan_writes_nothing(gguf: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["imatrix", str(gguf), "--data", str(text), "-o", str(tmp_path / "m.gguf"), "--chunk-size", "32"]
    assert run([*command, "--plan"]) == 0
    chunks = len(chunks_of(gguf, text.read_text()))
    assert f"{chunks} chunks of 32 tokens" in capsys.readouterr().out
    assert not (tmp_path / "m.gguf").exists()
    assert run(["imatrix", str(gguf), "-o", str(tmp_path / "m.gguf")]) == 2
    assert "--data is missing" in capsys.readouterr().err
    assert run(["imatrix", str(gguf), str(gguf), "-o", str(tmp_path / "m.gguf"), "-d", str(text)]) == 2
    assert "--merge" in capsys.readouterr().err


def testtext_of_several_files(gguf: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    from aprfmt.running.imatrix import text_of

    assert (
        "".join(text_of([text, tmp_path / "b.jsonl", text]))
        == f"{text.read_text()}\n\none\n\ntwo\n\n{text.read_text()}"
    )
    report = aprfmt.imatrix(gguf, [text, tmp_path / "b.jsonl"], tmp_path / "m.gguf", chunk_size=CHUNK, chunks=2)
    assert report.chunks == 2
    sums: ImatrixSums = read_sums(tmp_path / "m.gguf")
    assert sums.datasets == ("text.txt", "b.jsonl")


def test_the_field_of_a_record_that_holds_its_text(
    gguf: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = text.read_text()
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": 1, "body": words}) + "\n")
    command = [
        "imatrix",
        str(gguf),
        "-d",
        str(tmp_path / "b.jsonl"),
        "-o",
        str(tmp_path / "m.gguf"),
        "--chunk-size",
        "32",
    ]
    assert run([*command, "--plan"]) != 0
    assert "body" in capsys.readouterr().err
    assert run([*command, "--text-field", "body", "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == len(chunks_of(gguf, words))
    with pytest.raises(UsageError, match="applies to jsonl, csv and parquet data"):
        aprfmt.imatrix(gguf, text, tmp_path / "m.gguf", text_field="body")


# --- computed on the way to a mix ---


def test_a_mix_computes_its_matrix_once(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    folder = folders("llama")
    (tmp_path / "t.txt").write_text("So many words, and so few of them are needed. " * 300)
    given = ["quantize", str(folder), "q4_k_m", "--imatrix", "auto", "--data", str(tmp_path / "t.txt"), "--chunks", "2"]
    assert run([*given, "-o", str(tmp_path / "a.gguf"), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["ok"]
    made = list((tmp_path / "cache" / "imatrix").glob("*.gguf"))
    assert len(made) == 1
    aprfmt.quantize_model(folder, tmp_path / "b.gguf", "q4_k_m", imatrix=made[0])
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    with aprfmt.open(tmp_path / "a.gguf") as model:
        assert model.metadata["quantize.imatrix.dataset"] == "t.txt"
        assert model.metadata["quantize.imatrix.chunks_count"] == 2
    monkeypatch.setattr(importance, "compute", lambda *a, **k: pytest.fail("computed twice"))
    report = aprfmt.quantize_model(
        folder, tmp_path / "c.gguf", "q4_k_m", imatrix="auto", data=tmp_path / "t.txt", chunks=2
    )
    assert any("1,024 tokens are few" in warning for warning in report.warnings)
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_a_mix_computes_its_matrix_on_a_field(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    folder, records, plain = folders("llama"), tmp_path / "t.jsonl", tmp_path / "t.txt"
    words = "So many words, and so few of them are needed. " * 100
    records.write_text(json.dumps({"body": words, "text": "Another text. " * 300}))
    plain.write_text(words)
    given = ["quantize", str(folder), "q4_k_m", "--imatrix", "auto", "--chunks", "2"]
    assert run([*given, "--data", str(records), "--text-field", "body", "-o", str(tmp_path / "a.gguf")]) == 0
    aprfmt.imatrix(folder, plain, tmp_path / "m.gguf", chunks=2)
    assert run([*given, "--data", str(records), "-o", str(tmp_path / "b.gguf")]) == 0
    made = [read_sums(path) for path in sorted((tmp_path / "cache" / "imatrix").glob("*.gguf"))]
    assert len(made) == 2
    expected = read_sums(tmp_path / "m.gguf").entries
    assert sum(all(np.array_equal(each.entries[n].sums, expected[n].sums) for n in expected) for each in made) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--imatrix", "auto"], "needs text"),
        (["--data", "t.txt"], "--data requires --imatrix auto"),
        (["--chunks", "3"], "--chunks requires --imatrix auto"),
        (["--text-field", "body"], "--text-field requires --imatrix auto"),
        (["--imatrix", "auto", "--data", "t.txt", "--plan"], "--plan cannot be combined"),
    ],
)
def test_what_auto_needs(
    gguf: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", str(gguf), "q4_k_m", "-o", str(tmp_path / "o.gguf"), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
