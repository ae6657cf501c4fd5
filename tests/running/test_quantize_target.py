"""apr quantize for a target: sizes, bits and measured divergences that are kept, and recipes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from imatrix_files import old_imatrix

import aprfmt
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.cli.main import run
from aprfmt.codecs.recode import decode
from aprfmt.convert.bit_allocation import AllocatedTensor, TypeOption
from aprfmt.convert.quantization_error import error_of, sample_rows
from aprfmt.errors import AprError, ExistsError, RefusedError, StorageError, UsageError
from aprfmt.running import sensitivity
from aprfmt.running.sensitivity import groups_of
from aprfmt.running.target_types import TypeChooser
from aprfmt.running.token_chunks import SPREAD, spread_chunks

pytestmark = pytest.mark.llama

Quantize = Callable[..., aprfmt.Report]
TEXT = "".join(f"{i} green bottles hang on the wall, and {i * i % 97} of them fall.\n" for i in range(40))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def types_of(path: Path) -> dict[str, str]:
    with aprfmt.open(path) as model:
        return {name: tensor.dtype for name, tensor in model.tensors.items()}


def test_sizes_are_kept_and_used(tiny_gguf: Path, tmp_path: Path) -> None:
    least = aprfmt.quantize_model(tiny_gguf, tmp_path / "q4.gguf", "q4_0", pure=True).output_bytes
    most = aprfmt.quantize_model(tiny_gguf, tmp_path / "q8.gguf", "q8_0").output_bytes
    target = (least + most) // 2
    report = aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", target_size=target)
    assert (tmp_path / "t.gguf").stat().st_size == report.output_bytes <= target
    assert report.output_bytes > 0.995 * target
    assert report.predicted_kl is not None
    assert {"Q8_0"} < set(report.dtypes)
    assert sum(row["share"] for row in report.groups) == pytest.approx(1)
    lines: list[str] = []
    with pytest.raises(ExistsError):  # before anything is measured
        aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", target_size=target, log=lines.append)
    assert lines == []
    plan = aprfmt.quantize_model(tiny_gguf, tmp_path / "p.gguf", target_size=target, plan=True)
    assert (plan.output_bytes, plan.groups) == (report.output_bytes, report.groups)
    assert not (tmp_path / "p.gguf").exists()
    for name in ("t.apr", "u.apr"):
        report = aprfmt.quantize_model(tiny_gguf, tmp_path / name, target_size=target + 20_000, force=True)
        assert (tmp_path / name).stat().st_size <= target + 20_000


def test_bits_are_kept(tiny_gguf: Path, tmp_path: Path) -> None:
    for bits in (6.0, 9.0):
        report = aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", target_bpw=bits, force=True)
        assert report.bits_per_weight is not None
        assert 0.97 * bits < report.bits_per_weight <= bits


def test_a_target_out_of_reach_names_the_nearest(tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.gguf"
    for given in ({"target_bpw": 1.0}, {"target_size": 1000}):
        with pytest.raises(RefusedError, match="cannot be reached: the smallest") as caught:
            aprfmt.quantize_model(tiny_gguf, out, **given, force=True)
        option, value = (caught.value.hint or "").split()
        nearest = {option[2:].replace("-", "_"): float(value) if "bpw" in option else value}
        report = aprfmt.quantize_model(tiny_gguf, out, **nearest, force=True)  # type: ignore[arg-type]
        assert report.output_bytes == out.stat().st_size


def test_a_type_of_the_user_stays(tiny_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.gguf"
    aprfmt.quantize_model(
        tiny_gguf, out, target_bpw=10.0, tensor_type="ffn_up=q8_0", embedding_type="q4_1", leave_output=True
    )
    types = types_of(out)
    assert {dtype for name, dtype in types.items() if "ffn_up" in name} == {"Q8_0"}
    assert types["token_embd.weight"] == "Q4_1"
    assert types.get("output.weight", "F32") in ("F32", "F16", "BF16")


def test_a_recipe_gives_the_same_bytes(tiny_gguf: Path, tmp_path: Path) -> None:
    one, recipe, words = tmp_path / "one.gguf", tmp_path / "r.toml", tmp_path / "types.txt"
    report = aprfmt.quantize_model(tiny_gguf, one, target_bpw=6.5, recipe_out=recipe)
    aprfmt.quantize_model(tiny_gguf, tmp_path / "two.gguf", recipe=recipe, recipe_out=words)
    assert (tmp_path / "two.gguf").read_bytes() == one.read_bytes()
    preset = next(line for line in recipe.read_text().splitlines() if line.startswith("type")).split('"')[1]
    aprfmt.quantize_model(tiny_gguf, tmp_path / "three.gguf", preset, recipe=words)
    assert (tmp_path / "three.gguf").read_bytes() == one.read_bytes()
    assert len(words.read_text().splitlines()) == sum(len(row["dtypes"]) > 0 for row in report.groups) + sum(
        sum(row["dtypes"].values()) - 1 for row in report.groups
    )
    with pytest.raises(UsageError, match="does not set the type"):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "four.gguf", recipe=words)
    with pytest.raises(ExistsError):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "four.gguf", target_bpw=6.5, recipe_out=recipe)
    recipe.write_text(recipe.read_text().replace("blk\\\\.0", "blk\\\\.7"))
    with pytest.raises(RefusedError, match="for another model"):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "four.gguf", recipe=recipe)
    assert not (tmp_path / "four.gguf").exists()


def test_lines_as_people_share_them(tiny_gguf: Path, tmp_path: Path) -> None:
    """llama-quantize's file: regular expressions, the first that matches counts, separated by any white space."""
    words = tmp_path / "types.txt"
    words.write_text("blk.*.ffn_down=q5_0\nblk.0.attn_v=q8_0 \t attn_(v|k)=Q5_1\n")
    aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", "q4_0", recipe=words)
    types = types_of(tmp_path / "t.gguf")
    assert {types[f"blk.{i}.ffn_down.weight"] for i in (0, 1)} == {"Q5_0"}
    assert [types[f"blk.{i}.attn_v.weight"] for i in (0, 1)] == ["Q8_0", "Q5_1"]
    assert types["blk.0.attn_k.weight"] == "Q5_1"
    assert types["blk.0.attn_q.weight"] == "Q4_0"


def test_importance_decides(tiny_gguf: Path, tmp_path: Path) -> None:
    """The matrix is used for errors, and one of another model is refused."""
    with aprfmt.open(tiny_gguf) as model:
        shapes = {t.name: t.shape for t in model.tensors.values() if t.name.startswith("blk.") and len(t.shape) > 1}
    good, bad = tmp_path / "m.dat", tmp_path / "bad.dat"
    good.write_bytes(old_imatrix({name: [1e-6 + (i % 32 == 0) for i in range(s[-1])] for name, s in shapes.items()}))
    bad.write_bytes(old_imatrix({name: [1.0] * (s[-1] + 32) for name, s in shapes.items()}))
    errors = {}
    for matrix in (None, good):
        report = aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", target_bpw=6.0, imatrix=matrix, plan=True)
        errors[matrix] = sum(row["error"] for row in report.groups if row["layers"])
    assert errors[good] < 0.8 * errors[None]
    with pytest.raises(RefusedError, match="belongs to another model") as caught:
        aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", target_bpw=6.0, imatrix=bad)
    assert f"apr imatrix {tiny_gguf} --data" in str(caught.value.hint)


@pytest.mark.parametrize("weighted", [False, True])
def test_errors_are_those_of_what_is_written(tiny_gguf: Path, weighted: bool) -> None:
    with aprfmt.open(tiny_gguf) as model:
        tensor = model.tensors["blk.0.ffn_up.weight"]
        values = tensor.numpy().astype("f8")
        weights = np.linspace(0.1, 3, tensor.shape[-1], dtype="f4") if weighted else None
        canonical = CanonicalTensor(tensor.name, (tensor,))
        sample = sample_rows(canonical, weights, n_values=1 << 30)  # all of it
        assert sample.values.shape == tensor.shape
        written = b"".join(map(bytes, (canonical.out("x", "Q4_0", None, weights).data(),)))
        back = decode("Q4_0", written, tensor.shape)
        scale = 1.0 if weights is None else weights
        expected = (scale * (values - back) ** 2).sum() / (scale * values**2).sum()
        assert error_of(sample, "Q4_0") == pytest.approx(expected, rel=1e-6)
        part = sample_rows(canonical, weights, n_values=4096)
        assert len(part.values) < len(sample.values)
        assert error_of(part, "Q4_0") == pytest.approx(expected, rel=0.3)
        assert np.array_equal(part.values, sample_rows(canonical, weights, n_values=4096).values)


def test_stacked_matrices_have_their_own_weights() -> None:
    """An expert whose columns matter elsewhere is measured with its own importance."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 8, 64)).astype("f4")
    values[0, :, 0], values[1, :, 63] = 30, 30
    weights = np.ones((2, 64), "f4")
    weights[0, 0] = weights[1, 63] = 0

    class Stack:
        name, dtype, shape, n_bytes = "s", "F32", values.shape, values.nbytes

        def read_into(self, offset: int, buffer: memoryview) -> None:
            buffer[:] = values.tobytes()[offset : offset + len(buffer)]

    stack = CanonicalTensor("s", (Stack(),))
    sample = sample_rows(stack, weights.reshape(-1), n_values=1 << 20)
    assert sample.weights is not None
    for row, matrix in enumerate(sample.matrices):
        assert np.array_equal(sample.weights[row], weights[matrix])
    both = error_of(sample, "Q4_0")
    one, other = (
        error_of(sample_rows(stack, weights.reshape(-1), np.array(counts), n_values=1 << 20), "Q4_0")
        for counts in ([9, 0], [0, 9])
    )
    assert min(one, other) < both < max(one, other)
    unused = error_of(sample_rows(stack, weights.reshape(-1), np.array([0, 0]), n_values=1 << 20), "Q4_0")
    assert 0 < unused < 1


def test_groups_are_bands_of_layers() -> None:
    names = [f"blk.{i}.ffn_up.weight" for i in range(10)] + ["token_embd.weight"]
    groups = groups_of(names, 3)
    assert list(groups) == ["ffn_up 0-2", "ffn_up 3-5", "ffn_up 6-9", "token_embd"]
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    assert list(groups_of(names[:2], 3)) == ["ffn_up 0", "ffn_up 1"]


def test_a_divergence_is_measured_and_met(tiny_gguf: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.txt"
    one.write_text(TEXT[: len(TEXT) // 2])  # one chunk
    aprfmt.quantize_model(tiny_gguf, tmp_path / "q4.gguf", "q4_0")
    at = aprfmt.kl_divergence(tmp_path / "q4.gguf", tiny_gguf, one).kl
    lines: list[str] = []
    out = tmp_path / "t.gguf"
    report = aprfmt.quantize_model(
        tiny_gguf, out, max_kl=at / 2, eval_data=one, eval_tokens=512, measure=True, log=lines.append
    )
    assert report.measured_kl is not None
    assert 1 <= report.rounds <= 3
    assert report.measured_kl <= at / 2
    assert report.measured_kl == pytest.approx(aprfmt.kl_divergence(out, tiny_gguf, one).kl, rel=1e-6)
    assert any("sensitivity of ffn_down" in line for line in lines)
    assert "measuring the rounding of activations" in lines
    # What was measured is known to the next run; the prediction is the divergence of the file itself.
    lines.clear()
    report = aprfmt.quantize_model(
        tiny_gguf, out, target_bpw=7.0, eval_data=one, eval_tokens=512, measure=True, log=lines.append, force=True
    )
    assert not any("sensitivity" in line or "rounding" in line for line in lines)
    assert report.predicted_kl == pytest.approx(aprfmt.kl_divergence(out, tiny_gguf, one).kl, rel=1e-6)
    with pytest.raises(RefusedError, match="cannot be reached"):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "u.gguf", max_kl=1e-9, eval_data=one, eval_tokens=512)
    assert not (tmp_path / "u.gguf").exists()


def test_rounded_activations_are_part_of_the_prediction(tmp_path: Path) -> None:
    chooser = TypeChooser(lambda line: None, tmp_path / "known.jsonl")
    chooser.tensors = [
        AllocatedTensor(
            name, (TypeOption("Q4_0", 18, 0.02), TypeOption("Q8_0", 34, 0.0), TypeOption("F16", 64, 0.0)), 1
        )
        for name in ("a", "b")
    ]
    chooser.measure_rounding(lambda: 0.005)
    chooser.measure_rounding(lambda: pytest.fail("it is known"))
    small = {t.name: t.options[0] for t in chooser.tensors}
    assert chooser.predicted(small) == pytest.approx(0.045)
    assert {o.dtype for o in chooser.within_loss(0.045).values()} == {"Q4_0"}
    assert {o.dtype for o in chooser.within_loss(0.044).values()} == {"Q4_0", "Q8_0"}
    assert {o.dtype for o in chooser.within_loss(0.005).values()} == {"Q8_0"}
    chooser.correct(small, 0.085)
    assert chooser.predicted(small) == pytest.approx(0.085)
    assert chooser.rounding == 0.005
    chooser.correct(small, 0.0)
    assert {o.dtype for o in chooser.within_loss(0.01).values()} == {"Q4_0"}


def test_a_full_disk_of_the_measurements_names_the_variable_of_the_cache(tmp_path: Path) -> None:
    chooser = TypeChooser(lambda line: None, tmp_path / "known.jsonl")
    (tmp_path / "known.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left") as caught:
        chooser.measure_rounding(lambda: 0.005)
    assert "set APR_CACHE" in str(caught.value.hint)


def test_two_measured_outputs_bracket_the_target(tmp_path: Path) -> None:
    """Where the KL grows as the square of the loss, one scale would aim too high and too low in turn."""
    chooser = TypeChooser(lambda line: None, tmp_path / "known.jsonl")
    options = tuple(TypeOption(f"T{i}", 200 - i, i * 1e-3) for i in range(101))
    chooser.tensors = [AllocatedTensor("a", options, 1.0)]
    for measured in (100, 40):
        chooser.correct({"a": options[measured]}, (measured * 1e-3) ** 2)
    chosen = chooser.within_loss(0.07**2)
    assert chosen["a"].dtype in ("T69", "T70")
    assert chooser.predicted(chosen) == pytest.approx(chosen["a"].error ** 2)
    assert chooser.predicted({"a": options[20]}) == pytest.approx(0.02 * 0.04)  # beyond them: in proportion to the last


def test_an_output_that_misses_is_not_published(
    tiny_gguf: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What llama.cpp measures decides, whatever was predicted."""
    from aprfmt.running import divergence

    out, records = tmp_path / "t.gguf", tmp_path / "t.jsonl"
    records.write_text(json.dumps({"body": text.read_text()}) + "\n")
    given = {"max_kl": 0.05, "eval_data": records, "text_field": "body", "eval_tokens": 512}
    measured = iter((1.0, 0.2, 0.03))

    def compare(*a: object, **b: object) -> list[object]:
        assert not out.exists()
        return [np.array([next(measured)])]

    monkeypatch.setattr(divergence, "compare", compare)
    report = aprfmt.quantize_model(tiny_gguf, out, **given)  # type: ignore[arg-type]
    assert (report.measured_kl, report.rounds) == (0.03, 3)
    out.unlink()
    measured = iter((0.06, 0.06, 0.06))
    with pytest.raises(RefusedError, match="was not reached in 3 rounds"):
        aprfmt.quantize_model(tiny_gguf, out, **given)  # type: ignore[arg-type]
    assert not out.exists()
    measured = iter((0.01,))  # far below the limit, but the next round would try the same types
    report = aprfmt.quantize_model(tiny_gguf, out, **(given | {"max_kl": 100.0}))  # type: ignore[arg-type]
    assert (report.measured_kl, report.rounds) == (0.01, 1)


def test_chunks_are_spread_over_the_text() -> None:
    class Words:
        def tokenize(self, text: str, **_: object) -> list[int]:
            return [int(word) for word in text.split()]

    def starts(n_words: int, count: int) -> list[int]:
        text = " ".join(map(str, range(n_words)))
        return [chunk[0] for chunk in spread_chunks(Words(), [text], 4, count)]  # type: ignore[arg-type]

    assert starts(40, 2) == [8, 28]  # the middles of the halves
    assert starts(40, 10) == starts(40, 12) == [*range(0, 40, 4)]
    assert starts(3, 2) == []
    assert starts(4 * SPREAD * 100, 1) == [4 * SPREAD // 2]  # of the start of a long one


def test_a_perturbed_model_is_restored(tiny_gguf: Path, text: Path, tmp_path: Path) -> None:
    with sensitivity.PerturbedModel(str(tiny_gguf), "tiny", [text], 512, {}) as model:
        types = {"blk.0.ffn_up.weight": "Q4_0"}
        first = model.divergence(types)
        assert first > 1e-6
        assert model.divergence({}) < first / 10
        assert model.divergence(types) == pytest.approx(first, rel=1e-6)
        assert model.divergence({"blk.9.nextn.weight": "Q4_0"}) == 0
        quantized = tmp_path / "q.gguf"
        aprfmt.quantize_model(tiny_gguf, quantized, "q4_0")
        assert model.divergence_of(str(quantized), 4) == pytest.approx(
            aprfmt.kl_divergence(quantized, tiny_gguf, text).kl, rel=1e-5
        )


def test_an_interrupted_measurement_resumes(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.running import type_systems

    asked, killing = 0, True

    def count(*a: object) -> float:
        nonlocal asked
        asked += 1
        if killing and asked >= 40:
            raise KeyboardInterrupt
        return error_of(*a)  # type: ignore[arg-type]

    monkeypatch.setenv("APR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(type_systems, "error_of", count)
    given = {"target_bpw": 6.0, "plan": True, "threads": 1}
    with pytest.raises(KeyboardInterrupt):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", **given)  # type: ignore[arg-type]
    store = next((tmp_path / "cache" / "quantization").iterdir())
    assert len(store.read_text().splitlines()) == 39
    killing = False
    with open(store, "a") as file:
        file.write('["error Q4_0 cut')  # what a killed process leaves
    aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", **given)  # type: ignore[arg-type]
    assert asked > 60
    asked = 0
    aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", **given)  # type: ignore[arg-type]
    assert asked <= 1  # the line after the one that was cut
    store.unlink()
    store.mkdir()
    with pytest.raises(StorageError):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "t.gguf", **given)  # type: ignore[arg-type]


def test_options_that_exclude_or_need_each_other(tiny_gguf: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.gguf"
    wrong: tuple[dict[str, object], ...] = (
        {},
        {"target_bpw": 5.0, "target_size": "1MB"},
        {"target_bpw": 5.0, "mix": "q4_k_m"},
        {"target_bpw": 5.0, "pure": True},
        {"target_bpw": "five"},
        {"target_bpw": float("nan")},
        {"target_bpw": 0.4},
        {"target_size": "five"},
        {"target_bpw": 5.0, "measure": True, "eval_data": text, "eval_tokens": 511},
        {"max_kl": 0.1},
        {"max_kl": -1.0, "eval_data": text},
        {"measure": True, "mix": "q8_0"},
        {"target_bpw": 5.0, "measure": True},
        {"target_bpw": 5.0, "eval_data": text},
        {"target_bpw": 5.0, "recipe_out": out},
    )
    for given in wrong:
        with pytest.raises(UsageError):
            aprfmt.quantize_model(tiny_gguf, out, **given)  # type: ignore[arg-type]
    said: list[str] = []
    for name, value in {"target_size": "five", "target_bpw": 40.0}.items():
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
            aprfmt.quantize_model(tiny_gguf, out, log=said.append, **{name: value})  # type: ignore[arg-type]
    assert said == []  # before anything is measured
    with pytest.raises(UsageError, match=r"--report page\.html"):
        aprfmt.quantize_model(tiny_gguf, out, target_bpw=5.0, report=tmp_path / "page.pdf")
    with pytest.raises(UsageError, match=r"write a \.gguf"):
        aprfmt.quantize_model(tiny_gguf, tmp_path / "t.apr", max_kl=0.1, eval_data=text)
    with pytest.raises(AprError):
        aprfmt.quantize_model(tiny_gguf, out, recipe=tmp_path / "none.toml")
    assert run(["quantize", str(tiny_gguf), "--target-bpw", "5"]) == 2  # without TYPE there is no default name
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_roles(tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", str(tiny_gguf), "--target-bpw", "6.5", "-o", str(tmp_path / "t.gguf")]
    assert run([*words, "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "ffn_down" in shown
    assert run([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["predicted_kl"] > 0
    assert {"role", "layers", "dtypes", "size_bytes", "bits_per_weight", "error", "share"} == set(body["groups"][0])
