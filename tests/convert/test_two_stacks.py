"""Encoder-decoders: each stack has its own number of layers, and the embedding may stand there under three names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from arch_models import build, find_case, write_tokenizers
from safetensors.numpy import load_file, save_file

import aprfmt

pytest.importorskip("torch")

COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Path:
    root = tmp_path_factory.mktemp("t5")
    build(find_case("t5"), root / "model", write_tokenizers(root / "tokenizers", ["smollm2"], 512))
    return root / "model"


def changed(source: Path, folder: Path, change: Any, **config: Any) -> Path:
    """A copy of `source` with other tensors and config values."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | config))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("names", [COPIES, COPIES[:1], COPIES[1:]])
@pytest.mark.parametrize("shared", [True, False])
def test_the_embedding_under_every_name(t5: Path, names: tuple[str, ...], shared: bool, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors |= dict.fromkeys(names, tensors["shared.weight"])
        if not shared:
            del tensors["shared.weight"]

    folder = changed(t5, tmp_path / "f", change)
    assert aprfmt.import_model(folder, tmp_path / "m.apr").lossless
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    aprfmt.export_model(t5, tmp_path / "plain.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model, aprfmt.open(tmp_path / "plain.gguf") as plain:
        assert {n: bytes(t.raw()) for n, t in model.tensors.items()} == {
            n: bytes(t.raw()) for n, t in plain.tensors.items()
        }


def test_two_embeddings_are_refused(t5: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[COPIES[1]] = tensors["shared.weight"] + 1

    folder = changed(t5, tmp_path / "f", change)
    with pytest.raises(aprfmt.AprError, match="two tensors have this name") as info:
        aprfmt.convert_model(folder, tmp_path / "m.apr")
    assert info.value.tensor == "shared.weight"
    assert not (tmp_path / "m.apr").exists()


@pytest.mark.parametrize(
    ("layers", "text"),
    [(2, "tensors of the t5 network are missing: decoder.block.1."), (0, r"has 0 such layers \(num_decoder_layers\)")],
)
def test_a_decoder_of_another_depth_is_refused(t5: Path, layers: int, text: str, tmp_path: Path) -> None:
    folder = changed(t5, tmp_path / "f", lambda tensors: None, num_decoder_layers=layers)
    for name in ("m.apr", "m.gguf"):
        with pytest.raises(aprfmt.AprError, match=text):
            aprfmt.convert_model(folder, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_the_first_t5_has_a_bias_that_nothing_reads(t5: Path, tmp_path: Path) -> None:
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] + 1

    folder = changed(t5, tmp_path / "f", change)
    aprfmt.export_model(folder, tmp_path / "m.gguf")
    aprfmt.export_model(tmp_path / "m.gguf", tmp_path / "back", format="hf")
    with (
        aprfmt.open(tmp_path / "m.gguf") as gguf,
        aprfmt.open(folder) as before,
        aprfmt.open(tmp_path / "back") as back,
    ):
        values = [bytes(before.tensors[name].raw()), bytes(back.tensors[name].raw())]
        assert values == [bytes(gguf.tensors["dec.blk.0.cross_attn_rel_b.weight"].raw())] * 2


def test_tensors_come_stack_by_stack(t5: Path, tmp_path: Path) -> None:
    aprfmt.export_model(t5, tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        names = [name.partition("blk.")[0] + name.partition("blk.")[2][:1] for name in model.tensors if "blk." in name]
    assert list(dict.fromkeys(names)) == ["enc.0", "enc.1", "dec.0"]
    assert names == sorted(names, key=["enc.0", "enc.1", "dec.0"].index)
