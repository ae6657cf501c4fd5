"""NeoBERT in llama.cpp: what its authors' network computes, by the few lines of it that are here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arch_models import find_case, relative_error, token_ids, write_checkpoint, write_tokenizers
from llama_peer import LlamaPeer

import aprfmt
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.io.pipe import FileLayout, WriteOptions, write_file

pytestmark = pytest.mark.llama
torch = pytest.importorskip("torch")

HEADS, SIZE, EPS = 4, 16, 1e-5


@pytest.fixture(scope="module")
def neobert(tmp_path_factory: pytest.TempPathFactory, llama_cpp_models: Path) -> Path:
    root = tmp_path_factory.mktemp("neobert")
    write_checkpoint(find_case("neobert"), root / "model", write_tokenizers(root / "tokenizers", ["bert"], 4096))
    return root / "model"


def norm(x: Any, weight: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Any) -> Any:
    """Neighbours of [tokens, heads, size] turned against each other."""
    frequencies = 10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.outer(torch.arange(len(x)).float(), frequencies)[:, None]
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones(()), angles)
    return torch.view_as_real(turned).flatten(-2)


def reference(folder: Path, ids: list[int]) -> Any:
    """The last hidden states: every head's queries, keys and values stand together in `qkv`."""
    from safetensors.torch import load_file

    w = load_file(folder / "model.safetensors")
    x = w["encoder.weight"][ids]
    for n in range(2):
        layer = {name.removeprefix(f"transformer_encoder.{n}."): t for name, t in w.items()}
        qkv = norm(x, layer["attention_norm.weight"]) @ layer["qkv.weight"].T
        q, k, v = qkv.unflatten(-1, (HEADS, 3 * SIZE)).chunk(3, -1)
        scores = torch.einsum("ihd,jhd->hij", rotated(q), rotated(k)) / SIZE**0.5
        x = x + torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(-2) @ layer["wo.weight"].T
        gate, up = (norm(x, layer["ffn_norm.weight"]) @ layer["ffn.w12.weight"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["ffn.w3.weight"].T
    return norm(x, w["layer_norm.weight"]).numpy()


def test_llama_cpp_computes_the_network(neobert: Path, tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    ids = token_ids(neobert)
    aprfmt.export_model(neobert, tmp_path / "m.gguf")
    assert relative_error(llama_cpp.logits(tmp_path / "m.gguf", ids, "encoder"), reference(neobert, ids)) < 1e-4


def test_a_file_that_does_not_say_its_order_keeps_it(neobert: Path, tmp_path: Path) -> None:
    """As llama.cpp's converter writes them: by way of an `.apr`, in another dtype, and back to a folder."""
    key, name = "neo-bert.attention.qkv_by_head", "blk.0.attn_qkv.weight"
    aprfmt.export_model(neobert, tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        native = model.native_as(GgufNative)
        assert native is not None
        pairs = native.parts[0].kv
        stored = bytes(model.tensors[name].raw())
        tensors = [
            OutTensor(n, t.dtype, t.shape, t.n_bytes, lambda t=t: [bytes(t.raw())])  # type: ignore[misc]
            for n, t in model.tensors.items()
        ]
        layout = gguf_write.layout([bytes(pairs.raw(k)) for k in pairs if k != key], tensors)
        write_file(str(tmp_path / "theirs.gguf"), FileLayout("theirs.gguf", layout), WriteOptions(fsync=False))
    aprfmt.import_model(tmp_path / "theirs.gguf", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "f16.gguf", dtype="f16")
    aprfmt.export_model(tmp_path / "f16.gguf", tmp_path / "again.gguf", dtype="f32")
    aprfmt.export_model(tmp_path / "theirs.gguf", tmp_path / "back", format="hf")
    with aprfmt.open(tmp_path / "again.gguf") as model, aprfmt.open(tmp_path / "back") as folder:
        assert key not in model.metadata
        half = torch.frombuffer(bytearray(stored), dtype=torch.float32).half().float().numpy().tobytes()
        assert bytes(model.tensors[name].raw()) == half
        assert bytes(folder.tensors["transformer_encoder.0.qkv.weight"].raw()) == stored
