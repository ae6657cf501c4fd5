"""Layers out of a model: beside transformers whose list of layers was cut the same way, in every form."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import build, find_case, inputs, token_ids, transformers_logits, write_tokenizers
from draft_models import write_drafted

import aprfmt
from aprfmt.arch.projectors import DEEPSTACK, MAP, TARGETS
from aprfmt.arch.row import Key
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.canonical.depth_pruning import (
    BY_NUMBER,
    LAST,
    LEADING,
    NUMBERS,
    NUMBERS_FROM_1,
    PER_LAYER,
    TRAILING,
    parse_layers,
    ranges,
    select_layers,
)
from aprfmt.canonical.read import canonical
from aprfmt.errors import AprError, UsageError

OTHER_LISTS = frozenset(
    (
        *("adapter_substitute_token_ids", "adapter_token_ids", "aux_hidden_state_layer_ids", "target_layer_ids"),
        *("dflash_config.target_layer_ids", "dspark_target_layer_ids", "eagle_aux_hidden_state_layer_ids", "id2label"),
        *("mrope_section", "target_rope_sections", "bskcn_tv", DEEPSTACK, MAP, TARGETS),
    )
)
"""config.json keys with lists that have nothing to do with the layers of the network."""

Built = tuple[Path, Any, list[int]]
Base = Callable[[str], Built]

CASES: dict[str, Sequence[int]] = {
    **dict.fromkeys(("llama", "gpt2", "bloom", "gpt_oss", "mamba", "falcon_h1"), (0, 1)),
    **dict.fromkeys(("gemma3_text", "cohere2", "qwen3_5_text", "nemotron_h", "lfm2", "bamba", "laguna"), (0, 2)),
    **dict.fromkeys(("deepseek_v3", "ernie4_5_moe", "glm4_moe", "dots1"), (0, 1)),
    **dict.fromkeys(("deepseek_v4", "smollm3", "llama4_text", "mimo_v2_flash"), (0, 3)),
    **dict.fromkeys(("minicpm3", "gemma4_text", "glm_moe_dsa", "kimi_linear"), (0,)),
    "jamba": (3,),
}
"""Cases of arch_models, and layers to leave out, one at a time: plain stacks, lists of kinds, of layers with experts,
numbers of leading layers, periods, factors by depth."""

REFUSED = {
    ("jamba", 0): "attn_layer_period",
    ("gemma3n_text", 0): "depends on the number of layers",
    ("hrm_text", 0): "several stacks of layers",
    ("hy_v4", 0): "indexer_types",
    ("gemma4_text", 1): "layer_types",
}
"""What a layer's number decides -> what the refusal names."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Gives the folder of a case, its transformers model, and ids of a text."""
    pytest.importorskip("transformers")
    work = tmp_path_factory.mktemp("pruned")
    made: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in made:
            case = find_case(name)
            model = build(case, work / name, write_tokenizers(work / "tokenizers", [case.tokenizer], 300))
            made[name] = work / name, model, token_ids(work / name)
        return made[name]

    return get


def cut(model: Any, kept: Sequence[int]) -> Any:
    """A copy of the model with these of its layers."""
    import torch

    model = copy.deepcopy(model)
    config = model.config.get_text_config()
    n_layers = config.num_hidden_layers
    for _, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.ModuleList) and len(child) == n_layers and name in ("layers", "h"):
                setattr(module, name, torch.nn.ModuleList([child[i] for i in kept]))
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(kept)
    # The masks of a forward pass are chosen by lists of the config.
    if getattr(config, "attn_layer_indices", None):
        config.attn_layer_indices = [i for i, layer in enumerate(kept) if layer in config.attn_layer_indices]
    elif isinstance(kinds, list):
        with suppress(AttributeError):  # what follows from another key
            config.layer_types = [kinds[layer] for layer in kept]
    return model


def logits(model: Any, ids: Sequence[int]) -> Any:
    import torch

    with torch.no_grad():
        return model(**inputs(ids, "causal")).logits[0].float().numpy()


@pytest.mark.turns
@pytest.mark.parametrize(("name", "layer"), [(name, layer) for name, layers in CASES.items() for layer in layers])
def test_logits_are_those_of_the_cut_list_of_layers(name: str, layer: int, base: Base, tmp_path: Path) -> None:
    folder, model, ids = base(name)
    n_layers = model.config.get_text_config().num_hidden_layers
    kept = [i for i in range(n_layers) if i != layer]
    report = aprfmt.prune_model(folder, tmp_path / "out", drop_layers=[layer], format="hf")
    assert report.losses == [f"layer {layer} of {n_layers} dropped: train the model to recover its quality"]
    wanted = logits(cut(model, kept), ids)
    assert np.abs(transformers_logits(tmp_path / "out", ids) - wanted).max() <= 1e-5 * max(1, np.abs(wanted).max())
    assert np.abs(logits(model, ids) - wanted).max() > 1e-2  # the layer had a say


@pytest.mark.parametrize(("name", "layer"), REFUSED)
def test_a_layer_keeps_its_role_or_is_refused(name: str, layer: int, base: Base, tmp_path: Path) -> None:
    folder, _, _ = base(name)
    with pytest.raises(AprError, match=REFUSED[name, layer]) as caught:
        aprfmt.prune_model(folder, tmp_path / "out", drop_layers=[layer], format="hf")
    assert caught.value.code == "refused"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt2", "qwen3_5_text"])
def test_every_form_gives_the_same_model(name: str, base: Base, tmp_path: Path) -> None:
    """Folder, GGUF and .apr, each pruned, and the pruned folder as a GGUF: the same tensors and keys."""
    folder, _, _ = base(name)
    aprfmt.export_model(folder, tmp_path / "m.gguf")
    aprfmt.import_model(folder, tmp_path / "m.apr")
    kept = [1, 2] if name == "qwen3_5_text" else [1]  # llama.cpp takes no network with layers of one kind there
    aprfmt.prune_model(folder, tmp_path / "cut", keep_layers=",".join(map(str, kept)), format="hf")
    aprfmt.export_model(tmp_path / "cut", tmp_path / "wanted.gguf")
    for i, source in enumerate((folder, tmp_path / "m.gguf", tmp_path / "m.apr")):
        aprfmt.prune_model(source, tmp_path / f"{i}.gguf", keep_layers=kept)
        assert _content(tmp_path / f"{i}.gguf") == _content(tmp_path / "wanted.gguf"), source.name
    if name != "qwen3_5_text":  # whose norms are rounded on the way
        aprfmt.prune_model(tmp_path / "m.gguf", tmp_path / "again", keep_layers=[1], format="hf")
        assert _tensors(tmp_path / "again") == _tensors(tmp_path / "cut")


def _tensors(path: Path) -> dict[str, bytes]:
    with aprfmt.open(path) as model:
        return {name: bytes(t.raw()) for name, t in model.tensors.items()}


def _content(path: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Tensors, and the keys of the network."""
    with aprfmt.open(path) as model:
        word = str(model.metadata["general.architecture"])
        keys = {key: value for key, value in model.metadata.items() if key.startswith(f"{word}.")}
    return _tensors(path), {k: v if isinstance(v, str | int | float) else list(v) for k, v in keys.items()}


def test_quantized_blocks_move_as_they_are(base: Base, tmp_path: Path) -> None:
    folder, _, _ = base("llama")
    aprfmt.quantize_model(folder, tmp_path / "m.gguf", "q8_0")
    aprfmt.prune_model(tmp_path / "m.gguf", tmp_path / "cut.gguf", drop_layers="0")
    before, after = _tensors(tmp_path / "m.gguf"), _tensors(tmp_path / "cut.gguf")
    assert after == {
        name.replace("blk.1.", "blk.0."): data for name, data in before.items() if not name.startswith("blk.0.")
    }


def test_layers_in_another_order_and_more_than_once(base: Base) -> None:
    folder, _, _ = base("llama")
    with aprfmt.open(folder) as model:
        c = canonical(model)
        made = select_layers([c, c], [(0, 1), (1, 0), (0, 1)])
        stored = {name: bytes(t.as_source().raw()) for name, t in made.tensors.items()}  # type: ignore[attr-defined]
        own = {name: bytes(t.raw()) for name, t in model.tensors.items()}
    assert made.hparams.num_layers == 3
    for new, old in ((0, 1), (1, 0), (2, 1)):
        own_names = [name for name in own if name.startswith(f"model.layers.{old}.")]
        assert own_names
        for name in own_names:
            assert stored[name.replace(f".{old}.", f".{new}.", 1)] == own[name]


def test_draft_layers_stay_behind_the_last(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_drafted("glm4_moe", tmp_path / "m")
    n_layers = json.loads((tmp_path / "m" / "config.json").read_text())["num_hidden_layers"]
    aprfmt.prune_model(tmp_path / "m", tmp_path / "out", drop_layers="0", format="hf")
    before, after = _tensors(tmp_path / "m"), _tensors(tmp_path / "out")
    drafts = {name: data for name, data in before.items() if f".layers.{n_layers}." in name}
    assert drafts
    assert all(after[name.replace(f".{n_layers}.", f".{n_layers - 1}.", 1)] == data for name, data in drafts.items())
    with pytest.raises(AprError, match=f"layer {n_layers} is an MTP layer"):
        aprfmt.prune_model(tmp_path / "m", tmp_path / "no", drop_layers=str(n_layers), format="hf")


def test_the_output_says_what_it_lacks(base: Base, tmp_path: Path) -> None:
    folder, _, _ = base("llama")
    named = tmp_path / "named"
    shutil.copytree(folder, named)
    (named / "README.md").write_text("---\nlicense: mit\nmodel_name: Small\n---\n")
    aprfmt.prune_model(named, tmp_path / "m.gguf", drop_layers="1")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        assert "Dropped from the base model: layer 1 of 2" in str(model.metadata["general.description"])
        assert "pruned" in list(model.metadata["general.tags"])
        assert model.metadata["general.base_model.0.name"] == "Small"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "either --drop-layers or --keep-layers"),
        ({"drop_layers": "0", "keep_layers": "1"}, "either --drop-layers or --keep-layers"),
        ({"drop_layers": "2"}, "unknown layer 2"),
        ({"drop_layers": "0-1"}, "cannot drop all 2 layers"),
        ({"keep_layers": "0-1"}, "this drops none of the 2 layers"),
        ({"drop_layers": "1-0"}, "is not a layer list"),
        ({"drop_layers": "0-"}, "is not a layer list"),
        ({"drop_layers": "0-99999999"}, "is not a layer list"),
        ({"drop_layers": "0-999999"}, "unknown layer 999999"),
        ({"drop_layers": []}, "layers must be numbers"),
        ({"drop_layers": [True]}, "layers must be numbers"),
        ({"keep_layers": 1}, "layers must be numbers"),
    ],
)
def test_wrong_layers_are_usage_errors(options: dict[str, Any], what: str, base: Base, tmp_path: Path) -> None:
    folder, _, _ = base("llama")
    with pytest.raises(UsageError, match=re.escape(what)):
        aprfmt.prune_model(folder, tmp_path / "out", format="hf", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_users_write() -> None:
    assert parse_layers("10-12, 2,11", 20) == [2, 10, 11, 12]
    assert ranges([11, 2, 10, 12, 20]) == "2, 10-12, 20"


def test_every_list_and_every_pattern_of_the_rows_is_known() -> None:
    """A key that gives layers their roles must be renumbered, or looked at: a new one belongs to one of the sets."""
    known = {*PER_LAYER, *NUMBERS, *NUMBERS_FROM_1, *LEADING, *OTHER_LISTS, *BY_NUMBER, TRAILING, LAST}
    missing = {
        (row.id, key.hf[0])
        for row in ARCHITECTURES.values()
        for key in row.keys
        if _lists(key) and key.hf and not key.field and not known & set(key.hf) and "{n}" not in key.hf[0]
    }
    assert missing == set()


def _lists(key: Key) -> bool:
    return key.kind.endswith("[]")
