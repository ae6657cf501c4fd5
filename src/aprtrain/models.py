"""The models of a run: opens and pairs teacher and student, and loads them onto the device.

--student-init prunes the teacher by depth or width, as `apr prune` does, or initializes a new model from a config.json:

    layers:0,2,4-6     these layers of the teacher
    layers:12          twelve evenly spaced layers, including the first and the last
    width:hidden=512,ffn=1408,heads=8,kv_heads=2      keep the largest weights of each width; others stay
    experts:32         the most salient experts of each MoE layer, see `reap`
    PATH               a config.json, or a folder with one: random weights
    self               the teacher itself, to be trained into a quantization preset (--qat)

`layers`, `width` and `experts` can be joined with `+`.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

import aprfmt
from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.canonical.depth_pruning import parse_layers, select_layers
from aprfmt.canonical.expert_pruning import with_fewer_experts
from aprfmt.canonical.packed import AS_VALUES
from aprfmt.canonical.read import canonical
from aprfmt.canonical.row_mapping import BufferedTensor
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.canonical.width_pruning import narrowed, parse_widths
from aprfmt.errors import NotFoundError, RefusedError, UnsupportedError, UsageError
from aprfmt.formats.hf_files import read_config
from aprfmt.formats.teacher_files import TeacherFiles
from aprfmt.provenance import provenance
from aprfmt.provenance.provenance import Provenance
from aprfmt.texts.encoding import Encoder
from aprfmt.texts.parallel import AlignedWindows
from aprfmt.texts.sequences import Windows, check_length
from aprfmt.texts.sources import short_names, split_weights
from aprfmt.tokenizer.alignment import ALIGNED, OutcomeMap, SharedVocabulary, align, outcomes_of
from aprfmt.tokenizer.model import Tokenizer
from aprfmt.types import JsonObject, PathLike
from aprtrain.checkpoints.checkpoint import ModelIdentity
from aprtrain.config import SELF, Config, command_fields, is_pruned, what_fields
from aprtrain.data.batches import batch_of
from aprtrain.guards import check_distinct
from aprtrain.lora_spec import parse_lora
from aprtrain.network.decoder import Decoder
from aprtrain.network.lora import add_lora
from aprtrain.network.names import hf_names, hf_parts
from aprtrain.network.shape import Shape, shape_of
from aprtrain.network.weights import (
    NetworkSource,
    edge_fingerprint,
    fill,
    fingerprint,
    load_decoder,
    network_of,
    open_network,
    refuse_zeros,
)
from aprtrain.optim.flat import FlatOptimizer
from aprtrain.optim.rules import Settings, rule_of
from aprtrain.optim.sharded import ShardedOptimizer, shard_weights
from aprtrain.optim.states import Optimizer
from aprtrain.qat import Quantizer, qat_preset, types_of
from aprtrain.teacher.files import TeacherTargets
from aprtrain.teacher.teacher import BlocksDecoder, Teacher, note_decoded, residency_of, teacher_dtype
from aprtrain.world import World

GATE_TOKENS = 4096
"""Held-out tokens for comparing an fp8 teacher with bf16."""


ROUTER_AUX_LOSS = 1e-3
"""The default of --router-aux-loss."""


@dataclass(frozen=True)
class TrainingPair:
    """The opened models of a run.

    Attributes:
        teacher: None in pretraining and with --teacher-logprobs.
        student: the student, or the model to pretrain.
        identity: hyper-parameters, tokenizer and provenance for the student's checkpoints.
        vocabulary: the ids that teacher and student share (all of the teacher's if its tokenizer is another one); None
            in pretraining.
        outcomes: of their tokens, if the teacher's tokenizer is another one; else None.
        files: saved log-probabilities instead of a teacher.
        qat_types: the GGML type of each tensor that --qat quantizes, by Hugging Face name.
    """

    teacher: NetworkSource | None
    student: NetworkSource
    identity: ModelIdentity
    vocabulary: SharedVocabulary | None
    files: TeacherFiles | None = None
    qat_types: Mapping[str, str] = field(default_factory=dict)
    outcomes: OutcomeMap | None = None

    def student_fingerprint(self) -> str:
        """Fingerprint of the student's initial weights; "" until its experts are chosen."""
        if self.student.experts is not None and not self.student.experts.of_layer:
            return ""
        file = self.student.model
        return edge_fingerprint(file) if file is not None else fingerprint(self.student)


@contextmanager
def open_pair(command: str, config: Config) -> Iterator[TrainingPair]:
    """Opens and checks the models of `config`. Raises AprError within seconds."""
    if config.qat is not None:
        qat_preset(config.qat)
    with ExitStack() as stack:
        teacher = _open(config.teacher, stack) if config.teacher is not None else None
        files = TeacherFiles(Path(config.teacher_logprobs)) if config.teacher_logprobs is not None else None
        student = _student(config, teacher, stack)
        if config.router_aux_loss is not None and (student.shape.experts is None or config.lora is not None):
            why = "--lora trains no routers" if student.shape.experts is not None else "the student has no experts"
            raise UsageError(f"--router-aux-loss has no effect: {why}", hint="leave out --router-aux-loss")
        qat_types = types_of(student, config.qat) if config.qat is not None else {}
        if files is not None:
            files.check(Encoder(student.tokenizer).digest, config.seq_len, config.top_k, config.temperature)
        other = teacher or student
        rows = other.shape.vocab_rows, student.shape.vocab_rows
        vocabulary = align(other.tokenizer, student.tokenizer, *rows, config.vocab_policy)
        outcomes = None
        if config.vocab_policy in ALIGNED and other.tokenizer is not None and student.tokenizer is not None:
            outcomes = outcomes_of(other.tokenizer, student.tokenizer)
        if teacher is not None and config.qat is None:  # a quantized student is none the less another model
            check_distinct(
                teacher.shape,
                student.shape,
                config.student or str(config.student_init),
                allow_same_arch=config.allow_same_arch,
                same_weights=lambda: fingerprint(other) == fingerprint(student),
            )
        for who, network in (("teacher", teacher), ("student", student)):
            if network is not None:
                check_length(config.seq_len, who, network.hparams.max_position_embeddings)
        shared = None if command == "pretrain" else vocabulary
        identity = _identity(config, student, teacher)
        yield TrainingPair(teacher, student, identity, shared, files, qat_types, outcomes)


def data_names(config: Config) -> list[str]:
    """The shortest names that tell the data of a run apart, without the folders that they are in."""
    paths, _ = split_weights(config.data)
    return short_names([Path(path) for path in paths])


def resolve_residency(config: Config, pair: TrainingPair) -> Config:
    """`config` with --teacher-residency auto resolved for the teacher."""
    if config.teacher_residency != "auto":
        if pair.teacher is not None and config.teacher_residency == "bf16":
            note_decoded(pair.teacher, asked=True)
        return config
    residency = "bf16"
    if pair.teacher is not None and (residency := residency_of(pair.teacher)) == "bf16":
        note_decoded(pair.teacher)
    return replace(config, teacher_residency=residency)


def _open(path: str, stack: ExitStack) -> NetworkSource:
    network = stack.enter_context(open_network(path))
    refuse_zeros(network)
    return network


def _student(config: Config, teacher: NetworkSource | None, stack: ExitStack) -> NetworkSource:
    if (path := config.student or config.init) is not None:
        student = _open(path, stack)
        _check_student(student.shape)
        return student
    if teacher is not None and config.student_init is not None:
        return make_student(teacher, config.student_init, seed=config.seed)
    assert config.like is not None
    assert config.shape is not None
    return new_student(config.shape, _open(config.like, stack).tokenizer, seed=config.seed)


def _check_student(shape: Shape) -> None:
    if shape.has("choice_bias"):
        raise UnsupportedError(
            f"{shape.architecture} is supported as a teacher only: gradients do not train the selection bias of its "
            "routers",
            hint="docs/training.md lists the families that can be trained",
        )


def _identity(config: Config, student: NetworkSource, teacher: NetworkSource | None) -> ModelIdentity:
    """Identity of the student, with the names of its data; one made from a teacher inherits the teacher's license."""
    data, source = data_names(config), teacher if config.student_init == SELF else student
    if source is not None and source.model is not None:
        known = provenance.read(source.model)
        stated = [name for name in known.info.get("data_source", "").split(",") if name]
        known.info |= {"data_source": ",".join(dict.fromkeys([*stated, *data]))} if data else {}
        return ModelIdentity(student.hparams, student.tokenizer, known)
    origin = Provenance({"data_source": ",".join(data)} if data else {}, None)
    if teacher is not None and teacher.model is not None:
        known = provenance.read(teacher.model)
        origin.info.update({k: v for k, v in known.info.items() if k in ("license", "author")})
        name = known.info.get("name") or teacher.path.stem
        origin.info["name"] = f"{name} student"
    return ModelIdentity(student.hparams, student.tokenizer, origin)


def settings_of(config: Config) -> Settings:
    """What the update rule is given."""
    return Settings((config.beta1, config.beta2), config.eps, config.weight_decay, config.clip)


def load_student(config: Config, pair: TrainingPair, world: World) -> tuple[Decoder, Optimizer, Quantizer | None]:
    """The student on the device, its optimizer, and what rounds its weights with --qat.

    It computes in bfloat16 on a GPU, in float32 on the CPU.
    """
    quantizer = Quantizer(pair.student, pair.qat_types, config.qat_every) if pair.qat_types else None
    shape, dtype = pair.student.shape, torch.bfloat16 if world.device.type == "cuda" else torch.float32
    settings = settings_of(config)
    rule = rule_of(config.optimizer)

    def matrices(parameter: str, whole: Tensor) -> list[Tensor]:
        return [part for _, part in hf_parts(shape, parameter, whole)]

    decoder: Decoder
    optimizer: Optimizer
    if config.lora is not None:
        decoder = _load_lora(config, config.lora, pair.student, dtype, world.device)
        optimizer = FlatOptimizer(decoder, settings, world, rule=rule)
    elif config.shard == "weights":
        decoder = shard_weights(shape, dtype, world)
        optimizer = ShardedOptimizer(decoder, settings, world, rule, matrices)
    else:
        decoder = Decoder(shape, dtype, world.device)
        optimizer = FlatOptimizer(decoder, settings, world, quantizer, rule, matrices)
    decoder.recompute = config.recompute

    def write(parameter: str, whole: Tensor) -> None:
        for name, target in hf_parts(shape, parameter, whole):
            fill(pair.student, name, target)

    if config.lora is None:
        weight = ROUTER_AUX_LOSS if config.router_aux_loss is None else config.router_aux_loss
        decoder.balance_experts(weight, config.tokens_per_step)
        optimizer.load("master", write)
    pair.student.check_intact()
    if pair.teacher is not None and pair.teacher.model is not None:  # the student may be made from its weights
        pair.teacher.model.check_unchanged()
    if config.is_compiled(world.device.type):
        decoder.compile_blocks()
    return decoder, optimizer, quantizer


def is_lora_in_blocks(config: Config, student: NetworkSource) -> bool:
    """Whether the frozen weights of --lora stay the blocks of their file."""
    return config.lora_base == "q4k" or (config.lora_base == "auto" and residency_of(student) == "q4k")


def _load_lora(config: Config, lora: str, student: NetworkSource, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The frozen student with pairs beside its matrices."""
    in_blocks = is_lora_in_blocks(config, student)
    decoder = BlocksDecoder(student, device) if in_blocks else load_decoder(student, dtype, device)
    add_lora(decoder, parse_lora(lora), config.seed)
    return decoder


def load_teacher(
    config: Config, pair: TrainingPair, held_out: Windows | AlignedWindows, device: torch.device
) -> Teacher | None:
    """The teacher on `device`; computes in bfloat16, or in float32 for bf16 residency on the CPU."""
    if pair.teacher is None or pair.vocabulary is None:
        return None
    sample = None
    if config.teacher_residency == "fp8":
        some = range(max(1, min(len(held_out), GATE_TOKENS // config.seq_len)))
        sample = (
            batch_of(held_out, some).tokens_NT
            if isinstance(held_out, Windows)
            else torch.from_numpy(held_out.rows(some).tokens_RT)
        )
    return Teacher(
        pair.teacher,
        pair.vocabulary,
        config.teacher_residency,
        device,
        dtype=teacher_dtype(config.teacher_residency, device),
        sample_NT=sample,
        compiled=config.is_compiled(device.type),
    )


def open_teacher_files(
    config: Config, pair: TrainingPair, windows: Windows, held_out: Windows
) -> tuple[TeacherTargets | None, TeacherTargets | None]:
    """Saved log-probabilities of the training and evaluation sequences. Raises RefusedError if any are missing."""
    files = pair.files
    if files is None or pair.vocabulary is None:
        return None, None
    parts = {"training": (windows, range(len(windows))), "held-out": (held_out, held_out.select(config.eval_sequences))}
    places = [files.bind(part, ids, what) for what, (part, ids) in parts.items()]
    n_ids, k = pair.vocabulary.n_real, config.top_k
    train, scored = (TeacherTargets(files, some, n_ids, k, config.temperature) for some in places)
    return train, scored


# --- students that a run makes ---


def make_student(teacher: NetworkSource, how: str, *, seed: int = 42) -> NetworkSource:
    """A student with the teacher's tokenizer; `layers` and `width` give lazy tensors.

    `seed` is for random weights only. Raises UsageError if `how` is malformed, RefusedError if this teacher cannot be
    pruned that way.
    """
    if not is_pruned(how):
        return new_student(how, teacher.tokenizer, seed=seed)
    words = [word.partition(":")[::2] for word in how.split("+")]
    said = dict(words)
    if len(said) < len(words):
        raise UsageError(f"{how!r} sets layers, width or experts twice")
    _check_student(teacher.shape)
    assert teacher.model is not None
    c, kept = replace(canonical(teacher.model, decoding=AS_VALUES), extras={}), None
    if "experts" in said:
        if not said["experts"].isdecimal():
            raise UsageError(f"experts:{said['experts']:.20} is not a number of experts", hint="use experts:32")
        c, kept = with_fewer_experts(c, int(said["experts"]))
    if "layers" in said:
        c = select_layers([c], [(0, layer) for layer in _layers(said["layers"], teacher.shape.n_layers)])
    if "width" in said:
        c, _ = narrowed(c, parse_widths(said["width"]))
    return replace(network_of(c), experts=kept)


def without_path(how: str | None) -> str | None:
    """`how` for published metadata: only the file name of a config.json."""
    return how if how is None or is_pruned(how) else Path(how).name


def _layers(text: str, n_layers: int) -> list[int]:
    """The listed layers, or N evenly spaced ones."""
    if not text.isdecimal():
        return parse_layers(text.removesuffix(","), n_layers)
    if not 1 <= int(text) <= n_layers:
        raise UsageError(f"cannot select {int(text)} layers: the teacher has {n_layers}")
    return _spread(int(text), n_layers)


def _spread(n: int, n_layers: int) -> list[int]:
    """`n` evenly spaced layers, including the first and the last."""
    step = (n_layers - 1) / max(1, n - 1)
    return [round(i * step) for i in range(n)]


def match_layers(config: Config, student: Shape, teacher: Shape) -> list[tuple[int, int]]:
    """The layers of --hidden-layers, each with its layer of the teacher: the one it was made from, or by its depth.

    Raises UsageError for unknown layers.
    """
    how = config.student_init if config.student_init is not None and is_pruned(config.student_init) else ""
    listed = dict(word.partition(":")[::2] for word in how.split("+")).get("layers")
    of_teacher = _layers(listed, teacher.n_layers) if listed else _spread(student.n_layers, teacher.n_layers)
    wanted = [*range(student.n_layers)]
    if config.hidden_layers is not None:
        wanted = parse_layers(config.hidden_layers, student.n_layers)
    if max(wanted) >= student.n_layers:
        raise UsageError(f"--hidden-layers: unknown layer {max(wanted)}", hint=f"the student has {student.n_layers}")
    return [(layer, of_teacher[layer]) for layer in wanted]


def new_student(source: PathLike, tokenizer: Tokenizer | None, *, seed: int = 42) -> NetworkSource:
    """A randomly initialized model with the dimensions of a config.json (or the folder that contains it).

    Raises NotFoundError if the file is missing, UnsupportedError for models that cannot be trained, RefusedError if
    the tokenizer has more tokens than vocab_size.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise NotFoundError(
            "no such config.json", path=path, hint="use layers:N, width:hidden=N,... or the path of a config.json"
        )
    config = read_config(path)
    hparams = from_hf_config(config)
    row = ARCHITECTURES.get(hparams.architecture or "")
    shape = shape_of(hparams, row)
    assert row is not None
    _check_student(shape)
    hparams.tied = shape.tied
    if tokenizer is not None and len(tokenizer.tokens) > shape.vocab_rows:
        raise RefusedError(
            f"the tokenizer has {len(tokenizer.tokens)} tokens, the config's vocab_size is {shape.vocab_rows}",
            path=path,
            hint=f"set vocab_size to at least {len(tokenizer.tokens)}",
        )
    decoder = Decoder(shape)
    spread = config.get("initializer_range")
    initialize_weights(decoder, seed, spread if isinstance(spread, float) and spread > 0 else 0.02)
    return NetworkSource(path, None, row, shape, hparams, tokenizer, tensors_of(decoder))


def tensors_of(decoder: Decoder) -> dict[str, CanonicalTensor]:
    """The tensors of an in-memory model as canonical tensors."""

    def stored(tensor: Tensor) -> list[bytes]:
        return [tensor.float().cpu().numpy().tobytes()]

    found = decoder.hf_tensors().items()
    sources = [BufferedTensor(name, "F32", tuple(tensor.shape), partial(stored, tensor)) for name, tensor in found]
    return {source.name: CanonicalTensor(source.name, (source,)) for source in sources}


def initialize_weights(decoder: Decoder, seed: int, spread: float = 0.02) -> None:
    """Initializes the weights at random, identically on every device and in every dtype.

    Matrices are normal with standard deviation `spread`, divided by sqrt(2 n_layers) for residual projections
    (Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3); norm weights are 1.
    """
    s, generator = decoder.shape, torch.Generator().manual_seed(seed)
    for hf, tensor in decoder.hf_tensors().items():
        name = hf_names(s)[hf][0].rpartition(".")[2]
        if tensor.ndim > 1 and not name.endswith("norm"):
            deviation = spread / math.sqrt(2 * s.n_layers) if name in ("out", "down") else spread
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)
        else:
            plain = ("scale", "delta_norm", "dt_bias") if s.norm_plus_one else ("scale", "norm")
            tensor.fill_(float(name.endswith(plain)))
            if name == "decay":
                tensor.copy_(torch.empty(tensor.shape).uniform_(1, 16, generator=generator).log())


# --- where a checkpoint comes from ---

SCHEMA = "aprtrain.run/1"


class ModelOrigin(TypedDict):
    """A model in a checkpoint's lineage; `print` is a fingerprint of its weights, `signature` says who signed it."""

    name: str
    print: str
    architecture: str
    parameters: int
    made: NotRequired[str | None]
    signature: NotRequired[str]


class Origin(TypedDict):
    """Lineage of a checkpoint; JSON data."""

    schema: str
    command: str
    teacher: ModelOrigin | None
    student: ModelOrigin
    data: str | None
    data_sources: list[dict[str, str]]
    config: JsonObject
    config_digest: str
    overrides: list[str]
    versions: dict[str, str]
    hardware: NotRequired[str]


def origin_of(command: str, config: Config, pair: TrainingPair, data: str | None) -> Origin:
    """Lineage of this run's checkpoints; `data` is the key of the corpus. Contains no paths."""
    overrides = [name for name in ("allow_same_arch", "allow_weaker_teacher") if getattr(config, name)]
    overrides += [f"changed {name}" for name in config.allow_changed]
    made = without_path(config.student_init)
    own = {row.name for row in command_fields(command)} & set(what_fields())
    decides = {name: value for name, value in config.to_json().items() if name in own}
    decides |= {"student_init": made} if command == "distill" else {}
    return {
        "schema": SCHEMA,
        "command": command,
        "teacher": _teacher_origin(pair),
        "student": {
            **_model_origin(pair.student, pair.student_fingerprint()),
            "made": made or without_path(config.shape),
        },
        "data": data,
        "data_sources": [{"name": name} for name in data_names(config)],
        "config": decides,
        "config_digest": config.digest(),
        "overrides": overrides,
        "versions": {"aprfmt": aprfmt.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _teacher_origin(pair: TrainingPair) -> ModelOrigin | None:
    """Name, fingerprint, architecture and size of the teacher, or of the one whose log-probabilities are stored.

    None in pretraining. The fingerprint of stored log-probabilities is their digest, top-k and temperatures.
    """
    if pair.files is not None:
        f = pair.files.facts
        words = f"{f.sha256} {f.k} {f.temperatures}"
        return {"name": f.teacher, "print": words, "architecture": f.architecture, "parameters": f.parameters}
    if pair.teacher is None or pair.teacher.model is None:
        return None
    return _model_origin(pair.teacher, edge_fingerprint(pair.teacher.model))


def _model_origin(network: NetworkSource, fingerprint: str) -> ModelOrigin:
    found: ModelOrigin = {
        "name": network.path.name,
        "print": fingerprint,
        "architecture": network.shape.architecture,
        "parameters": network.shape.n_params,
    }
    if network.model is not None and network.model.signature is not None:
        found["signature"] = network.model.signature.sentence()
    return found
