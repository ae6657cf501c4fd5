"""Scores equal those of dense float64 logits; whatever fails gives an error and no score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from train_corpora import SHAPE, part, tiny_decoder, varied

from aprfmt.errors import AprError, RefusedError, RunError
from aprfmt.running.evaluation import Scores, scores_of, scoring
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.sequences import IGNORED, Windows
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain import evaluate as module
from aprtrain.data.batches import batch_of
from aprtrain.evaluate import evaluate
from aprtrain.network.attention import Documents
from aprtrain.network.decoder import Decoder, soft_cap
from aprtrain.network.shape import Shape

N_REAL = 300
VOCABULARY = SharedVocabulary(N_REAL, 310, 320)


@dataclass
class FakeTeacher:
    """A decoder in the teacher's place, with as many rows of its head as asked for."""

    decoder: Decoder
    head_weight: Tensor
    dropped_weight: Tensor | None = None
    vocabulary: SharedVocabulary = VOCABULARY

    @property
    def shape(self) -> Shape:
        return self.decoder.shape

    def hidden(self, tokens_NT: Tensor, documents: Documents | None) -> Tensor:
        found: Tensor = self.decoder(tokens_NT, documents)
        return found


def teacher(seed: int = 2, rows: int = 310, **changes: Any) -> Any:
    found = tiny_decoder(seed, **changes)
    return FakeTeacher(found, found.head_weight.detach()[:rows].clone())


@pytest.fixture
def data() -> Windows:
    """Documents of pairs of equal tokens: a tied random network finds some labels."""
    docs = (varied(6 + 4 * i, seed=i, high=N_REAL) for i in range(7))
    return Windows(part(*([token for token in doc for _ in range(2)] for doc in docs)), 16, 2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEAD_ROWS", 77)
    monkeypatch.setattr(module, "_POSITIONS", 13)


def dense(student: Decoder, data: Windows, other: FakeTeacher | None = None) -> Scores:
    """The definition, in float64 over all logits at once."""
    batch = batch_of(data, range(len(data)))
    keep, labels = batch.labels_NT != IGNORED, batch.labels_NT[batch.labels_NT != IGNORED]

    def log_probabilities(hidden: Tensor, head: Tensor, cap: float) -> Tensor:
        return torch.log_softmax(soft_cap(hidden[keep].double() @ head.double().T, cap), -1)

    with torch.no_grad():
        hidden = student(batch.tokens_NT, batch.documents)
        p = log_probabilities(hidden, student.head_weight, student.shape.logit_softcap)
        ce = float(functional.nll_loss(p, labels))
        accuracy = float((p.argmax(-1) == labels).double().mean())
        if other is None:
            return Scores(len(data), len(labels), ce, math.exp(ce), accuracy)
        hidden = other.hidden(batch.tokens_NT, batch.documents)
        q = log_probabilities(hidden, other.head_weight[:N_REAL], other.shape.logit_softcap)
        kl = float((q.exp() * (q - p[:, :N_REAL])).sum(-1).mean())
        agreement = float((q.argmax(-1) == p.argmax(-1)).double().mean())
        teacher_ce = float(functional.nll_loss(q, labels))
    return Scores(len(data), len(labels), ce, math.exp(ce), accuracy, kl, agreement, teacher_ce)


def assert_same(found: Scores, wanted: Scores) -> None:
    for name in Scores.__slots__:
        value = getattr(wanted, name)
        expected = value if value is None else pytest.approx(value, rel=2e-6, abs=1e-7)
        assert getattr(found, name) == expected, name


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_scores_are_those_of_the_definition(rows: int, softcap: float, data: Windows) -> None:
    student, other = tiny_decoder(1, logit_softcap=softcap), teacher(logit_softcap=2 * softcap)
    wanted = dense(student, data, other)
    assert wanted.kl is not None
    assert wanted.kl > 0.3
    assert 0 < wanted.accuracy < 1
    assert_same(evaluate(student, data, rows=rows, teacher=other), wanted)
    assert_same(evaluate(student, data, rows=rows), dense(student, data))


def test_the_mass_of_tokens_that_only_the_teacher_has(data: Windows) -> None:
    student, other = tiny_decoder(1), teacher()
    other.dropped_weight = other.head_weight[N_REAL:310]
    other.vocabulary = SharedVocabulary(N_REAL, 310, 320, tuple("0123456789"))
    found = evaluate(student, data, rows=3, teacher=other)
    batch = batch_of(data, range(len(data)))
    with torch.no_grad():
        hidden = other.hidden(batch.tokens_NT, batch.documents)[batch.labels_NT != IGNORED].double()
    p = torch.softmax(hidden @ other.head_weight.double().T, -1)
    assert found.dropped_mass == pytest.approx(float(p[:, N_REAL:].sum(-1).mean()), rel=1e-5)
    assert_same(replace(found, dropped_mass=None), dense(student, data, other))


def test_a_model_is_no_distance_from_itself(data: Windows) -> None:
    same = teacher(1, rows=320)
    same.vocabulary = SharedVocabulary(320, 320, 320)
    found = evaluate(tiny_decoder(1), data, rows=4, teacher=same)
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.agreement == 1
    assert found.teacher_ce == found.ce


def test_rows_of_the_teacher_beyond_the_tokens_change_nothing(data: Windows) -> None:
    other, filled = teacher(), teacher()
    filled.head_weight[N_REAL:] = 50.0
    student = tiny_decoder(1)
    scores = [evaluate(student, data, rows=4, teacher=t) for t in (other, filled)]
    assert scores[0] == scores[1]
    filled.vocabulary = SharedVocabulary(310, 310, 320)
    unmasked = evaluate(student, data, rows=4, teacher=filled)
    assert unmasked.kl != pytest.approx(scores[0].kl)  # this comparison can tell


def test_an_even_selection_of_windows_can_be_read(data: Windows) -> None:
    found = evaluate(tiny_decoder(1), data, rows=2, max_windows=3)
    last = len(data) - 1
    assert (found.windows, found.tokens) == (3, data.n_labels([0, last // 2, last]))
    assert evaluate(tiny_decoder(1), data, rows=2, max_windows=1000).windows == len(data)


def test_the_logits_of_a_batch_never_exist(data: Windows) -> None:
    largest = 0

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] != (SHAPE.d_model,):
                largest = max(largest, out.numel())
            return out

    with Watch():  # type: ignore[no-untyped-call]
        evaluate(tiny_decoder(1), data, rows=100, teacher=teacher())
    n_tokens = len(data) * data.seq_len
    assert 77 * 13 <= largest < n_tokens * SHAPE.vocab_rows / 4


# --- failures give no score ---


def fails(run: Callable[[], object], message: str) -> AprError:
    with pytest.raises(RunError, match=message) as caught:
        run()
    assert caught.value.exit_code == 8
    return caught.value


class Broken:
    """A student whose hidden states go through `change`."""

    def __init__(self, change: Callable[[Tensor], Any], head: Tensor | None = None) -> None:
        self.decoder = tiny_decoder(1)
        self.shape, self.norm = self.decoder.shape, self.decoder.norm
        self.head_weight = self.decoder.head_weight if head is None else head
        self.change = change

    def __call__(self, tokens_NT: Tensor, documents: Documents | None) -> Any:
        return self.change(self.decoder(tokens_NT, documents))


def broken(change: Callable[[Tensor], Any], head: Tensor | None = None) -> Any:
    return Broken(change, head)


def crash(_: Tensor) -> Any:
    raise ValueError("no such kernel")


def one_nan(hidden: Tensor) -> Tensor:
    hidden[-1, 0, 0] = math.nan
    return hidden


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (crash, "the evaluation failed, no score: no such kernel"),
        (one_nan, "hidden states are not finite"),
        (lambda x: x * math.inf, "hidden states are not finite"),
        (lambda x: x[:, :0], "returned no valid hidden states"),
        (lambda x: x[:1, :, :0], "returned no valid hidden states"),
        (lambda x: x[0], "returned no valid hidden states"),
        (lambda x: None, "returned no valid hidden states"),
    ],
)
def test_a_failure_of_either_model_is_no_score(change: Callable[[Tensor], Any], message: str, data: Windows) -> None:
    fails(lambda: evaluate(broken(change), data, rows=2), message)
    other = teacher()
    whole = other.hidden
    other.hidden = lambda *args: change(whole(*args))
    fails(lambda: evaluate(tiny_decoder(1), data, rows=2, teacher=other), message)


def test_a_damaged_head_is_no_score(data: Windows) -> None:
    for value in (math.nan, math.inf):
        head = tiny_decoder(1).head_weight.detach().clone()
        head[17, 3] = value
        fails(lambda head=head: evaluate(broken(lambda x: x, head), data, rows=2), "not finite")  # type: ignore[misc]


def test_an_id_without_a_row_is_no_score(data: Windows) -> None:
    head = tiny_decoder(1).head_weight.detach()[:200]
    fails(lambda: evaluate(broken(lambda x: x, head), data, rows=2), "not finite|failed")


def test_a_perplexity_beyond_all_numbers_is_no_score(data: Windows) -> None:
    fails(lambda: evaluate(broken(lambda x: x * 1e5), data, rows=2), r"cross entropy is \d+ nats")


def test_data_without_a_label_are_no_score() -> None:
    with pytest.raises(RefusedError, match="no document has a token to predict"):
        Windows(part(*([i] for i in range(20))), 8, 2)
    fails(lambda: scores_of(3, 0, [0.0] * 6, False, False), "no token to predict")


def test_errors_of_all_kinds_become_one() -> None:
    def missing_tokenizer() -> None:
        with scoring():
            Encoder(None)

    error = fails(missing_tokenizer, "the model has no tokenizer")
    assert isinstance(error.__cause__, RefusedError)
    assert error.hint == error.__cause__.hint

    def interrupted() -> None:
        with scoring():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    def silent() -> None:
        with scoring():
            raise AssertionError

    fails(silent, "AssertionError")


def test_a_full_gpu_says_what_takes_less() -> None:
    with pytest.raises(RunError, match="no score") as caught, scoring():
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "--micro-tokens" in str(caught.value.hint)
