"""Evaluation: cross entropy on held-out text and KL from the teacher. A failure is an error, never a score.

Logits are computed in float32 for a slice of the head at a time and reduced at once (online softmax, Milakov and
Gimelshein, Online normalizer calculation for softmax, 2018), so the logits of a batch are never materialized. The code
is independent of the training loss, so that a bug in one cannot hide in the other.

Shape suffixes: N rows of a batch, T positions, P positions with a label, D width, V rows of a head, R a slice of them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from aprfmt.errors import RunError
from aprfmt.running.evaluation import EvaluatedModel, Evaluation, Scores, read_part, scores_of, scoring, sequence_length
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.records import TEXT_FIELD
from aprfmt.texts.sequences import IGNORED, Windows
from aprfmt.tokenizer.alignment import align
from aprtrain.data.batches import Batch, batch_of
from aprtrain.guards import EvaluationStopped
from aprtrain.loss.objective import Objective
from aprtrain.loss.spans import aligned as span_losses
from aprtrain.network.decoder import Decoder, soft_cap
from aprtrain.network.weights import NetworkSource, load_decoder, open_network
from aprtrain.teacher.aligned import AlignedTeacher
from aprtrain.teacher.files import TeacherTargets, TopKTargets
from aprtrain.teacher.teacher import Teacher
from aprtrain.world import device_of

_HEAD_ROWS = 8192
_POSITIONS = 2048
_SUMS = 6
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}  # of a batch, by type of device
_NO_MASS = 1e-7  # precision of 1 minus a float32 sum


def evaluate(
    student: Decoder,
    windows: Windows,
    *,
    rows: int,
    teacher: Teacher | None = None,
    max_windows: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    is_stopped: Callable[[], bool] = lambda: False,
    answers: TeacherTargets | None = None,
    aligned: AlignedTeacher | None = None,
) -> Scores:
    """Scores a model on held-out sequences.

    Args:
        student: the model.
        windows: the held-out sequences.
        rows: batch size in sequences.
        teacher: the teacher to compare with.
        max_windows: maximum number of sequences, selected evenly.
        progress: called with the number of sequences done and the total.
        is_stopped: asked before each batch whether to stop.
        answers: saved teacher log-probabilities instead of a teacher; KL then treats all unsaved tokens as one.
        aligned: runs a teacher with another tokenizer; KL is that of the outcomes of each span, per label.

    Raises:
        EvaluationStopped: `is_stopped` returned True.
        RunError: no valid score: an exception; hidden states that are missing, have the wrong shape or are not
            finite; no labels; an id beyond the head.
    """
    device = student.norm.device
    # Not inference_mode: weights gathered here may be used for training later.
    with scoring(), torch.no_grad():
        ids = windows.select(max_windows)
        n = len(ids)

        def sums_of(batch: Batch) -> Tensor:
            """Sums [6] over the labels of a batch; frees the heads, which a teacher may have dequantized."""
            counts_NT, size = batch.labels_NT != IGNORED, batch.tokens_NT.shape
            labels_P = batch.labels_NT[counts_NT]
            hidden = _hidden(student(batch.tokens_NT, batch.documents), size, "model")
            sides = [_ScoredSide(hidden[counts_NT], student.head_weight, student.shape.logit_softcap)]
            if aligned is not None:
                found = _sums(sides, labels_P)
                found[2:5] = _aligned_sums(sides[0], hidden.flatten(0, 1), batch, aligned)
                return found
            if teacher is not None:
                found = teacher.hidden(batch.tokens_NT, batch.documents)
                hidden, cap = _hidden(found, size, "teacher"), teacher.shape.logit_softcap
                sides.append(_ScoredSide(hidden[counts_NT], teacher.head_weight[: teacher.vocabulary.n_real], cap))
                if (dropped := teacher.dropped_weight) is not None:
                    sides.append(_ScoredSide(hidden[counts_NT], dropped, cap))
            given = answers(batch.windows).to(labels_P.device) if answers is not None else None
            return _sums(sides, labels_P, given)

        sums = torch.zeros(_SUMS, dtype=torch.float64, device=device)
        count = 0
        for start in range(0, n, rows):
            progress(start, n)
            if is_stopped():
                raise EvaluationStopped("a signal stopped the evaluation")
            batch = batch_of(windows, ids[start : start + rows])
            count += batch.n_valid
            sums += sums_of(batch.to(device))
        has_dropped = teacher is not None and teacher.dropped_weight is not None
        return scores_of(n, count, sums.tolist(), teacher is not None or answers is not None, has_dropped)


def _hidden(hidden: object, size: torch.Size, who: str) -> Tensor:
    if not isinstance(hidden, Tensor) or hidden.shape[:2] != size or hidden.ndim != 3 or not hidden.numel():
        raise RunError(f"the {who} returned no valid hidden states for {size[0]} sequences of {size[1]} tokens")
    if not bool(torch.isfinite(hidden).all()):
        raise RunError(f"the {who}'s hidden states are not finite", hint="its weights may be damaged")
    return hidden


@dataclass(frozen=True, slots=True)
class _ScoredSide:
    """Hidden states [P, D], head [V, D] without padding rows, and logit softcap of one model."""

    hidden_PD: Tensor
    head_VD: Tensor
    softcap: float

    def logits(self, places: slice, rows: slice) -> Tensor:
        """Float32 logits [P, R]."""
        product = functional.linear(self.hidden_PD[places].float(), self.head_VD[rows].float())
        return soft_cap(product, self.softcap)


def _aligned_sums(side: _ScoredSide, hidden_ND: Tensor, batch: Batch, aligned: AlignedTeacher) -> Tensor:
    """Sums [3] over the spans: KL of their outcomes, labels at which the models agree, the teacher's cross entropy.

    The last one is scaled to all labels.
    """
    teacher, given, labels_N = aligned.teacher, aligned(batch.windows), batch.labels_NT.flatten()
    theirs = _ScoredSide(given.hidden_ED, teacher.head_weight[: teacher.vocabulary.n_real], teacher.shape.logit_softcap)
    ours = replace(side, hidden_PD=hidden_ND[given.index_P])
    total = torch.zeros(3, dtype=torch.float64, device=hidden_ND.device)
    for rows, rows_E, spans in given.spans.chunks:
        if spans.start < spans.stop:
            found, _, text_G = span_losses(
                Objective(1.0, 1.0), ours.logits(rows, slice(None)), theirs.logits(rows_E, slice(None)),
                labels_N[given.index_P[rows]], given.spans.chunk(rows_E, spans), given.spans.ids,
            )  # fmt: skip
            total += torch.stack([x.double().sum() for x in (found.kl1_N, found.agree_N, -text_G)])
    total[2] *= batch.n_valid / max(1, given.n_labels)
    return total


class _Running:
    """Online softmax state, each [P]: log of the sum of exp, mean of other values, top logit and id, label's logit."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.log_sum = torch.full((n,), -math.inf, device=device)
        self.mean = torch.zeros(n, device=device)
        self.top = torch.full((n,), -math.inf, device=device)
        self.top_id = torch.full((n,), -1, dtype=torch.int64, device=device)
        self.label = torch.full((n,), math.nan, device=device)

    def add(self, logits_PR: Tensor, first: int, labels_P: Tensor, values_PR: Tensor | None = None) -> None:
        """Adds the logits of the ids from `first` on; `values_PR` are averaged under the softmax."""
        top, where = logits_PR.max(1)
        self.top_id = torch.where(top > self.top, where + first, self.top_id)
        self.top = torch.maximum(self.top, top)
        before, self.log_sum = self.log_sum, torch.logaddexp(self.log_sum, logits_PR.logsumexp(1))
        if values_PR is not None:
            weights_PR = torch.exp(logits_PR - self.log_sum[:, None])
            self.mean = self.mean * torch.exp(before - self.log_sum) + (weights_PR * values_PR).sum(1)
        self.label = _pick(logits_PR, (labels_P - first)[:, None], self.label[:, None])[:, 0]


def _pick(logits_PR: Tensor, places_PK: Tensor, otherwise_PK: Tensor) -> Tensor:
    """The logits of these ids, if they are in this slice of the head, else `otherwise_PK`."""
    inside = (places_PK >= 0) & (places_PK < logits_PR.shape[1])
    return torch.where(inside, logits_PR.gather(1, places_PK.clamp(0, logits_PR.shape[1] - 1)), otherwise_PK)


def _sums(sides: list[_ScoredSide], labels_P: Tensor, given: TopKTargets | None = None) -> Tensor:
    """Sums [6] over positions: cross entropy, hits, KL, agreement, the teacher's cross entropy, dropped mass.

    The sides are the model, optionally the teacher, and optionally the teacher's tokens that the model lacks.
    """
    total = torch.zeros(_SUMS, dtype=torch.float64, device=labels_P.device)
    for start in range(0, len(labels_P), _POSITIONS):
        places = slice(start, start + _POSITIONS)
        labels = labels_P[places]
        running = [_Running(len(labels), labels.device) for _ in sides]
        ids_PK = given.top.ids_NK[places] if given is not None else labels[:, None]
        known_PK = torch.full(ids_PK.shape, math.nan, device=labels.device)
        for first in range(0, max(len(side.head_VD) for side in sides), _HEAD_ROWS):
            logits = [side.logits(places, slice(first, first + _HEAD_ROWS)) for side in sides]
            if logits[0].shape[1]:
                running[0].add(logits[0], first, labels)
                known_PK = _pick(logits[0], ids_PK - first, known_PK)
            if len(sides) > 1 and (width := logits[1].shape[1]):
                running[1].add(logits[1], first, labels, logits[1] - logits[0][:, :width])
            if len(sides) > 2 and logits[2].shape[1]:
                running[2].add(logits[2], first, labels)
        student = running[0]
        found = [student.log_sum - student.label, (student.top_id == labels).float()]
        if given is not None:
            logp_PK = (known_PK - student.log_sum[:, None]).double()
            others_P = (1 - logp_PK.exp().sum(1)).clamp(min=_NO_MASS)
            logq_PK, rest_P = given.top.logprobs_NK[places].double(), given.top.residual1_N[places].double()
            kl = (logq_PK.exp() * (logq_PK - logp_PK)).sum(1) + torch.special.xlogy(rest_P, rest_P / others_P)
            found += [kl, (student.top_id == ids_PK[:, 0]).float(), -given.label_P[places]]
        if len(sides) > 1:
            teacher = running[1]
            kl = teacher.mean - teacher.log_sum + student.log_sum
            found += [kl, (student.top_id == teacher.top_id).float(), teacher.log_sum - teacher.label]
        if len(sides) > 2:
            found.append(torch.sigmoid(running[2].log_sum - running[1].log_sum))
        sums = torch.stack([values.double().sum() for values in found])
        total += functional.pad(sums, (0, _SUMS - len(found)))
    return total


# --- a file ---


def score(
    path: str,
    data: Path,
    *,
    teacher: str | None = None,
    device: str = "cuda",
    seq_len: int | None = None,
    limit: int | None = None,
    text_field: str = TEXT_FIELD,
    vocab_policy: str = "shared",
    log: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """Implements `aprfmt.evaluate` with torch; float32 on the CPU, bfloat16 on a GPU.

    Raises RunError if weights, tokenizer, data or computation do not give a valid score, and any error of opening the
    models or reading the data.
    """
    begin, where = time.perf_counter(), device_of(device)
    with ExitStack() as stack:
        network = stack.enter_context(open_network(path))
        other = stack.enter_context(open_network(teacher)) if teacher is not None else None
        models = {"model": network} if other is None else {"model": network, "teacher": other}
        made_for = {who: n for who, m in models.items() if (n := m.hparams.max_position_embeddings)}
        length = sequence_length(seq_len, limit, made_for)
        skipped: Counter[str] = Counter()
        with scoring():
            encoder = Encoder(network.tokenizer)
        vocabulary = None
        if other is not None:
            rows = other.shape.vocab_rows, network.shape.vocab_rows
            vocabulary = align(other.tokenizer, network.tokenizer, *rows, vocab_policy)
        part, separator = read_part(data, encoder, skipped, log, text_field), encoder.separator
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        with scoring():
            windows = Windows(part, length, separator)
            model = load_decoder(network, dtype, where)
            comparison = None
            if other is not None and vocabulary is not None:
                comparison = Teacher(other, vocabulary, "bf16", where, dtype=dtype)
        scores = evaluate(
            model,
            windows,
            rows=max(1, TOKENS_AT_ONCE[where.type] // length),
            teacher=comparison,
            max_windows=limit and limit // length,
        )
        return Evaluation(
            **asdict(_facts(path, network)),
            teacher=_facts(teacher, other) if teacher and other else None,
            data=str(data),
            documents=len(part.ends),
            data_tokens=len(part.tokens),
            left_out=dict(+skipped),
            device=str(where),
            dtype="f32" if where.type == "cpu" else "bf16",
            seq_len=length,
            **asdict(scores),
            seconds=time.perf_counter() - begin,
        )


def _facts(path: str, network: NetworkSource) -> EvaluatedModel:
    label = network.model.label if network.model is not None else None
    return EvaluatedModel(path, label, network.shape.architecture, network.shape.n_params)
