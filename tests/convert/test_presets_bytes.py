"""Whole models by every preset: the types and bytes of llama_model_quantize on the GGUF of the floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import ArchCase, find_case
from imatrix_files import old_imatrix
from llama_peer import LlamaError, LlamaPeer
from tiny_models import BYTES, build

import aprfmt
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.presets import PRESETS
from aprfmt.errors import RefusedError

pytestmark = pytest.mark.llama

_DIMS: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
CASES = {
    case.id: case
    for case in (
        ArchCase("llama", "llama", "LlamaConfig", "LlamaForCausalLM", _DIMS, BYTES),
        ArchCase("qwen2", "qwen2", "Qwen2Config", "Qwen2ForCausalLM",
                 {**_DIMS, "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 64,
                  "intermediate_size": 288, "tie_word_embeddings": True}, BYTES),
        ArchCase("mixtral", "mixtral", "MixtralConfig", "MixtralForCausalLM",
                 {**_DIMS, "num_hidden_layers": 1, "num_local_experts": 8}, BYTES),
        ArchCase("gpt2", "gpt2", "GPT2Config", "GPT2LMHeadModel",
                 {"hidden_size": 256, "n_inner": 256, "num_hidden_layers": 2, "n_positions": 64}, BYTES),
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Folder in bf16 and GGUF of the same values, by name."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("presets")
    for name, case in CASES.items():
        build(case, folder / name, None, dtype="bfloat16")
        aprfmt.export_model(folder / name, folder / f"{name}.gguf")
    return {name: (folder / name, folder / f"{name}.gguf") for name in CASES}


def importance(gguf: Path) -> dict[str, Any]:
    """Importance of every column of every matrix of a layer, other for each matrix of a stack."""
    rng = np.random.default_rng(7)
    out = {}
    with aprfmt.open(gguf) as model:
        for name, tensor in model.tensors.items():
            if name.startswith("blk.") and len(tensor.shape) > 1:
                n = tensor.shape[-1] * (tensor.shape[0] if len(tensor.shape) > 2 else 1)
                out[name] = rng.uniform(0.01, 4.0, n).astype("<f4")
    return out


def contents(path: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...], bytes]]]:
    with aprfmt.open(path) as model:
        for name, tensor in model.tensors.items():
            # ggml drops outer dims of one
            outer = next((i for i, dim in enumerate(tensor.shape) if dim != 1), 0)
            yield name, (tensor.dtype, tensor.shape[outer:], bytes(tensor.raw()))


def fallbacks(written: dict[str, tuple[str, tuple[int, ...], bytes]], preset: str) -> list[str]:
    """What a report must say of matrices whose rows the blocks of the preset do not divide."""
    block = DTYPES[PRESETS[preset].dtype].block
    odd = [
        dtype
        for dtype, shape, _ in written.values()
        if len(shape) > 1 and shape[-1] % block and 1 < DTYPES[dtype].block < block
    ]
    if not odd:
        return []
    noun = "tensor" if len(odd) == 1 else "tensors"
    stored = ", ".join(sorted(set(odd)))
    return [f"{len(odd)} {noun} with rows that are not a multiple of {block}: stored as {stored}"]


SLOW = tuple(preset for preset in PRESETS if preset.startswith("iq"))
NEED = ("iq3_xs", "iq3_xxs", "q2_k_s", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")


Expected = Callable[..., dict[str, Any]]


@pytest.fixture
def expected(llama_cpp: LlamaPeer) -> Expected:
    """The tensors of what llama.cpp makes of a GGUF by a preset."""

    def run(gguf: Path, preset: str, out: Path, imatrix: Any = None, **wishes: Any) -> dict[str, Any]:
        llama_cpp.quantize(gguf, out, PRESETS[preset].file_type, imatrix=imatrix, **wishes)
        return dict(contents(out))

    return run


@pytest.mark.turns(of=8)
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        *((name, preset) for name in CASES for preset in PRESETS if preset not in (*SLOW, *NEED, "q1_0")),
        ("gpt2", "q1_0"),  # llama.cpp takes only rows of whole blocks of 128 for it
    ],
)
def test_a_folder_becomes_what_llama_cpp_makes_of_its_gguf(
    name: str, preset: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, expected: Expected
) -> None:
    folder, gguf = models[name]
    theirs = expected(gguf, preset, tmp_path / "theirs.gguf")
    report = aprfmt.convert_model(folder, tmp_path / "ours.gguf", dtype=preset)
    assert dict(contents(tmp_path / "ours.gguf")) == theirs
    assert report.warnings == fallbacks(theirs, preset)
    with aprfmt.open(tmp_path / "ours.gguf") as a, aprfmt.open(tmp_path / "theirs.gguf") as b:
        assert a.metadata["general.file_type"] == b.metadata["general.file_type"]


@pytest.mark.turns(of=8)
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        *((name, preset) for name in ("qwen2", "gpt2") for preset in PRESETS if preset not in (*SLOW, "q1_0")),
        *(("mixtral", preset) for preset in PRESETS if preset not in (*SLOW, "q1_0")),
        *(pytest.param("mixtral", preset, marks=pytest.mark.turns(first=False, of=16)) for preset in SLOW),
    ],
)
def test_so_it_does_with_an_importance_matrix(
    name: str, preset: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, expected: Expected
) -> None:
    folder, gguf = models[name]
    weights = importance(gguf)
    theirs = expected(gguf, preset, tmp_path / "theirs.gguf", weights)
    (tmp_path / "i.dat").write_bytes(old_imatrix({n: v.tolist() for n, v in weights.items()}, calls=1))
    source = gguf if preset.endswith("m") else folder
    report = aprfmt.convert_model(source, tmp_path / "ours.gguf", dtype=preset, imatrix=tmp_path / "i.dat")
    assert dict(contents(tmp_path / "ours.gguf")) == theirs
    assert report.warnings == fallbacks(theirs, preset)
    with aprfmt.open(tmp_path / "ours.gguf") as model:
        said = {k: v for k, v in model.metadata.items() if k.startswith("quantize.")}
    assert said == {
        "quantize.imatrix.file": str(tmp_path / "i.dat"),
        "quantize.imatrix.dataset": "text.txt",
        "quantize.imatrix.entries_count": len(weights),
        "quantize.imatrix.chunks_count": 7,
    }


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("preset", "weighted"),
    [("q4_k_m", False), ("q4_k_m", True), ("q3_k_m", False), ("q5_0", True), ("mxfp4_moe", False)],
)
def test_an_apr_has_the_bytes_that_its_gguf_gets(
    name: str, preset: str, weighted: bool, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, gguf = models[name]
    options: dict[str, Any] = {"dtype": preset}
    if weighted:
        entries = {n: v.tolist() for n, v in importance(gguf).items()}
        (tmp_path / "i.dat").write_bytes(old_imatrix(entries, calls=1))
        options["imatrix"] = tmp_path / "i.dat"
    aprfmt.convert_model(folder, tmp_path / "direct.gguf", **options)
    theirs = dict(contents(tmp_path / "direct.gguf"))
    for source in (folder, gguf):
        aprfmt.import_model(source, tmp_path / "m.apr", force=True, **options)
        aprfmt.export_model(tmp_path / "m.apr", tmp_path / "ours.gguf", force=True)
        assert dict(contents(tmp_path / "ours.gguf")) == theirs
        if name == "mixtral" or preset != "mxfp4_moe":  # which else makes the same of it as q8_0
            with aprfmt.open(tmp_path / "ours.gguf") as model:
                assert model.metadata["general.file_type"] == PRESETS[preset].file_type
    aprfmt.import_model(tmp_path / "direct.gguf", tmp_path / "imported.apr")
    with aprfmt.open(tmp_path / "m.apr") as a, aprfmt.open(tmp_path / "imported.apr") as b:
        # what an import of that GGUF gives: the same names, quantized tensors of the same bytes
        assert set(a.tensors) == set(b.tensors)
        for tensor in b.tensors.values():
            if DTYPES[tensor.dtype].is_quantized:
                ours = a.tensors[tensor.name]
                assert (ours.dtype, ours.shape, bytes(ours.raw())) == (
                    tensor.dtype, tensor.shape, bytes(tensor.raw())
                )  # fmt: skip


# Rows that are split, stacked, transposed, shuffled or mapped on the way to a GGUF.
FAMILIES = (
    "falcon",
    "gpt_neox",
    "bloom",
    "phi3",
    "deepseek_v3",
    "granitemoe",
    "qwen3_next",
    "nemotron_h",
    "gemma3_text",
)


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_family_comes_out_as_from_llama_cpp(family: str, tmp_path: Path, expected: Expected) -> None:
    pytest.importorskip("transformers")
    build(replace(find_case(family), tokenizer=BYTES), tmp_path / "hf", None, dtype="bfloat16")
    aprfmt.export_model(tmp_path / "hf", tmp_path / "m.gguf")
    weights = importance(tmp_path / "m.gguf")
    (tmp_path / "i.dat").write_bytes(old_imatrix({n: v.tolist() for n, v in weights.items()}, calls=1))
    for imatrix, file in ((None, None), (weights, tmp_path / "i.dat")):
        theirs = expected(tmp_path / "m.gguf", "q4_k_m", tmp_path / "theirs.gguf", imatrix)
        for way in (("hf", "a.gguf"), ("m.gguf", "a.gguf"), ("hf", "a.apr"), ("m.gguf", "a.apr")):
            source, out = (tmp_path / name for name in way)
            aprfmt.convert_model(source, out, dtype="q4_k_m", force=True, imatrix=file)
            aprfmt.convert_model(out, tmp_path / "b.gguf", force=True)
            assert dict(contents(tmp_path / "b.gguf")) == theirs, way


WISHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pure": ({"pure": True}, {"pure": True}),
    "types": ({"output_type": "q8_0", "embedding_type": "f16"}, {"output": "q8_0", "embedding": "f16"}),
    "leave": ({"leave_output": True}, {"leave_output": True}),
    "overrides": (
        {"tensor_type": ["FFN_down=q8_0", r"blk\.0\.attn=bf16"]},
        {"overrides": [("ffn_down", "q8_0"), (r"blk\.0\.attn", "bf16")]},
    ),
}


@pytest.mark.turns(of=8)
@pytest.mark.parametrize("wish", WISHES)
def test_wishes_give_the_bytes_of_llama_cpp(
    wish: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, expected: Expected
) -> None:
    ours, theirs = WISHES[wish]
    for name in ("llama", "mixtral"):
        folder, gguf = models[name]
        want = expected(gguf, "q4_k_m", tmp_path / "theirs.gguf", **theirs)
        aprfmt.convert_model(folder, tmp_path / "ours.gguf", dtype="q4_k_m", force=True, **ours)
        assert dict(contents(tmp_path / "ours.gguf")) == want


def test_requantizing_gives_the_bytes_of_llama_cpp(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, expected: Expected
) -> None:
    aprfmt.convert_model(models["llama"][1], tmp_path / "q8.gguf", dtype="q8_0")
    want = expected(tmp_path / "q8.gguf", "q4_k_m", tmp_path / "theirs.gguf", allow_requantize=True)
    aprfmt.convert_model(tmp_path / "q8.gguf", tmp_path / "ours.gguf", dtype="q4_k_m", allow_requantize=True)
    assert dict(contents(tmp_path / "ours.gguf")) == want
    with pytest.raises(RefusedError, match="already quantized") as caught:
        aprfmt.convert_model(tmp_path / "q8.gguf", tmp_path / "no.gguf", dtype="q4_k_m")
    assert "--allow-requantize" in (caught.value.hint or "")
    # what has its type already is kept
    report = aprfmt.convert_model(tmp_path / "q8.gguf", tmp_path / "same.gguf", dtype="q8_0")
    assert dict(contents(tmp_path / "same.gguf")) == dict(contents(tmp_path / "q8.gguf"))
    assert report.losses == []


@pytest.mark.parametrize("preset", NEED)
def test_a_mix_that_needs_weights_is_refused_without(
    preset: str, models: dict[str, tuple[Path, Path]], tmp_path: Path, llama_cpp: LlamaPeer
) -> None:
    with pytest.raises(LlamaError, match="imatrix"):
        llama_cpp.quantize(models["qwen2"][1], tmp_path / "theirs.gguf", PRESETS[preset].file_type)
    with pytest.raises(RefusedError, match="needs an importance matrix"):
        aprfmt.convert_model(models["qwen2"][0], tmp_path / "ours.gguf", dtype=preset)
    assert not (tmp_path / "ours.gguf").exists()


def test_a_type_that_cannot_do_without_weights_is_refused_where_llama_cpp_would_abort(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    entries = {n: v.tolist() for n, v in importance(models["mixtral"][1]).items()}
    (tmp_path / "i.dat").write_bytes(old_imatrix(entries, calls=1))
    with pytest.raises(RefusedError, match="weights, and the importance matrix has none") as caught:
        aprfmt.convert_model(
            models["mixtral"][0], tmp_path / "m.gguf", dtype="iq2_xxs", pure=True, imatrix=tmp_path / "i.dat"
        )
    assert caught.value.tensor == "token_embd.weight"


def test_padded_rows_of_an_apr_become_whole_blocks_of_a_gguf(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    aprfmt.import_model(models["qwen2"][0], tmp_path / "m.apr", dtype="q4_k", pure=True)
    with aprfmt.open(tmp_path / "m.apr") as model, aprfmt.open(models["qwen2"][0]) as source:
        down = model.tensors["model.layers.0.mlp.down_proj.weight"]
        assert (down.dtype, down.shape, down.n_bytes) == ("Q4_K", (256, 288), 256 * 2 * 144)
        want = source.tensors[down.name].numpy()
        assert np.abs(down.numpy() - want).max() <= 0.2 * np.abs(want).max()
        assert all(t.dtype == "Q4_K" for t in model.tensors.values() if len(t.shape) > 1)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert model.tensors["blk.0.ffn_down.weight"].dtype == "Q8_0"
        assert model.tensors["blk.0.ffn_up.weight"].dtype == "Q4_K"
