"""What Python callers see: tensors by item, a tokenizer that encodes, functions of commands, hints as arguments."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import demo_model
import pytest

import aprfmt
from aprfmt.cli.main import run as apr
from aprfmt.errors import RefusedError, UnknownTensorError, UsageError, python_words, set_hint_words
from aprfmt.tokenizer import encoding


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    demo_model.build(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_a_model_is_a_mapping_of_its_tensors(model_file: Path) -> None:
    with aprfmt.open(model_file) as model:
        names = list(model)
        assert names == list(model.tensors)
        assert model[names[0]] is model.tensors[names[0]]
        assert names[0] in model
        assert "absent" not in model
        with pytest.raises(UnknownTensorError, match="absent"):
            model["absent"]


def test_a_tokenizer_encodes_decodes_and_renders(model_file: Path) -> None:
    with aprfmt.open(model_file) as model:
        tokenizer = model.tokenizer
    assert tokenizer is not None
    text = "the cat and the h\u00e9n<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == aprfmt.vocab(model_file, text, special=False).texts[0].ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat and the h\u00e9n"
    talk = [{"role": "user", "content": "Who?"}]
    rendered = "<|im_start|>user\nWho?<|im_end|>\n"
    assert tokenizer.apply_chat_template(talk, tokenize=False) == rendered
    answer = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert answer == f"{rendered}<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(talk) == tokenizer.encode(rendered, add_special_tokens=False)
    for wrong in (300, -1, 1.5, True):
        with pytest.raises(UsageError, match="not in the vocabulary"):
            tokenizer.decode([wrong])  # type: ignore[list-item]
    tokenizer.chat_template = None
    with pytest.raises(RefusedError, match="no chat template"):
        tokenizer.apply_chat_template(talk)
    key = id(tokenizer)
    assert key in encoding._loaded
    del tokenizer, model
    gc.collect()
    assert key not in encoding._loaded, "what nobody uses is freed"


def test_functions_give_what_the_commands_print(model_file: Path, tmp_path: Path) -> None:
    found = aprfmt.tensors(model_file, filter="ffn_up", stats=True, hash=True, limit=1)
    assert (found.matched, len(found.tensors)) == (2, 1)
    row = found.to_json()["tensors"]
    assert isinstance(row, list)
    assert {"name", "sha256", "std", "offset"} <= row[0].keys()
    assert aprfmt.architectures("LlamaForCausalLM")["name"] == "llama"
    assert aprfmt.architectures()["count"] == len(aprfmt.architectures()["architectures"])  # type: ignore[arg-type]
    report = aprfmt.shard(model_file, tmp_path / "shards", shard_size="100KB")
    assert len(report.written) == 2
    with pytest.raises(UsageError, match="not a valid size"):
        aprfmt.shard(model_file, tmp_path / "none", shard_size=0)
    with pytest.raises(UsageError, match="unknown option 'stepz'") as caught:
        aprfmt.pretrain(stepz=3)
    assert caught.value.hint == "did you mean steps?"


@pytest.fixture
def python_hints() -> Iterator[None]:
    """Hints as a Python program gets them."""
    before = set_hint_words(python_words)
    yield
    set_hint_words(before)


@pytest.mark.usefixtures("python_hints")
def test_hints_name_arguments_for_python_and_options_for_a_shell(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.apr").write_text("")
    with pytest.raises(aprfmt.AprError) as caught:
        aprfmt.import_model(model_file, tmp_path / "x.apr")
    assert caught.value.hint is not None
    assert "force=True" in caught.value.hint
    assert "--" not in caught.value.hint
    assert apr(["import", str(model_file), "-o", str(tmp_path / "x.apr")]) == 5
    assert "--force" in capsys.readouterr().err
    with pytest.raises(aprfmt.AprError) as caught:
        aprfmt.import_model(model_file, tmp_path / "x.apr")
    assert "force=True" in str(caught.value.hint), "also after a command line in the same process"


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ("add --force to overwrite", "add force=True to overwrite"),
        ("use --epochs 3 or --repeat", "use epochs=3 or repeat=True"),
        ("pass --tokenizer FOLDER", "pass tokenizer=FOLDER"),
        ("leave out --top-k", "leave out top_k"),
        ("--no-license pushes without one", "license=False pushes without one"),
        ("--allow-unmapped drops them", "allow_unmapped=True drops them"),
        ("apr eval m.gguf --data text.txt", "apr eval m.gguf --data text.txt"),
        ("aws s3 cp --recursive s3://b/x FOLDER", "aws s3 cp --recursive s3://b/x FOLDER"),
        ("--verify=logits compares logits", "verify='logits' compares logits"),
        ("a -- b --- c", "a -- b --- c"),
    ],
)
def test_words(hint: str, words: str) -> None:
    assert python_words(hint) == words
