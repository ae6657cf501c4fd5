"""`apr validate` of a GGUF against llama.cpp: each key of a file is taken out in turn, and both are asked.

By turns a 24th of the rows; with APR_FULL=1 every row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from arch_models import all_cases, build, find_case, token_ids, write_tokenizers
from llama_peer import LlamaError, LlamaPeer
from turns import in_turn, turn

import aprfmt
from aprfmt.formats import gguf_write
from aprfmt.formats.gguf import GgufNative
from aprfmt.formats.out_tensor import OutTensor
from aprfmt.inspection.validate import RULES, Subject
from aprfmt.io.pipe import FileLayout, WriteOptions, write_file

pytestmark = pytest.mark.llama

ROUND = 24
"""Commits in a row that try every row: one takes five seconds of processor time."""
TOO_STRICT = (
    # llama.cpp divides feed_forward_length by the experts in use then, which is right for so small a model by chance.
    *(f"{name}.expert_feed_forward_length" for name in ("qwen2moe", "qwen3moe", "qwen3next", "qwen3vlmoe")),
    # The constant that llama.cpp takes, or the quotient hidden / heads, is that of the model by chance.
    "gemma3n.embedding_length_per_layer_input", "gemma3n.altup.num_inputs", "mimo2.attention.value_length",
    "qwen2vl.attention.layer_norm_rms_epsilon",  # llama.cpp takes 0 without a word: other logits
    "exaone-moe.expert_shared_count",  # only the width of the shared experts is read
)  # fmt: skip
"""Keys that llama.cpp does without in the files of this test, and that `apr validate` asks for."""
RULE = next(rule for rule in RULES if rule.id == "metadata.runtime")
SHAPES = next(rule for rule in RULES if rule.id == "shapes.match")


def chosen() -> list[str]:
    base = [case.id for case in all_cases() if case.base and case.computable and not case.llama_cpp_cannot]
    return in_turn(base, lambda name: name == base[0], turn(), of=ROUND)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path, llama_cpp_models: Path) -> dict[str, Path]:
    pytest.importorskip("torch").set_num_threads(1)
    folder = tmp_path_factory.mktemp("tokenizers")
    # Chameleon's config names ids of image tokens beyond a short vocabulary.
    return write_tokenizers(folder, ["smollm2", "bert"], 512) | {
        "chameleon": write_tokenizers(folder / "whole", ["smollm2"])["smollm2"]
    }


def without(source: Path, key: str, target: Path) -> Path:
    """A copy of a GGUF without one of its keys."""
    with aprfmt.open(source) as model:
        native = model.native_as(GgufNative)
        assert native is not None
        pairs = native.parts[0].kv
        entries: list[Any] = [bytes(pairs.raw(name)) for name in pairs if name != key]
        tensors = [
            OutTensor(name, t.dtype, t.shape, t.n_bytes, lambda t=t: [bytes(t.raw())])  # type: ignore[misc]
            for name, t in model.tensors.items()
        ]
        write_file(
            str(target),
            FileLayout(target.name, gguf_write.layout(entries, tensors)),
            WriteOptions(force=True, fsync=False),
        )
    return target


def complaints(path: Path) -> list[str]:
    """What validate says of the keys, and of shapes that do not follow from them."""
    with aprfmt.open(path) as model:
        subject, found = Subject(model), []
        for rule in (RULE, SHAPES):
            try:
                found += [check.message for check in rule.look(subject) if check.status == "fail"]
            except aprfmt.AprError as error:
                found.append(error.message)
        return found


@pytest.mark.parametrize("name", chosen())
def test_no_key_that_llama_cpp_insists_on_may_be_missing(
    name: str, tokenizers: dict[str, Path], tmp_path: Path, llama_cpp: LlamaPeer
) -> None:
    case = find_case(name)
    folder, whole = tmp_path / "model", tmp_path / "m.gguf"
    build(case, folder, tokenizers if name != "chameleon" else {case.tokenizer: tokenizers[name]})
    aprfmt.export_model(folder, whole, dtype="f32", allow_different=True)
    ids = token_ids(folder)[:4]
    llama_cpp.logits(whole, ids, case.kind)
    assert complaints(whole) == []
    with aprfmt.open(whole) as model:
        keys = [key for key in model.metadata if not key.startswith("general.")]
    wrong = []
    for key in keys:
        path = without(whole, key, tmp_path / "cut.gguf")
        said = complaints(path)
        try:
            llama_cpp.logits(path, ids, case.kind)
            reason = ""
        except LlamaError as error:
            reason = str(error)
        if key in TOO_STRICT and said and not reason:
            continue
        if bool(reason) != bool(said):
            wrong.append(f"{key}: llama.cpp {reason or 'loads it'}; validate {said or 'passes it'}")
        elif said and key not in "".join(said) and "hyper-parameters" not in "".join(said):
            wrong.append(f"{key} is not named in {said}")
    assert not wrong, "\n".join(wrong)
