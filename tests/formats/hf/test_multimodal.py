"""Multimodal folders: an `.apr` carries the whole, a GGUF its language model, and text gives the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arch_cases_multimodal import CASES
from arch_models import ArchCase, build, relative_error, token_ids, top1_equal, transformers_logits
from llama_peer import LlamaPeer
from tiny_models import write_byte_tokenizer

import aprfmt

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizer") / "bytes"
    folder.mkdir()
    write_byte_tokenizer(folder)
    return {"bytes": folder}


def text_logits(model: Any, ids: list[int]) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def tensors(folder: Path) -> dict[str, bytes]:
    with aprfmt.open(folder) as model:
        return {name: bytes(tensor.raw()) for name, tensor in model.tensors.items()}


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.llama
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_the_language_model_is_taken(
    case: ArchCase, tokenizers: dict[str, Path], tmp_path: Path, llama_cpp: LlamaPeer
) -> None:
    source, apr, back, gguf = (tmp_path / name for name in ("whole", "text.apr", "text", "text.gguf"))
    model = build(case, source, tokenizers)
    ids = token_ids(source)
    wanted = text_logits(model, ids)

    report = aprfmt.import_model(source, apr)
    assert report.lossless
    assert not report.losses
    aprfmt.export_model(apr, back)
    assert files(back) == files(source)
    whole = tensors(source)
    assert report.tensor_count == len(whole)

    report = aprfmt.export_model(apr, gguf, dtype="f32")
    assert not report.lossless
    n_left = sum(any(word in name for word in ("vi", "projector", "connector", "image_")) for name in whole)
    assert sum(int(loss.split()[0]) for loss in report.losses) == n_left
    assert all("behind: a GGUF of the language model has no place for such tensors" in loss for loss in report.losses)
    got = llama_cpp.logits(gguf, ids)
    assert relative_error(got, wanted) <= 5e-3
    assert top1_equal(got, wanted)

    aprfmt.export_model(gguf, tmp_path / "from-gguf", format="hf")
    assert relative_error(transformers_logits(tmp_path / "from-gguf", ids), wanted) <= 1e-6
