"""The gates of `apr qa`: what each checks, its evidence, and its limit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from aprfmt.canonical.model import embedding_rows
from aprfmt.errors import RunError
from aprfmt.inspection.validate import Check
from aprfmt.llama.engine import Sampling
from aprfmt.running.chat_gate import chat_template
from aprfmt.running.diseases import AGAIN
from aprfmt.running.encoder_gates import (
    against,
    batch,
    finite_vectors,
    pooling,
    repeatable,
    similar,
    special_tokens,
    varies,
)
from aprfmt.running.examined import ModelUnderTest
from aprfmt.running.findings import GateFinding, SkippedError
from aprfmt.running.original import NO_ORIGINAL, header, logits, tensors
from aprfmt.running.qa_text import ARITHMETIC, COPY, PROMPTS, STORIES
from aprfmt.text import first_few

_TEXT = ("causal",)
_VECTORS = ("encoder", "states", "rank", "rank_decoder")
_NO_TEXT = (*_VECTORS, "seq2seq")
_ALL = (*_TEXT, *_NO_TEXT)


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate.

    Attributes:
        id: its name.
        shows: what holds if it passes.
        look: returns the finding; raises SkippedError if it does not apply.
        needs: gates that must pass before it.
        mend: the command to type if it fails without naming a disease; {file}, {original} and {arch} are replaced.
        kinds: kinds of models that it applies to: see kind_of.
    """

    id: str
    shows: str
    look: Callable[[ModelUnderTest], GateFinding]
    needs: tuple[str, ...] = ()
    mend: str = AGAIN
    kinds: tuple[str, ...] = _TEXT


# --- the file ---


def _of_checks(checks: Sequence[Check], summary: str) -> GateFinding:
    failed = [check for check in checks if check.status == "fail"]
    disease = next((_CAUSES[check.id] for check in failed if check.id in _CAUSES), None)
    text = first_few(f"{check.message}{f' ({check.tensor})' if check.tensor else ''}" for check in failed)
    return GateFinding(not failed, text or summary, value=len(failed), threshold=0, disease=disease)


_CAUSES = {"values.finite": "nan", "values.zero": "zeros"}
"""Rule of apr validate -> disease."""


def _structure(x: ModelUnderTest) -> GateFinding:
    checks = [check for check in x.validation.checks if not check.id.startswith("values.")]
    return _of_checks(checks, f"{len(checks)} rules of apr validate pass")


def _weights(x: ModelUnderTest) -> GateFinding:
    checks = [check for check in x.validation.checks if check.id.startswith("values.")]
    if not checks:
        raise SkippedError("no weights to check")
    return _of_checks(checks, f"{len(x.model.tensors.entries):,} tensors: no NaN, no infinity, none all zero")


def _loads(x: ModelUnderTest) -> GateFinding:
    try:
        facts = x.llama.facts
    except RunError as error:
        return GateFinding(False, error.message)
    return GateFinding(True, f"in {facts.load_seconds:.2g} s by {facts.engine}", value=facts.load_seconds)


def _vocabulary(x: ModelUnderTest) -> GateFinding:
    embedding = x.gguf.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None else embedding_rows(x.canonical) if x.canonical else None
    if rows is None:
        raise SkippedError("the model has no token embedding")
    n = x.llama.n_vocab
    text = f"{n:,} tokens, {rows:,} embedding rows"
    return GateFinding(n == rows, text, value=n, threshold=rows)


# --- what it computes ---


def _finite(x: ModelUnderTest) -> GateFinding:
    for number, prompt in enumerate(PROMPTS, 1):
        try:
            x.reader.score(x.llama.tokenize(prompt, parse_special=False))
        except RunError as error:
            return GateFinding(False, f"prompt {number} of {len(PROMPTS)}: {error.message}", value=number - 1)
    n = len(PROMPTS)
    return GateFinding(True, f"the logits of {n} prompts are finite", value=n, threshold=n)


LEAST_EFFECT = 1e-3
"""How far a layer moves the hidden states, relative to their size. Layers of trained models move them by 0.05 and more;
a zeroed layer by 0.
"""


def _layers(x: ModelUnderTest) -> GateFinding:
    effects, _ = x.watched.effects(x.texts[0][:96])
    known = {i: value for i, value in enumerate(effects) if value is not None}
    if not known:
        raise SkippedError("llama.cpp does not expose the hidden states of this architecture", required=False)
    idle = [i for i, value in known.items() if not value >= LEAST_EFFECT]
    least = min(known, key=lambda i: known[i])
    text = (
        f"inactive layers: {first_few(map(str, idle))}"
        if idle
        else f"{len(known)} layers, least active: {least}, changes its input by {known[least]:.2g}"
    )
    return GateFinding(not idle, text, value=known[least], threshold=LEAST_EFFECT)


ORDER_MARGIN = 0.25
"""Nats per token by which another order of Q and K may be better: noise between equal orders is far below."""

_PART = re.compile(r"blk\.(\d+)\.attn_(q|k|qkv)\.(weight|bias)")


def _rope_order(x: ModelUnderTest) -> GateFinding:
    ids = x.texts[0][:192]
    _, names = x.watched.effects(ids[:16])
    heads = _heads(x, names)
    reader = x.reader_of(x.watched)
    losses = {"unchanged": float(reader.score(ids).loss.mean())}
    for name, halves in (("unpermuted once", True), ("permuted once more", False)):
        x.watched.reorder(heads, halves=halves)
        losses[name] = float(reader.score(ids).loss.mean())
        x.watched.reorder(heads, halves=not halves)
    x.close_watched()
    own = losses.pop("unchanged")
    best = min(losses, key=lambda name: losses[name])
    gain = own - losses[best]
    is_guessing = losses[best] > math.log(x.llama.n_vocab)  # in any order, so none is right
    passed = is_guessing or gain < ORDER_MARGIN
    others = ", ".join(f"{name} {math.exp(loss):,.1f}" for name, loss in losses.items())
    text = f"perplexity {math.exp(own):,.1f} with the rows of Q and K unchanged; {others}"
    if not passed:
        text = f"the rows of Q and K are in the wrong order and must be {best}: {text}"
    return GateFinding(passed, text, gain, ORDER_MARGIN, None if passed else "rope-order")


BOS_MARGIN = 0.5
"""Nats per token by which text may be more likely after BOS than without it."""

_FIRST, _LAST = 8, 96


def _bos(x: ModelUnderTest) -> GateFinding:
    facts = x.llama.facts
    if x.against is not None and (adds := x.original.facts.adds_bos) != facts.adds_bos:
        text = f"BOS is {'not ' if adds else ''}added, but the original {'adds it' if adds else 'does not add it'}"
        words = {"key": "tokenizer.ggml.add_bos_token", "value": str(adds).lower()}
        return GateFinding(False, text, disease="bos", words=words)
    if facts.bos < 0:
        raise SkippedError("the vocabulary has no BOS token", required=False)
    if facts.adds_bos:
        return GateFinding(True, "the tokenizer adds BOS")
    ids = x.texts[0][:_LAST]
    without = float(x.reader.score(ids).loss[_FIRST:].mean())
    behind = float(x.reader.score([facts.bos, *ids]).loss[_FIRST + 1 :].mean())
    gain, passed = without - behind, without - behind < BOS_MARGIN
    text = f"no BOS is added: {without:.2f} nats per token, {behind:.2f} with BOS"
    return GateFinding(passed, text, gain, BOS_MARGIN, None if passed else "missing-bos")


def _heads(x: ModelUnderTest, names: Sequence[str]) -> list[tuple[str, int, int, int]]:
    """What is reordered: (weight, first row, heads, rows per head). Raises SkippedError."""

    def per_layer(key: str, layer: int) -> int:
        value = x.metadata(f"ARCH.attention.{key}")
        value = value[layer] if isinstance(value, list | tuple) else value
        return value if isinstance(value, int) else 0

    found = []
    stated = x.metadata("ARCH.embedding_length")
    width = stated if isinstance(stated, int) else 0
    for name in names:
        part = _PART.fullmatch(name)
        if part is None:
            continue
        layer = int(part[1])
        n_q = per_layer("head_count", layer)
        n_kv = per_layer("head_count_kv", layer) or n_q
        if not n_q:
            continue
        size = per_layer("key_length", layer) or width // n_q
        rotated = x.metadata("ARCH.rope.dimension_count") or size
        if rotated != size:
            raise SkippedError("partial RoPE", required=False)
        if part[2] in ("q", "qkv"):
            found.append((name, 0, n_q, size))
        if part[2] in ("k", "qkv"):
            found.append((name, n_q * size if part[2] == "qkv" else 0, n_kv, size))
    if not found:
        raise SkippedError("the model has no per-head rotary Q and K", required=False)
    return found


OWN_TOKENS = 64
SAME_TOKENS = 0.95
FOREIGN_GAP = 0.4
"""Tokens that the model generates, twice; the fraction of them that round-trips, and the fraction of ln(vocabulary) by
which the text is less likely than the model's own output. For SmolLM2 0.98 and 0.03; with the tokenizer of Qwen 0.62
and 0.83.
"""


def _tokenizer(x: ModelUnderTest) -> GateFinding:
    """Fails a model that predicts its own output far better than text: it was trained with another tokenizer."""
    begin = max(0, x.llama.facts.bos)
    same = total = 0
    losses = []
    for seed in (1, 2):
        made = x.llama.generate([begin], OWN_TOKENS, sampling=Sampling(temperature=0.8, seed=seed))
        ids = made.ids[:-1] if made.ended == "end" else made.ids
        if len(ids) < 8:
            continue
        again = x.llama.tokenize(x.llama.detokenize(ids, special=True), add_special=False)
        same += sum(b.size for b in SequenceMatcher(None, ids, again, autojunk=False).get_matching_blocks())
        total += len(ids)
        losses += x.reader.score([begin, *ids]).loss.tolist()
    if not losses:
        raise SkippedError("the model generates too little text", required=False)
    own, share = sum(losses) / len(losses), same / total
    gap = (x.loss - own) / math.log(x.llama.n_vocab)
    foreign = gap > FOREIGN_GAP and share < SAME_TOKENS
    text = (
        f"{share:.1%} of generated tokens survive detokenizing and tokenizing; loss {own:.2f} nats on its "
        f"own tokens, {x.loss:.2f} on text"
    )
    return GateFinding(
        not foreign,
        f"another model's tokenizer, or untrained weights: {text}" if foreign else text,
        value=gap,
        threshold=FOREIGN_GAP,
    )


LONGEST_PERIOD, LEAST_DISTINCT = 4, 6


def _text(x: ModelUnderTest) -> GateFinding:
    """Greedy text: at least one of several prompts must continue without looping over a few tokens."""
    made = [x.llama.generate(prompt, 48) for prompt in STORIES]
    circling = []
    for each in made:
        ids = each.ids
        loop = any(
            len(ids) >= 32 and ids[-24:] == ids[-24 - period : -period] for period in range(1, LONGEST_PERIOD + 1)
        )
        few = each.ended == "length" and len(set(ids)) < LEAST_DISTINCT
        circling.append(loop or few or not each.text.strip())
    sample = " ".join(made[circling.index(False) if False in circling else 0].text.split())[:60]
    distinct = max(len(set(each.ids)) for each in made)
    text = "the text repeats in a loop" if all(circling) else f"{distinct} different tokens"
    return GateFinding(
        not all(circling), f"{text}: \u201c{sample}\u2026\u201d", value=distinct, threshold=LEAST_DISTINCT
    )


_MEASURED, _MEASURED_PARAMS, _FACTOR, _LEAST_PARAMS = 0.78, 134.5e6, 2.0, 10e6


def bits_limit(n_params: int) -> float:
    """The maximum bits per byte of the bundled text for a language model of this size.

    Twice the expected value: measured for SmolLM2-135M, other sizes by the parameter term of Chinchilla's law (Hoffmann
    et al.
    2022, arXiv:2203.15556: 406.4 / N^0.34 nats per token), at 4 bytes per token.
    """
    n = max(float(n_params), _LEAST_PARAMS)
    nats = 406.4 / n**0.34 - 406.4 / _MEASURED_PARAMS**0.34
    limit: float = _FACTOR * (_MEASURED + nats / math.log(2) / 4)
    return limit


def _perplexity(x: ModelUnderTest) -> GateFinding:
    bits, limit = x.bits_per_byte, bits_limit(x.n_params)
    parts = ", ".join(
        f"{name} {math.exp(float(found.loss.mean())):,.1f}"
        for name, found in zip(("prose", "code", "numbers"), x.scores, strict=True)
    )
    text = f"{bits:.2f} bits per byte of the bundled text, perplexity {math.exp(x.loss):,.1f} ({parts})"
    return GateFinding(bits <= limit, text, value=bits, threshold=limit)


COPIED, REMEMBERED = 0.5, 0.25
"""Minimum fraction of right answers without an original (chance: 1/8), and how far it may fall below the original's."""

_CHANCE = math.log(10)
"""Loss of a random answer among ten."""


def _copy(x: ModelUnderTest) -> GateFinding:
    _, share = x.answers(COPY)
    limit, of = COPIED, "chance 12%"
    if x.against is not None:
        theirs = x.answers(COPY, original=True)[1]
        limit, of = theirs - REMEMBERED, f"the original {theirs:.0%}"
    return GateFinding(share >= limit, f"{share:.0%} of {len(COPY)} words copied, {of}", value=share, threshold=limit)


LOST = 1.5
"""Nats by which the right sums may be less likely than for the original: Q2_K of SmolLM2 loses 0.7."""


def _arithmetic(x: ModelUnderTest) -> GateFinding:
    likely, share = x.answers(ARITHMETIC)
    limit, of = -_CHANCE, "chance 10%"
    if x.against is not None:
        theirs = x.answers(ARITHMETIC, original=True)
        limit, of = theirs[0] - LOST, f"the original {theirs[1]:.0%}"
    text = f"{share:.0%} of {len(ARITHMETIC)} sums correct, {of}; log-probability {likely:.2f}"
    return GateFinding(likely >= limit, text, value=likely, threshold=limit)


# --- beside the original ---


_LIMITS = ((12.0, 0.005), (8.0, 0.02), (6.4, 0.05), (5.5, 0.08), (4.6, 0.12), (4.0, 0.16), (3.4, 0.2), (0.0, 0.25))
"""(bits per weight, nats): the maximum KL from the original for at least as many bits."""


def kl_limit(bits: float) -> float:
    """Maximum nats per token from the original: usual for a good quantization with that many bits, plus a margin."""
    return next(limit for least, limit in _LIMITS if bits >= least)


def _original(x: ModelUnderTest) -> dict[str, float]:
    if x.against is None:
        raise SkippedError(NO_ORIGINAL, required=False)
    if x.original.n_vocab != x.llama.n_vocab or any(
        x.original.tokenize(x.llama.detokenize(ids), add_special=False)
        != x.llama.tokenize(x.llama.detokenize(ids), add_special=False)
        for ids in x.texts
    ):
        raise SkippedError("the original tokenizes text differently")
    return x.compared


def _kl(x: ModelUnderTest) -> GateFinding:
    kl, limit = _original(x)["kl"], kl_limit(x.coarse_bits)
    text = f"{kl:.4f} nats per token from the original, at {x.coarse_bits:.2f} bits per weight"
    return GateFinding(kl <= limit, text, value=kl, threshold=limit)


def _agreement(x: ModelUnderTest) -> GateFinding:
    share = _original(x)["agreement"]
    # The top-1 token changes between nearly equal ones: agreement falls with the square root of the KL.
    limit = 1 - 0.62 * math.sqrt(kl_limit(x.coarse_bits))
    return GateFinding(share >= limit, f"{share:.1%} top-1 agreement", value=share, threshold=limit)


def _ratio(x: ModelUnderTest) -> GateFinding:
    found = _original(x)
    ratio, limit = math.exp(found["loss"] - found["other_loss"]), math.exp(kl_limit(x.coarse_bits))
    text = f"perplexity {math.exp(found['loss']):,.2f}, {ratio:.3f} times the original's"
    return GateFinding(ratio <= limit, text, value=ratio, threshold=limit)


def _canary(x: ModelUnderTest) -> GateFinding:
    from aprfmt.running.canary import check_canary, find_canary

    if find_canary(x.file) is None:
        raise SkippedError("the model has no golden outputs", required=False)
    report = check_canary(x.file)
    worst = max(report.layers.values(), default=math.inf)
    text = first_few(report.findings) or f"states within {worst:.2g}, output KL {report.kl:.2g} nats"
    return GateFinding(report.passed, text, value=worst if math.isfinite(worst) else None, threshold=report.band)


_SAME = ("header", "tensors")
_RUNS = (*_SAME, "loads", "finite")
_SOUND = (*_RUNS, "layers", "rope-order", "tokenizer", "bos")
"""Gates that name a cause; if one fails, the symptom gates add nothing."""

_VECTOR = (*_SAME, "loads", "finite-vectors")
_EMBEDS = ("encoder", "states")
_VALIDATE = "apr validate {file}"
FINER = "apr quantize {original} q8_0 -o FIXED.gguf --verify=logits"
_POOLING = "apr stamp {file} --in-place --set {arch}.pooling_type=1 (1: mean, 2: CLS, 3: last)"
_TOKENIZER = "apr convert {file} -o FIXED.gguf --tokenizer FOLDER"

GATES = (
    Gate("header", "against the original: the keys of network and tokenizer", header, kinds=_ALL),
    Gate("tensors", "against the original: the values of the tensors", tensors, kinds=_ALL),
    Gate(
        "structure",
        "the rules of apr validate on names, shapes, keys and tokens pass",
        _structure,
        mend=_VALIDATE,
        kinds=_ALL,
    ),
    Gate("weights", "no tensor has NaN or infinity, or is all zero", _weights, kinds=_ALL),
    Gate("loads", "llama.cpp loads the model", _loads, mend=_VALIDATE, kinds=_ALL),
    Gate(
        "vocabulary",
        "the number of tokens equals the number of embedding rows",
        _vocabulary,
        ("loads",),
        _TOKENIZER,
        _ALL,
    ),
    Gate(
        "logits",
        "against an original that is not a GGUF: logits of 16 tokens, by transformers or the trainer's decoder",
        logits,
        (*_SAME, "loads"),
        kinds=_ALL,
    ),
    Gate("finite", "all logits of several prompts are finite", _finite, ("loads",)),
    Gate("layers", "every layer changes the hidden states", _layers, _RUNS),
    Gate("rope-order", "no other order of the rows of Q and K predicts text better", _rope_order, (*_RUNS, "layers")),
    Gate(
        "tokenizer",
        "the tokenizer is the one the model was trained with",
        _tokenizer,
        (*_RUNS, "layers", "rope-order"),
        _TOKENIZER,
    ),
    Gate("bos", "if the tokenizer adds no BOS, text is not much more likely with one", _bos, (*_RUNS, "layers")),
    Gate("text", "greedy text is not one token or a short loop", _text, _SOUND),
    Gate("perplexity", "bits per byte are normal for the model's size", _perplexity, _SOUND),
    Gate("copy", "copies words from examples", _copy, _SOUND),
    Gate("arithmetic", "adds small numbers from examples", _arithmetic, _SOUND),
    Gate("chat-template", "the chat template is the one the model was trained with", chat_template, _SOUND),
    Gate("kl", "against the original: KL divergence", _kl, _SOUND, FINER),
    Gate("agreement", "against the original: top-1 agreement", _agreement, _SOUND, FINER),
    Gate("ratio", "against the original: perplexity", _ratio, _SOUND, FINER),
    Gate("canary", "reproduces its golden outputs (apr canary), if it has any", _canary, ("loads",)),
    Gate("pooling", "the pooling type is set", pooling, ("loads",), kinds=_VECTORS),
    Gate(
        "special-tokens",
        "the tokenizer adds the tokens that begin and end a text",
        special_tokens,
        ("loads",),
        _TOKENIZER,
        _NO_TEXT,
    ),
    Gate(
        "finite-vectors",
        "the vectors of several texts are finite, and not zero",
        finite_vectors,
        ("loads",),
        AGAIN,
        _NO_TEXT,
    ),
    Gate("varies", "different texts get different vectors", varies, _VECTOR, AGAIN, _NO_TEXT),
    Gate("repeatable", "embedding a text twice gives the same vector", repeatable, _VECTOR, "apr doctor", _NO_TEXT),
    Gate("batch", "batching does not change a text's vector", batch, _VECTOR, "apr doctor", _VECTORS),
    Gate(
        "similar", "paraphrases are closer than unrelated sentences", similar, (*_VECTOR, "varies"), _POOLING, _EMBEDS
    ),
    Gate("vectors", "against the original: the vectors of several texts", against, _VECTOR, FINER, _NO_TEXT),
)
"""In order: gates that name a cause before those that show symptoms."""
