"""`apr prune --vocab-from`: the tokens of some texts in every format, encoded as before but for their numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arch_models import tokenizer_files
from demo_model import MERGES, N_TOKENS, build
from plain_models import write_seeing_folder

import aprfmt
from aprfmt.canonical.padded_vocabulary import ChosenRows
from aprfmt.cli.main import run
from aprfmt.errors import CorruptError, RefusedError, RunError, UsageError
from aprfmt.tokenizer.hf import read_files
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.tokenizer.trimming import closure, renumbered, trim

TEXT = "the heat and the thin error in the end"
UNSEEN = "Ünï→çødé of being 🦙"
OUTPUTS = {"out.gguf": "token_embd.weight", "out.apr": "model.embed_tokens.weight", "hf": "model.embed_tokens.weight"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    build(path)
    (path.parent / "t.txt").write_text(TEXT)
    return path


def opened_tokenizer(path: Path) -> Tokenizer:
    with aprfmt.open(path) as opened:
        assert opened.tokenizer is not None
        return opened.tokenizer


@pytest.mark.parametrize("then", OUTPUTS)
@pytest.mark.parametrize("name", OUTPUTS)
def test_every_format_has_the_rows_and_tokens_and_goes_to_the_others(
    name: str, then: str, model: Path, tmp_path: Path
) -> None:
    def format_of(name: str) -> dict[str, Any]:
        return {"format": name} if name == "hf" else {}

    first, second = tmp_path / f"first-{name}", tmp_path / f"second-{then}"
    report = aprfmt.prune_model(model, first, vocab_from=model.parent / "t.txt", **format_of(name))
    aprfmt.convert_model(first, second, **format_of(then))
    whole = opened_tokenizer(model)
    for path, tensor in ((first, OUTPUTS[name]), (second, OUTPUTS[then])):
        small = opened_tokenizer(path)
        places = [whole.tokens.index(text) for text in small.tokens]
        assert places == sorted(places)
        assert 260 < len(places) < N_TOKENS
        for text in (TEXT, f"<|im_start|>{TEXT}<|im_end|>"):
            assert [places[i] for i in small.encode(text)] == whole.encode(text)
        assert small.decode(small.encode(UNSEEN)) == UNSEEN
        assert {role: places[i] for role, i in small.special.items()} == whole.special
        with aprfmt.open(path) as made, aprfmt.open(model) as source:
            rows = source.tensors["token_embd.weight"].numpy()
            np.testing.assert_array_equal(made.tensors[tensor].numpy(), rows[places])
            assert made.hparams.vocab_size == len(places)
            assert made.hparams.eos_token_id == small.special["eos"]
    assert any(f"{len(places)} of {N_TOKENS} tokens kept, {N_TOKENS - len(places)} dropped" in x for x in report.losses)
    assert any("are unchanged except for their ids" in loss for loss in report.losses)


def test_configs_of_a_folder_name_the_new_ids(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    aprfmt.convert_model(model, folder, format="hf")
    document = json.loads((folder / "tokenizer.json").read_bytes())
    last = document["model"]["vocab"]["the"] if "the" in document["model"]["vocab"] else N_TOKENS - 1
    document["added_tokens"].append(
        {"id": N_TOKENS, "content": "<|new|>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
    )  # fmt: skip
    document["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|new|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|new|>": {"id": "<|new|>", "ids": [N_TOKENS], "tokens": ["<|new|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))
    generation = {"eos_token_id": [N_TOKENS, 2], "suppress_tokens": [last, N_TOKENS], "top_k": 3, "pad_token_id": None}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"vocab_size": N_TOKENS + 1, "eos_token_id": [N_TOKENS, 2]}
    (folder / "config.json").write_text(json.dumps(config))
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for key, values in tensors.items():
        if values.shape[0] == N_TOKENS:
            tensors[key] = np.concatenate([values, values[:1]])
    save_file(tensors, folder / "model.safetensors")
    for source in (folder, tmp_path / "whole.apr"):
        if source != folder:
            aprfmt.import_model(folder, source)
        made = tmp_path / f"small-{source.suffix}"
        aprfmt.prune_model(source, made, vocab_from=[model.parent / "t.txt"], format="hf")
        n = json.loads((made / "config.json").read_bytes())["vocab_size"]
        assert json.loads((made / "config.json").read_bytes())["eos_token_id"] == [n - 1, 2]
        read = json.loads((made / "generation_config.json").read_bytes())
        assert read["eos_token_id"] == [n - 1, 2]
        assert n - 1 in read["suppress_tokens"]
        assert (read["top_k"], read["pad_token_id"]) == (3, None)
        import tokenizers

        library = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
        assert library.get_vocab_size() == n
        assert library.encode(TEXT).ids[0] == n - 1
        assert library.decode(library.encode(TEXT).ids) == TEXT


@pytest.mark.parametrize("damaged", [b"{", b"[]", b"\xff"])
def test_a_damaged_generation_config_is_refused(damaged: bytes, model: Path, tmp_path: Path) -> None:
    aprfmt.convert_model(model, tmp_path / "whole", format="hf")
    (tmp_path / "whole" / "generation_config.json").write_bytes(damaged)
    with pytest.raises(CorruptError, match=r"generation_config\.json is not") as caught:
        aprfmt.prune_model(tmp_path / "whole", tmp_path / "small", vocab_from=model.parent / "t.txt", format="hf")
    assert caught.value.path == str(tmp_path / "whole")


def test_any_texts_keep_their_tokens_with_any_merges() -> None:
    rng = random.Random(5)
    words = ["abab", "aabb", "bbaab", "abcab", "ccab", "cabbage", "back", "ab", "deed", "a bed"]
    for _ in range(20):
        merges, known = list[str](), list("abcdeg k")
        while len(merges) < 25:
            left, right = rng.choices(known, k=2)
            if len(left + right) < 6 and " " not in left + right and left + right not in known:
                merges.append(f"{left} {right}")
                known.append(left + right)
        whole = Tokenizer("gpt2", ["<e>", *known[:-26], *known[-26:]], merges, [3] + [1] * len(known), pre="gpt-2")
        whole.special["eos"] = 0
        texts = rng.sample(words, 3)
        used = {i for text in texts for i in whole.encode(text)}
        kept = closure(whole, used)
        small = trim(whole, kept)
        for text in texts:
            assert [kept[i] for i in small.encode(text)] == whole.encode(text)


def test_real_merges_and_files(tmp_path: Path) -> None:
    whole = read_files(tokenizer_files("smollm2", 3000))
    assert whole is not None
    used = {*whole.encode(TEXT)}
    small = trim(whole, kept := closure(whole, used))
    again = read_files(small.files)
    assert again is not None
    assert again.tokens == small.tokens
    assert again.special == small.special
    assert [kept[i] for i in again.encode(TEXT)] == whole.encode(TEXT)
    assert len(small.merges) < len(small.tokens) < 400
    assert renumbered({"a_token_id": 5, "b_token_ids": [1, 5], "n": 5, "c_token_id": -1}, {5: 2}) == {
        "a_token_id": 2, "b_token_ids": [2], "n": 5, "c_token_id": -1,
    }  # fmt: skip


def test_rows_are_read_in_any_pieces() -> None:
    class Source:
        name, dtype, shape, n_bytes = "x", "F16", (40, 3), 240

        def read_into(self, offset: int, buffer: memoryview) -> None:
            buffer[:] = bytes(range(240))[offset : offset + len(buffer)]

    rows = ChosenRows(Source(), 5, {}, np.array([0, 1, 7, 8, 39]))
    whole = bytearray(rows.n_bytes)
    rows.read_into(0, memoryview(whole))
    assert whole == b"".join(bytes(range(6 * i, 6 * i + 6)) for i in (0, 1, 7, 8, 39))
    for start in range(30):
        for end in range(start, 30):
            part = bytearray(end - start)
            rows.read_into(start, memoryview(part))
            assert part == whole[start:end]


def test_what_cannot_be_trimmed_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = model.parent / "t.txt"
    with pytest.raises(UsageError, match="--vocab-from"):
        aprfmt.prune_model(model, tmp_path / "x.gguf")
    (tmp_path / "none.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(RefusedError, match="have no tokens"):
        aprfmt.prune_model(model, tmp_path / "x.gguf", vocab_from=tmp_path / "none.jsonl")
    with pytest.raises(RefusedError, match="extra tensors"):
        aprfmt.prune_model(write_seeing_folder(tmp_path / "seeing"), tmp_path / "x", format="hf", vocab_from=texts)
    with pytest.raises(RefusedError, match="only a BPE vocabulary can be trimmed"):
        closure(Tokenizer("llama", ["a"], scores=[0.0]), {0})
    monkeypatch.setattr("aprfmt.tokenizer.trimming._sides", lambda merge: ("", ""))
    with pytest.raises(RunError, match="encodes the texts differently; nothing was written"):
        aprfmt.prune_model(model, tmp_path / "x.gguf", vocab_from=texts)
    assert not (tmp_path / "x.gguf").exists()


def test_the_command_says_what_it_kept(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = str(model.parent / "t.txt")
    out = str(tmp_path / "o.gguf")
    assert (
        run(["prune", str(model), "--vocab-from", texts, "--vocab-from", texts, "--keep-layers", "1", "-o", out]) == 0
    )
    assert "tokens kept" in " ".join(capsys.readouterr().out.split())
    with aprfmt.open(out) as opened:
        assert opened.hparams.num_layers == 1
        assert "Vocabulary: " in str(opened.metadata["general.description"])
    assert len(MERGES) > len(opened_tokenizer(tmp_path / "o.gguf").merges) > 3
