"""Networks that an export refuses are such that llama.cpp does not load; those that it warns of compute otherwise.

A sample and, by turns, a few of the others; with APR_FULL=1 every case.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from arch_models import (
    ArchCase,
    all_cases,
    build,
    has_gguf,
    n_kept,
    relative_error,
    token_ids,
    transformers_logits,
    write_tokenizers,
)
from conformance_steps import LLAMA_TOLERANCE
from llama_peer import LlamaError, LlamaPeer
from turns import in_turn, turn

import aprfmt
from aprfmt.arch import hparams
from aprfmt.errors import RefusedError

pytestmark = pytest.mark.llama

MAMBA_OF_FOUR = ArchCase(
    "mamba/expand", "mamba", "MambaConfig", "MambaForCausalLM", {"expand": 4}, llama_cpp_cannot="its width"
)
SAMPLE = ("arcee/biases", "qwen3/window", "glm/head_dim", "olmoe/gqa", "exaone4/hybrid_small", "olmoe/clip_qkv")
TURNS = 24
ALIKE = {
    "llama4_text/cold": "temperatures begin at 8,192 tokens",
    "cohere2_moe/odd_prefix": "both networks rotate the layers of this pattern",
    "muse_glimmer_text/eps": "norms of random weights are far above either epsilon",
    "hrm_text/prefix": "without token types transformers masks causally",
    "gemma/paligemma": "without token types transformers masks causally",
    "qwen3_classifier": "the scores compared are those before the softmax",
}
"""Cases whose difference 24 tokens through random weights do not show."""


def chosen() -> list[ArchCase]:
    loaded = (case for case in all_cases() if has_gguf(case.row))
    cannot = [case for case in loaded if case.llama_cpp_cannot and case.computable and case.id not in ALIKE]
    return [MAMBA_OF_FOUR, *in_turn(cannot, lambda case: case.id in SAMPLE, turn(), of=TURNS)]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path, llama_cpp_models: Path) -> Path:
    pytest.importorskip("torch").set_num_threads(1)
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.id)
def test_what_is_refused_does_not_load_and_what_is_told_differs(
    case: ArchCase, tokenizers: Path, tmp_path: Path, llama_cpp: LlamaPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, gguf = tmp_path / "model", tmp_path / "m.gguf"
    limit = n_kept(case, 1024)
    build(case, folder, write_tokenizers(tokenizers / str(limit), [case.tokenizer], limit))
    ids = token_ids(folder)
    with suppress(RefusedError):
        report = aprfmt.export_model(folder, gguf, dtype="f32")
    if gguf.exists():
        assert report.losses == [text for text in report.warnings if text.startswith("llama.cpp")]
        assert report.losses
        got = llama_cpp.logits(gguf, ids, case.kind)
        assert relative_error(got, transformers_logits(folder, ids, case.kind)) > 3 * LLAMA_TOLERANCE
        return
    # Written all the same, it is of no use.
    real = hparams.to_gguf
    with monkeypatch.context() as patch:
        patch.setattr(hparams, "to_gguf", lambda h, arch, **options: real(h, arch, **{**options, "complete": False}))
        try:
            aprfmt.export_model(folder, gguf, dtype="f32")
        except RefusedError:
            return  # no tensor of a GGUF could hold it
    try:
        got = llama_cpp.logits(gguf, ids, case.kind)
    except LlamaError:
        return
    assert relative_error(got, transformers_logits(folder, ids, case.kind)) > 3 * LLAMA_TOLERANCE
