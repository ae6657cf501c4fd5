"""Sources that break the rules of their own network are refused before a byte is written, whatever container holds
them; nothing but an AprError comes of any, and what is imported can be read and given back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import arch_models
import odd_models
import pytest
from odd_models import DAMAGES, Odd
from tiny_models import BYTES, write_byte_tokenizer

import aprfmt
from aprfmt.canonical.read import canonical
from aprfmt.errors import AprError
from aprfmt.formats.gguf_fields import GgufType

pytest.importorskip("transformers")

ROWS = (
    *("llama", "qwen2", "mixtral", "gpt2", "gemma3_text", "bert", "mamba2"),
    *("glm4_moe", "deepseek_v3", "gpt_oss", "falcon", "qwen3_5_text"),
)
KINDS = ("gguf", "hf", "safetensors")
Get = Callable[[str, str], Odd]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Gives a sound model of a row in pieces."""
    work = tmp_path_factory.mktemp("sound")
    (work / "tokenizer").mkdir()
    write_byte_tokenizer(work / "tokenizer")
    made: dict[tuple[str, str], Odd] = {}

    def get(row: str, kind: str) -> Odd:
        folder = work / row
        if not folder.is_dir():
            case = arch_models.find_case(row)
            case = replace(case, config={**case.config, "vocab_size": 320}, tokenizer=BYTES)
            arch_models.build(case, folder, {BYTES: work / "tokenizer"})
        if (row, kind) not in made:
            path = folder.with_suffix(".gguf") if kind == "gguf" else folder
            if kind == "gguf":
                aprfmt.export_model(folder, path)
            made[row, kind] = odd_models.read(path, kind)
        return odd_models.copy(made[row, kind])

    return get


def _options(row: str, kind: str) -> dict[str, Any]:
    return {"arch": row, "allow_no_config": True} if kind == "safetensors" else {}


def _refused(source: Path, folder: Path, **options: Any) -> AprError:
    """The error of an import, which leaves nothing behind."""
    out = folder / "out"
    out.mkdir()
    with pytest.raises(AprError) as caught:
        aprfmt.import_model(source, out / "m.apr", **options)
    assert list(out.iterdir()) == []
    return caught.value


@pytest.mark.turns
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_matrix_is_refused_by_its_name(kind: str, damage: str, sound: Get, tmp_path: Path) -> None:
    if kind == "safetensors" and damage == "a row too many":
        pytest.skip("without a config.json nothing says how many rows there should be")
    odd = sound("llama", kind)
    name = "blk.0.attn_k.weight" if kind == "gguf" else "model.layers.0.self_attn.k_proj.weight"
    index = next(i for i, tensor in enumerate(odd.tensors) if tensor.name == name)
    DAMAGES[damage](odd.tensors, index)
    error = _refused(odd.write(tmp_path), tmp_path, **_options("llama", kind))
    assert error.exit_code in (4, 5)
    if damage == "in a layer that is not there":  # for all that is known, others are missing
        assert error.tensor is not None
    else:
        told = f"{error.tensor} {error.message}"
        assert "k_proj" in told or "attn_k" in told


_WRONG: dict[str, list[tuple[str, str, Any]]] = {
    "a constant that is not a number": [("rms_norm_eps", "attention.layer_norm_rms_epsilon", float("nan"))],
    "an infinite constant": [("rope_theta", "rope.freq_base", float("inf"))],
    "no layers": [("num_hidden_layers", "block_count", 0)],
    "a thousand million layers": [("num_hidden_layers", "block_count", 10**9)],
    "a negative number of layers": [("num_hidden_layers", "block_count", -1)],
    "layers as text": [("num_hidden_layers", "block_count", "two")],
    "no heads": [("num_attention_heads", "attention.head_count", 0)],
    "another width": [("hidden_size", "embedding_length", 65)],
    "an object for a width": [("hidden_size", "embedding_length", {"a": 1})],
}


@pytest.mark.turns
@pytest.mark.parametrize("wrong", _WRONG)
@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_wrong_dimensions_are_refused(kind: str, wrong: str, sound: Get, tmp_path: Path) -> None:
    odd = sound("llama", kind)
    for config_key, gguf_key, value in _WRONG[wrong]:
        if kind == "hf":
            odd.config.pop("rope_parameters", None)
            odd.config[config_key] = value
            continue
        types = {float: GgufType.FLOAT32, int: GgufType.INT32 if value == -1 else GgufType.UINT32, str: GgufType.STRING}
        if type(value) not in types:
            pytest.skip("a GGUF has no objects")
        odd.set(f"llama.{gguf_key}", types[type(value)], value)
    error = _refused(odd.write(tmp_path), tmp_path)
    assert error.exit_code in (4, 5)


@pytest.mark.turns
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_an_error_of_ours_comes_of_odd_models(kind: str, row: str, sound: Get, tmp_path: Path) -> None:
    for seed in range(8):
        random_ = random.Random(f"{kind} {row} {seed}")
        odd = sound(row, kind)
        what = [odd_models.disturb(odd, random_) for _ in range(random_.choice((1, 1, 2, 3)))]
        odd_models.clear(tmp_path / "in")
        odd_models.clear(tmp_path / "out")
        source = odd.write(tmp_path / "in")
        options = _options(row, kind) | ({"allow_unmapped": True} if random_.random() < 0.2 else {})
        try:
            _try(source, tmp_path / "out", kind, options)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {what}") from error
        except Exception as error:  # anything else is what this test looks for
            raise AssertionError(f"seed {seed}, {what}: {error!r}") from error


def _try(source: Path, out: Path, kind: str, options: dict[str, Any]) -> None:
    for look in (aprfmt.validate, aprfmt.inspect):
        _error_of(look, source)
    _error_of(aprfmt.export_model, source, out / ("folder" if kind == "gguf" else "m.gguf"), **options)
    if _error_of(aprfmt.import_model, source, out / "m.apr", **options) is not None:
        assert not (out / "m.apr").exists()
        return
    unmapped: dict[str, Any] = {"allow_unmapped": True} if "allow_unmapped" in options else {}
    with aprfmt.open(out / "m.apr") as model:
        for tensor in canonical(model, **unmapped).tensors.values():
            assert tensor.n_bytes >= 0
    back = out / {"gguf": "back.gguf", "hf": "back", "safetensors": "back.safetensors"}[kind]
    aprfmt.export_model(out / "m.apr", back, **unmapped)
    assert _files(back) == _files(source)
    if kind != "gguf":
        _error_of(aprfmt.export_model, out / "m.apr", out / "other.gguf")
    else:
        _error_of(aprfmt.export_model, out / "m.apr", out / "other", format="hf")


def _error_of(function: Callable[..., object], *args: Any, **options: Any) -> AprError | None:
    try:
        function(*args, **options)
    except AprError as error:
        return error
    return None


def _files(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()} if path.is_dir() else {"": path.read_bytes()}
