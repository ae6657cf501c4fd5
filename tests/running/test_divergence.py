"""apr eval --against: the statistics of llama-perplexity's --kl-divergence, and its logits files."""

from __future__ import annotations

import json
import math
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import demo_model
import numpy as np
import pytest

import aprfmt
from aprfmt.cli.main import run
from aprfmt.errors import CorruptError, ExistsError, RefusedError, UsageError
from aprfmt.llama.client import Llama
from aprfmt.running import divergence, scoring
from aprfmt.running.divergence_report import histogram

pytestmark = pytest.mark.llama

Apr = Callable[..., Any]
N_CTX = 32
TEXT = "".join(f"{i} green bottles hang on the wall, and {i * i % 97} of them fall.\n" for i in range(9))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def small(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in four bits."""
    path = tmp_path_factory.mktemp("small") / "q4.gguf"
    aprfmt.quantize_model(tiny_gguf, path, "q4_0")
    return path


@pytest.fixture
def apr(capsys: pytest.CaptureFixture[str]) -> Apr:
    """Runs the command line; gives its exit status and what it prints."""

    def call(*words: object) -> tuple[int, str]:
        code = run([str(word) for word in words])
        return code, capsys.readouterr().out

    return call


def logits_of(path: Path, chunks: list[list[int]], folder: Path) -> list[Any]:
    """float64 logits of the scored positions, by the definition of llama-perplexity."""
    found = []
    with Llama(path, n_ctx=N_CTX) as llama:
        for ids in chunks:
            given = [llama.facts.bos, *ids[1:]] if llama.facts.adds_bos else ids
            out = folder / "out"
            out.write_bytes(bytes(4 * len(given) * llama.n_vocab))
            llama.logits(given, out)
            rows = np.fromfile(out, np.float32).reshape(len(given), -1).astype(np.float64)
            found += [(rows[i], ids[i + 1]) for i in range(N_CTX // 2, N_CTX - 1)]
    return found


def test_the_statistics_are_those_of_the_definition(tiny_gguf: Path, small: Path, text: Path, tmp_path: Path) -> None:
    with Llama(tiny_gguf, n_ctx=N_CTX) as llama:
        ids = llama.tokenize(TEXT, parse_special=False)
    chunks = [ids[i * N_CTX : (i + 1) * N_CTX] for i in range(3)]
    kl: list[float] = []
    change, same, losses = [], [], []
    for (base, label), (own, _) in zip(
        logits_of(tiny_gguf, chunks, tmp_path), logits_of(small, chunks, tmp_path), strict=True
    ):
        p = [x - math.log(np.exp(base - base.max()).sum()) - base.max() for x in base]
        q = [x - math.log(np.exp(own - own.max()).sum()) - own.max() for x in own]
        kl.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
        change.append(math.exp(q[label]) - math.exp(p[label]))
        same.append(int(np.argmax(base)) == int(np.argmax(own)))
        losses.append(-q[label])
    found = aprfmt.kl_divergence(small, tiny_gguf, text, n_ctx=N_CTX, chunks=3)
    assert (found.tokens, found.chunks) == (45, 3)
    assert found.kl == pytest.approx(np.mean(kl), abs=1e-3, rel=1e-3)
    assert found.kl > 0.001  # four bits lose something
    for part in (0.5, 0.9, 0.99, 0.999, 1):
        assert found.kl_quantiles[f"{part:g}"] == pytest.approx(np.quantile(kl, part), abs=1e-3)
    assert found.kl_error == pytest.approx(np.std(kl) / math.sqrt(44), abs=1e-4)
    assert found.agreement == pytest.approx(np.mean(same))
    assert found.rms_dp == pytest.approx(math.sqrt(np.mean(np.square(change))), abs=1e-4)
    assert found.ce == pytest.approx(np.mean(losses), abs=1e-3)


def test_a_model_does_not_diverge_from_itself(tiny_gguf: Path, text: Path) -> None:
    found = aprfmt.kl_divergence(tiny_gguf, tiny_gguf, text, n_ctx=N_CTX, chunks=1)
    assert abs(found.kl) < 1e-5
    assert found.agreement == 1
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=1e-3)


def test_rows_of_a_logits_file() -> None:
    """The arithmetic of llama-perplexity, one value after the other."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((3, 7)) * 9).astype("f4")
    for row, values in zip(divergence.packed(logits), logits, strict=True):
        top, low = float(values.max()), max(float(values.min()), float(values.max()) - 16)
        total = sum(math.exp(float(x) - top) for x in values)
        scale, floor = struct.unpack("<2f", row[:4].tobytes())
        assert scale == pytest.approx((top - low) / 65535, rel=1e-6)
        assert floor == pytest.approx(low - top - math.log(total), rel=1e-6)
        codes = [round((float(x) - low) / scale) if x > low else 0 for x in values]
        assert np.abs(row[4:11].astype(int) - codes).max() <= 1
    assert len(divergence.packed(logits)[0]) == 12  # an odd vocabulary is filled up
    assert not divergence.packed(np.zeros((1, 4), "f4"))[0, 4:].any()  # no range, no division by zero


def test_a_saved_file_gives_the_same_report(apr: Apr, tiny_gguf: Path, small: Path, text: Path, tmp_path: Path) -> None:
    saved = tmp_path / "base.kld"
    words = ("--data", text, "--seq-len", N_CTX, "--limit", 3 * N_CTX)
    first = json.loads(apr("eval", small, "--against", tiny_gguf, *words, "--save-logits", saved, "--json")[1])
    again = json.loads(apr("eval", small, "--against", saved, "--json")[1])
    for key in ("kl", "kl_quantiles", "agreement", "rms_dp", "perplexity", "reference_perplexity", "n_ctx", "chunks"):
        assert again[key] == pytest.approx(first[key], rel=1e-6), key
    data = saved.read_bytes()
    n_vocab = divergence.read_head(saved).n_vocab
    assert struct.unpack("<8s3i", data[:20]) == (b"_logits_", N_CTX, n_vocab, 3)
    assert len(data) == 20 + 4 * 3 * N_CTX + 3 * (N_CTX - 1 - N_CTX // 2) * 2 * (n_vocab + n_vocab % 2 + 4)
    assert f"{first['kl']:.6f}" in apr("eval", small, "--against", saved)[1]
    with pytest.raises(ExistsError):
        aprfmt.kl_divergence(small, tiny_gguf, text, n_ctx=N_CTX, save_logits=saved)


def test_a_page_shows_the_distribution_and_the_layers(
    apr: Apr, tiny_gguf: Path, small: Path, text: Path, tmp_path: Path
) -> None:
    page, saved = tmp_path / "page.html", tmp_path / "base.kld"
    words = ("eval", small, "--against", tiny_gguf, "--data", text, "--seq-len", N_CTX, "--limit", 3 * N_CTX)
    code, said = apr(*words, "-o", page, "--save-logits", saved, "--json")
    assert code == 0
    body = json.loads(said)
    assert body["output"] == str(page)
    assert sum(body["kl_histogram"]) == body["tokens"]
    top = max(range(len(body["kl_histogram"])), key=body["kl_histogram"].__getitem__)
    assert abs(-8 + top / 4 - math.log10(body["kl_quantiles"]["0.5"])) < 1
    shown = page.read_text()
    assert f"{body['kl']:.4g}" in shown
    for title in ("Distribution of KL", "KL by percentile", "SNR of B, in dB"):
        assert f"<b>{title}</b>" in shown
    assert "layer 1 mlp.up_proj.weight: SNR" in shown
    assert apr(*words, "-o", page)[0] == 5  # it exists
    assert apr("eval", small, "--against", saved, "-o", page, "--force")[0] == 0
    assert "without weights" in page.read_text()
    assert apr("eval", small, "--data", text, "-o", page)[0] == 2
    assert apr(*words, "-o", tmp_path / "page.txt")[0] == 2


def test_a_histogram_counts_what_lies_beyond_its_ends() -> None:
    found = histogram(np.array([0.0, -1e-9, 1e-12, 1.0, 1e9]))
    assert (found[0], found[32], found[-1], sum(found)) == (3, 1, 1, 5)


def test_damaged_logits_files(small: Path, text: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    saved = tmp_path / "base.kld"
    aprfmt.kl_divergence(small, tiny_gguf, text, n_ctx=N_CTX, chunks=1, save_logits=saved)
    good = saved.read_bytes()
    damaged = {
        "cut": good[:-2],
        "longer": good + b"\0",
        "head": good[:15],
        "id": good[:20] + struct.pack("<i", 1 << 20) + good[24:],
        "negative id": good[:20] + struct.pack("<i", -1) + good[24:],
        "no chunk": good[:16] + struct.pack("<i", 0) + good[20:],
        "many chunks": good[:16] + struct.pack("<i", 2**31 - 1) + good[20:],
    }
    tracemalloc.start()
    for data in damaged.values():
        saved.write_bytes(data)
        with pytest.raises(CorruptError):
            aprfmt.kl_divergence(small, saved)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20  # two billion chunks are compared with the size first
    tracemalloc.stop()
    # A complete file of another vocabulary.
    rows = np.zeros((N_CTX - 1 - N_CTX // 2, 12), "<u2")
    saved.write_bytes(struct.pack("<8s3i", b"_logits_", N_CTX, 8, 1) + bytes(4 * N_CTX) + rows.tobytes())
    with pytest.raises(RefusedError, match="vocabularies differ"):
        aprfmt.kl_divergence(small, saved)


def test_vocabularies_are_compared_before_the_reference_is_computed(
    tiny_gguf: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "write_logits", lambda *args, **options: pytest.fail("too early"))
    demo_model.build(tmp_path / "demo.gguf")
    with pytest.raises(RefusedError, match="the model has 300 tokens, the reference 320"):
        aprfmt.kl_divergence(tmp_path / "demo.gguf", tiny_gguf, text, n_ctx=N_CTX)


def test_chunks_are_not_longer_than_the_context(tiny_model: Callable[[str], Any], text: Path, tmp_path: Path) -> None:
    folder, long = tmp_path / "m", tmp_path / "long.txt"
    shutil.copytree(tiny_model("mistral")[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    long.write_text(TEXT * 9)
    found = aprfmt.kl_divergence(folder, folder, long, limit=200)
    assert (found.n_ctx, found.chunks) == (64, 3)
    with pytest.raises(RefusedError, match="exceeds the context length 64 of the reference"):
        aprfmt.kl_divergence(folder, folder, long, n_ctx=65)


def test_options_that_do_not_apply(apr: Apr, small: Path, tiny_gguf: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data is missing"):
        aprfmt.kl_divergence(small, tiny_gguf)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(RefusedError, match="shorter than one chunk"):
        aprfmt.kl_divergence(small, tiny_gguf, tmp_path / "short.txt")
    (tmp_path / "base.kld").write_bytes(b"_logits_")
    for given in ({"data": text}, {"n_ctx": N_CTX}, {"chunks": 1}, {"limit": 99}, {"save_logits": tmp_path / "x.kld"}):
        with pytest.raises(UsageError, match="contains its text"):
            aprfmt.kl_divergence(small, tmp_path / "base.kld", **given)
    with pytest.raises(RefusedError, match="exceeds the context length") as info:
        aprfmt.kl_divergence(small, tiny_gguf, text, n_ctx=513)
    assert "--seq-len" in str(info.value.hint)
    assert apr("eval", small, "--against", tiny_gguf, "--data", text, "--seq-len", 2)[0] == 2
    for words in (
        ("--against", tiny_gguf, "--data", text, "--teacher", tiny_gguf),
        ("--against", tiny_gguf, "--data", text, "--engine", "llama"),
        ("--data", text, "--save-logits", tmp_path / "x.kld"),
        (),
    ):
        assert apr("eval", small, *words)[0] == 2, words


class CountingLlama:
    """Notes what is computed; the logits of a token are its position in the batch."""

    n_vocab = 4

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, bool]] = []
        self.facts = SimpleNamespace(bos=1)

    def generate(self, *_: object) -> None:
        """As Llama does."""

    def compute(self, ids: Sequence[int], *, first: int, follow: bool) -> None:
        self.batches.append((len(ids), first, follow))

    def outputs(self, first: int, count: int, path: str) -> None:
        n_ids, start, _ = self.batches[-1]
        assert start <= first
        assert first + count <= n_ids
        np.repeat(np.arange(first, first + count, dtype="f4")[:, None], self.n_vocab, 1).tofile(path)


def test_a_text_is_computed_in_whole_batches_and_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_BYTES", 3 * 4 * CountingLlama.n_vocab)
    monkeypatch.setattr(scoring, "BATCH", 16)
    llama = CountingLlama()
    reader = scoring.LogitsReader(str(tmp_path), llama)  # type: ignore[arg-type]  # the calls that it makes
    found = [*reader.after(range(40), 20)]
    assert llama.batches == [(16, 20, False), (16, 4, True), (8, 0, True)]
    assert [len(rows) for _, rows in found] == [3, 3, 3, 3, 3, 3, 2]
    positions = [position + i for position, rows in found for i in range(len(rows))]
    assert positions == [*range(20, 40)]
    assert [int(value) for _, rows in found for value in rows[:, 0]] == [p % 16 for p in positions]
