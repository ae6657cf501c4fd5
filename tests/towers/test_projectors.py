"""Granite 4 Vision's projectors: two lists of a config.json, one order of a GGUF, layers that another GGUF tells."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import CACHE, quiet_transformers
from safetensors.numpy import load_file
from tower_models import all_tower_cases, build_tower
from tower_steps import tokenizer_folder

import aprfmt
from aprfmt.arch.projectors import MAP, TARGETS, deepstack_mapping, projectors, with_layers
from aprfmt.errors import AprError, CorruptError, RefusedError

TOLD: dict[str, object] = {MAP: [[-1, 9], [-4, 0]], TARGETS: [3, 12]}


def test_a_gguf_has_them_in_the_order_of_the_layers_that_they_feed() -> None:
    found = projectors(TOLD, None)
    assert [(one.kind, one.item, one.vision_layer, one.text_layer) for one in found] == [
        ("layerwise", 1, -4, 0),
        ("spatial", 0, -1, 3),
        ("layerwise", 0, -1, 9),
        ("spatial", 1, -1, 12),
    ]
    assert deepstack_mapping(TOLD, 14) == [-1, -1, -1, 1, -1, -1, -1, -1, -1, 2, -1, -1, 3, -1]


def test_layers_may_be_counted_from_the_end() -> None:
    assert deepstack_mapping({MAP: [[-1, -2], [-2, -4]]}, 4) == [-1, -1, 1, -1]


@pytest.mark.parametrize(
    ("told", "kind", "message"),
    [
        ({MAP: [[-1, 0], [-2, 3]], TARGETS: [3]}, RefusedError, "two projectors feed layer 3"),
        ({MAP: [[-1, 2]], TARGETS: [3]}, RefusedError, "no projector feeds layer 0 .* the first feeds layer 2"),
        ({MAP: [[-1, 0], [-1, 8]]}, CorruptError, "layer 8 of a language model with 4 layers"),
        ({MAP: [[-1, 0, 2]]}, CorruptError, "not pairs of layers"),
        ({MAP: 3}, CorruptError, "not pairs of layers"),
        ({TARGETS: ["0"]}, CorruptError, "not a list of layers"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(
    told: dict[str, object], kind: type[AprError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        deepstack_mapping(told, 4)


def test_the_language_model_tells_the_layers() -> None:
    of_towers: dict[str, object] = {MAP: [[-4, 0], [-1, 2]], TARGETS: [1, 3]}
    assert with_layers(of_towers, [-1, 2, -1, 1, 3]) == {MAP: [[-4, 0], [-1, 1]], TARGETS: [3, 4]}
    for mapping in (None, [-1, 1, 2], [-1, 1, 2, 3, 4]):
        with pytest.raises(RefusedError, match="the towers have 4 projectors"):
            with_layers(of_towers, mapping)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that transformers saves."""
    pytest.importorskip("transformers")
    if not CACHE.is_dir():
        pytest.skip("needs a real tokenizer")
    work = tmp_path_factory.mktemp("granite4")
    case = next(case for case in all_tower_cases() if case.id == "granite4_vision")
    build_tower(case, work / "folder", tokenizer_folder(work))
    return work / "folder"


def _with(folder: Path, copy: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_the_list_numbers_them_and_not_its_order(granite: Path, tmp_path: Path) -> None:
    """transformers counts them as they are listed; the converter sorts the list, and gives each another's layer."""
    turned = _with(granite, tmp_path / "turned", lambda config: config[MAP].reverse())
    for folder, name in ((granite, "a.gguf"), (turned, "b.gguf")):
        aprfmt.export_model(folder, tmp_path / name, mmproj=True)
    tensors = load_file(granite / "model.safetensors")
    with aprfmt.open(tmp_path / "a.gguf") as a, aprfmt.open(tmp_path / "b.gguf") as b:
        for model, first, fourth in ((a, 1, 0), (b, 0, 1)):
            for number, item in ((0, first), (3, fourth)):
                found = model.tensors[f"v.proj_blk.{number}.query"].numpy()
                assert np.array_equal(found, tensors[f"model.layerwise_projectors.{item}.query"])
        for key in ("feature_layer", "projector.spatial_offsets"):
            assert a.metadata[f"clip.vision.{key}"] == b.metadata[f"clip.vision.{key}"]


def test_transformers_computes_the_same_from_the_folder_of_two_ggufs(granite: Path, tmp_path: Path) -> None:
    import torch

    transformers = quiet_transformers()
    aprfmt.export_model(granite, tmp_path / "text.gguf")
    aprfmt.export_model(granite, tmp_path / "mmproj.gguf", mmproj=True, dtype="f32")
    aprfmt.import_model(tmp_path / "text.gguf", tmp_path / "one.apr", mmproj=tmp_path / "mmproj.gguf")
    aprfmt.export_model(tmp_path / "one.apr", tmp_path / "back", format="hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config[MAP], config[TARGETS], config["spatial_vision_layer"]) == ([[-4, 3], [-2, 0]], [1, 2, 4, 5], -3)
    kind = transformers.Granite4VisionForConditionalGeneration
    pixels = torch.rand(1, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, *[5] * 36, 7, 8]])
    found = []
    for folder in (granite, tmp_path / "back"):
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        model.config.image_token_id = 5
        with torch.no_grad():
            found.append(model(input_ids=ids, pixel_values=pixels, image_sizes=torch.tensor([[32, 32]])).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(downsample_rate="1.5"), "downsample_rate is '1.5', not two sizes"),
        (lambda config: config.update({MAP: [[-4, 0], [-2, 5]]}), "two projectors feed layer 5"),
        (lambda config: config.update({MAP: [[-4, 3], [-2, 0]][::-1], TARGETS: [1, 2, 4, -6]}), "feed layer 0"),
        (lambda config: config.update(spatial_vision_layer=0), "refers to hidden state 0, but the tower has 7 layers"),
        (
            lambda config: config.update(spatial_vision_layer=-8),
            "refers to hidden state -8, but the tower has 7 layers",
        ),
        (lambda config: config["qformer_config"].update(num_hidden_layers=2), "num_hidden_layers is 2"),
        (lambda config: config["qformer_config"].update(hidden_act="relu"), "hidden_act is 'relu'"),
    ],
)
def test_a_network_that_llama_cpp_does_not_have(
    granite: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = _with(granite, tmp_path / "changed", change)
    with pytest.raises(RefusedError, match=message):
        aprfmt.export_model(folder, tmp_path / "out.gguf", mmproj=True)
    assert not (tmp_path / "out.gguf").exists()


def test_towers_of_another_language_model_are_refused(granite: Path, tmp_path: Path) -> None:
    fewer = _with(granite, tmp_path / "fewer", lambda config: config.update({TARGETS: [1, 2, 4]}))
    aprfmt.export_model(fewer, tmp_path / "text.gguf")
    aprfmt.export_model(granite, tmp_path / "mmproj.gguf", mmproj=True)
    aprfmt.import_model(tmp_path / "text.gguf", tmp_path / "one.apr", mmproj=tmp_path / "mmproj.gguf")
    with pytest.raises(RefusedError, match="the towers have 6 projectors"):
        aprfmt.export_model(tmp_path / "one.apr", tmp_path / "back", format="hf")


def test_a_layer_that_a_projector_feeds_keeps_its_number(granite: Path, tmp_path: Path) -> None:
    aprfmt.export_model(granite, tmp_path / "text.gguf")
    for source in (granite, tmp_path / "text.gguf"):
        with pytest.raises(RefusedError, match="deepstack_mapping"):
            aprfmt.prune_model(source, tmp_path / "out.apr", keep_layers="0-1,3-5")
