"""A GGUF that llama.cpp could not load, or would compute otherwise, is refused, or the report says so."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import plain_models
import pytest
from llama_peer import LlamaError, LlamaPeer

import aprfmt
from aprfmt.cli.main import main
from aprfmt.errors import RefusedError, UsageError

IDS = [1, 5, 9, 200, 33, 7, 301, 12]


def without_tokenizer(folder: Path) -> Path:
    """A Hugging Face folder of a tiny llama that has no tokenizer files."""
    path = plain_models.write_folder(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    return path


def rewritten(
    source: Path,
    target: Path,
    keep: Callable[[str], bool] = lambda key: True,
    put: Mapping[str, str] = MappingProxyType({}),
    rename: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A copy of a GGUF with those of its keys that are wanted; `put` gives keys a string, `rename` tensors a name."""
    from aprfmt.formats import gguf_write
    from aprfmt.formats.gguf import GgufNative
    from aprfmt.formats.gguf_fields import GgufType
    from aprfmt.formats.out_tensor import OutTensor
    from aprfmt.io.pipe import FileLayout, WriteOptions, write_file

    with aprfmt.open(source) as model:
        native = model.native_as(GgufNative)
        assert native is not None
        pairs = native.parts[0].kv
        keys: list[Any] = [bytes(pairs.raw(key)) for key in pairs if keep(key) and key not in put]
        keys += [(key, GgufType.STRING, value) for key, value in put.items()]
        tensors = [
            OutTensor(rename.get(name, name), t.dtype, t.shape, t.n_bytes, lambda t=t: [bytes(t.raw())])  # type: ignore[misc]
            for name, t in model.tensors.items()
        ]
        write_file(str(target), FileLayout(target.name, gguf_write.layout(keys, tensors)), WriteOptions())
    return target


# --- no tokenizer ---


@pytest.mark.parametrize("options", [{}, {"dtype": "q8_0"}, {"shard_size": 20_000}], ids=str)
def test_a_gguf_without_a_tokenizer_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    folder = without_tokenizer(tmp_path / "model")
    aprfmt.import_model(folder, tmp_path / "m.apr")
    before = sorted(tmp_path.iterdir())
    for source in (folder, tmp_path / "m.apr"):
        with pytest.raises(RefusedError, match="no tokenizer") as caught:
            aprfmt.export_model(source, tmp_path / "m.gguf", **options)
        assert caught.value.exit_code == 5
        assert "--tokenizer DIR" in str(caught.value.hint)
        assert "--no-tokenizer" in str(caught.value.hint)
    assert sorted(tmp_path.iterdir()) == before


def test_both_hints_work_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = without_tokenizer(tmp_path / "model"), plain_models.write_folder(tmp_path / "other")
    for command in (["convert", str(folder)], ["export", str(folder)], ["quantize", str(folder), "q8_0"]):
        for number, options in enumerate((["--no-tokenizer"], ["--tokenizer", str(other)])):
            name = tmp_path / f"{command[0]}{number}.gguf"
            with pytest.raises(SystemExit, match="0"):
                main([*command, "-o", str(name), *options, "--json"])
            said = json.loads(capsys.readouterr().out)["warnings"]
            assert said == (
                ["written without a tokenizer: llama.cpp accepts and returns token ids only"] if not number else []
            )


def test_a_tokenizer_and_none_at_once_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--no-tokenizer"):
        aprfmt.export_model(tmp_path / "m", tmp_path / "m.gguf", no_tokenizer=True, tokenizer=tmp_path)


@pytest.mark.llama
def test_llama_cpp_loads_what_has_none_by_wish_and_not_what_says_nothing(tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    folder = plain_models.write_folder(tmp_path / "model")
    aprfmt.export_model(folder, tmp_path / "with.gguf")
    report = aprfmt.export_model(folder, tmp_path / "none.gguf", no_tokenizer=True)
    assert report.losses == ["the tokenizer of 320 tokens is dropped"]
    expected = llama_cpp.logits(tmp_path / "with.gguf", IDS)
    assert np.array_equal(llama_cpp.logits(tmp_path / "none.gguf", IDS), expected)
    bare = rewritten(tmp_path / "none.gguf", tmp_path / "bare.gguf", lambda key: not key.startswith("tokenizer."))
    with pytest.raises(LlamaError, match=r"key not found in model: tokenizer\.ggml\.model"):
        llama_cpp.logits(bare, IDS)


@pytest.mark.parametrize("kind", ["model", "adapter", "mmproj", "imatrix"])
def test_a_gguf_that_never_had_a_tokenizer_comes_back_the_same(kind: str, tmp_path: Path) -> None:
    """Also from GGUF to GGUF."""
    aprfmt.export_model(plain_models.write_folder(tmp_path / "model"), tmp_path / "m.gguf")
    source = rewritten(
        tmp_path / "m.gguf", tmp_path / "s.gguf", lambda key: not key.startswith("tokenizer."), {"general.type": kind}
    )
    aprfmt.import_model(source, tmp_path / "s.apr")
    for origin in (source, tmp_path / "s.apr"):
        back = tmp_path / f"from{origin.suffix}.gguf"
        assert aprfmt.export_model(origin, back).lossless
        assert back.read_bytes() == source.read_bytes()
    if kind == "model":
        with pytest.raises(RefusedError, match="no tokenizer"):
            aprfmt.export_model(source, tmp_path / "q.gguf", dtype="q8_0")
    else:  # nothing that llama.cpp runs alone
        aprfmt.export_model(source, tmp_path / "q.gguf", dtype="q8_0")


def test_a_gguf_without_a_vocabulary_goes_through_an_apr_and_a_folder(tmp_path: Path) -> None:
    folder = plain_models.write_folder(tmp_path / "model")
    aprfmt.export_model(folder, tmp_path / "none.gguf", no_tokenizer=True)
    aprfmt.import_model(tmp_path / "none.gguf", tmp_path / "none.apr")
    assert aprfmt.export_model(tmp_path / "none.apr", tmp_path / "again.gguf").lossless
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "none.gguf").read_bytes()
    aprfmt.export_model(tmp_path / "none.apr", tmp_path / "hf", format="hf")
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    aprfmt.export_model(tmp_path / "none.gguf", tmp_path / "q.gguf", dtype="q8_0")
    with pytest.raises(RefusedError, match="no tokenizer"):
        aprfmt.export_model(tmp_path / "hf", tmp_path / "again2.gguf")


# --- a name that llama.cpp takes for a kind of tokenizer ---


@pytest.mark.llama
def test_a_model_called_phi3_without_its_tokens(
    tmp_path: Path, llama_cpp: LlamaPeer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plain_models.write_folder(tmp_path / "My-Phi3-model")
    with pytest.raises(RefusedError, match="'phi3' in its name") as caught:
        aprfmt.export_model(folder, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    # The hint, typed.
    hint = str(caught.value.hint).partition(": ")[2]
    commands = hint.replace("SRC", str(folder)).replace("X.apr", str(tmp_path / "m.apr"))
    for command in commands.split(";"):
        with pytest.raises(SystemExit, match="0"):
            main(shlex.split(command)[1:])
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert llama_cpp.logits(tmp_path / "m.gguf", IDS).shape == (len(IDS), 320)
    # What was refused does not load.
    for name, loads in (("phi3", False), ("Phi-3 mini", False), ("phi-2", True), ("phi 3", True)):
        renamed = rewritten(tmp_path / "m.gguf", tmp_path / f"{name}.gguf", put={"general.name": name})
        if loads:
            llama_cpp.logits(renamed, IDS)
        else:
            with pytest.raises(LlamaError, match=r"unordered_map::at|_Map_base::at"):
                llama_cpp.logits(renamed, IDS)


def test_the_name_does_not_matter_without_a_vocabulary(tmp_path: Path) -> None:
    folder = plain_models.write_folder(tmp_path / "phi-3")
    aprfmt.export_model(folder, tmp_path / "m.gguf", no_tokenizer=True)


# --- other logits ---

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def test_other_logits_of_short_texts_need_consent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = plain_models.write_folder(tmp_path / "m", rope_parameters={**_YARN, "beta_slow": 0.1})
    out = tmp_path / "m.gguf"
    with pytest.raises(SystemExit, match=r"^5$"):
        main(["export", str(source), "-o", str(out), "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert "the config has beta_fast 32, beta_slow 0.1" in error["message"]
    assert "--allow-different" in error["hint"]
    assert not out.exists()
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["export", str(source), "-o", str(out), "--json", "--allow-different"])
    report = json.loads(capsys.readouterr().out)
    assert [(found["beyond"], found["slight"]) for found in report["differences"]] == [(None, False)]
    assert report["differences"][0]["what"] in report["warnings"]
    back = aprfmt.export_model(out, tmp_path / "back", format="hf")
    assert [found["what"] for found in back.differences] == [report["differences"][0]["what"]]


def test_other_logits_of_long_texts_are_a_warning_with_their_length(tmp_path: Path) -> None:
    named: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 48}
    source = plain_models.write_folder(tmp_path / "m", **named)
    report = aprfmt.export_model(source, tmp_path / "m.gguf")
    assert [found["beyond"] for found in report.differences] == [48]
    assert any(
        "ignores the sliding window: logits differ for texts longer than 48 tokens" in warning
        for warning in report.warnings
    )


def test_rope_factors_that_the_network_does_not_read_are_refused(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    named = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
    scaling = {**llama3, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    source = plain_models.write_folder(
        tmp_path / "m", plain_models.weights(qk_norm=True), **named, rope_parameters=scaling
    )
    with pytest.raises(RefusedError, match=r"rope_type is 'llama3', which llama.cpp's qwen3 does not support"):
        aprfmt.export_model(source, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    aprfmt.import_model(source, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "back", format="hf")
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_tensor_that_the_loader_does_not_read_fails_validation(tmp_path: Path) -> None:
    plain = plain_models.write_folder(tmp_path / "m")
    aprfmt.export_model(plain, tmp_path / "m.gguf")
    assert aprfmt.validate(tmp_path / "m.gguf").passed
    told = rewritten(tmp_path / "m.gguf", tmp_path / "told.gguf", put={"general.architecture": "llama"})
    assert aprfmt.validate(told).passed
    added = rewritten(
        tmp_path / "m.gguf", tmp_path / "added.gguf", rename={"blk.0.attn_norm.weight": "blk.0.odd.weight"}
    )
    said = [check.message for check in aprfmt.validate(added).checks if check.id == "metadata.runtime"]
    assert "llama.cpp cannot load the file: blk.0.odd.weight is not a tensor of its 'llama'" in said


def test_norms_of_64_bits_are_f32_in_a_gguf(tmp_path: Path) -> None:
    arrays = {name: array.astype(np.float64) for name, array in plain_models.weights().items()}
    source = plain_models.write_folder(tmp_path / "m", arrays)
    for dtype in ("f32", "keep"):
        report = aprfmt.export_model(source, tmp_path / f"{dtype}.gguf", dtype=dtype)
        assert {*report.dtypes} == {"F32"}
        assert any("rounded from F64 to F32" in loss for loss in report.losses)
