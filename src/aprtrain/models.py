"""The models of a run: opened, paired, and put on the device, where the student's weights are float32 masters."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

import aprfmt
from aprfmt.provenance import provenance
from aprfmt.provenance.provenance import Provenance
from aprfmt.types import JsonObject
from aprtrain.checkpoints.checkpoint import Identity
from aprtrain.config import Config, command_fields, what_fields
from aprtrain.data.batches import Windows, batch_of
from aprtrain.guards import check_distinct, check_length
from aprtrain.loss.vocab import Vocabulary, align
from aprtrain.network.decoder import Decoder, hf_parts
from aprtrain.network.weights import Network, edge_fingerprint, fill, fingerprint, open_network, refuse_zeros
from aprtrain.optim.adamw import FlatAdamW, Optimizer, Settings, ShardedAdamW, shard_weights
from aprtrain.student import fresh_student, make_student, without_folders
from aprtrain.teacher.teacher import Teacher, teacher_dtype
from aprtrain.world import World

_GATE_TOKENS = 4096  # that an fp8 teacher is compared with bf16 on


@dataclass(frozen=True)
class Pair:
    """What is trained and what it learns from, opened.

    Attributes:
        teacher: None in pretraining.
        student: what is known of the student.
        made: the student's weights where it was made for this run, float32 on the CPU; else they are in its file.
        identity: what checkpoints say of the student beside its weights.
        vocabulary: the ids that both share; None in pretraining.
    """

    teacher: Network | None
    student: Network
    made: Decoder | None
    identity: Identity
    vocabulary: Vocabulary | None

    def student_fingerprint(self) -> str:
        """Tells the student's initial weights from others."""
        return fingerprint(self.made) if self.made is not None else edge_fingerprint(self.student)


@contextmanager
def open_pair(command: str, config: Config) -> Iterator[Pair]:
    """The models that `config` names. Raises what opening and pairing them raises, each within seconds."""
    with ExitStack() as stack:
        pair = _pretrained(config, stack) if command == "pretrain" else _distilled(config, stack)
        for who, network in (("teacher", pair.teacher), ("student", pair.student)):
            if network is not None:
                check_length(config.seq_len, who, network.hparams.max_position_embeddings)
        yield pair


def _open(path: str | None, stack: ExitStack) -> Network:
    assert path is not None
    network = stack.enter_context(open_network(path))
    refuse_zeros(network)
    return network


def _distilled(config: Config, stack: ExitStack) -> Pair:
    teacher, made = _open(config.teacher, stack), None
    if config.student is not None:
        student = _open(config.student, stack)
    else:
        assert config.student_init is not None
        made, student = make_student(teacher, config.student_init, seed=config.seed)
    rows = teacher.shape.vocab_rows, student.shape.vocab_rows
    vocabulary = align(teacher.tokenizer, student.tokenizer, *rows, config.vocab_policy)
    check_distinct(
        teacher.shape,
        student.shape,
        config.student or str(config.student_init),
        allow_same_arch=config.allow_same_arch,
        same_weights=lambda: fingerprint(teacher) == fingerprint(made if made is not None else student),
    )
    return Pair(teacher, student, made, _identity(student, teacher), vocabulary)


def _pretrained(config: Config, stack: ExitStack) -> Pair:
    made = None
    if config.init is not None:
        student = _open(config.init, stack)
    else:
        assert config.shape is not None
        source = _open(config.like, stack)
        made, student = fresh_student(config.shape, source.tokenizer, seed=config.seed)
    align(student.tokenizer, student.tokenizer, student.shape.vocab_rows, student.shape.vocab_rows)
    return Pair(None, student, made, _identity(student, None), None)


def _identity(student: Network, teacher: Network | None) -> Identity:
    """The student's own provenance; one that was taken from a teacher falls under the teacher's licence."""
    if student.model is not None:
        return Identity(student.hparams, student.tokenizer, provenance.read(student.model))
    origin = Provenance({}, None)
    if teacher is not None and teacher.model is not None:
        known = provenance.read(teacher.model)
        origin.info.update({k: v for k, v in known.info.items() if k in ("license", "author")})
        name = known.info.get("name") or teacher.path.stem
        origin.info["name"] = f"{name} student"
    return Identity(student.hparams, student.tokenizer, origin)


def load_student(config: Config, pair: Pair, world: World) -> tuple[Decoder, Optimizer]:
    """The student on the device and the owner of its weights; bfloat16 on a GPU, float32 on the CPU."""
    shape, dtype = pair.student.shape, torch.bfloat16 if world.device.type == "cuda" else torch.float32
    settings = Settings((config.beta1, config.beta2), config.eps, config.weight_decay, config.clip)
    decoder: Decoder
    optimizer: Optimizer
    if config.shard == "weights":
        decoder = shard_weights(shape, dtype, world)
        optimizer = ShardedAdamW(decoder, settings, world)
    else:
        decoder = Decoder(shape, dtype, world.device)
        optimizer = FlatAdamW(decoder, settings, world)
    decoder.recompute = config.recompute
    made = pair.made.hf_tensors() if pair.made is not None else {}

    def write(parameter: str, whole: Tensor) -> None:
        for name, target in hf_parts(shape, parameter, whole):
            if pair.made is not None:
                target.copy_(made[name])
            else:
                fill(pair.student, name, target)

    optimizer.load("master", write)
    if config.is_compiled(world.device.type):
        decoder.compile_blocks()
    return decoder, optimizer


def load_teacher(
    config: Config, pair: Pair, held_out: Windows, device: torch.device, *, backbone: bool = True
) -> Teacher | None:
    """The teacher on `device`, or without `backbone` its head; bfloat16, but float32 for a bf16 one on the CPU."""
    if pair.teacher is None or pair.vocabulary is None:
        return None
    sample = None
    if config.teacher_residency == "fp8":
        count = max(1, min(len(held_out), _GATE_TOKENS // config.seq_len))
        sample = batch_of(held_out, range(count)).tokens_NT
    return Teacher(
        pair.teacher,
        pair.vocabulary,
        config.teacher_residency,
        device,
        dtype=teacher_dtype(config.teacher_residency, device),
        sample_NT=sample,
        compiled=config.is_compiled(device.type),
        backbone=backbone,
    )


# --- where a checkpoint comes from ---

SCHEMA = "aprtrain.run/1"


class ModelOrigin(TypedDict):
    """What a checkpoint says of a model that it comes from; `print` is a fingerprint of its weights."""

    name: str
    print: str
    architecture: str
    parameters: int
    made: NotRequired[str | None]


class Origin(TypedDict):
    """Where a checkpoint comes from; JSON data."""

    schema: str
    command: str
    teacher: ModelOrigin | None
    student: ModelOrigin
    data: str | None
    config: JsonObject
    config_digest: str
    overrides: list[str]
    versions: dict[str, str]


def origin_of(command: str, config: Config, pair: Pair, data: str | None) -> Origin:
    """Where a checkpoint of this run comes from; `data` is its corpus's key. It names no folders."""
    overrides = [name for name in ("allow_same_arch", "allow_weaker_teacher") if getattr(config, name)]
    overrides += [f"changed {name}" for name in config.allow_changed]
    made = without_folders(config.student_init)
    own = {row.name for row in command_fields(command)} & set(what_fields())
    decides = {name: value for name, value in config.to_json().items() if name in own}
    decides |= {"student_init": made} if command == "distill" else {}
    return {
        "schema": SCHEMA,
        "command": command,
        "teacher": _model_origin(pair.teacher, edge_fingerprint(pair.teacher)) if pair.teacher else None,
        "student": {
            **_model_origin(pair.student, pair.student_fingerprint()),
            "made": made or without_folders(config.shape),
        },
        "data": data,
        "config": decides,
        "config_digest": config.digest(),
        "overrides": overrides,
        "versions": {
            "aprfmt": aprfmt.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _model_origin(network: Network, fingerprint: str) -> ModelOrigin:
    return {
        "name": network.path.name,
        "print": fingerprint,
        "architecture": network.shape.architecture,
        "parameters": network.shape.n_params,
    }
