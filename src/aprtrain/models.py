"""The models of a run: opened, paired, and put on the device, where the student's weights are float32 masters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from aprfmt.convert import provenance
from aprfmt.convert.provenance import Provenance
from aprfmt.errors import RefusedError
from aprtrain.batches import batch_of
from aprtrain.checkpoint import Identity
from aprtrain.config import Config
from aprtrain.decoder import Decoder
from aprtrain.guards import check_distinct
from aprtrain.optim import Optimizer
from aprtrain.packing import Windows
from aprtrain.student import fresh_student, make_student
from aprtrain.teacher import Teacher
from aprtrain.vocab import Vocabulary, align
from aprtrain.weights import Network, fill, fingerprint, open_network

_EDGE_BYTES = 1 << 16
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

    def student_print(self) -> str:
        """Tells the student's initial weights from others."""
        return fingerprint(self.made) if self.made is not None else quick_print(self.student)


@contextmanager
def opened(command: str, config: Config) -> Iterator[Pair]:
    """The models that `config` names. Raises what opening and pairing them raises, each within seconds."""
    with ExitStack() as stack:
        yield _pretrained(config, stack) if command == "pretrain" else _distilled(config, stack)


def _open(path: str | None, stack: ExitStack) -> Network:
    assert path is not None
    return stack.enter_context(open_network(path))


def _distilled(config: Config, stack: ExitStack) -> Pair:
    teacher, made = _open(config.teacher, stack), None
    if config.student is not None:
        student = _open(config.student, stack)
    else:
        assert config.student_init is not None
        made, student = make_student(teacher, config.student_init, seed=config.seed)
    vocabulary = align(
        teacher.tokenizer, student.tokenizer, teacher.shape.vocab_rows, student.shape.vocab_rows
    )
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


def quick_print(network: Network) -> str:
    """sha-256 over names, dtypes, shapes and both ends of every tensor of an opened file, stored form.

    Enough to tell two models apart, at the cost of a few reads a tensor. Raises RefusedError for a made network.
    """
    if network.model is None:
        raise RefusedError("a network without a file has no stored tensors")
    digest = hashlib.sha256()
    for tensor in sorted(network.model.tensors.values(), key=lambda t: t.name):
        digest.update(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        data = tensor.raw()
        digest.update(data[:_EDGE_BYTES])
        digest.update(data[-_EDGE_BYTES:])
    return digest.hexdigest()


def load_student(config: Config, pair: Pair, device: torch.device) -> tuple[Decoder, Optimizer]:
    """The student on `device` and the owner of its weights; bfloat16 on a GPU, float32 on the CPU."""
    decoder = Decoder(pair.student.shape, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    decoder.recompute = config.recompute
    optimizer = Optimizer(
        decoder.named_parameters(),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        clip=config.clip,
    )
    made = pair.made.hf_tensors() if pair.made is not None else {}
    with optimizer.masters():
        for name, target in decoder.hf_tensors().items():
            if pair.made is not None:
                target.copy_(made[name])
            else:
                fill(pair.student, name, target)
    optimizer.publish()
    if is_compiled(config, device):
        decoder.compile_blocks()
    return decoder, optimizer


def load_teacher(config: Config, pair: Pair, held_out: Windows, device: torch.device) -> Teacher | None:
    """The teacher on `device`; bfloat16, but float32 for a bf16 teacher on the CPU."""
    if pair.teacher is None or pair.vocabulary is None:
        return None
    plain = device.type == "cpu" and config.teacher_residency == "bf16"
    sample = None
    if config.teacher_residency == "fp8":
        count = max(1, min(len(held_out), _GATE_TOKENS // config.seq_len))
        sample = batch_of(held_out, range(count)).tokens_NT
    return Teacher(
        pair.teacher,
        pair.vocabulary,
        config.teacher_residency,
        device,
        dtype=torch.float32 if plain else torch.bfloat16,
        sample_NT=sample,
        compiled=is_compiled(config, device),
    )


def is_compiled(config: Config, device: torch.device) -> bool:
    """Whether blocks are compiled."""
    return config.compile == "on" or (config.compile == "auto" and device.type == "cuda")
