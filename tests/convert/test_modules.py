"""sentence-transformers repositories: what comes behind the network goes into a GGUF where llama.cpp has a place.

The modules that each folder gets, and what of them llama.cpp must compute, are rows of data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from arch_models import relative_error, token_ids
from conformance_steps import list_keys, list_tensors, same_tensors
from converter_peer import CONVERTER, ConverterPeer
from llama_peer import LlamaPeer
from repository_models import REPOSITORIES, Repository, write, write_json

import aprfmt
from aprfmt.errors import RefusedError
from aprfmt.inspection.validate import validate

torch = pytest.importorskip("torch")


by_repository = pytest.mark.parametrize("repository", REPOSITORIES, ids=str)
by_whole = pytest.mark.parametrize("repository", [r for r in REPOSITORIES if not r.left], ids=str)


def _files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@by_repository
def test_every_file_comes_back(repository: Repository, tmp_path: Path) -> None:
    write(repository, tmp_path / "m")
    aprfmt.import_model(tmp_path / "m", tmp_path / "m.apr")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert report.lossless
    assert _files(tmp_path / "back") == _files(tmp_path / "m")


@by_repository
def test_a_gguf_says_how_it_pools_and_what_stays(repository: Repository, tmp_path: Path) -> None:
    write(repository, tmp_path / "m")
    report = aprfmt.export_model(tmp_path / "m", tmp_path / "m.gguf", dtype="f32")
    with aprfmt.open(tmp_path / "m.gguf") as model:
        arch = model.metadata["general.architecture"]
        told = {
            key.removeprefix(f"{arch}."): model.metadata[key] for key in model.metadata if key.startswith(f"{arch}.")
        }
        words = ("pooling", "dense_", "length_out")
        assert {key: value for key, value in told.items() if any(word in key for word in words)} == dict(
            repository.keys
        )
    said = [loss for loss in report.losses if repository.left and repository.left in loss]
    assert bool(said) == bool(repository.left), report.losses
    if not repository.left:
        assert not report.losses


@pytest.mark.llama
@by_whole
def test_llama_cpp_gives_the_embedding_of_the_modules(
    repository: Repository, tmp_path: Path, llama_cpp: LlamaPeer
) -> None:
    """As sentence-transformers has it, in torch's terms: hidden states, pooled, through the linear layers."""
    from safetensors.torch import load_file

    model = write(repository, tmp_path / "m")
    ids = token_ids(tmp_path / "m")
    with torch.no_grad():
        inside = getattr(model, "model", model) if repository.model_class == "" else model
        states = inside(input_ids=torch.tensor([ids])).last_hidden_state[0].float()
    pooled = {"mean": lambda: states.mean(0), "cls": lambda: states[0], "last": lambda: states[-1], "": lambda: states}
    wanted = pooled[repository.pooling]()
    for dense in repository.dense:
        layer = load_file(tmp_path / "m" / dense.folder / "model.safetensors")
        wanted = wanted @ layer["linear.weight"].T + layer.get("linear.bias", 0)
    aprfmt.export_model(tmp_path / "m", tmp_path / "m.gguf", dtype="f32")
    got = llama_cpp.embedding(tmp_path / "m.gguf", ids)
    assert relative_error(got, wanted.numpy()) < 5e-3


@pytest.mark.turns
@pytest.mark.parametrize(
    "repository", [r for r in REPOSITORIES if r.keys and not r.left], ids=str
)  # fmt: skip
def test_the_gguf_alone_makes_the_modules_again(repository: Repository, tmp_path: Path) -> None:
    write(repository, tmp_path / "m")
    aprfmt.export_model(tmp_path / "m", tmp_path / "m.gguf", dtype="f32")
    aprfmt.export_model(tmp_path / "m.gguf", tmp_path / "back", format="hf")
    again, source = _files(tmp_path / "back"), _files(tmp_path / "m")
    kept = [line for line in json.loads(source["modules.json"]) if not line["type"].endswith("Normalize")]
    assert json.loads(again["modules.json"]) == kept
    for dense in repository.dense:
        path = f"{dense.folder}/config.json"
        assert json.loads(again[path]) == json.loads(source[path])
        step = same_tensors(tmp_path / "back" / dense.folder, tmp_path / "m" / dense.folder)
        assert step.ok, step.reason
    aprfmt.export_model(tmp_path / "back", tmp_path / "again.gguf", dtype="f32")
    with aprfmt.open(tmp_path / "m.gguf") as a, aprfmt.open(tmp_path / "again.gguf") as b:
        assert {n: bytes(t.raw()) for n, t in a.tensors.items()} == {n: bytes(t.raw()) for n, t in b.tensors.items()}


@pytest.mark.turns
@pytest.mark.skipif(not CONVERTER.is_dir(), reason="needs llama.cpp's converter")
@pytest.mark.parametrize("repository", [r for r in REPOSITORIES if r.dense and not r.left], ids=str)
def test_the_converter_writes_the_same_layers(repository: Repository, tmp_path: Path) -> None:
    """But for a bias, which it leaves out."""
    write(repository, tmp_path / "m", vocabulary=None)
    ConverterPeer().convert(tmp_path / "m", tmp_path / "theirs.gguf", "f32", ("--sentence-transformers-dense-modules",))
    aprfmt.export_model(tmp_path / "m", tmp_path / "ours.gguf", dtype="f32")
    ours, theirs = list_tensors(tmp_path / "ours.gguf"), list_tensors(tmp_path / "theirs.gguf")
    assert {name: ours[name] for name in ours if name != "dense_2.bias"} == theirs
    keys, wanted = list_keys(tmp_path / "ours.gguf"), list_keys(tmp_path / "theirs.gguf")
    assert {key: keys.get(key) for key in wanted if "dense" in key or "pooling" in key or "_out" in key} == {
        key: value for key, value in wanted.items() if "dense" in key or "pooling" in key or "_out" in key
    }


def _edit(path: str, **changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        write_json(folder / path, json.loads((folder / path).read_text()) | changes)

    return edit


def _put(path: str, data: bytes | None) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / path).unlink() if data is None else (folder / path).write_bytes(data)

    return put


@dataclass(frozen=True)
class Bad:
    """What is done to the repository of EmbeddingGemma's kind, and what is said of it."""

    what: str
    spoil: Callable[[Path], None]
    said: str
    case: str = "gemma_embedding"


_BAD = (
    Bad("list that is not JSON", _put("modules.json", b"[{"), r"modules\.json is not JSON", "bert"),
    Bad("pooling without config", _put("1_Pooling/config.json", None), r"1_Pooling/config\.json is missing"),
    Bad("layer without config", _put("2_Dense/config.json", None), r"2_Dense/config\.json is missing"),
    Bad("config that is a list", _put("2_Dense/config.json", b"[]"), r"2_Dense/config\.json is missing or not a JSON"),
    Bad("layer without weights", _put("3_Dense/model.safetensors", None), "3_Dense.*missing|missing.*3_Dense"),
    Bad("layer that says no sizes", _edit("2_Dense/config.json", in_features=None), "lacks valid in_features"),
    Bad("sizes that are not sizes", _edit("2_Dense/config.json", out_features=-3), "lacks valid in_features"),
    Bad("layer for another width", _edit("2_Dense/config.json", in_features=32), "takes 32 values, .* outputs 64"),
    Bad("layers that do not fit", _edit("3_Dense/config.json", in_features=95), "takes 95 values, .* outputs 96"),
    Bad("weights of another shape", _edit("3_Dense/config.json", out_features=63), r"needs a weight of \[63, 96\]"),
)


@pytest.mark.turns
@pytest.mark.parametrize("bad", _BAD, ids=lambda bad: bad.what)
def test_what_is_missing_or_does_not_fit_is_refused(bad: Bad, tmp_path: Path) -> None:
    case = next(r for r in REPOSITORIES if r.case == bad.case and not r.left)
    write(case, tmp_path / "m")
    bad.spoil(tmp_path / "m")
    for target in ("m.apr", "m.gguf"):
        with pytest.raises(RefusedError, match=bad.said):
            aprfmt.convert_model(tmp_path / "m", tmp_path / target)
        assert not (tmp_path / target).exists()
    report = validate(tmp_path / "m")
    assert not report.passed
    assert [check for check in report.checks if check.status == "fail" and re.search(bad.said, check.message)]


def test_pickled_weights_of_a_layer_are_carried_as_a_file(tmp_path: Path) -> None:
    write(next(r for r in REPOSITORIES if r.case == "bert" and r.dense), tmp_path / "m")
    (tmp_path / "m" / "2_Dense" / "model.safetensors").rename(tmp_path / "m" / "2_Dense" / "pytorch_model.bin")
    aprfmt.import_model(tmp_path / "m", tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert _files(tmp_path / "back") == _files(tmp_path / "m")
