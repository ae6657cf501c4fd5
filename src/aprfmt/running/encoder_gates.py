"""Gates of encoders, rerankers and classifiers (vectors and scores) and of seq2seq decoders."""

from __future__ import annotations

import math
from collections.abc import Sequence

from aprfmt.convert.logits import matrix_dtypes, tolerance
from aprfmt.errors import AprError, RunError
from aprfmt.running.examined import ModelUnderTest
from aprfmt.running.findings import GateFinding, SkippedError
from aprfmt.running.original import NO_ORIGINAL
from aprfmt.running.qa_text import PAIRS, PROMPTS, UNRELATED
from aprfmt.tokenizer.encoding import tokenizer_json
from aprfmt.tokenizer.fast import load

REPEATED, BATCHED = 1e-4, 2e-3
"""Maximum relative errors: of a text computed twice, and of one computed in a batch."""

VARIES = 1e-3
"""Minimum relative difference between the vectors of two texts."""

_COSINES = ((12.0, 0.999), (8.0, 0.995), (6.0, 0.99), (5.0, 0.98), (4.0, 0.96), (3.0, 0.9), (0.0, 0.8))
"""(bits per weight, minimum cosine with the original's vectors)."""


def pooling(x: ModelUnderTest) -> GateFinding:
    """Without a pooling type llama.cpp returns a vector per token."""
    if x.pooling is None:
        key = f"{x.gguf.metadata['general.architecture']}.pooling_type"
        raise SkippedError(f"no pooling type: set one, such as apr stamp {x.file} --in-place --set {key}=1 (mean)")
    return GateFinding(True, f"pooling by {x.pooling}")


def special_tokens(x: ModelUnderTest) -> GateFinding:
    """The first and last token of a text are those of tokenizer.json, or CLS and SEP of a WordPiece vocabulary."""
    text = PROMPTS[0]
    found = x.llama.tokenize(text)
    if x.model.format != "gguf" and x.tokenizer is not None:
        try:
            ids = load(tokenizer_json(x.tokenizer)).encode([text], special=True)[0].ids
        except AprError as error:
            raise SkippedError(f"its tokenizer cannot be run: {error.message}", required=False) from error
        wanted = [*ids[:1], *ids[-1:]]
    elif x.metadata("tokenizer.ggml.model") == "bert":
        names = (("cls", "bos"), ("seperator", "sep", "eos"))
        known = [next((v for n in some if isinstance(v := x.metadata(f"tokenizer.ggml.{n}_token_id"), int)), None)
                 for some in names]  # fmt: skip
        if known[0] is None or known[1] is None:
            raise SkippedError("the vocabulary defines no CLS and SEP tokens", required=False)
        wanted = [token for token in known if token is not None]
    else:
        raise SkippedError("the file does not name the tokens that begin and end a text", required=False)
    ends = [*found[:1], *found[-1:]]
    shown = [x.llama.detokenize([token], special=True) or str(token) for token in (*wanted, *ends)]
    text = f"a text begins with {shown[2]!r} and ends with {shown[3]!r}"
    if ends != wanted:
        return GateFinding(False, f"{text}, not with {shown[0]!r} and {shown[1]!r}")
    return GateFinding(True, text)


def finite_vectors(x: ModelUnderTest) -> GateFinding:
    """Vectors of several texts are finite and not zero."""
    for number, prompt in enumerate(PROMPTS, 1):
        try:
            vector = x.vector(prompt)
        except RunError as error:
            return GateFinding(False, f"prompt {number} of {len(PROMPTS)}: {error.message}", value=number - 1)
        if not any(vector):
            return GateFinding(False, f"prompt {number} of {len(PROMPTS)} returns zeros", value=number - 1)
    n = len(PROMPTS)
    return GateFinding(True, f"the {x.words} of {n} prompts are finite", value=n, threshold=n)


def varies(x: ModelUnderTest) -> GateFinding:
    """Different texts have different vectors."""
    by_ids = {tuple(x.ids(prompt)): x.vector(prompt) for prompt in PROMPTS}
    if len(by_ids) < 2:
        raise SkippedError("the tokenizer returns the same ids for all texts")
    vectors = [*by_ids.values()]
    least = min(distance(a, b) for i, a in enumerate(vectors) for b in vectors[:i])
    text = f"{x.words} of two texts differ by {least:.2g} or more"
    if least < VARIES:
        text = f"two texts have the same {x.words}"
    return GateFinding(least >= VARIES, text, value=least, threshold=VARIES)


def repeatable(x: ModelUnderTest) -> GateFinding:
    """The same text has the same vector again, after other texts."""
    x.vector(PROMPTS[1])
    error = distance(x.vector(PROMPTS[0], again=True), x.vector(PROMPTS[0]))
    return GateFinding(
        error <= REPEATED, f"embedding a text twice changes it by {error:.2g}", value=error, threshold=REPEATED
    )


def batch(x: ModelUnderTest) -> GateFinding:
    """A text has the same vector in a batch."""
    ids = [x.ids(prompt) for prompt in (PROMPTS[0], PROMPTS[-1])]
    both = [vectors[0] for vectors in x.llama.vectors(ids)]
    error = max(distance(vector, x.vector(text)) for vector, text in zip(both, (PROMPTS[0], PROMPTS[-1]), strict=True))
    return GateFinding(error <= BATCHED, f"batching changes a text by {error:.2g}", value=error, threshold=BATCHED)


def similar(x: ModelUnderTest) -> GateFinding:
    """Paraphrases are closer than unrelated sentences, on average."""
    if x.pooling is None or x.pooling == "none":
        raise SkippedError("the model is not a sentence-embedding model", required=False)
    other = x.vector(UNRELATED)
    alike = sum(cosine(x.vector(a), x.vector(b)) for a, b in PAIRS) / len(PAIRS)
    unlike = sum(cosine(x.vector(a), other) for a, _ in PAIRS) / len(PAIRS)
    text = f"cosine {alike:.3f} of paraphrases, {unlike:.3f} of unrelated sentences"
    return GateFinding(alike > unlike, text, value=alike - unlike, threshold=0)


def against(x: ModelUnderTest) -> GateFinding:
    """The vectors of several texts compared with the original's."""
    if x.against is None:
        raise SkippedError(NO_ORIGINAL, required=False)
    pairs = [(x.vector(prompt), x.vector(prompt, original=True)) for prompt in PROMPTS]
    limit = next(limit for least, limit in _COSINES if x.bits_per_weight >= least)
    if any(len(a) != len(b) for a, b in pairs):
        return GateFinding(False, f"the {x.words} differ in size from the original's")
    if x.kind in ("encoder", "states"):
        least = min(cosine(a, b) for a, b in pairs)
        text = f"cosine with the original's embeddings: at least {least:.5f}"
        return GateFinding(least >= limit, text, value=least, threshold=limit)
    most, limit = max(distance(a, b) for a, b in pairs), tolerance(matrix_dtypes(x.gguf), same_weights=False)
    text = f"{x.words} differ from the original's by {most:.2g} or less"
    return GateFinding(most <= limit, text, value=most, threshold=limit)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 for zeros."""
    size = math.hypot(*a) * math.hypot(*b)
    return sum(p * q for p, q in zip(a, b, strict=True)) / size if size else 0.0


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Norm of the difference over that of `b`."""
    return math.hypot(*(p - q for p, q in zip(a, b, strict=True))) / max(math.hypot(*b), 1e-30)
