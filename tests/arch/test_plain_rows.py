"""Rows of networks that llama.cpp does not run: what tools/plain_rows.py reads off the classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from arch_models import build, find_case, write_tokenizers

import aprfmt
from aprfmt.arch.families.plain import LINES
from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.loaders import loader_of
from aprfmt.arch.names import canonical_name, check_shapes, check_tensors
from aprfmt.arch.table import ARCHITECTURES, find
from aprfmt.errors import RefusedError
from plain_rows import UNKNOWN, Probe, line_of, size_of, sizes_by_value, template_of

NAMES = [json.loads(line)["classes"][0] for line in LINES.read_text("utf-8").splitlines()]
NOT_BUILT = {
    "MuseSparkForCausalLM",  # not a class of transformers: its wrapper's case covers it
    *("AXK1ForCausalLM", "AXK2ForCausalLM", "BeamForCausalLM", "FlintForCausalLM", "Kolibri1ForCausalLM"),
    *("LongcatFlashForCausalLM", "NllbMoeForConditionalGeneration"),  # tens of thousands of tensors
}
TABLE = sizes_by_value(
    {"hidden": 96, "ffn": 112, "heads": 4, "x": 20}, {"hidden": 128, "ffn": 144, "heads": 8, "x": 30}
)


@pytest.mark.turns
def test_a_line_is_what_the_class_has() -> None:
    lines = {line["classes"][0]: line for line in map(json.loads, LINES.read_text("utf-8").splitlines())}
    assert json.loads(json.dumps(line_of("OPTForCausalLM"))) == lines["OPTForCausalLM"]


@pytest.mark.turns(of=16)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_BUILT])
def test_the_full_network_of_a_class_fits_its_row(name: str) -> None:
    """At the sizes of its config class, where equal sizes of a tiny network differ and optional parts are absent."""
    probe = Probe(name)
    config = json.loads(json.dumps(probe.config_class().to_dict()))
    h = from_hf_config({**config, "architectures": [name]})
    row = ARCHITECTURES[str(h.architecture)]
    computed = "embed_positions" if name == "MarianMTModel" else "nothing"  # which checkpoints leave out
    shapes = {tensor: shape for tensor, shape in probe.full.items() if computed not in tensor}
    check_shapes(row, h, shapes)
    check_tensors(row, h, list(shapes))


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ((96, 128), "hidden"), ((192, 256), "2*hidden"), ((48, 64), "hidden/2"), ((98, 130), "hidden+2"),
        ((80, 120), "4*x"), ((116, 158), "hidden+x"), ((4, 4), "4"), ((4, 8), "heads"),
    ],
)  # fmt: skip
def test_sizes_are_told_by_two_networks(values: tuple[int, int], size: str) -> None:
    assert size_of(values, TABLE) == size


def test_a_number_that_no_config_gives_is_no_size() -> None:
    assert [size_of(values, TABLE) for values in ((97, 500), (40, 40))] == [UNKNOWN, UNKNOWN]


def test_a_size_that_only_tiny_networks_have_is_not_taken() -> None:
    """Of the sizes that give both values, the first one that the full network has too; none rather than a wrong one."""
    table = sizes_by_value({"kv": 8, "routed": 4, "used": 2}, {"kv": 16, "routed": 8, "used": 2})
    words = {"kv": 512, "routed": 384, "used": 12}
    found = [size_of((8, 16), table, full, words) for full in (None, 512, 768, 4608, 7)]
    assert found == ["kv", "kv", "2*routed", "routed*used", UNKNOWN]


def test_layers_of_a_kind_that_the_first_ones_are_not_have_their_tensors() -> None:
    beam = ARCHITECTURES["beam"]
    needs = {row.hf[0].partition("{n}.")[2]: row.need for row in beam.tensors}
    assert (needs["mlp.up_proj.weight"], needs["mlp.experts.{e}.up_proj.weight"]) == ("optional", "optional")


def test_layers_of_two_kinds_may_have_a_matrix_and_a_vector_of_one_name() -> None:
    row, name = ARCHITECTURES["inkling2_text"], "model.llm.attn_res.attn_queries.1"
    h = Hyperparams(num_layers=4, hidden_size=64)
    for shape in ((3, 64), (64,)):
        check_shapes(row, h, {name: shape})
    for wrong in ((2, 64), (63,), (3, 64, 1)):
        with pytest.raises(RefusedError, match=r"require \[3, hidden 64\]"):
            check_shapes(row, h, {name: wrong})


def test_names_have_their_layers_and_experts() -> None:
    assert template_of("model.layers.3.mlp.experts.7.up.weight") == "model.layers.{n}.mlp.experts.{e}.up.weight"
    assert template_of("h.1.mlp.2.weight") == "h.{n}.mlp.2.weight"


def test_llama_cpp_runs_none_of_them() -> None:
    rows = [ARCHITECTURES[json.loads(line)["id"]] for line in LINES.read_text("utf-8").splitlines()]
    assert [row.id for row in rows if loader_of(row.gguf) is not None] == []


def test_classes_of_a_shared_model_type_are_known_by_name_alone() -> None:
    row, other = find(hf_class="BertLMHeadModel", model_type="bert"), find(hf_class="BertModel", model_type="bert")
    assert row is not None
    assert other is not None
    assert (row.id, other.id) == ("bert_decoder", "bert")
    assert find(hf_class="ProphetNetEncoder", model_type="whisper") is None


def test_a_decoder_alone_is_another_row_than_the_whole_network() -> None:
    decoder, whole, head = (
        find(hf_class=f"Bart{name}", model_type="bart")
        for name in ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification")
    )
    assert [row and row.id for row in (decoder, whole, head)] == ["bart_decoder", "bart", "bart"]
    assert whole is not None
    assert {row.depth for row in whole.tensors if "{n}" in row.hf[0]} == {"layers", "encoder_layers"}


def test_heads_are_needed_by_the_classes_that_have_them() -> None:
    """Of a decoder's class and of a bare model whose names lack the prefix."""
    electra = ARCHITECTURES["electra"]
    assert electra.bare_classes == ("ElectraModel",)
    assert canonical_name(electra, "embeddings.LayerNorm.weight") == "electra.embeddings.LayerNorm.weight"
    needs = {row.hf[0].partition(".")[0]: row.need for row in electra.tensors}
    assert (needs["generator_predictions"], needs["generator_lm_head"]) == ("output", "head")


def test_a_gguf_of_another_row_has_no_class_and_no_config_of_the_first(tmp_path: Path) -> None:
    """HyperCLOVAX multiplies its logits by what Granite, as which its GGUF comes back, divides them by."""
    case = find_case("hyperclovax")
    build(case, tmp_path / "m", write_tokenizers(tmp_path / "tokenizers", [case.tokenizer], 512))
    aprfmt.import_model(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    aprfmt.import_model(tmp_path / "m.gguf", tmp_path / "back.apr")
    aprfmt.export_model(tmp_path / "back.apr", tmp_path / "back", format="hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["architectures"], config["logits_scaling"]) == (["GraniteForCausalLM"], 8.0)


def test_networks_are_merged(tmp_path: Path) -> None:
    case, tokenizers = find_case("opt"), write_tokenizers(tmp_path / "tokenizers", ["smollm2"], 512)
    for seed in (0, 1):
        build(case, tmp_path / f"{seed}", tokenizers, seed=seed)
    aprfmt.merge_models([tmp_path / "0", tmp_path / "1"], tmp_path / "out", method="linear")
    name = "model.decoder.layers.1.fc2.weight"
    with aprfmt.open(tmp_path / "0") as a, aprfmt.open(tmp_path / "1") as b, aprfmt.open(tmp_path / "out") as merged:
        mean = (a.tensors[name].numpy() + b.tensors[name].numpy()) / 2
        assert abs(merged.tensors[name].numpy() - mean).max() < 1e-6


def test_a_gguf_is_refused_and_the_hint_says_what_runs_it(tmp_path: Path) -> None:
    case = find_case("opt")
    build(case, tmp_path / "opt", write_tokenizers(tmp_path / "tokenizers", [case.tokenizer], 512))
    with pytest.raises(RefusedError, match=r"llama\.cpp has no network for OPTForCausalLM") as error:
        aprfmt.convert_model(tmp_path / "opt", tmp_path / "opt.gguf", allow_different=True)
    assert "--format hf" in str(error.value.hint)
    assert not (tmp_path / "opt.gguf").exists()
