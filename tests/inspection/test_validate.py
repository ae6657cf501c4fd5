"""Every rule passes on a good model and fails on the one that breaks it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.inspection.validate import RULES, Validation, validate

EMBEDDING = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def status(found: Validation, rule: str) -> set[str]:
    return {check.status for check in found.checks if check.id == rule}


def test_weights_sum_to_100() -> None:
    assert sum(rule.weight for rule in RULES) == 100
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_a_good_model_passes_everything(write: Callable[..., Path], arrays: Any) -> None:
    found = validate(write(arrays), strict=True, min_score=100)
    assert [c for c in found.checks if c.status != "pass"] == []
    assert (found.passed, found.score) == (True, 100)
    assert [c.id for c in found.skipped] == [
        *("record.names", "adapter.pairs", "repository.modules", "metadata.runtime")
    ]


def change(name: str, value: float, rows: slice = slice(None)) -> Callable[[Any], None]:
    def apply(arrays: Any) -> None:
        arrays[name][rows] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "metadata", "rule", "expected"),
    [
        (change(Q, np.nan, slice(1)), {}, "values.finite", "fail"),
        (change(Q, -np.inf, slice(1)), {}, "values.finite", "fail"),
        (change(Q, 0.0), {}, "values.zero", "fail"),
        (change("model.norm.weight", 0.0), {}, "values.zero", "warn"),
        (change(EMBEDDING, 0.0, slice(1)), {}, "values.dead-rows", "warn"),
        (change(EMBEDDING, 0.0, slice(0, 4)), {}, "values.dead-rows", "fail"),
        (change(EMBEDDING, 0.0, slice(9, 10)), {}, "values.dead-rows", "warn"),
        (lambda arrays: arrays.pop(Q), {}, "names.complete", "fail"),
        (lambda arrays: arrays.update(odd=np.ones(3, "<f4")), {}, "names.complete", "fail"),
        (lambda arrays: arrays.update({Q: np.ones((8, 4), "<f4")}), {}, "shapes.match", "fail"),
        (lambda arrays: None, {"tokenizer.vocabulary": [str(i) for i in range(11)]}, "tokenizer.size", "fail"),
        (lambda arrays: None, {"tokenizer.bos_token_id": 9}, "tokenizer.special", "fail"),
        (lambda arrays: None, {"intermediate_size": None}, "metadata.required", "fail"),
    ],
)
def test_rules(
    write: Callable[..., Path], arrays: Any, edit: Callable[[Any], Any], metadata: Any, rule: str, expected: str
) -> None:
    edit(arrays)
    path = write(arrays, **metadata)
    found = validate(path)
    assert status(found, rule) == {expected}
    assert found.passed is (expected == "warn")
    assert found.score < 100
    assert not validate(path, strict=True).passed


def test_a_flipped_byte_fails(write: Callable[..., Path], arrays: Any) -> None:
    path = write(arrays)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    assert status(validate(path), "container.footer") == {"fail"}


def test_a_missing_footer_is_a_warning(write: Callable[..., Path], arrays: Any) -> None:
    path = write(arrays)
    path.write_bytes(path.read_bytes()[:-4])
    found = validate(path)
    assert status(found, "container.footer") == {"warn"}
    assert found.passed


def test_duplicates_fail(tmp_path: Path) -> None:
    one = np.ones(2, "<f4")
    aprfmt.save_file([("a", one), ("a", one)], tmp_path / "d.apr", metadata={"model_type": "x"})
    assert status(validate(tmp_path / "d.apr"), "tensors.unique") == {"fail"}


def test_min_score(write: Callable[..., Path], arrays: Any) -> None:
    arrays[EMBEDDING][0] = 0
    path = write(arrays)
    score = validate(path).score
    assert validate(path, min_score=score).passed
    assert not validate(path, min_score=score + 1).passed


def test_what_does_not_apply_is_skipped_not_passed(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1.5))
    found = validate(path)
    skipped = {skip.id for skip in found.skipped}
    assert {"container.header", "container.footer", "tokenizer.size", "names.complete"} <= skipped
    assert status(found, "metadata.required") == {"warn"}


def test_progress_counts_every_byte(write: Callable[..., Path], arrays: Any) -> None:
    announced: list[int] = []
    seen: list[int] = []

    def start(n_bytes: int) -> Callable[[int, str], None]:
        announced.append(n_bytes)
        return lambda n_bytes, label: seen.append(n_bytes)

    validate(write(arrays), progress=start)
    assert announced == [sum(seen)] == [sum(array.nbytes for array in arrays.values())]


def test_real_model(smollm2_gguf: Path) -> None:
    found = validate(smollm2_gguf, strict=True)
    assert (found.passed, found.score) == (True, 100)


def test_encrypted_tensors_are_named_as_such(fixtures_dir: Path) -> None:
    found = validate(fixtures_dir / "vectors" / "golden" / "v1_encrypted_password.apr")
    skipped = {skip.id: skip.message for skip in found.skipped}
    assert skipped["values.finite"] == "the tensors are encrypted"


def messages(found: Validation, rule: str) -> list[str]:
    return [check.message for check in found.checks if check.id == rule]


def test_it_says_what_protects_the_file(write: Callable[..., Path], arrays: Any, tmp_path: Path) -> None:
    path = write(arrays)
    covered = "a CRC-32 at the end of the file covers every byte"
    nothing = "the container stores no checksum: only sizes and contents can be checked"
    assert messages(validate(path), "container.protection") == [covered]
    aprfmt.convert_model(path, tmp_path / "shards", format="apr-shards", shard_size=4_000)
    n = len(list((tmp_path / "shards").glob("*.apr")))
    assert n > 1
    sums = f"the manifest stores the SHA-256 of {n} shards"
    assert messages(validate(tmp_path / "shards"), "container.protection") == [sums, covered]
    aprfmt.export_model(path, tmp_path / "m.safetensors")
    without = validate(tmp_path / "m.safetensors", strict=True)
    assert not messages(without, "container.protection")  # no "ok" for what is missing
    assert [skip.message for skip in without.skipped if skip.id == "container.protection"] == [nothing]
    for hash, label in ((False, "CRC-32"), (True, "BLAKE3")):
        again = tmp_path / f"{label}.apr"
        aprfmt.import_model(tmp_path / "m.safetensors", again, allow_no_config=True, arch="llama", hash=hash)
        digests = f"the source manifest stores the {label} of 1 file"
        assert messages(validate(again), "container.protection") == [covered, digests]


def test_a_signalling_nan_is_found_like_any_other(write: Callable[..., Path], arrays: Any) -> None:
    arrays[EMBEDDING].view(np.uint32)[3, 5] = 0x7F800001
    found = validate(write(arrays))
    assert [check.message for check in found.checks if check.status == "fail"] == [
        f"1 NaN and 0 infinite of {arrays[EMBEDDING].size:,} values"
    ]
