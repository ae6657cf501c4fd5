"""Golden outputs of a model, and whether a conversion of it still computes them: `aprfmt.make_canary`, `check_canary`.

A canary holds, for a few prompts: their tokens, the greedy continuation, the most likely tokens of each position with
their log-probabilities, and a sketch of the hidden states after each layer. Both sides run in llama.cpp on one thread.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aprfmt import formats
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.convert.stamp import store_record
from aprfmt.errors import AprError, CorruptError, ExistsError, LimitError, NotFoundError, UnsupportedError, UsageError
from aprfmt.io.json_shape import list_of, mapping_of
from aprfmt.io.jsonx import loads
from aprfmt.io.sink import AtomicFile, check_target, inputs_of
from aprfmt.io.source import Source, exists
from aprfmt.limits import MAX_CANARY_BYTES
from aprfmt.llama.client import Llama
from aprfmt.model import Tensor
from aprfmt.running.decoders import open_decoder
from aprfmt.running.prepared import prepare
from aprfmt.running.qa_text import PROMPTS, STORIES
from aprfmt.types import Array, JsonObject, PathLike

SUFFIX = ".canary.json"
SCHEMA = "aprfmt.canary/1"
CANARY_KEY = "aprfmt.canary"
"""Metadata key of an `.apr` with its golden outputs: the contents of a canary file."""

CONTEXT = 256

_TOP, _GREEDY = 8, 16
_TEXTS = (*PROMPTS[:3], *STORIES[:1])
_BANDS = (
    *((24.0, 0.003), (16.0, 0.02), (8.0, 0.08), (6.0, 0.15), (5.0, 0.3), (4.0, 0.4), (3.0, 0.7), (2.0, 1.0)),
    (0.0, 1.2),
)
"""(bits of the coarser weights, largest relative difference of the states after a layer).

SmolLM2 135M in F32 differs from its BF16 by 0.010, Q8_0 0.049, Q6_K 0.091, Q5_K_M 0.21, Q4_K_M 0.20, Q2_K 0.61.
"""


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """What a model computes of one prompt.

    Attributes:
        text, ids: the prompt and its tokens.
        greedy: the tokens that it continues with.
        top: for each position the most likely tokens with their log-probabilities (natural).
        layers: sketches of the hidden states by layer, "-1" for the embeddings: `digest`, and `probes` for each token.
    """

    text: str
    ids: list[int]
    greedy: list[int]
    top: list[list[tuple[int, float]]]
    layers: dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Canary:
    """Golden outputs of a model.

    Attributes:
        model: its file name.
        engine: which llama.cpp computed them.
        bits: bits per weight of its coarsest matrices.
        template: SHA-256 of its chat template in hex; None without one.
        prompts: what it computes.
    """

    model: str
    engine: str
    bits: float
    template: str | None
    prompts: list[GoldenPrompt]

    def to_json(self) -> JsonObject:
        """The contents of a canary file."""
        return {"schema": SCHEMA, **asdict(self)}


@dataclass(slots=True)
class CanaryReport:
    """How a model compares with a canary; `to_json` is the object of `apr canary check --json`.

    Attributes:
        file, canary: what was compared: the paths, or for `parity` both models.
        passed: whether nothing was found.
        findings: what differs beyond the band, in sentences.
        layers: largest relative difference of the hidden states, by layer; -1 for the embeddings.
        band: the largest difference that the coarser dtype explains.
        first_layer: the first layer beyond the band; None if there is none.
        first_change: the first layer whose states are not the same bits; None if all are.
        kl: mean over positions of the KL divergence of the most likely tokens, in nats.
        agreement: share of positions with the same most likely token.
        greedy: share of the golden continuation's tokens that are reproduced from the start.
    """

    file: str
    canary: str
    passed: bool = True
    findings: list[str] = field(default_factory=list)
    layers: dict[int, float] = field(default_factory=dict)
    band: float = 0.0
    first_layer: int | None = None
    first_change: int | None = None
    kl: float = 0.0
    agreement: float = 1.0
    greedy: float = 1.0

    def to_json(self) -> dict[str, object]:
        """The object of the command line."""
        layers = {str(layer): value if math.isfinite(value) else None for layer, value in self.layers.items()}
        return asdict(self) | {"layers": layers}


def layer_name(layer: int) -> str:
    """A layer in words."""
    return "the embeddings" if layer < 0 else f"layer {layer}"


def make_canary(
    file: PathLike,
    output: PathLike | None = None,
    *,
    prompts: Sequence[str] = _TEXTS,
    in_place: bool = False,
    force: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Canary:
    """Computes golden outputs of a model and writes them to a file, or into the `.apr` itself.

    Args:
        file: the model, in any format.
        output: the file to write; default: FILE.canary.json.
        prompts: texts of up to 200 tokens.
        in_place: store them in the `.apr` (metadata key `aprfmt.canary`), which every `.apr` converted from it keeps.
        force: replace an existing output.
        log: called with a line when the model is exported first.

    Raises:
        RunError: llama.cpp cannot run the model.
        UnsupportedError: the model is an encoder; with `in_place` not one `.apr` file.
        ExistsError, StorageError.
    """
    name = formats.path_text(file, "file")
    if in_place:
        return _make_inside(name, output, prompts, log, force=force)
    target = canary_path(name) if output is None else os.fspath(output)
    check_target(target, inputs_of([name], SUFFIX), force)
    canary = _compute(name, prompts, log)
    with AtomicFile(target, force=force) as sink:
        sink.write(json.dumps(canary.to_json(), separators=(",", ":")).encode())
    return canary


def _make_inside(
    name: str, output: PathLike | None, prompts: Sequence[str], log: Callable[[str], None], *, force: bool
) -> Canary:
    if output is not None:
        raise UsageError("in_place stores the golden outputs in the .apr itself: leave out the output file")
    with formats.open(name) as model:
        if model.format != "apr-v2":
            hint = "leave out --in-place: they are then stored in a file next to the model"
            raise UnsupportedError(f"golden outputs cannot be stored in {model.label}", path=name, hint=hint)
        if CANARY_KEY in model.metadata and not force:
            raise ExistsError("the model already has golden outputs", path=name, hint="replace them with --force")
    canary = _compute(name, prompts, log)
    store_record(name, CANARY_KEY, canary.to_json())
    return canary


def canary_path(file: PathLike) -> str:
    """Where the canary of a model is: beside it."""
    return f"{os.fspath(file).rstrip(os.sep)}{SUFFIX}"


def read_canary(path: PathLike) -> Canary:
    """Reads a canary file. Raises NotFoundError, CorruptError, LimitError."""
    name = os.fspath(path)
    with Source.open(name) as source:
        if source.size > MAX_CANARY_BYTES:
            raise LimitError(f"a canary is limited to {MAX_CANARY_BYTES} bytes", path=name)
        data = source.read(0, source.size)
    return _parse(name, lambda: loads(data))


def find_canary(file: PathLike) -> tuple[str, Canary] | None:
    """The golden outputs beside a model, else those in it, and where they are; None without any.

    Raises CorruptError, LimitError for damaged ones.
    """
    beside = canary_path(file)
    if exists(beside):
        return beside, read_canary(beside)
    with formats.open(file) as model:
        value = model.metadata.get(CANARY_KEY) if model.convention == "apr" else None
    return None if value is None else (f"{os.fspath(file)}: {CANARY_KEY}", _parse(os.fspath(file), lambda: value))


def _parse(name: str, read: Callable[[], object]) -> Canary:
    try:
        value = mapping_of(read())
        if value["schema"] != SCHEMA:
            raise CorruptError("not a canary that this version can read")
        prompts = [_prompt(row) for row in list_of(value["prompts"])]
        if not prompts:
            raise ValueError
        return Canary(
            str(value["model"]), str(value["engine"]), _number(value["bits"]),
            None if value["template"] is None else str(value["template"]), prompts,
        )  # fmt: skip
    except AprError as error:
        error.path = name
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError("not a canary", path=name) from error


def _prompt(value: object) -> GoldenPrompt:
    row = mapping_of(value)
    ids, greedy = ([_integer(item) for item in list_of(row[key])] for key in ("ids", "greedy"))
    top = [[_pair(pair) for pair in list_of(position)] for position in list_of(row["top"])]
    layers: dict[str, dict[str, object]] = {}
    for layer, entry in mapping_of(row["layers"]).items():
        probes = [[_number(item) for item in list_of(token)] for token in list_of(mapping_of(entry)["probes"])]
        if len({len(token) for token in probes}) != 1:
            raise ValueError
        layers[str(int(layer))] = {"digest": str(mapping_of(entry)["digest"]), "probes": probes}
    if not ids or len(ids) >= CONTEXT or not greedy or len(greedy) > CONTEXT or len(top) != len(ids) or not all(top):
        raise ValueError
    return GoldenPrompt(str(row["text"]), ids, greedy, top, layers)


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _pair(value: object) -> tuple[int, float]:
    token, logarithm = list_of(value)
    return _integer(token), _number(logarithm)


def _integer(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def check_canary(
    file: PathLike,
    canary: PathLike | None = None,
    *,
    exact: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> CanaryReport:
    """Compares what a model computes with golden outputs.

    Args:
        file: the model, in any format and dtype.
        canary: the file of golden outputs; default: FILE.canary.json, else those in the `.apr`.
        exact: require the same bits after every layer: only for the same weights, machine and llama.cpp.
        log: called with a line when the model is exported first.

    Raises:
        RunError: llama.cpp cannot run the model.
        NotFoundError, CorruptError: no canary, or a damaged one.
    """
    name = formats.path_text(file, "file")
    found = find_canary(name) if canary is None else (os.fspath(canary), read_canary(canary))
    if found is None:
        raise NotFoundError(
            "the model has no golden outputs", path=name, hint=f"apr canary make {name}, or pass them with --canary"
        )
    place, golden = found
    return compare(golden, _compute(name, [p.text for p in golden.prompts], log, golden), name, place, exact=exact)


def parity(
    a: PathLike, b: PathLike, *, exact: bool = False, log: Callable[[str], None] = lambda line: None
) -> CanaryReport:
    """Compares what two models compute, layer by layer; `b` is judged by `a`. Raises as `check_canary`."""
    names = formats.path_text(a, "a"), formats.path_text(b, "b")
    golden = _compute(names[0], _TEXTS, log)
    return compare(golden, _compute(names[1], _TEXTS, log, golden), names[1], names[0], exact=exact)


def _compute(name: str, prompts: Sequence[str], log: Callable[[str], None], golden: Canary | None = None) -> Canary:
    """Golden outputs of a model; with `golden` of its tokens, whatever the model's own tokenizer makes of the texts."""
    prepared = prepare(name, say=log)
    with formats.open(prepared.path) as model:
        template = model.metadata.get("tokenizer.chat_template")
        bits = _bits(model.tensors.entries)
    digest = hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None
    found = []
    with open_decoder(name, n_ctx=CONTEXT, n_threads=1, watched=True) as llama:
        for number, text in enumerate(prompts):
            own = llama.tokenize(text)[: CONTEXT - _GREEDY - 1]
            ids = own if golden is None else golden.prompts[number].ids
            ids = [min(token, llama.n_vocab - 1) for token in ids]
            layers = llama.states(ids)
            top = _top(_logits(llama, ids))
            found.append(GoldenPrompt(text, own, _greedy(llama, ids), top, layers))
        return Canary(Path(name).name, llama.facts.engine, bits, digest, found)


def _bits(tensors: Sequence[Tensor]) -> float:
    sizes: dict[float, int] = {}
    for tensor in tensors:
        shape, dtype = tensor.shape, DTYPES[tensor.dtype]
        if len(shape) > 1:
            bits = 8 * dtype.block_bytes / dtype.block
            sizes[bits] = sizes.get(bits, 0) + tensor.n_bytes
    total = sum(sizes.values())
    return min((bits for bits, n_bytes in sizes.items() if n_bytes >= total / 20), default=16.0)


def _logits(llama: Llama, ids: Sequence[int]) -> Array:
    import numpy as np

    with tempfile.NamedTemporaryFile(prefix="apr-canary-") as file:
        file.truncate(4 * len(ids) * llama.n_vocab)
        llama.logits(ids, file.name)
        return np.fromfile(file.name, np.float32).reshape(len(ids), llama.n_vocab)


def _top(logits: Array) -> list[list[tuple[int, float]]]:
    import numpy as np

    values = np.asarray(logits, np.float64)
    values = values - values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    order = np.argsort(-values, axis=1, kind="stable")[:, :_TOP]
    return [
        [(int(i), round(max(float(row[i]), -1e30), 6)) for i in best] for row, best in zip(values, order, strict=True)
    ]


def _greedy(llama: Llama, ids: Sequence[int]) -> list[int]:
    import numpy as np

    found: list[int] = []
    with tempfile.NamedTemporaryFile(prefix="apr-canary-") as file:
        for _ in range(_GREEDY):
            llama.last_logits([*ids, *found], file.name)
            found.append(int(np.fromfile(file.name, np.float32).argmax()))
    return found


def compare(golden: Canary, found: Canary, file: str, canary: str, *, exact: bool = False) -> CanaryReport:
    """How `found` differs from `golden`, whose tokens it was computed with."""
    bits = min(golden.bits, found.bits)
    report = CanaryReport(file, canary, band=next(band for least, band in _BANDS if bits >= least))
    report.findings += _other_text(golden, found)
    _compare_layers(report, golden, found)
    pairs = [
        (a, b) for p, q in zip(golden.prompts, found.prompts, strict=True) for a, b in zip(p.top, q.top, strict=True)
    ]
    report.kl = sum(_kl(a, b) for a, b in pairs) / len(pairs)
    report.agreement = sum(a[0][0] == b[0][0] for a, b in pairs) / len(pairs)
    report.greedy = sum(_common(p.greedy, q.greedy) for p, q in zip(golden.prompts, found.prompts, strict=True)) / sum(
        len(p.greedy) for p in golden.prompts
    )
    if report.first_layer is not None:
        value = report.layers[report.first_layer]
        report.findings.append(
            f"{layer_name(report.first_layer)} is the first that differs: by {value:.2g} of its states, "
            f"beyond {report.band:g} for {bits:.3g} bits per weight"
        )
    elif exact and report.first_change is not None:
        report.findings.append(
            f"{layer_name(report.first_change)} is the first layer whose states are not bit-identical"
        )
    elif report.kl > report.band:
        report.findings.append(f"the output differs: KL {report.kl:.2g} nats, with all layers within {report.band:g}")
    report.passed = not report.findings
    return report


def _other_text(golden: Canary, found: Canary) -> Iterator[str]:
    for p, q in zip(golden.prompts, found.prompts, strict=True):
        if p.ids != q.ids:
            counts = f"{len(q.ids)} tokens {q.ids[:6]}, not {len(p.ids)} {p.ids[:6]}"
            yield f"the tokenizer differs: {p.text[:40]!r} is {counts}"
            break
    if golden.template != found.template:
        yield (
            "the chat template differs"
            if golden.template and found.template
            else ("the chat template is missing" if golden.template else "a chat template was added")
        )


def _compare_layers(report: CanaryReport, golden: Canary, found: Canary) -> None:
    import numpy as np

    squares: dict[int, list[float]] = {}
    for p, q in zip(golden.prompts, found.prompts, strict=True):
        if p.layers.keys() != q.layers.keys():
            report.findings.append(f"{len(q.layers) - 1} layers instead of {len(p.layers) - 1}")
            return
        for layer in sorted(map(int, p.layers)):
            a, b = (np.asarray(side.layers[str(layer)]["probes"], np.float64) for side in (p, q))
            if a.shape != b.shape:
                report.findings.append(f"{layer_name(layer)} has hidden states of a different shape")
                return
            size = float(np.linalg.norm(a))
            error = float(np.linalg.norm(a - b)) / size if size else math.inf
            squares.setdefault(layer, []).append(error if math.isfinite(error) else math.inf)
            if p.layers[str(layer)]["digest"] != q.layers[str(layer)]["digest"] and (
                report.first_change is None or layer < report.first_change
            ):
                report.first_change = layer
    report.layers = {layer: max(values) for layer, values in sorted(squares.items())}
    report.first_layer = next((layer for layer, value in report.layers.items() if not value <= report.band), None)


def _kl(a: Sequence[tuple[int, float]], b: Sequence[tuple[int, float]]) -> float:
    """KL divergence of `b` from `a` over the most likely tokens of `a` and the rest, in nats; a lower bound."""
    known = dict(b)
    least = min(known.values())
    p = [math.exp(value) for _, value in a]
    q = [math.exp(known.get(token, least)) for token, _ in a]
    p_rest, q_rest = max(1 - sum(p), 1e-9), max(1 - sum(q), 1e-9)
    return max(
        0.0, sum(x * math.log(x / y) for x, y in zip([*p, p_rest], [*q, q_rest], strict=True) if x > 0 and y > 0)
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
