"""The table against what llama.cpp's converter and transformers register, and against what was verified of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from arch_models import all_cases
from registry_modules import draft_of, nearest_rows, network_of
from registry_sources import (
    CONVERTER,
    TRANSFORMERS_TABLES,
    converter_classes,
    installed,
    lacks_backbone,
    reasons,
    registries_in,
    unknown_in,
    without_row,
)

from aprfmt.arch.table import ARCHITECTURES
from aprfmt.arch.verified import TRANSFORMERS, verified
from conformance_report import docs_page, verified_text
from conformance_results import kept

WITHOUT_ROW: dict[str, str] = {}
"""Text classes of the converter that the table does not know, and what they need."""

needs_converter = pytest.mark.skipif(not CONVERTER.is_dir(), reason="needs llama.cpp's converter")


@needs_converter
def test_text_classes_of_the_converter_have_rows() -> None:
    assert len(converter_classes()) >= 267
    assert without_row(converter_classes()) == sorted(WITHOUT_ROW)


def test_a_class_that_nobody_knows_turns_up() -> None:
    assert without_row(("LlamaForCausalLM", "NobodyKnowsForCausalLM")) == ["NobodyKnowsForCausalLM"]


def test_registered_classes_are_found_by_what_they_derive_from(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '@ModelBase.register("A", "B")\nclass A(TextModel): ...\n'
        '@ModelBase.register("C")\n@other\nclass C(A): ...\n'
        '@ModelBase.register("V")\nclass V(MmprojModel): ...\n'
        "class D(A): ...\n"
    )
    assert converter_classes(tmp_path) == ("A", "B", "C")


def test_every_case_has_a_result() -> None:
    """Where this fails, cases were added or changed: `python tools/conformance.py --missing --docs` runs those."""
    known = kept(all_cases())
    assert [case.id for case in all_cases() if case.id not in known] == []


@needs_converter
def test_page_and_figures_are_those_of_the_results() -> None:
    """Where this fails, `python tools/conformance.py --missing --docs` writes both again."""
    root = Path(__file__).parents[2]
    results = list(kept(all_cases()).values())
    assert (root / "docs" / "architectures.md").read_text() == docs_page(results)
    assert (root / "src" / "aprfmt" / "arch" / "verified.jsonl").read_text() == verified_text(results)


def test_every_row_says_how_it_was_verified() -> None:
    counts = Counter(case.row for case in all_cases())
    assert {row: known.cases for row, known in verified().items()} == {row: counts[row] for row in ARCHITECTURES}
    computable = {case.row for case in all_cases() if case.computable}
    assert {row for row, known in verified().items() if known.against == TRANSFORMERS} == computable
    for row, known in verified().items():
        assert known.cases == known.right + known.refused > 0, row


def test_classes_of_other_projects_are_read_without_importing_them(tmp_path: Path) -> None:
    auto = tmp_path / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    tables = {
        name: [("llama", "LlamaForCausalLM"), ("nobody", ("NobodyForCausalLM", "ForX"))]
        for name in TRANSFORMERS_TABLES.values()
    }
    (auto / "modeling_auto.py").write_text(
        "".join(f"{name} = OrderedDict({pairs})\n" for name, pairs in tables.items())
    )
    nobody = tmp_path / "transformers" / "models" / "nobody"
    nobody.mkdir()
    (nobody / "modeling_nobody.py").write_text(_SOURCE)
    (nobody / "configuration_nobody.py").write_text("class NobodyConfig(C):\n    norm_eps: float = 1e-5\n")
    causal = next(found for found in registries_in(tmp_path) if found.title == "transformers causal")
    assert [found.name for found in unknown_in(causal)] == ["ForX", "NobodyForCausalLM"]
    unknown = unknown_in(causal)[1]
    assert unknown.source is not None
    assert unknown.model_type == "nobody"
    network = network_of(unknown.source, unknown.top)
    assert network.keys == {"norm_eps"}
    assert network.modules == {
        *("embed_tokens", "norm", "lm_head", "input_layernorm", "post_attention_layernorm", "mlp.experts.up_proj"),
        *(f"self_attn.{name}_proj" for name in "qkvo"), *("mlp.up_proj", "mlp.down_proj", "mlp.router"),
    }  # fmt: skip
    near = nearest_rows(network, 1)[0]
    assert nearest_rows(replace(network, modules=frozenset()))[0].row != near.row
    assert "mlp.router" in near.modules
    assert draft_of("NobodyForCausalLM", "nobody", near).startswith(f'variant(ARCHITECTURES["{near.row}"], "nobody"')


def test_other_projects_have_registries_of_their_own_form(tmp_path: Path) -> None:
    for name, text in {
        "vllm/model_executor/models/registry.py": '_TEXT_GENERATION_MODELS = {"AForCausalLM": ("a", "A")}\n',
        "sglang/srt/models/registry.py": "",
        "sglang/srt/models/b.py": "class B: ...\nEntryClass = [B]\n",
        "mlx_lm/models/switch_layers.py": "",
        "mlx_lm/models/c.py": "class ModelArgs: ...\nclass Model: ...\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        found = registries_in(tmp_path / name.partition("/")[0])
    assert [entry.name for entry in found[0].classes] == ["c"]
    assert registries_in(tmp_path / "sglang")[0].classes[0].name == "B"
    assert [found.title for found in registries_in(tmp_path / "vllm")] == [
        "vllm text", "vllm multimodal", "vllm embedding",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="found none of"):
        registries_in(tmp_path / "vllm" / "model_executor")


@pytest.mark.parametrize("title", ["transformers causal", "mlx_lm"])
def test_every_unknown_class_has_a_reason(title: str) -> None:
    """Where this fails: a row, or a line of tests/conformance/unregistered.jsonl; no reason for what has one."""
    if title == "mlx_lm" and find_spec(title) is None:
        pytest.skip("needs mlx_lm")
    unknown = {found.name for found in unknown_in(installed(title))}
    assert unknown == reasons(title).keys()


@pytest.mark.parametrize(
    "title", ["masked LM", "sequence classification", "token classification", "seq2seq"]
)  # fmt: skip
def test_every_head_on_a_known_network_is_known(title: str) -> None:
    """Where this fails: a network that got a row has classes with heads that are not found by their model type."""
    registry = installed(f"transformers {title}")
    unknown = unknown_in(registry)
    assert [found.name for found in unknown if not lacks_backbone(registry, found)] == []
    assert len(unknown) < len(registry.classes) / 2


_SOURCE = """
class RMSNorm(nn.Module):
    def __init__(self, size):
        self.weight = nn.Parameter(torch.ones(size))
class Attention(nn.Module):
    def __init__(self, config):
        self.q_proj = nn.Linear(1, 1)
        self.k_proj = self.v_proj = nn.Linear(1, 1)
        self.o_proj = nn.Linear(1, 1)
        self.rotary_emb = Rotary()
class Experts(nn.Module):
    def __init__(self, config):
        self.gate_up_proj = nn.Parameter(torch.empty(1))
class MLP(nn.Module):
    def __init__(self, config):
        self.up_proj = nn.Linear(1, 1)
class SparseMLP(MLP):
    def __init__(self, config):
        self.down_proj = nn.Linear(1, 1)
        self.experts = Experts(config)
        self.router = nn.Linear(1, 1)
KINDS = {"a": Attention}
class Layer(nn.Module):
    def __init__(self, config):
        self.self_attn = KINDS[config.kind](config) if config else Attention(config)
        self.mlp = SparseMLP(config)
        self.input_layernorm = RMSNorm(1)
        self.post_attention_layernorm = RMSNorm(1)
class Model(nn.Module):
    def __init__(self, config):
        self.embed_tokens = nn.Embedding(1, 1)
        self.layers = nn.ModuleList([Layer(config) for _ in range(2)])
        self.norm = RMSNorm(1)
class NobodyForCausalLM(nn.Module):
    def __init__(self, config):
        self.model = Model(config)
        self.lm_head = nn.Linear(1, 1)
"""
