"""Golden outputs find injected faults, with the first layer that differs, and let quantization pass within its band."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken_models
import demo_model
import numpy as np
import pytest
from arch_models import build, find_case, write_tokenizers

import aprfmt
from aprfmt.cli.main import run
from aprfmt.convert.stamp import store_record
from aprfmt.errors import CorruptError, LimitError, NotFoundError
from aprfmt.running import gates
from aprfmt.running.canary import read_canary
from aprfmt.running.examined import ModelUnderTest
from aprfmt.running.findings import SkippedError

pytestmark = pytest.mark.llama

LAYERS, HEADS, KV_HEADS = 4, 4, 2


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of four layers whose rows have whole K-quant blocks, F32, and its canary."""
    folder = tmp_path_factory.mktemp("canary")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HIDDEN": 256, "FEED_FORWARD": 512, "LAYERS": LAYERS, "HEADS": HEADS}.items():
            patch.setattr(demo_model, name, value)
        demo_model.build(folder / "f16.gguf")
    aprfmt.convert_model(folder / "f16.gguf", folder / "sound.gguf", dtype="f32")
    aprfmt.make_canary(folder / "sound.gguf")
    return folder / "sound.gguf"


def _rows(n_heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """The rows of heads in the order of the other RoPE layout."""
    return lambda x: x.reshape(n_heads, 2, 32, 256).swapaxes(1, 2).reshape(-1)


def _reordered(source: Path, target: Path) -> Path:
    queries = broken_models.with_values(source, target.with_suffix(".q"), "blk.1.attn_q", _rows(HEADS))
    return broken_models.with_values(queries, target, "blk.1.attn_k", _rows(KV_HEADS))


def _swap(source: Path, target: Path, a: str, b: str) -> Path:
    with aprfmt.open(source) as model:
        data = {name: bytes(model.tensors[name].raw()) for name in (a, b)}
    data[a], data[b] = data[b], data[a]

    def change(name: str, buffer: bytearray) -> None:
        if name in data:
            buffer[:] = data[name]

    return broken_models.edit(source, target, change, "blk.")


def _bit(source: Path, target: Path) -> Path:
    """The lowest bit of the mantissa of one weight."""

    def change(name: str, data: bytearray) -> None:
        data[4 * 64] ^= 1

    return broken_models.edit(source, target, change, "blk.2.ffn_down.weight")


def _values(tensors: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path, Path], Path]:
    return lambda source, target: broken_models.with_values(source, target, tensors, change)


def _key(key: str, value: object) -> Callable[[Path, Path], Path]:
    return lambda source, target: broken_models.with_key(source, target, key, value)


def _another_tokenizer(source: Path, target: Path) -> Path:
    with aprfmt.open(source) as model:
        merges = list(model.metadata["tokenizer.ggml.merges"])
    return broken_models.with_key(source, target, "tokenizer.ggml.merges", merges[:5])


# What is done, the first layer that differs (None: none does), and a word of what is found.
FAULTS: dict[str, tuple[Callable[[Path, Path], Path], int | None, str]] = {
    "rope base": (_key("llama.rope.freq_base", 100.0), 0, "layer 0"),
    "norm epsilon": (_key("llama.attention.layer_norm_rms_epsilon", 0.1), 0, "layer 0"),
    "chat template": (_key("tokenizer.chat_template", "{{ messages[0].content }}"), None, "the chat template differs"),
    "tokenizer": (_another_tokenizer, None, "the tokenizer differs"),
    "rows of Q and K": (_reordered, 1, "layer 1"),
    "gate and up swapped": (lambda s, t: _swap(s, t, "blk.2.ffn_gate.weight", "blk.2.ffn_up.weight"), 2, "layer 2"),
    "a zeroed layer": (lambda s, t: broken_models.zeroed(s, t, 3), 3, "layer 3"),
    "a scaled norm": (_values("blk.1.ffn_norm", lambda x: x + 1), 1, "layer 1"),
    "V of another layer": (lambda s, t: _swap(s, t, "blk.0.attn_v.weight", "blk.3.attn_v.weight"), 0, "layer 0"),
    "shifted embeddings": (_values("token_embd", lambda x: np.roll(x, 256)), -1, "the embeddings"),
    "a scaled output norm": (_values("output_norm", lambda x: x * 8), None, "the output differs"),
    "half a matrix": (
        _values("blk.2.attn_output", lambda x: np.where(np.arange(x.size) < x.size // 2, x, 0)), 2, "layer 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_first_layer(sound: Path, tmp_path: Path, fault: str) -> None:
    break_it, layer, words = FAULTS[fault]
    broken = break_it(sound, tmp_path / "broken.gguf")
    report = aprfmt.check_canary(broken, canary_of(sound))
    assert not report.passed
    assert report.first_layer == layer
    assert any(words in finding for finding in report.findings), report.findings


def canary_of(model: Path) -> Path:
    return Path(f"{model}.canary.json")


def test_the_same_model_passes_exactly_in_any_container(sound: Path, tmp_path: Path) -> None:
    assert aprfmt.check_canary(sound, exact=True).findings == []
    aprfmt.import_model(sound, tmp_path / "m.apr")
    report = aprfmt.check_canary(tmp_path / "m.apr", canary_of(sound), exact=True)
    assert report.passed
    assert (report.first_change, report.greedy, report.agreement, report.kl) == (None, 1.0, 1.0, 0.0)


def test_one_bit_of_one_weight_is_seen_by_exact(sound: Path, tmp_path: Path) -> None:
    broken = _bit(sound, tmp_path / "bit.gguf")
    report = aprfmt.check_canary(broken, canary_of(sound))
    assert report.passed
    assert (report.greedy, report.first_change) == (1.0, 2)
    report = aprfmt.check_canary(broken, canary_of(sound), exact=True)
    assert report.findings == ["layer 2 is the first layer whose states are not bit-identical"]


def test_a_quantization_passes_within_its_band_and_says_how_far_it_is(sound: Path, tmp_path: Path) -> None:
    worst = {}
    for dtype in ("q8_0", "q4_k_m", "q2_k"):
        aprfmt.quantize_model(sound, tmp_path / f"{dtype}.gguf", dtype)
        report = aprfmt.check_canary(tmp_path / f"{dtype}.gguf", canary_of(sound))
        worst[dtype] = max(report.layers.values())
        assert report.first_layer is None, (dtype, report)
    assert worst["q8_0"] < 0.03 < 3 * worst["q8_0"] < worst["q4_k_m"] < worst["q2_k"]
    passed = aprfmt.check_canary(tmp_path / "q8_0.gguf", canary_of(sound))
    assert passed.passed
    assert passed.band == 0.08


def test_a_zeroed_expert(tmp_path: Path) -> None:
    case = find_case("qwen2_moe")
    build(case, tmp_path / "moe", write_tokenizers(tmp_path / "tokenizers", [case.tokenizer], 512))
    aprfmt.export_model(tmp_path / "moe", tmp_path / "moe.gguf", dtype="f32")
    aprfmt.make_canary(tmp_path / "moe.gguf")

    def change(name: str, data: bytearray) -> None:
        with aprfmt.open(tmp_path / "moe.gguf") as model:
            size = len(data) // model.tensors[name].shape[0]
        data[:size] = bytes(size)

    broken = broken_models.edit(tmp_path / "moe.gguf", tmp_path / "broken.gguf", change, "blk.1.ffn_down_exps")
    report = aprfmt.check_canary(broken, canary_of(tmp_path / "moe.gguf"))
    assert (report.passed, report.first_layer, report.first_change) == (False, 1, 1)


def test_the_commands(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, golden = Path(shutil.copy(sound, tmp_path / "m.gguf")), tmp_path / "golden.json"
    make = ["canary", "make", str(copy), "--canary", str(golden), "--prompt", "The king was"]
    assert run([*make, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_count"] == 1
    assert run(make) == 5
    assert run(["canary", "check", str(copy), "--canary", str(golden), "--exact"]) == 0
    broken = broken_models.zeroed(copy, tmp_path / "broken.gguf", 2)
    capsys.readouterr()
    assert run(["canary", "check", str(broken), "--canary", str(golden)]) == 1
    assert "layer 2 is the first that differs" in capsys.readouterr().out
    assert run(["parity", str(copy), str(broken), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_layer"] == 2
    assert run(["canary", "look", str(copy)]) == 2
    assert run(["canary", "check", str(copy)]) == 3


def test_golden_outputs_inside_an_apr(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apr = tmp_path / "m.apr"
    aprfmt.import_model(sound, apr)
    with aprfmt.open(apr) as model:
        before = {name: bytes(tensor.raw()) for name, tensor in model.tensors.items()}
    assert run(["canary", "check", str(apr)]) == 3
    assert run(["canary", "make", str(apr), "--in-place", "--prompt", "The king was"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m.apr"]
    assert run(["canary", "make", str(apr), "--in-place"]) == 5
    assert run(["canary", "make", str(sound), "--in-place"]) == 4
    assert aprfmt.validate(apr).passed
    with aprfmt.open(apr) as model:
        assert {name: bytes(tensor.raw()) for name, tensor in model.tensors.items()} == before
    aprfmt.convert_model(apr, tmp_path / "q8.apr", dtype="q8_0")
    report = aprfmt.check_canary(tmp_path / "q8.apr")
    assert report.passed
    assert report.canary.endswith("q8.apr: aprfmt.canary")
    assert 0 < max(report.layers.values()) < report.band
    gate = next(gate for gate in gates.GATES if gate.id == "canary")
    with ModelUnderTest(str(tmp_path / "q8.apr"), None, 1) as x:
        assert gate.look(x).passed
    with aprfmt.open(apr) as model:
        golden = model.metadata["aprfmt.canary"]
    golden["prompts"][0]["layers"]["2"]["probes"][0][0] += 100.0
    store_record(tmp_path / "q8.apr", "aprfmt.canary", golden)
    with ModelUnderTest(str(tmp_path / "q8.apr"), None, 1) as x:
        found = gate.look(x)
    assert not found.passed
    assert "layer 2 is the first that differs" in found.message
    store_record(tmp_path / "q8.apr", "aprfmt.canary", {"schema": "another"})
    assert run(["canary", "check", str(tmp_path / "q8.apr")]) == 4
    with ModelUnderTest(str(sound), None, 1) as x:
        (Path(f"{sound}.canary.json")).rename(tmp_path / "aside")
        with pytest.raises(SkippedError):
            gate.look(x)
        (tmp_path / "aside").rename(f"{sound}.canary.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value.pop("prompts"),
        lambda value: value.update(schema="aprfmt.canary/9"),
        lambda value: value["prompts"][0].update(ids=[-1]),
        lambda value: value["prompts"][0].update(ids=[1] * 10_000),
        lambda value: value["prompts"][0]["layers"]["0"].update(probes=[[1.0], [1.0, 2.0]]),
        lambda value: value["prompts"][0]["layers"].update(x={}),
        lambda value: value["prompts"][0].update(layers=[]),
        lambda value: value["prompts"][0].update(top=[]),
    ],
)
def test_a_damaged_canary_is_an_error(sound: Path, tmp_path: Path, damage: Callable[[Any], object]) -> None:
    value = json.loads(canary_of(sound).read_text())
    damage(value)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(value))
    with pytest.raises(CorruptError):
        read_canary(path)


def test_a_huge_or_missing_canary(tmp_path: Path) -> None:
    with (tmp_path / "c.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(LimitError):
        read_canary(tmp_path / "c.json")
    with pytest.raises(NotFoundError):
        read_canary(tmp_path / "nowhere.json")
