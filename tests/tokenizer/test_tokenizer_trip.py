"""Real tokenizers in whole models: folders and files come back, and llama.cpp gives the ids of `tokenizers`."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from converter_peer import ConverterPeer
from llama_peer import LlamaPeer, Vocabulary
from natives import apr2_native, gguf_parts
from texts import make_texts
from tokenizer_folders import write_folder

import aprfmt
from aprfmt.formats import gguf
from aprfmt.tokenizer import hf, hf_write
from aprfmt.tokenizer.model import Tokenizer

SIZES = {"qwen2_5": 151936, "qwen3": 151936, "llama3": 128256, "gemma3": 262208, "gpt4o": 200064}
MOST_METADATA = {"qwen2_5": 8_000_000, "gemma3": 25_000_000}
pytestmark = pytest.mark.turns(by="name", of=16)
FAMILIES = [pytest.param(name, marks=pytest.mark.slow) for name in SIZES]
Trip = tuple[Path, Path]


@pytest.fixture(scope="module")
def trip(real_tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trip]:
    """The folder of a tiny model with a real tokenizer, and the `.apr` imported from it."""
    made: dict[str, Trip] = {}

    def get(name: str) -> Trip:
        if name not in made:
            work = tmp_path_factory.mktemp(name)
            files = {path.name: path.read_bytes() for path in real_tokenizers[name].iterdir()}
            folder = write_folder(work / "model", files, SIZES[name], bos_token_id=None, eos_token_id=None)
            aprfmt.import_model(folder, work / "m.apr")
            made[name] = folder, work / "m.apr"
        return made[name]

    return get


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def added(tok: Tokenizer) -> list[str]:
    return [text for text, kind in zip(tok.tokens, tok.types, strict=True) if kind in (3, 4)]


def different(fast: Any, model: Vocabulary, texts: list[str]) -> list[str]:
    """The texts whose ids differ between `tokenizers` and llama.cpp."""
    expected = fast.encode_batch(texts)
    return [
        text
        for text, known, ids in zip(texts, expected, model.tokenize(texts, add_bos=True), strict=True)
        if ids != list(known.ids)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_folder_comes_back_and_stores_its_vocabulary_once(
    trip: Callable[[str], Trip], tmp_path: Path, name: str
) -> None:
    folder, apr = trip(name)
    report = aprfmt.export_model(apr, tmp_path / "back", format="hf")
    assert report.lossless
    assert hashes(tmp_path / "back") == hashes(folder)
    with aprfmt.open(apr) as model:
        size = apr2_native(model).header.metadata_size
        text = json.dumps(model.metadata["aprfmt.source"])
    assert size < MOST_METADATA.get(name, 25_000_000)
    assert len(text) < 2_000_000  # what stands beside the lists


@pytest.mark.llama
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_gives_the_ids_of_tokenizers(
    trip: Callable[[str], Trip], llama_cpp: LlamaPeer, tmp_path: Path, name: str
) -> None:
    from tokenizers import Tokenizer as Fast

    folder, apr = trip(name)
    aprfmt.export_model(apr, tmp_path / "m.gguf")
    model = llama_cpp.vocabulary(tmp_path / "m.gguf")
    assert model.size == SIZES[name]
    with aprfmt.open(apr) as opened:
        assert opened.tokenizer is not None
        texts = make_texts(10_000, added(opened.tokenizer))
    wrong = different(Fast.from_file(str(folder / "tokenizer.json")), model, texts)
    assert not wrong, f"{len(wrong)} of {len(texts)}, the first {wrong[0]!r}"


@pytest.mark.llama
@pytest.mark.slow
def test_gpt_4o_needs_another_rule_than_the_one_of_its_name(
    trip: Callable[[str], Trip], llama_cpp: LlamaPeer, tmp_path: Path
) -> None:
    """Under `gpt-4o` llama.cpp ends words before combining marks: a tenth of the mixed texts differ."""
    from tokenizers import Tokenizer as Fast

    folder, apr = trip("gpt4o")
    (note,) = aprfmt.export_model(apr, tmp_path / "own.gguf", plan=True).warnings
    assert "b9484" in note
    assert "--pre gpt-4o" in note
    assert aprfmt.export_model(apr, tmp_path / "m.gguf", pre="gpt-4o").warnings == []
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    wrong = different(fast, llama_cpp.vocabulary(tmp_path / "m.gguf"), make_texts(1000, []))
    assert 50 < len(wrong) < 200
    assert "हिन्दी" not in wrong


@pytest.mark.llama
@pytest.mark.slow
def test_smollm2(smollm2_gguf: Path, llama_cpp: LlamaPeer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast

    aprfmt.import_model(smollm2_gguf, tmp_path / "m.apr")
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    with aprfmt.open(tmp_path / "m.apr") as model:
        tok = model.tokenizer
    assert tok is not None
    fast = Fast.from_buffer(hf_write.to_hf_files(tok)["tokenizer.json"])
    wrong = different(fast, llama_cpp.vocabulary(tmp_path / "m.gguf"), make_texts(10_000, added(tok)))
    assert not wrong, f"{len(wrong)}, the first {wrong[0]!r}"


CASES = [
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe",
    "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
]  # fmt: skip
ALL = [*CASES, "aquila", "baichuan", "gpt-neox", "nomic-bert-moe"]


def cases(path: Path) -> list[tuple[str, list[int]]]:
    """llama.cpp's own test texts of a vocabulary, with their ids."""
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in line.split()] for line in path.with_name(path.name + ".out").read_text().splitlines()]
    assert len(texts) - len(ids) in (0, 1)
    return list(zip(texts, ids, strict=False))


@pytest.mark.llama
@pytest.mark.parametrize("name", CASES)
def test_llama_cpps_own_cases_after_the_trip(
    llama_cpp_models: Path, llama_cpp: LlamaPeer, tmp_path: Path, name: str
) -> None:
    source = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    aprfmt.import_model(source, tmp_path / "m.apr")
    report = aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    assert report.lossless
    assert (tmp_path / "m.gguf").read_bytes() == source.read_bytes()
    model = llama_cpp.vocabulary(tmp_path / "m.gguf")
    known = cases(source)
    assert len(known) >= 46
    texts = [text for text, _ in known]
    ids = model.tokenize(texts, add_bos=False, special=False)
    assert [t for t, (_, own), its in zip(texts, known, ids, strict=True) if own != its] == []


@pytest.mark.parametrize("name", ALL)
def test_no_tokenizer_key_is_lost_in_the_metadata(llama_cpp_models: Path, name: str) -> None:
    """GGUF keys -> Tokenizer -> APR metadata as JSON text -> Tokenizer -> GGUF keys."""
    from aprfmt.tokenizer import apr, ggml

    with gguf.open_model(llama_cpp_models / f"ggml-vocab-{name}.gguf") as model:
        kv = gguf_parts(model)[0].kv
        source = [(key, kv.kind(key), kv[key]) for key in kv if key.startswith("tokenizer.")]
        tok = model.tokenizer
    assert tok is not None
    back = apr.from_metadata(json.loads(json.dumps(apr.to_metadata(tok), sort_keys=True)))
    assert back == tok
    assert ggml.to_gguf(back, vocab_size=len(tok.tokens)) == source


# Vocabulary, mixed texts, how many of them differ at most.
WRITTEN = [
    # llama.cpp takes an ideographic space for a vertical tab
    ("deepseek-llm", 10),
    # its vocabulary has no token for a vertical tab, which `tokenizers` leaves out before merges, llama.cpp behind them
    ("falcon", 10),
    ("aquila", 0),
    ("gpt-neox", 0),
    ("llama-spm", 0),
    # `tokenizers` takes away any white space behind Phi-3's special tokens, llama.cpp that of ASCII
    ("phi-3", 60),
    ("baichuan", 0),
    ("gemma-4", 0),
    # `tokenizers` normalises whole grapheme clusters where SentencePiece and llama.cpp look at code points
    ("nomic-bert-moe", 3),
]


@pytest.mark.llama
@pytest.mark.parametrize(("name", "most"), WRITTEN)
def test_written_tokenizer_json_gives_llama_cpps_ids(
    llama_cpp_models: Path, llama_cpp: LlamaPeer, name: str, most: int
) -> None:
    from tokenizers import Tokenizer as Fast

    path = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    with gguf.open_model(path) as model:
        tok, title = model.tokenizer, model.metadata.get("general.name")
    assert tok is not None
    files = hf_write.to_hf_files(tok, name=title)
    fast = Fast.from_buffer(files["tokenizer.json"])
    wrong = different(fast, llama_cpp.vocabulary(path), make_texts(2000, added(tok)))
    assert len(wrong) <= most, f"{len(wrong)}, the first {wrong[0]!r}"
    if name in CASES:
        encoded = [(text, list(fast.encode(text, add_special_tokens=False).ids)) for text, _ in cases(path)]
        assert encoded == cases(path)
    again = hf.read_files(files)
    assert again is not None
    assert again.special["bos"] == tok.special["bos"]


@pytest.mark.parametrize("name", CASES)
def test_llama_cpps_own_cases_through_the_written_tokenizer_json(llama_cpp_models: Path, name: str) -> None:
    from tokenizers import Tokenizer as Fast

    path = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    with gguf.open_model(path) as model:
        tok = model.tokenizer
    assert tok is not None
    written = hf_write.to_hf_files(tok)["tokenizer.json"]
    fast = plain = Fast.from_buffer(written)
    known = cases(path)
    odd = [text for text, _ in known if not unicodedata.is_normalized("NFC", text)]
    assert len(odd) == (3 if name == "qwen35" else 0)
    if odd:  # llama.cpp does not normalise to NFC, the tokenizers of Qwen do
        plain = Fast.from_str(json.dumps({**json.loads(written), "normalizer": None}))
    found = [(plain if text in odd else fast).encode(text, add_special_tokens=False).ids for text, _ in known]
    assert [(text, list(ids)) for (text, _), ids in zip(known, found, strict=True)] == known


@pytest.mark.slow
def test_a_gguf_that_the_converter_made_of_gemma_3_goes_back(
    real_tokenizers: dict[str, Path], llama_cpp_converter: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer as Fast

    files = {path.name: path.read_bytes() for path in real_tokenizers["gemma3"].iterdir()}
    sizes: dict[str, Any] = {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16}
    folder = write_folder(
        tmp_path / "model", files, SIZES["gemma3"], rows=1, **sizes, architectures=["Gemma3ForCausalLM"]
    )
    ConverterPeer().convert_once(folder, tmp_path / "m.gguf", "f16", ["--vocab-only"])
    with gguf.open_model(tmp_path / "m.gguf") as model:
        tok = model.tokenizer
    assert tok is not None
    assert (tok.model, tok.pre) == ("gpt2", "granite-embed-multi-311m")
    fast = Fast.from_buffer(hf_write.to_hf_files(tok)["tokenizer.json"])
    own = Fast.from_buffer(files["tokenizer.json"])
    texts = make_texts(2000, ["<start_of_turn>"])
    assert [text for text in texts if fast.encode(text).ids != own.encode(text).ids] == []


@pytest.mark.llama
def test_written_wordpiece_gives_llama_cpps_ids(llama_cpp_models: Path, llama_cpp: LlamaPeer) -> None:
    """Equal but for Hangul and spacing marks, of which llama.cpp takes more away than BERT, and for control
    characters, some of which end words there."""
    from tokenizers import Tokenizer as Fast

    path = llama_cpp_models / "ggml-vocab-bert-bge.gguf"
    with gguf.open_model(path) as model:
        tok = model.tokenizer
    assert tok is not None
    files = hf_write.to_hf_files(tok)
    fast = Fast.from_buffer(files["tokenizer.json"])
    assert [list(fast.encode(t, add_special_tokens=False).ids) for t, _ in cases(path)] == [
        ids for _, ids in cases(path)
    ]

    def plain(text: str) -> bool:
        odd = {"Mc", "Me", "Cc", "Cf", "Zl"}
        return not any(
            "\uac00" <= c <= "\ud7a3" or (c not in "\t\n\r" and unicodedata.category(c) in odd) for c in text
        )

    texts = [text for text in make_texts(6000, added(tok)) if plain(text)]
    assert len(texts) > 1000
    wrong = different(fast, llama_cpp.vocabulary(path), texts)
    assert wrong == []
    again = hf.read_files(files, {"type_vocab_size": 2})
    assert again is not None
    assert (again.model, again.tokens, again.types) == ("bert", tok.tokens, tok.types)
    assert again.extra == tok.extra
