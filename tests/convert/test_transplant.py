"""`apr transplant`: rows of shared tokens are copied, those of new tokens follow from a donor or from their text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import MERGES, N_TOKENS, build, byte_characters
from llama_peer import LlamaPeer
from plain_models import write_seeing_folder
from safetensors.numpy import load_file, save_file

import aprfmt
from aprfmt.canonical.combined_rows import CombinedRows, RowSums
from aprfmt.canonical.matching_pursuit import matching_pursuit
from aprfmt.cli.main import run
from aprfmt.errors import AprError, RefusedError, UnknownFormatError, UsageError
from aprfmt.tokenizer.counterparts import counterparts
from aprfmt.tokenizer.hf_write import to_hf_files
from aprfmt.tokenizer.model import Tokenizer

OUTPUTS = {"out.gguf": "token_embd.weight", "out.apr": "model.embed_tokens.weight", "hf": "model.embed_tokens.weight"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SPECIAL = ("</s>", "<s>", "<|im_end|>", "<|tool|>")
NEW_MERGES = ("t h", "Ġ th", "Ġth e", "h e", "Ġ q", "u i", "Ġq ui", "x y", "xy x", "e r", "h er")


def new_tokenizer() -> Tokenizer:
    """Other ids, other merges, </s> as the end; <|im_end|> is in both vocabularies, <|tool|> in the new one only."""
    merged = [merge.replace(" ", "") for merge in NEW_MERGES]
    tokens = [*reversed(byte_characters()), *SPECIAL, *merged]
    types = [3 if text in SPECIAL else 1 for text in tokens]
    special = {"eos": tokens.index("</s>"), "bos": tokens.index("<s>"), "pad": tokens.index("</s>")}
    made = Tokenizer("gpt2", tokens, [*NEW_MERGES], types, pre="gpt-2", special=special, flags={"add_bos": False})
    return replace(made, chat_template="{{ messages[0].content }}<|im_end|>")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """m.gguf, the folder `new` of a tokenizer, and the folder `donor` of a model with it, with float32 weights."""
    path = tmp_path_factory.mktemp("transplant")
    build(path / "m.gguf")
    (path / "new").mkdir()
    for name, data in to_hf_files(new_tokenizer()).items():
        (path / "new" / name).write_bytes(data)
    aprfmt.transplant_model(
        path / "m.gguf", path / "donor", tokenizer=path / "new", format="hf", dtype="f32", tensor_type=()
    )
    return path


def opened(path: Path, tensor: str = EMBEDDING) -> tuple[Any, Tokenizer, Any]:
    with aprfmt.open(path) as model:
        assert model.tokenizer is not None
        return np.array(model.tensors[tensor].numpy(), np.float32), model.tokenizer, model.hparams


@pytest.mark.parametrize("name", OUTPUTS)
def test_shared_rows_are_copied_and_new_ones_are_means(name: str, place: Path, tmp_path: Path) -> None:
    report = aprfmt.transplant_model(
        place / "m.gguf", tmp_path / name, tokenizer=place / "new", format=name if name == "hf" else None
    )
    rows, old, _ = opened(place / "m.gguf", "token_embd.weight")
    made, new, h = opened(tmp_path / name, OUTPUTS[name])
    expected = new_tokenizer()
    assert (new.tokens, new.merges, new.special) == (expected.tokens, expected.merges, expected.special)
    assert new.chat_template == expected.chat_template
    assert (h.vocab_size, h.bos_token_id, h.eos_token_id) == (len(new.tokens), *map(new.special.get, ("bos", "eos")))
    assert made.shape == (len(new.tokens), rows.shape[1])
    roles = {"</s>": "<|im_end|>", "<s>": "<|im_start|>"}  # the old EOS is <|im_end|>, which has a row twice
    n = dict.fromkeys(("copied", "composed"), 0)
    for i, text in enumerate(new.tokens):
        if (found := roles.get(text, text)) in old.tokens:
            np.testing.assert_array_equal(made[i], rows[old.tokens.index(found)])
            n["copied"] += 1
        else:
            pieces = [old.tokens[piece] for piece in old.encode(text.replace("Ġ", " "))]
            mean = np.mean([rows[old.tokens.index(piece)] for piece in pieces], axis=0)
            np.testing.assert_allclose(made[i], mean, atol=1e-3 * np.abs(mean).max())
            n["composed"] += 1
    counts = ", ".join(f"{number} {what}" for what, number in n.items())
    assert f"of {len(new.tokens)} rows: {counts} of the old tokens of their text" in report.losses[0]
    assert "<|tool|>" in report.losses[1]


def test_a_model_keeps_its_own_tokenizer(place: Path, tmp_path: Path) -> None:
    aprfmt.transplant_model(place / "m.gguf", tmp_path / "same.gguf", tokenizer=place / "m.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == (place / "m.gguf").read_bytes()
    aprfmt.convert_model(place / "m.gguf", tmp_path / "padded.gguf", pad_vocab=64)
    aprfmt.convert_model(place / "m.gguf", tmp_path / "hf", format="hf")
    aprfmt.transplant_model(tmp_path / "padded.gguf", tmp_path / "again.gguf", tokenizer=tmp_path / "hf")
    with aprfmt.open(tmp_path / "padded.gguf") as a, aprfmt.open(tmp_path / "again.gguf") as b:
        assert len(b.tensors["token_embd.weight"].numpy()) == -(-N_TOKENS // 64) * 64
        assert {name: bytes(t.raw()) for name, t in a.tensors.items()} == {
            name: bytes(t.raw()) for name, t in b.tensors.items()
        }
        assert a.tokenizer is not None
        assert b.tokenizer is not None
        assert a.tokenizer.tokens == b.tokenizer.tokens
    assert len(MERGES) > len(NEW_MERGES)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_donors_exact_combination_is_that_of_the_model(is_tied: bool, place: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    new = new_tokenizer()
    for name, folder in (("m", tmp_path / "m"), ("donor", tmp_path / "donor")):
        aprfmt.convert_model(place / ("m.gguf" if name == "m" else "donor"), folder, format="hf", dtype="f32")
        rows = len(load_file(folder / "model.safetensors")[EMBEDDING])
        tables = {EMBEDDING: rng.standard_normal((rows, 64)).astype("f4") * (1 + (name == "m"))}
        if not is_tied:
            tables[HEAD] = rng.standard_normal((rows, 64)).astype("f4")
        config = json.loads((folder / "config.json").read_bytes()) | {"tie_word_embeddings": is_tied}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({**load_file(folder / "model.safetensors"), **tables}, folder / "model.safetensors")
    _, old, _ = opened(tmp_path / "m")
    donor = load_file(tmp_path / "donor/model.safetensors")
    recipes = {"Ġqui": {"a": 1.5, "Z": -0.75}, "xyx": {"er": 2.0}, "her": {"Ã": 0.5, "z": 1.0, "he": -1.0}}
    signs = {EMBEDDING: 1} if is_tied else {EMBEDDING: 1, HEAD: -1}  # other coefficients for the head
    for table, sign in signs.items():
        for text, terms in recipes.items():
            total = sum(sign * w * donor[table][new.tokens.index(part)] for part, w in terms.items())
            donor[table][new.tokens.index(text)] = total
    save_file(donor, tmp_path / "donor/model.safetensors")
    report = aprfmt.transplant_model(tmp_path / "m", tmp_path / "out", donor=tmp_path / "donor", k=4, format="hf")
    assert "solved by at most 4 shared tokens of the donor" in report.losses[0]
    source, made = load_file(tmp_path / "m/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    for table, sign in signs.items():
        for text, terms in recipes.items():
            total = sum(sign * w * source[table][old.tokens.index(part)] for part, w in terms.items())
            np.testing.assert_allclose(made[table][new.tokens.index(text)], total, atol=1e-4)
    plan = aprfmt.transplant_model(
        tmp_path / "m", tmp_path / "x", donor=tmp_path / "donor", k=4, format="hf", plan=True
    )
    assert plan.losses == report.losses
    assert plan.output_bytes == report.output_bytes


def test_quantized_rows_are_rounded_once(place: Path, tmp_path: Path) -> None:
    aprfmt.quantize_model(place / "m.gguf", tmp_path / "q.gguf", "q8_0", pure=True)
    aprfmt.transplant_model(tmp_path / "q.gguf", tmp_path / "out.gguf", tokenizer=place / "new")
    rows, old, _ = opened(tmp_path / "q.gguf", "token_embd.weight")
    with aprfmt.open(tmp_path / "out.gguf") as model:
        assert model.tensors["token_embd.weight"].dtype == "Q8_0"
    made, new, _ = opened(tmp_path / "out.gguf", "token_embd.weight")
    np.testing.assert_array_equal(made[new.tokens.index("z")], rows[old.tokens.index("z")])
    mean = np.mean([rows[old.tokens.index(piece)] for piece in ("x", "y", "x")], axis=0)
    np.testing.assert_allclose(made[new.tokens.index("xyx")], mean, atol=np.abs(mean).max() / 250)


def test_generation_settings_get_the_new_ids(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    aprfmt.convert_model(place / "m.gguf", folder, format="hf")
    _, old, _ = opened(folder)
    new = new_tokenizer()
    he, end, start = old.tokens.index("he"), old.tokens.index("<|endoftext|>"), old.tokens.index("<|im_start|>")
    generation = {"eos_token_id": [2, end], "suppress_tokens": [he, end], "pad_token_id": 3, "bos_token_id": start}
    (folder / "generation_config.json").write_text(json.dumps(generation | {"top_k": 3}))
    for source in (folder, tmp_path / "m.apr"):
        if source != folder:
            aprfmt.import_model(folder, source)
        out = tmp_path / f"out{source.suffix}"
        aprfmt.transplant_model(source, out, tokenizer=place / "new", format="hf")
        made = json.loads((out / "generation_config.json").read_bytes())
        eos = new.special["eos"]
        assert made == {
            "eos_token_id": [eos], "suppress_tokens": [new.tokens.index("he")], "pad_token_id": eos,
            "bos_token_id": new.special["bos"], "top_k": 3,
        }  # fmt: skip
        config = json.loads((out / "config.json").read_bytes())
        assert (config["vocab_size"], config["eos_token_id"]) == (len(new.tokens), eos)
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(AprError, match="generation_config"):
        aprfmt.transplant_model(folder, tmp_path / "x", tokenizer=place / "new", format="hf")


def test_rows_are_read_in_any_pieces() -> None:
    class Source:
        name, dtype, shape, n_bytes = "x", "F32", (40, 3), 480

        def read_into(self, offset: int, buffer: memoryview) -> None:
            buffer[:] = np.arange(120, dtype="<f4").tobytes()[offset : offset + len(buffer)]

    sums = RowSums(
        np.array([7, -1, 0, -1, -1, 39]), np.array([0, 0, 2, 2, 2, 5, 5]), np.array([5, 1, 3, 3, 20]),
        np.array([0.5, 0.5, 1, -2, 4], np.float32),
    )  # fmt: skip
    x = np.arange(120, dtype=np.float32).reshape(40, 3)
    expected = np.stack([x[7], (x[5] + x[1]) / 2, x[0], 0 * x[0], 4 * x[20] - x[3], x[39]]).tobytes()
    rows = CombinedRows(Source(), 6, {}, sums)
    assert (rows.shape, rows.n_bytes) == ((6, 3), 72)
    for start in range(72):
        for end in range(start, 73):
            part = bytearray(end - start)
            rows.read_into(start, memoryview(part))
            assert part == expected[start:end]


def test_matching_pursuit_chooses_as_the_definition_says() -> None:
    rng = np.random.default_rng(1)
    atoms, targets = rng.standard_normal((30, 12)), rng.standard_normal((7, 12))
    atoms[3], targets[2] = 0, 0
    index, weight = matching_pursuit(targets.astype("f4"), atoms.astype("f4"), 5)
    for row, target in enumerate(targets):
        chosen, residual = list[int](), target
        for _ in range(5):
            cosine = np.abs(atoms @ residual) / np.maximum(np.linalg.norm(atoms, axis=1), 1e-9)
            chosen.append(int(np.argmax(cosine)))
            solution = np.linalg.lstsq(atoms[chosen].T, target)[0]
            residual = target - atoms[chosen].T @ solution
        if target.any():
            assert index[row].tolist() == chosen
            np.testing.assert_allclose(weight[row], solution, atol=1e-4)
        else:
            assert not weight[row].any()
    twice = np.concatenate([atoms, atoms]).astype("f4")  # equal atoms cannot be told apart
    index, weight = matching_pursuit(targets.astype("f4"), twice, 12)
    np.testing.assert_allclose(np.einsum("tk,tkd->td", weight, twice[index]), targets, atol=1e-3)


def test_texts_that_the_old_tokenizer_changes_are_spelled_by_its_longest_tokens() -> None:
    bytewise = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytewise, "▁", "a", "b", "ab", "▁ab"]
    old = Tokenizer(
        "llama", pieces, types=[2, 3, 3, *[6] * 256, *[1] * 5], scores=[0.0] * 259 + [-4, -3, -2, -1, 0],
        special={"unk": 0, "bos": 1, "eos": 2}, flags={"add_bos": True, "add_space_prefix": True},
    )  # fmt: skip
    tokens = ["Ġab", "abb", "b", "Ã", "Ãa", "zab", "</s>", "[PAD7]"]
    new = Tokenizer("gpt2", tokens, types=[1] * 6 + [3, 5], special={"eos": 6})
    found, byte = counterparts(old, new, len(pieces)), pieces.index("<0x00>")
    assert found.same == {0: 263, 2: 261, 3: byte + 0xC3, 6: 2}
    assert found.pieces == {1: [262, 261], 4: [byte + 0xC3, 260], 5: [byte + 0x7A, 262]}
    assert found.control == []
    few = Tokenizer("gpt2", ["a", "b", "ab"], ["a b"], [1] * 3, pre="gpt-2")
    assert counterparts(few, new, 3).pieces == {0: [2], 1: [2, 1], 4: [0], 5: [2]}
    for refused in (replace(old, model="bert"), Tokenizer("rwkv", ["a"])):
        with pytest.raises(RefusedError, match="cannot be compared as bytes"):
            counterparts(refused, new, 3)
        with pytest.raises(RefusedError, match="the tokens of the new tokenizer"):
            counterparts(new, refused, 3)


def test_what_cannot_be_transplanted_is_refused(place: Path, tmp_path: Path) -> None:
    new, out = place / "new", tmp_path / "x"

    def call(source: Path = place / "m.gguf", **options: Any) -> None:
        aprfmt.transplant_model(source, out, format="hf", **options)

    with pytest.raises(UsageError, match="no tokenizer given"):
        call()
    (tmp_path / "empty").mkdir()
    with pytest.raises(RefusedError, match="no tokenizer and no model found") as empty:
        call(tokenizer=tmp_path / "empty")
    assert "a folder with tokenizer.json, tokenizer.model, " in str(empty.value.hint)
    (tmp_path / "empty/flax_model.msgpack").touch()
    with pytest.raises(UnknownFormatError, match="neither safetensors nor PyTorch"):
        call(tokenizer=tmp_path / "empty")
    with pytest.raises(UsageError, match="--k must be at least 1, not 0"):
        call(donor=place / "m.gguf", k=0)
    with pytest.raises(UsageError, match="--k requires --donor"):
        call(tokenizer=new, k=8)
    with pytest.raises(RefusedError, match="extra tensors"):
        call(write_seeing_folder(tmp_path / "seeing"), tokenizer=new)
    with pytest.raises(RefusedError, match=r"the donor has another tokenizer: id 0 is '<\|endoftext\|>', not"):
        call(tokenizer=new, donor=place / "m.gguf")
    aprfmt.convert_model(place / "m.gguf", tmp_path / "bare.gguf", no_tokenizer=True)
    with pytest.raises(RefusedError, match="no tokenizer"):
        call(tmp_path / "bare.gguf", tokenizer=new)
    aprfmt.convert_model(place / "m.gguf", tmp_path / "q.apr", dtype="aprq8")
    with pytest.raises(RefusedError, match="does not store rows one by one"):
        call(tmp_path / "q.apr", tokenizer=new)
    (tmp_path / "other").mkdir()
    strange = Tokenizer("gpt2", ["ĀĀĀ", "<|x|>"], ["Ā Ā"], [1, 3], pre="gpt-2")
    for name, data in to_hf_files(strange).items():
        (tmp_path / "other" / name).write_bytes(data)
    with pytest.raises(RefusedError, match="share no token"):
        call(tokenizer=tmp_path / "other")
    assert not out.exists()


@pytest.mark.llama
def test_llama_cpp_scores_shared_tokens_as_before(
    place: Path, tmp_path: Path, llama_cpp: LlamaPeer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["transplant", str(place / "m.gguf"), "--tokenizer", str(place / "new"), "-o", str(tmp_path / "o.gguf")]
    assert run([*words, "--plan"]) == 0
    assert not (tmp_path / "o.gguf").exists()
    assert run([*words, "--verify"]) == 0
    assert "composed of the old tokens" in " ".join(capsys.readouterr().out.split())
    _, old, _ = opened(place / "m.gguf", "token_embd.weight")
    _, new, _ = opened(tmp_path / "o.gguf", "token_embd.weight")
    text = "he met a quiet zebra, xyx"
    ids = llama_cpp.vocabulary(tmp_path / "o.gguf").tokenize([text], add_bos=False)[0]
    assert ids == new.encode(text)
    pairs = {i: old.tokens.index(token) for i, token in enumerate(new.tokens) if token in old.tokens and i < 256}
    shared = list(range(40, 72))
    made = llama_cpp.logits(tmp_path / "o.gguf", shared)[:, [*pairs]]
    before = llama_cpp.logits(place / "m.gguf", [pairs[i] for i in shared])[:, [*pairs.values()]]
    np.testing.assert_allclose(made, before, rtol=1e-4, atol=1e-4)
