"""Models merged into one: beside mergekit, beside the formulas of the papers, and as a user calls it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mergekit_peer
import numpy as np
import pytest
from arch_models import build, find_case, write_tokenizers

import aprfmt
from aprfmt.canonical import merge_methods
from aprfmt.canonical.merge_arrays import CHUNK, dare_mask
from aprfmt.canonical.merge_methods import Combination, MergeRule
from aprfmt.codecs.stream import BLOCK, STEP
from aprfmt.errors import NotFoundError, RefusedError, UsageError
from aprfmt.limits import MAX_SETTINGS_BYTES, MAX_SETTINGS_DEPTH
from aprfmt.types import Array

Folders = Mapping[str, Path]
Weights = dict[str, Array]


def weights(path: Path) -> Weights:
    """All tensors of a model by name, decoded."""
    with aprfmt.open(path) as model:
        return {name: np.array(tensor.numpy(), np.float32) for name, tensor in model.tensors.items()}


def changed(source: Path, target: Path, change: Callable[[str, Array], Array], **config: object) -> Path:
    """A copy of a folder with other weights."""
    from safetensors.numpy import save_file

    shutil.copytree(source, target)
    made = {name: np.ascontiguousarray(change(name, values)) for name, values in weights(source).items()}
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**told, **config}))
    return target


def noisy(source: Path, target: Path, seed: int, size: float = 0.02) -> Path:
    """A copy whose weights are a little different."""
    random = np.random.default_rng(seed)

    def change(name: str, values: Array) -> Array:
        noise: Array = np.asarray(random.normal(0, size, values.shape), np.float32)
        return values + noise

    return changed(source, target, change)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Base models of two families, each with two fine-tunes of it."""
    pytest.importorskip("transformers")
    work = tmp_path_factory.mktemp("merged")
    out: dict[str, Path] = {}
    for family in ("llama", "qwen2"):
        case = find_case(family)
        build(case, work / family, write_tokenizers(work / "tokenizers", [case.tokenizer], 300))
        out[family] = work / family
        for number in (1, 2):
            out[f"{family}{number}"] = noisy(work / family, work / f"{family}{number}", number)
    return out


def recipe(text: str, folders: Folders) -> dict[str, Any]:
    """A recipe whose models are named by their names here."""
    import yaml

    found: dict[str, Any] = yaml.safe_load(text)

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: named(item) for key, item in value.items()}
        if isinstance(value, list):
            return [named(item) for item in value]
        return str(folders[value]) if isinstance(value, str) and value in folders else value

    made: dict[str, Any] = named(found)
    return made


def ours(made: Mapping[str, object], output: Path, **options: Any) -> aprfmt.Report:
    """Merges by a recipe."""
    import yaml

    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(dict(made), sort_keys=False))
    return aprfmt.merge_models([], output, config=path, format="hf", **options)


def assert_same(a: Weights, b: Weights, limit: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name, values in a.items():
        assert values.shape == b[name].shape, name
        assert np.abs(values - b[name]).max() <= limit, name


RECIPES = {
    "linear": """
merge_method: linear
models:
- {model: llama1, parameters: {weight: 0.3}}
- {model: llama2, parameters: {weight: 1.1}}
""",
    "linear not normalized, by filters": """
merge_method: linear
models:
- model: llama
  parameters:
    weight:
    - {filter: self_attn, value: [0.1, 0.9]}
    - {filter: mlp, value: 0.5}
    - {value: 0.25}
- {model: llama1, parameters: {weight: [0.2, 0.4, 1.0]}}
parameters: {normalize: false}
""",
    "slerp": """
merge_method: slerp
base_model: llama
models: [{model: llama}, {model: llama1}]
parameters:
  t:
  - {filter: self_attn, value: [0, 0.5, 0.3, 1]}
  - {filter: mlp, value: [1, 0.2]}
  - {value: 0.45}
""",
    "slerp of strangers": """
merge_method: slerp
base_model: far
models: [{model: llama1}, {model: far}]
parameters: {t: 0.3}
""",
    "task arithmetic": """
merge_method: task_arithmetic
base_model: llama
models:
- {model: llama1, parameters: {weight: 0.7}}
- {model: llama2, parameters: {weight: -0.4}}
parameters: {lambda: 0.9}
""",
    "task arithmetic normalized": """
merge_method: task_arithmetic
base_model: qwen2
models:
- {model: qwen21, parameters: {weight: 0.7}}
- {model: qwen22, parameters: {weight: 0.6}}
parameters: {normalize: true}
""",
    "ties": """
merge_method: ties
base_model: llama
models:
- {model: llama1, parameters: {weight: 1, density: 0.4}}
- {model: llama2, parameters: {weight: 0.5, density: [0.2, 0.9]}}
- {model: far, parameters: {weight: 0.3, density: 0.7}}
parameters: {lambda: 1.2, int8_mask: true}
""",
    "ties rescaled": """
merge_method: ties
base_model: qwen2
models:
- {model: qwen21, parameters: {weight: 1, density: 0.3}}
- {model: qwen22, parameters: {weight: 1, density: 0.6}}
parameters: {normalize: false, rescale: true}
""",
    "dare ties that drops nothing": """
merge_method: dare_ties
base_model: llama
models:
- {model: llama1, parameters: {weight: 0.6}}
- {model: llama2, parameters: {weight: 0.7, density: 1}}
""",
    "dare linear that drops nothing": """
merge_method: dare_linear
base_model: llama
models:
- {model: llama1, parameters: {weight: 0.6}}
- {model: llama2, parameters: {weight: 0.7}}
parameters: {normalize: true}
""",
    "layers of two": """
merge_method: passthrough
slices:
- sources: [{model: llama1, layer_range: [0, 2]}]
- sources: [{model: llama2, layer_range: [1, 2], parameters: {scale: [{filter: o_proj, value: 0.5}, {value: 1}]}}]
- sources: [{model: llama2, layer_range: [0, 1]}]
""",
    "slerp of slices": """
merge_method: slerp
base_model: llama
slices:
- sources: [{model: llama, layer_range: [0, 1]}, {model: llama1, layer_range: [1, 2]}]
- sources: [{model: llama, layer_range: [0, 2]}, {model: llama1, layer_range: [0, 2]}]
  parameters: {t: [0.2, 0.6]}
parameters: {t: 0.5}
""",
}


@pytest.fixture(scope="module")
def with_stranger(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    far = noisy(folders["llama"], tmp_path_factory.mktemp("far") / "far", 9, 1.0)
    return {**folders, "far": far}


@pytest.fixture(scope="module")
def theirs(mergekit: None, with_stranger: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """What mergekit makes of RECIPES."""
    work = tmp_path_factory.mktemp("theirs")
    out = {name: work / str(number) for number, name in enumerate(RECIPES)}
    mergekit_peer.merge(*((recipe(RECIPES[name], with_stranger), path) for name, path in out.items()))
    return out


@pytest.mark.parametrize("name", RECIPES)
def test_each_method_gives_what_mergekit_gives(
    name: str, theirs: Folders, with_stranger: Folders, tmp_path: Path
) -> None:
    ours(recipe(RECIPES[name], with_stranger), tmp_path / "ours")
    assert_same(weights(tmp_path / "ours"), weights(theirs[name]))
    configs = [json.loads((path / "config.json").read_text()) for path in (tmp_path / "ours", theirs[name])]
    assert configs[0]["num_hidden_layers"] == configs[1]["num_hidden_layers"]


DARE = """
merge_method: {method}
base_model: llama
models:
- {{model: llama1, parameters: {{weight: 0.6, density: 0.3}}}}
- {{model: llama2, parameters: {{weight: 0.9, density: [0.2, 0.7]}}}}
parameters: {{normalize: {normalize}}}
"""


@pytest.mark.turns(first=False, of=8)
@pytest.mark.usefixtures("mergekit")
@pytest.mark.parametrize("method", ["dare_ties", "dare_linear"])
@pytest.mark.parametrize("normalize", ["true", "false"])
def test_dare_is_mergekits_where_the_same_is_dropped(
    method: str, normalize: str, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(DARE.format(method=method, normalize=normalize), folders)
    masks = tmp_path / "masks"
    masks.mkdir()
    mergekit_peer.merge((made, tmp_path / "theirs"), masks=masks)

    def given(seed: int, name: str, model: int, first: int, last: int, density: float) -> Array:
        mask: Array = np.load(masks / f"{name}.{model - 1}.npy").reshape(-1)[first:last]
        return mask

    monkeypatch.setattr(merge_methods, "dare_mask", given)
    ours(made, tmp_path / "ours")
    assert_same(weights(tmp_path / "ours"), weights(tmp_path / "theirs"))


# --- the papers ---


class Held:
    """Values in memory."""

    def __init__(self, values: Array) -> None:
        self.values = np.ascontiguousarray(values, np.float32)

    def read_into(self, first: int, out: Array) -> None:
        out[:] = self.values[first : first + len(out)]


def combine(rule: MergeRule, *models: Array, threads: int = 1, step: int = 1 << 30) -> Array:
    """The whole result, read in sources by several threads."""
    made = Combination("w", len(models[0]), rule, [Held(values) for values in models])
    ends = range(0, len(models[0]), step)
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda start: made.read(start, min(start + step, len(models[0]))), ends)
        return np.concatenate(list(parts))


def models_of(n: int, *, coarse: bool = False) -> list[Array]:
    random = np.random.default_rng(n)
    base: Array = random.normal(0, 1, n).astype(np.float32)
    tuned: list[Array] = [random.normal(0, 0.1, n).astype(np.float32) for _ in range(3)]
    if coarse:  # most magnitudes are there many times
        base = np.round(base * 8) / 8
        tuned = [np.round(delta * 16) / 16 for delta in tuned]
    return [base, *((base + delta).astype(np.float32) for delta in tuned)]


def trimmed(delta: Array, density: float) -> Array:
    """The largest magnitudes, the first of equal ones."""
    k = max(1, int(density * len(delta)))
    kept = np.zeros_like(delta)
    places = np.argsort(-np.abs(delta), kind="stable")[:k]
    kept[places] = delta[places]
    return kept


@pytest.mark.parametrize("n", [1, 1000, 2 * STEP + 17])
@pytest.mark.parametrize("coarse", [False, True])
def test_ties_trims_elects_and_averages_as_its_paper_says(n: int, coarse: bool) -> None:
    base, *tuned = models_of(n, coarse=coarse)
    densities = (0.2, 0.5, 0.05)
    rule = MergeRule(method="ties", base=0, weights=(0, 1, 1, 1), densities=(0, *densities), normalize=True, factor=0.7)
    deltas = np.stack([trimmed(m - base, density) for m, density in zip(tuned, densities, strict=True)])
    elected = np.where(deltas.sum(axis=0) >= 0, 1, -1)
    agree = np.sign(deltas) == elected
    mean = np.where(agree, deltas, 0).sum(axis=0) / np.maximum(agree.sum(axis=0), 1)
    assert np.abs(combine(rule, base, *tuned, threads=3, step=STEP // 2) - (base + 0.7 * mean)).max() < 1e-6


def test_ties_keeps_as_many_values_as_its_density_says_however_many_are_equal() -> None:
    n = 3 * STEP
    base = np.zeros(n, np.float32)
    same = np.full(n, 0.5, np.float32)
    rule = MergeRule(method="ties", base=0, weights=(0, 1), densities=(0, 0.4))
    made = combine(rule, base, same, threads=4, step=STEP // 3)
    assert np.count_nonzero(made) == int(0.4 * n)
    assert made[: int(0.4 * n)].all()


@pytest.mark.parametrize(("sample", "most"), [(1 << 17, 1 << 22), (1 << 10, 1 << 22), (1 << 17, 100)])
@pytest.mark.parametrize("kind", ["sorted", "coarse", "random"])
def test_ties_finds_the_threshold_exactly_whatever_the_sample_says(
    sample: int, most: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_methods, "_SAMPLE", sample)
    monkeypatch.setattr(merge_methods, "_MOST_CANDIDATES", most)
    n = 3 * CHUNK + 77
    tuned: Array = np.random.default_rng(5).standard_normal(n).astype(np.float32)
    if kind == "sorted":  # the first values of a chunk say nothing of the others
        tuned = np.sort(tuned)
    elif kind == "coarse":
        tuned = np.round(tuned * 4) / 4
    rule = MergeRule(method="ties", base=0, weights=(0, 1), densities=(0, 0.3))
    made = combine(rule, np.zeros(n, np.float32), tuned, threads=3)
    kept = np.argsort(-np.abs(tuned), kind="stable")[: int(0.3 * n)]
    expected = np.zeros(n, np.float32)
    expected[kept] = tuned[kept]
    assert np.array_equal(made, expected)


@pytest.mark.parametrize("density", [0.1, 0.9])
def test_dare_drops_at_random_and_rescales_as_its_paper_says(density: float) -> None:
    n = 2 * STEP + 5
    base, tuned, *_ = models_of(n)
    rule = MergeRule(method="dare_linear", base=0, weights=(0, 1), densities=(0, density), rescale="density", seed=3)
    made = combine(rule, base, tuned, threads=4, step=BLOCK // 2 + 1)
    kept = dare_mask(3, "w", 1, 0, n, density)
    assert abs(kept.mean() - density) < 4 * np.sqrt(density * (1 - density) / n)
    assert np.abs(made - (base + np.where(kept, (tuned - base) / density, 0))).max() < 1e-6
    plain = combine(replace(rule, rescale="none"), base, tuned)
    assert np.abs(plain - (base + np.where(kept, tuned - base, 0))).max() < 1e-6
    norm = combine(replace(rule, rescale="norm"), base, tuned)
    assert np.abs(norm - base).sum(dtype=np.float64) == pytest.approx(np.abs(tuned - base).sum(dtype=np.float64), 1e-5)


def test_what_dare_drops_is_by_seed_weight_model_and_element_alone() -> None:
    whole = dare_mask(0, "w", 1, 0, 3 * BLOCK, 0.5)
    parts = [dare_mask(0, "w", 1, a, a + 1000, 0.5) for a in range(0, 3 * BLOCK - 1000, 1000)]
    assert np.array_equal(whole[: 1000 * len(parts)], np.concatenate(parts))
    for other in ((1, "w", 1), (0, "v", 1), (0, "w", 2)):
        same = (dare_mask(*other, 0, 3 * BLOCK, 0.5) == whole).mean()
        assert abs(same - 0.5) < 0.01
    assert abs((whole[:BLOCK] == whole[BLOCK : 2 * BLOCK]).mean() - 0.5) < 0.01


def test_slerp_keeps_the_angle_and_is_linear_for_parallel_weights() -> None:
    n = STEP + 3
    a, b = np.zeros(n, np.float32), np.zeros(n, np.float32)
    a[0], b[n - 1] = 2, 3
    made = combine(MergeRule(method="slerp", base=1, weights=(1, 1), t=1 / 3), b, a, threads=2, step=STEP // 2)
    assert made[0] == pytest.approx(2 * np.sin(np.pi / 3), 1e-6)
    assert made[n - 1] == pytest.approx(3 * np.sin(np.pi / 6), 1e-6)
    b[0], b[n - 1] = 3 * np.cos(np.pi / 3), 3 * np.sin(np.pi / 3)
    made = combine(MergeRule(method="slerp", base=0, weights=(1, 1), t=0.5), a, b)
    assert made[0] == pytest.approx((2 + 1.5) * np.sin(np.pi / 6) / np.sin(np.pi / 3), 1e-6)
    b[0], b[n - 1] = 0, 3
    made = combine(MergeRule(method="slerp", base=0, weights=(1, 1), t=0.25), a, 3 * a)
    assert made[0] == 3
    assert combine(MergeRule(method="slerp", base=0, weights=(1, 1), t=0.25), 0 * a, b)[n - 1] == pytest.approx(
        3 * np.sin(np.pi / 8), 1e-6
    )


def test_a_source_that_cannot_be_read_is_an_error_in_every_thread() -> None:
    class Broken(Held):
        def read_into(self, first: int, out: Array) -> None:
            if first >= CHUNK:
                raise RefusedError("no such bytes")
            super().read_into(first, out)

    base = np.zeros(4 * CHUNK, np.float32)
    rule = MergeRule(method="slerp", base=0, weights=(1, 1))
    made = Combination("w", len(base), rule, [Held(base), Broken(base)])
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(made.read, start, start + 10) for start in range(0, 40, 10)]:
            with pytest.raises(RefusedError, match="no such bytes"):
                future.result(timeout=60)


# --- forms ---


@pytest.mark.turns(of=8)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("linear", {}),
        ("slerp", {}),
        ("ties", {"density": 0.5}),
        ("dare_ties", {"density": 0.5}),
        ("task_arithmetic", {"weight": 0.3}),
    ],
)
def test_a_model_merged_with_itself_is_itself(
    method: str, options: dict[str, Any], smollm2_short: Path, tmp_path: Path
) -> None:
    out = tmp_path / "m.gguf"
    base = smollm2_short if options else None
    aprfmt.merge_models([smollm2_short, smollm2_short], out, method=method, base=base, **options)
    with aprfmt.open(smollm2_short) as a, aprfmt.open(out) as b:
        assert list(a.tensors) == list(b.tensors)
        for name, tensor in a.tensors.items():
            assert bytes(tensor.raw()) == bytes(b.tensors[name].raw()), name
        assert b.tokenizer == a.tokenizer
        assert b.metadata["general.tags"] == [*a.metadata["general.tags"], "merge"]


FAMILIES = ("llama", "llama/llama3", "gpt2", "mixtral", "falcon", "gemma2", "granite", "deepseek_v3")


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_result_is_the_same_whatever_forms_the_models_have(family: str, tmp_path: Path) -> None:
    case = find_case(family)
    build(case, tmp_path / "a", write_tokenizers(tmp_path / "tokenizers", [case.tokenizer], 300))
    noisy(tmp_path / "a", tmp_path / "b", 1)
    a, b = tmp_path / "a", tmp_path / "b"
    for name in "ab":
        aprfmt.convert_model(tmp_path / name, tmp_path / f"{name}.gguf")
        aprfmt.convert_model(tmp_path / name, tmp_path / f"{name}.apr")
    for method in ({"method": "ties", "base": a, "density": 0.4}, {"method": "slerp", "t": 0.3}):
        options: dict[str, Any] = {**method, "format": "hf", "force": True}
        aprfmt.merge_models([a, b], tmp_path / "plain", **options)
        plain = weights(tmp_path / "plain")
        for other in (b.with_suffix(".gguf"), b.with_suffix(".apr")):
            aprfmt.merge_models([a, other], tmp_path / "mixed", **options)
            assert_same(weights(tmp_path / "mixed"), plain, 2e-6)
        base = a.with_suffix(".gguf")
        options |= {"base": base} if "base" in method else {}
        aprfmt.merge_models([base, b], tmp_path / "out.gguf", **options | {"format": None})
        aprfmt.convert_model(tmp_path / "plain", tmp_path / "plain.gguf", force=True)
        with aprfmt.open(tmp_path / "out.gguf") as one, aprfmt.open(tmp_path / "plain.gguf") as two:
            assert {n: t.shape for n, t in one.tensors.items()} == {n: t.shape for n, t in two.tensors.items()}
            for name, tensor in one.tensors.items():
                assert np.abs(tensor.numpy() - two.tensors[name].numpy()).max() <= 2e-6, name


def test_rows_that_do_not_change_keep_their_blocks(folders: Folders, tmp_path: Path) -> None:
    a, out = tmp_path / "a.gguf", tmp_path / "out.gguf"
    aprfmt.convert_model(folders["llama"], a, dtype="iq4_nl", pure=True)
    aprfmt.merge_models([a, a], out, method="linear")
    with aprfmt.open(a) as one, aprfmt.open(out) as two:
        assert "IQ4_NL" in {tensor.dtype for tensor in one.tensors.values()}  # whose values become other blocks
        for name, tensor in one.tensors.items():
            assert bytes(tensor.raw()) == bytes(two.tensors[name].raw()), name


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3"])
def test_blocks_that_have_no_place_in_a_checkpoint_are_merged_with_one(family: str, tmp_path: Path) -> None:
    case = find_case(family)
    a = tmp_path / "a"
    build(case, a, write_tokenizers(tmp_path / "tokenizers", [case.tokenizer], 300))
    b = noisy(a, tmp_path / "b", 1)
    aprfmt.convert_model(b, tmp_path / "b.gguf", dtype="q8_0")
    one, two = weights(a), weights(b)
    for pair in ([a, tmp_path / "b.gguf"], [tmp_path / "b.gguf", a]):
        report = aprfmt.merge_models(pair, tmp_path / "out", method="linear", format="hf", force=True)
        assert any("cannot be put in checkpoint order" in loss for loss in report.losses) == (pair[1] is a)
        made = weights(tmp_path / "out")
        assert made.keys() == one.keys()
        for name, values in made.items():
            assert np.abs(values - (one[name] + two[name]) / 2).max() <= 0.01 * np.abs(two[name]).max(), name


def test_a_quantized_model_is_decoded_and_only_what_changed_is_quantized_again(
    folders: Folders, tmp_path: Path
) -> None:
    half = changed(folders["llama"], tmp_path / "half", lambda name, values: values * (2 if "mlp" in name else 1))
    for name, path in (("a", folders["llama"]), ("b", half)):
        aprfmt.convert_model(path, tmp_path / f"{name}.gguf", dtype="q8_0")
    report = aprfmt.merge_models([tmp_path / "a.gguf", tmp_path / "b.gguf"], tmp_path / "c.gguf", method="linear")
    assert any("dequantized and requantized where they changed" in loss for loss in report.losses)
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "c.gguf") as c:
        for name, tensor in a.tensors.items():
            assert c.tensors[name].dtype == tensor.dtype
            same = bytes(tensor.raw()) == bytes(c.tensors[name].raw())
            assert same == ("ffn_" not in name or "norm" in name), name
            ratio = c.tensors[name].numpy() - tensor.numpy() * (1.5 if not same else 1)
            assert np.abs(ratio).max() <= 0.01 * np.abs(tensor.numpy()).max()
    aprfmt.merge_models([tmp_path / "a.gguf", tmp_path / "b.gguf"], tmp_path / "d.gguf", method="linear", dtype="f32")
    with aprfmt.open(tmp_path / "d.gguf") as d:
        assert {tensor.dtype for tensor in d.tensors.values()} == {"F32"}


def test_stacked_layers_are_a_network_that_transformers_loads(folders: Folders, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "deep"
    a = folders["llama"]
    aprfmt.merge_models([a, folders["llama1"], a], out, method="passthrough", layers=["0-1", "0", "1"], format="hf")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == len(model.model.layers) == 4
    own, other = weights(a), weights(folders["llama1"])
    made = weights(out)
    for new, (source, old) in enumerate([(own, 0), (own, 1), (other, 0), (own, 1)]):
        for name in own:
            if name.startswith(f"model.layers.{old}."):
                spelled = name.replace(f".{old}.", f".{new}.", 1)
                assert np.array_equal(made[spelled], source[name]), spelled


def test_a_head_of_its_own_is_merged_with_the_embedding_that_is_one(folders: Folders, tmp_path: Path) -> None:
    tied = find_case("llama/tied")
    build(tied, tmp_path / "tied", write_tokenizers(tmp_path / "tokenizers", [tied.tokenizer], 300))
    for pair in ([tmp_path / "tied", folders["llama"]], [folders["llama"], tmp_path / "tied"]):
        aprfmt.merge_models(pair, tmp_path / "out", method="linear", format="hf", force=True)
        made, parts = weights(tmp_path / "out"), [weights(path) for path in pair]
        heads = [part.get("lm_head.weight", part["model.embed_tokens.weight"]) for part in parts]
        assert np.abs(made["lm_head.weight"] - (heads[0] + heads[1]) / 2).max() < 1e-6
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


# --- vocabularies ---


def resized(source: Path, target: Path, rows: int) -> Path:
    """A copy with other rows at the end of embedding and head."""

    def change(name: str, values: Array) -> Array:
        if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return values
        more = np.full((max(0, rows - len(values)), values.shape[1]), 7, np.float32)
        return np.concatenate([values[:rows], more])

    return changed(source, target, change, vocab_size=rows)


def test_embeddings_of_other_sizes_are_filled_up_or_cut_where_that_is_asked_for(
    folders: Folders, tmp_path: Path
) -> None:
    a = folders["llama"]
    rows = len(weights(a)["model.embed_tokens.weight"])
    for n in (rows - 4, rows + 6):
        b = resized(folders["llama1"], tmp_path / f"b{n}", n)
        with pytest.raises(RefusedError, match=rf"\[{n}, \d+\], but in .* it is \[{rows}, \d+\]") as error:
            aprfmt.merge_models([a, b], tmp_path / "out", method="linear", format="hf")
        assert error.value.tensor in ("model.embed_tokens.weight", "lm_head.weight")
        assert "--pad-vocab" in str(error.value.hint)
        assert not (tmp_path / "out").exists()
        aprfmt.merge_models([a, b], tmp_path / "out", method="linear", format="hf", pad_vocab=True)
        one, two = (weights(path)["model.embed_tokens.weight"] for path in (a, b))
        filled = np.concatenate([two[:rows], one[len(two) :]])
        assert np.array_equal(weights(tmp_path / "out")["model.embed_tokens.weight"], (one + filled) / 2)
        shutil.rmtree(tmp_path / "out")


def test_other_tokens_are_refused_with_the_first_that_differs(folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders["llama1"], tmp_path / "b")
    path = tmp_path / "b" / "tokenizer.json"
    told = json.loads(path.read_text())
    vocab = told["model"]["vocab"]
    one, two = sorted(vocab, key=lambda token: vocab[token])[-2:]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    path.write_text(json.dumps(told))
    with pytest.raises(RefusedError, match=r"token \d+ is .*, but .* in "):
        aprfmt.merge_models([folders["llama"], tmp_path / "b"], tmp_path / "out", method="linear", format="hf")


# --- what cannot be ---


def test_models_of_other_networks_are_refused_before_a_byte_is_written(folders: Folders, tmp_path: Path) -> None:
    def refused(match: str, other: Path, tensor: str | None = None, **options: Any) -> None:
        with pytest.raises(RefusedError, match=match) as error:
            aprfmt.merge_models(
                [folders["llama"], other], tmp_path / "out", **{"method": "linear", "format": "hf"} | options
            )
        assert error.value.tensor == tensor
        assert not (tmp_path / "out").exists()

    refused("architecture is qwen2, but .* has llama", folders["qwen2"])
    down = "model.layers.1.mlp.down_proj.weight"
    narrow = changed(folders["llama1"], tmp_path / "narrow", lambda name, v: v[:, :-8] if name == down else v)
    refused(r"the weight is \[\d+, \d+\], but in .* it is \[", narrow, down)
    heads = changed(folders["llama1"], tmp_path / "heads", lambda name, v: v, rope_theta=5.0, num_attention_heads=2,
                    num_key_value_heads=1, head_dim=32)  # fmt: skip
    refused("num_heads is 2, but in .* it is", heads)
    aprfmt.prune_model(folders["llama1"], tmp_path / "short", keep_layers=[0], format="hf")
    refused("the model has 1 layers, but .* has 2", tmp_path / "short")
    aprfmt.convert_model(folders["llama"], tmp_path / "a.gguf")
    with pytest.raises(RefusedError, match="the output is an input"):
        aprfmt.merge_models([folders["llama"], tmp_path / "a.gguf"], tmp_path / "a.gguf", method="linear", force=True)


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no method": ({}, "no merge method given"),
    "unknown": ({"method": "median"}, "unknown merge method 'median'"),
    "no base": ({"method": "ties"}, "ties needs a base model"),
    "base of linear": ({"method": "linear", "base": "x"}, "--base does not apply to linear"),
    "three for slerp": ({"method": "slerp", "n": 3}, "slerp merges exactly two models, not 3"),
    "weights": ({"method": "linear", "weight": [1, 2, 3]}, "3 values of --weight given for 2 models"),
    "no weights": ({"method": "weighted"}, "weighted needs a weight"),
    "zero": ({"method": "linear", "weight": [1, -1]}, "add up to 0"),
    "not finite": ({"method": "linear", "weight": [1, float("nan")]}, "weight must be a number"),
    "density": ({"method": "ties", "base": "llama", "density": 1.5}, "density must be from 0 to 1"),
    "t": ({"method": "slerp", "t": "much"}, "t must be a number"),
    "t of linear": ({"method": "linear", "t": 0.5}, "--t does not apply to linear"),
    "rescale": ({"method": "ties", "base": "llama", "rescale": "twice"}, "rescale must be"),
    "layers": ({"method": "linear", "layers": ["0-1"]}, "--layers does not apply"),
    "fewer layers": ({"method": "passthrough", "layers": ["0-1"]}, "1 value of --layers given for 2 models"),
    "gaps": ({"method": "passthrough", "layers": ["0,2", "1"]}, "is not a layer range"),
    "no layer": ({"method": "passthrough", "layers": ["0-9", "0"]}, "unknown layer 9"),
    "one": ({"method": "linear", "n": 1}, "a merge takes at least two models"),
    "none": ({"method": "linear", "n": 0}, "no models given"),
    "seed": ({"method": "linear", "seed": 1.5}, "seed must be a number"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_make_no_merge_are_refused(case: str, folders: Folders, tmp_path: Path) -> None:
    options, message = OPTIONS[case]
    models = [folders["llama1"], folders["llama2"], folders["llama"]][: options.get("n", 2)]
    given = {key: folders.get(value, value) if key == "base" else value for key, value in options.items() if key != "n"}
    with pytest.raises(UsageError, match=re.escape(message)):
        aprfmt.merge_models(models, tmp_path / "out", format="hf", **given)
    assert not (tmp_path / "out").exists()


WRONG: dict[str, tuple[str, str]] = {
    "no yaml": ("merge_method: [linear\nmodels: 1", "line 2: not valid YAML"),
    "empty": ("", "the recipe is empty"),
    "a list": ("- 1", "line 1: the recipe must be a mapping"),
    "unknown key": ("merge_method: linear\nmodles: []", "line 2: unknown key 'modles'"),
    "twice": ("merge_method: linear\nmerge_method: ties", "line 2: duplicate key 'merge_method'"),
    "no method": ("models: [{model: a}]", "line 1: merge_method is missing"),
    "unknown method": ("models: [{model: a}]\nmerge_method: della", "line 2: unknown merge method 'della'"),
    "both": ("merge_method: linear\nmodels: []\nslices: []", "either models or slices"),
    "no models": ("merge_method: linear\nmodels: []", "line 2: models must be a list with items"),
    "no model": ("merge_method: linear\nmodels:\n- parameters: {weight: 1}", "line 3: a model needs the key model"),
    "no range": ("merge_method: linear\nslices:\n- sources:\n  - model: a", "line 4: layer_range is missing"),
    "a range": (
        "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [4, 2]}]}]",
        "layer_range must be",
    ),
    "lengths": (
        "merge_method: linear\nslices:\n- sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 1]}]",
        "line 3: the sources of a slice must have the same number of layers",
    ),
    "weight": (
        "merge_method: linear\nmodels:\n- model: a\n  parameters:\n    weight: lots",
        "line 5: weight must be a number",
    ),
    "parameter": (
        "merge_method: slerp\nmodels: [{model: a}]\nparameters:\n  density: 1",
        "line 4: slerp has no parameter density",
    ),
    "no parameter": (
        "merge_method: slerp\nmodels: [{model: a}]\nparameters:\n  dense: 1",
        "line 4: unknown parameter 'dense'",
    ),
    "filter": (
        "merge_method: slerp\nmodels: [{model: a}]\nparameters:\n  t: [{filter: mlp}]",
        "line 4: t: a filter takes",
    ),
    "mixed": (
        "merge_method: slerp\nmodels: [{model: a}]\nparameters:\n  t: [1, {value: 1}]",
        "line 4: t must be a list of",
    ),
    "base": ("merge_method: ties\nmodels:\n- {model: a}", "line 3: ties needs a base model"),
    "dtype": ("merge_method: linear\nmodels: [{model: a}]\ndtype: q4", "line 3: dtype must be one of"),
    "modules": ("merge_method: linear\nmodules: {}", "line 2: modules are not supported"),
    "template": (
        "merge_method: linear\nmodels: [{model: a}]\nchat_template: chatml",
        "line 3: chat_template is not supported",
    ),
    "alias": ("merge_method: &a linear\nmodels: [{model: *a}]", "line 1: anchors and aliases"),
    "deep": ("merge_method: " + "[" * (MAX_SETTINGS_DEPTH + 1), f"nested deeper than {MAX_SETTINGS_DEPTH} levels"),
    "large": ("#" * (MAX_SETTINGS_BYTES + 1), f"{MAX_SETTINGS_BYTES} bytes"),
    "adapter": ("merge_method: linear\nmodels:\n- model: base+lora", "line 3: base+lora names an adapter"),
    "date": ("merge_method: 2001-99-99", "line 1: month must be in 1..12"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_recipe_that_cannot_be_is_refused_with_its_line(case: str, tmp_path: Path) -> None:
    text, message = WRONG[case]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        aprfmt.merge_models([], tmp_path / "out", config=path, format="hf")
    assert error.value.path == str(path)


def test_a_recipe_and_options_do_not_mix_and_what_it_ignores_is_said(folders: Folders, tmp_path: Path) -> None:
    made = recipe(RECIPES["task arithmetic"], folders)
    with pytest.raises(UsageError, match="--method and --config are mutually exclusive"):
        ours(made, tmp_path / "out", method="linear")
    made["parameters"] = {"int8_mask": True}
    made |= {"out_dtype": "bfloat16", "dtype": "float32", "tokenizer_source": "base"}
    report = ours(made, tmp_path / "out", plan=True)
    assert "int8_mask is ignored: masks are not stored" in report.losses
    assert report.dtypes.keys() == {"BF16"}
    assert not (tmp_path / "out").exists()
    missing = recipe(RECIPES["slerp"], folders)
    missing["parameters"]["t"] = [{"filter": "self_attn", "value": 1}]
    with pytest.raises(UsageError, match=r"slerp needs t, which is not set for"):
        ours(missing, tmp_path / "out")
    with pytest.raises(UsageError, match=r"tokenizer_source .* is not one of the models"):
        ours(made | {"tokenizer_source": "elsewhere"}, tmp_path / "out")
    with pytest.raises(NotFoundError):
        aprfmt.merge_models([], tmp_path / "out", config=tmp_path / "none.yaml")
