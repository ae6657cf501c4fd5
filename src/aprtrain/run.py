"""A training run: loads models and data, checks them, runs the loop and writes the run's folder."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from aprfmt.errors import RefusedError, RunError, UsageError, causes
from aprfmt.formats.hub_datasets import split_sources
from aprfmt.io.server_url import is_server
from aprfmt.io.sink import check_no_inputs_inside
from aprfmt.io.temporary import scratch_folder
from aprfmt.texts.corpus import prepare
from aprfmt.texts.encoding import Encoder, Ids
from aprfmt.texts.parallel import AlignedWindows, digest_of, retokenize
from aprfmt.texts.sequences import Windows, check_windows
from aprfmt.texts.shards import Corpus, open_corpus
from aprfmt.types import Numbers
from aprtrain import budget, features, guards
from aprtrain.budget import check_means, flops_of
from aprtrain.checkpoints.checkpoint import Saver, clear, lock_folder, prepare_folder
from aprtrain.checkpoints.state import open_state
from aprtrain.config import Config, changed_fields, command_fields, resolve, schema, usual_values
from aprtrain.data.batches import Batches, batch_of, shares_of
from aprtrain.evaluate import evaluate
from aprtrain.finish import Summary, run_loop
from aprtrain.guards import catch_signals
from aprtrain.hidden import HiddenStates
from aprtrain.loop import Trainer
from aprtrain.loss.objective import Objective
from aprtrain.loss.spans import VocabularyMap
from aprtrain.memory import MemoryRow, memory_plan
from aprtrain.models import (
    Origin,
    TrainingPair,
    load_student,
    load_teacher,
    match_layers,
    open_pair,
    open_teacher_files,
    origin_of,
    resolve_residency,
    settings_of,
)
from aprtrain.network.decoder import Decoder
from aprtrain.nodes import fetch
from aprtrain.optim.rules import rule_of
from aprtrain.optim.states import Optimizer, load_states
from aprtrain.qat import Quantizer
from aprtrain.reap import keep_experts, rate_experts
from aprtrain.report.metrics import Recorder, settings_table
from aprtrain.resume import Saved, check_student, find_checkpoint, is_finished, point_latest_at, state_file
from aprtrain.sampler import Sampler, read_prompts
from aprtrain.samples import sample_texts
from aprtrain.selection import note_kernels
from aprtrain.teach import save_answers
from aprtrain.teacher.aligned import AlignedTeacher
from aprtrain.teacher.teacher import Teacher, check_residency
from aprtrain.world import World, join_world, world_size

_TOKENS = "tokens"
_ANSWERS = "teacher"
_ALIGNED = "teacher-tokens"
_SHARE_OF = 256
"""Sequences whose aligned labels are counted before the first step."""

_LOST = ("gloo", "NCCL", "peer")
"""Words in torch.distributed's errors when another process has died."""


def run(
    command: str,
    config: Config,
    *,
    stream: TextIO | None = sys.stderr,
    lines: Sequence[str] = (),
    on_stall: Callable[[RunError], None] = guards.abort,
) -> Summary:
    """Trains according to `config` and returns the summary; logs `lines`, then progress, to `stream`.

    If a step takes too long, `on_stall` is called from another thread and must end the process.

    If a signal stops the run, it saves a checkpoint and sets "interrupted" in the summary. Raises AprError.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(features.recording())
            if config.deterministic:
                stack.enter_context(guards.deterministic())
            world = stack.enter_context(join_world(config.device))
            check_means(config, world.size)
            budget.reset_peak(world.device)
            keeps = config.output is not None and config.smoke is None and world.is_first
            recorder = Recorder(Path(config.output or "") if keeps else None, stream if world.is_first else None)
            for line in lines:
                recorder.log(line)
            folder, saved = stack.enter_context(_folder(config, world))
            for line in saved.lines():
                recorder.log(line)
            config = _with_answers(config, world, folder, recorder)
            pair = stack.enter_context(open_pair(command, config))
            return _train(command, config, world, recorder, folder, saved, pair, on_stall)
    except BaseException as error:
        # A notebook keeps the last error, and its frames would keep the models.
        for each in causes(error):
            traceback.clear_frames(each.__traceback__)
        if isinstance(error, torch.OutOfMemoryError):
            raise RunError(
                "the GPU is out of memory",
                hint="try a smaller --micro-tokens or --recompute block; --plan shows the memory of each part",
            ) from error
        if isinstance(error, RuntimeError) and world_size() > 1 and any(word in str(error) for word in _LOST):
            last = str(error).strip().splitlines()[-1]
            raise RunError(
                "lost the connection to the other processes",
                hint=f"if one of them failed, see its own error message; torch.distributed reported: {last}",
            ) from error
        raise


def _with_answers(config: Config, world: World, folder: Path, recorder: Recorder) -> Config:
    """`config` with files of the log-probabilities, which rank 0 gets from the server where the teacher is one."""
    if not is_server(config.teacher):
        return config
    if world.is_first:
        save_answers(config, folder / _ANSWERS, recorder.log)
    world.wait_for_first()
    return replace(config, teacher=None, teacher_logprobs=str(folder / _ANSWERS))


# --- before the first step ---


def _train(
    command: str,
    config: Config,
    world: World,
    recorder: Recorder,
    folder: Path,
    saved: Saved,
    pair: TrainingPair,
    on_stall: Callable[[RunError], None],
) -> Summary:
    asked, config = config, resolve_residency(config, pair)
    check_residency(config.teacher_residency if pair.teacher is not None else "bf16", world.device)
    prompts = _prompts(config, pair, recorder)  # before the data, which take longer
    corpus = _corpus(config, world, folder, saved, pair, recorder)
    windows = Windows(corpus.train, config.seq_len, corpus.separator)
    held_out = Windows(corpus.held_out, config.seq_len, corpus.separator)
    check_windows(windows, recorder.log)
    twins = _aligned(world, folder, pair, corpus, (windows, held_out), recorder)
    on_gpu = world.device.type == "cuda"
    memory, before = budget.device_bytes(world.device), saved.config.get("micro_tokens")
    config = budget.choose_pass(
        config, pair, world.device, None if memory is None else min(world.gather(memory)), processes=world.size,
        saved=before if isinstance(before, int) else 0, tried=on_gpu,
    )  # fmt: skip
    config, batches = _batches(config, corpus, windows, world, recorder, saved.cursor)
    if (kept := pair.student.experts) is not None:
        rate = partial(_rate_experts, config, pair, windows, held_out, world, recorder)
        kept.of_layer = keep_experts(kept.n, folder, world, resumes=bool(saved), rate=rate)
    origin = origin_of(command, config, pair, corpus.key)
    origin["hardware"] = f"{world.size} x {_device_name(world)}"
    _check_same_everywhere(world, origin)
    if saved:
        _check_resumed(config, saved, origin)
        _check_unfinished(config, world, folder, saved)
        check_student(folder, saved, pair.student)
    plan, student, optimizer, quantizer, teacher = _load(config, pair, world, twins[1] if twins else held_out, memory)

    saver: Saver | None = None
    if config.smoke is None and world.is_first:
        saver = Saver(folder, pair.identity, config.keep, recorder.log, recorder.record)
        saver.also_keep = partial(batches.ends_epochs, each=config.save_epochs)
    # No more than a step's passes take, for which the memory is planned.
    rows = min(config.sequences_per_pass, config.sequences_per_step // world.size)

    answers, scored = open_teacher_files(config, pair, windows, held_out)
    aligned, aligned_held_out = _aligned_teachers(config, pair, teacher, twins, world.device)

    def evaluate_student(is_stopped: Callable[[], bool]) -> Numbers:
        try:
            found = evaluate(
                student, held_out, rows=rows, teacher=teacher, max_windows=config.eval_sequences, answers=scored,
                aligned=aligned_held_out, is_stopped=is_stopped,
                progress=lambda done, of: recorder.doing(f"evaluating: {done} of {of} sequences"),
            )  # fmt: skip
        finally:
            recorder.doing("")
        return {**asdict(found), "best": found.ce if found.kl is None or not config.kd_weight else found.kl}

    learns = teacher is not None or answers is not None
    trainer = Trainer(
        config,
        world,
        student=student,
        optimizer=optimizer,
        teacher=teacher,
        vocabulary=pair.vocabulary,
        batches=batches,
        objective=Objective(config.kd_weight if learns else 0.0, config.temperature, config.loss, config.beta),
        evaluate_student=evaluate_student,
        saver=saver,
        recorder=recorder,
        plan=plan,
        flops=flops_of(config, pair),
        origin=origin,
        on_stall=on_stall,
        answers=answers,
        aligned=aligned,
        sampler=_sampler(config, prompts, student, corpus, world, rows),
        sample=partial(sample_texts, student, held_out, tokenizer, config.samples)
        if config.samples and (tokenizer := pair.student.tokenizer) is not None
        else None,
        quantizer=quantizer,
        hidden=_hidden_states(config, student, teacher, world),
        progress=saved.progress,
    )
    if saved:
        _restore(saved, folder, trainer)
    note_kernels(
        config, batch_of(windows, range(min(rows, len(windows)))).to(world.device), student, teacher, world.device
    )
    if on_gpu and budget.peak_flops(name := _device_name(world)) is None:
        features.current().miss("mfu", f"the peak FLOP/s of {name} are unknown")
    recorder.begin(saved.step if saved else None, [asdict(damage) for damage in saved.damaged], config.to_json())
    _announce(command, trainer, asked)
    if saved:
        _announce_resumed(config, saved, recorder)
    with catch_signals(recorder.notice) as trainer.stop:
        return run_loop(trainer, command, saved)


def _announce_resumed(config: Config, saved: Saved, recorder: Recorder) -> None:
    recorder.log(f"resuming from step {saved.step}, {saved.progress.tokens:,} tokens")
    if config.steps is not None and saved.step > config.steps:
        beyond = f"the run is at step {saved.step:,}, beyond --steps {config.steps}"
        recorder.log(f"{beyond}: writing the final model without further steps")


def _hidden_states(config: Config, student: Decoder, teacher: Teacher | None, world: World) -> HiddenStates | None:
    """The loss of --hidden-weight."""
    if teacher is None or not config.hidden_weight:
        return None
    pairs = match_layers(config, student.shape, teacher.shape)
    return HiddenStates(
        student, teacher.decoder, pairs, config.hidden_loss, rule_of(config.optimizer), settings_of(config), world,
        config.seed,
    )  # fmt: skip


def _restore(saved: Saved, folder: Path, trainer: Trainer) -> None:
    """Loads the state of the checkpoint that a run resumes from."""
    with open_state(state_file(folder, saved.step)) as state:
        load_states(trainer.optimizer, state)
        if trainer.hidden is not None:
            trainer.hidden.load(state)
        torch.set_rng_state(state["rng"])
    if trainer.sampler is not None and len(saved.sampled) == trainer.world.size:
        trainer.sampler.drawn = saved.sampled[trainer.world.rank]
    trainer.world.barrier()
    for path in saved.fetched:
        path.unlink(missing_ok=True)
    if trainer.world.is_first:
        point_latest_at(folder, saved)
        if trainer.saver is not None:
            trainer.saver.left.update(saved.left)


def _rate_experts(
    config: Config, pair: TrainingPair, windows: Windows, held_out: Windows, world: World, recorder: Recorder
) -> list[list[float]]:
    recorder.log("rating the teacher's experts on the training data")
    teacher = load_teacher(replace(config, compile="off"), pair, held_out, world.device)
    assert teacher is not None
    return rate_experts(teacher, windows, config.sequences_per_pass)


def _load(
    config: Config, pair: TrainingPair, world: World, held_out: Windows | AlignedWindows, memory: int | None
) -> tuple[list[MemoryRow], Decoder, Optimizer, Quantizer | None, Teacher | None]:
    """The memory plan, checked against the device's `memory`, and the loaded models."""
    on_gpu = world.device.type == "cuda"
    planned = partial(memory_plan, config, pair, world.device, processes=world.size, tried=on_gpu)
    plan = planned()
    budget.check_fits(plan, memory)
    student, optimizer, quantizer = load_student(config, pair, world)
    teacher = load_teacher(config, pair, held_out, world.device)
    if teacher is not None and teacher.gate is not None:  # how many parts are e4m3 is known only now
        plan = planned(teacher_bytes=teacher.n_bytes)
        budget.check_fits(plan, memory)
    for network in (student, *([teacher.decoder] if teacher is not None else [])):
        # A matrix that stays blocks has a stand-in without memory.
        guards.check_resident(((name, p) for name, p in network.named_parameters() if not p.is_meta), world.device)
    return plan, student, optimizer, quantizer, teacher


def _prompts(config: Config, pair: TrainingPair, recorder: Recorder) -> tuple[Encoder, list[Ids]] | None:
    """The prompts of --on-policy, and what has encoded them."""
    if config.prompts is None:
        return None
    encoder, longest = Encoder(pair.student.tokenizer), config.seq_len - config.new_tokens
    return encoder, read_prompts(Path(config.prompts), encoder, config.text_field, longest, recorder.log)


def _sampler(
    config: Config, given: tuple[Encoder, list[Ids]] | None, student: Decoder, corpus: Corpus, world: World, rows: int
) -> Sampler | None:
    """What --on-policy samples with."""
    if given is None:
        return None
    encoder, prompts = given
    return Sampler(
        student, prompts, config.seq_len, config.sequences_per_step // world.size, rows, config.new_tokens,
        corpus.separator, encoder.begin, config.seed, world.rank, world.size, share=config.on_policy,
        every=config.sample_every, end=config.total_steps or config.stop,
    )  # fmt: skip


def _inputs(config: Config, folder: Path) -> Iterator[str]:
    """The files and folders that a run reads, without the token shards of its own folder.

    Data that are the folder itself are left out: `prepare` refuses them.
    """
    teacher = None if is_server(config.teacher) else config.teacher
    yield from (
        path for path in (teacher, config.student, config.teacher_logprobs, config.eval_data, config.prompts) if path
    )
    for path in split_sources(config.data)[0]:
        if path.absolute() not in (folder.absolute(), folder.absolute() / _TOKENS):
            yield str(path)


@contextmanager
def _folder(config: Config, world: World) -> Iterator[tuple[Path, Saved]]:
    """The run's folder, temporary for a smoke run, and the state to resume from."""
    if config.smoke is not None:
        with scratch_folder("smoke") as name:
            yield Path(name), Saved()
        return
    assert config.output is not None
    path = Path(config.output)
    if world.is_first:
        check_no_inputs_inside(path, _inputs(config, path))
    is_new = not path.exists()
    with lock_folder(path) if world.is_first else nullcontext():
        try:
            if world.is_first:
                prepare_folder(path, resumes=config.resumes)
            world.barrier()
            yield path, find_checkpoint(path, config.resume, world) if config.resumes else Saved()
        except BaseException:
            if world.is_first:
                clear(path, is_new=is_new)
            raise


def _corpus(config: Config, world: World, folder: Path, saved: Saved, pair: TrainingPair, recorder: Recorder) -> Corpus:
    """The token shards: rank 0 writes them, the other nodes fetch them, one process per node verifies the hashes."""
    held_out = [Path(config.eval_data)] if config.eval_data is not None else []
    wanted = saved.origin.get("data")
    corpus = None
    if world.is_first:
        paths, weights = split_sources(config.data)
        corpus = prepare(
            paths, pair.student.tokenizer, folder / _TOKENS,
            held_out=config.held_out, held_out_paths=held_out, log=recorder.log,
            wanted=wanted if isinstance(wanted, str) else None, own=folder, weights=weights,
            text_field=config.text_field, strict=config.strict,
        )  # fmt: skip
    return _everywhere(corpus, folder / _TOKENS, lambda: Encoder(pair.student.tokenizer).digest, world)


def _aligned(
    world: World, folder: Path, pair: TrainingPair, corpus: Corpus, windows: Sequence[Windows], recorder: Recorder
) -> list[AlignedWindows]:
    """The training and held-out windows as a teacher with another tokenizer reads them; [] for other teachers."""
    if pair.outcomes is None or pair.teacher is None:
        return []
    twin, path = None, folder / _ALIGNED
    if world.is_first:
        twin = retokenize(corpus, pair.student.tokenizer, pair.teacher.tokenizer, path, recorder.log)
    tokenizers = pair.student.tokenizer, pair.teacher.tokenizer
    twin = _everywhere(twin, path, lambda: digest_of(*map(Encoder, tokenizers)), world)
    longest = pair.teacher.hparams.max_position_embeddings
    sides = zip(windows, (corpus.train, corpus.held_out), (twin.train, twin.held_out), strict=True)
    found = [AlignedWindows(*side, twin.separator, longest) for side in sides]
    train, held_out = (each.share(each.windows.select(_SHARE_OF)) for each in found)
    recorder.log(
        f"the tokenizers share {pair.outcomes.n:,} tokens; {train:.1%} of the labels are aligned, {held_out:.1%} of "
        "the held-out ones (the others learn from the cross entropy alone)"
    )
    if not train:
        raise RefusedError(
            "no label is aligned: teacher and student do not read the same text",
            hint="check that both models have the tokenizers that they were trained with",
        )
    return found


def _aligned_teachers(
    config: Config, pair: TrainingPair, teacher: Teacher | None, windows: list[AlignedWindows], device: torch.device
) -> tuple[AlignedTeacher | None, AlignedTeacher | None]:
    """Run the teacher on training and held-out windows."""
    if not windows or pair.outcomes is None or pair.vocabulary is None or teacher is None:
        return None, None
    sizes = pair.vocabulary.student_rows, pair.vocabulary.n_real
    ids = VocabularyMap(pair.outcomes, *sizes, device, uld=config.vocab_policy == "uld")
    train, held_out = (AlignedTeacher(teacher, each, ids, config.chunk) for each in windows)
    return train, held_out


def _everywhere(corpus: Corpus | None, path: Path, digest: Callable[[], str], world: World) -> Corpus:
    """The shards that the first process has written to `path` or found elsewhere, in every process."""
    world.wait_for_first()
    here = corpus.folder if corpus is not None else path
    fetch(world.gather(corpus.files() if corpus is not None else [])[0], here, here, world)
    here = world.gather(here)[world.rank - world.local_rank if world.local_size else 0]
    if corpus is None and world.is_local_first:
        corpus = open_corpus(here, digest())
    world.barrier()
    return corpus or open_corpus(here, digest(), skip_checksums=True)


def _check_same_everywhere(world: World, origin: Origin) -> None:
    """Refuses a run whose processes have different models or options."""
    every = world.gather({"configuration": origin["config_digest"], **_fingerprints(origin)})
    for rank, found in enumerate(every):
        for what, mine in found.items():
            if mine != every[0][what]:
                words = f"the {what} of process {rank} differs from that of the first process"
                hint = "run the same command with the same files on every node"
                raise world.told(RefusedError(words, hint=hint))


def _batches(
    config: Config, corpus: Corpus, windows: Windows, world: World, recorder: Recorder, cursor: int
) -> tuple[Config, Batches]:
    """The resolved configuration, and the batches at their cursor."""
    batches = Batches(
        windows,
        shares=shares_of(corpus, windows),
        sequences_per_step=config.sequences_per_step,
        windows_per_micro=config.sequences_per_pass,
        seed=config.seed,
        rank=world.rank,
        world=world.size,
        epochs=None if config.repeat else config.epochs or 1,
        cursor=cursor,
        log=recorder.log,
    )
    config = resolve(config, batches.n_steps)
    batches.check(config.stop)
    return config, batches


def _check_resumed(config: Config, saved: Saved, origin: Origin) -> None:
    """Refuses to resume with options, models or data that would change the results."""
    changed = [name for name in changed_fields(saved.config, config) if name not in config.allow_changed]
    if changed:
        now = config.to_json()
        differences = ", ".join(
            f"{schema()[name].flag} was {saved.config.get(name)!r}, is {now[name]!r}" for name in changed
        )
        raise RefusedError(
            f"the run to resume was configured differently: {differences}",
            hint="to resume anyway, add " + " ".join(f"--allow-changed {name}" for name in changed),
        )
    before, names = _fingerprints(saved.origin), {"student": "student's initial weights"}
    for what, fact in _fingerprints(origin).items():
        if before[what] != fact:
            raise RefusedError(
                f"the {names.get(what, what)} changed since the run to resume", hint="start a new run with another -o"
            )


def _check_unfinished(config: Config, world: World, folder: Path, saved: Saved) -> None:
    """Refuses to resume after the last step, unless the final model is missing or damaged.

    `--resume auto` is the line of a job that a scheduler may start once more: it writes the same model again.
    """
    if config.resume == "auto" or saved.step < config.stop:
        return
    if world.gather(world.is_first and is_finished(folder, saved))[0]:
        raise UsageError(
            f"the run has already completed {saved.step} steps", hint=f"--steps must be more than {saved.step}"
        )


def _fingerprints(origin: Mapping[str, object]) -> dict[str, object]:
    """Fingerprints of the models and the data of a run."""
    facts = {what: origin.get(what) for what in ("teacher", "student", "data")}
    return {what: fact.get("print") if isinstance(fact, Mapping) else fact for what, fact in facts.items()}


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


def _announce(command: str, trainer: Trainer, asked: Config) -> None:
    """Logs and records the resolved configuration before the first step; `asked` is the one before that."""
    config, recorder, origin = trainer.config, trainer.recorder, trainer.origin
    device, width = _device_name(trainer.world), trainer.student.shape.d_model
    resolved = config.to_json()
    given = {row.name: resolved[row.name] for row in command_fields(command)}
    usual = {name: value for name, value in usual_values(config, width, asked).items() if name in given}
    facts = {"command": command, "config": given, "defaults": usual, "digest": config.digest(), "device": device}
    record = features.current()
    recorder.record("start", {**facts, "kernels": record.to_json()})
    recorder.log(record.line())
    for miss in record.missed:
        recorder.log(miss.text())
    record.tell = partial(_log_unused_feature, recorder)
    recorder.log(f"{command} on {trainer.world.size} x {device}")
    for line in settings_table(given, usual):
        recorder.log(line)
    recorder.log(f"training options {config.digest()[:16]}  data {str(origin['data'])[:16]}")
    for what, model in (("teacher", origin["teacher"]), ("student", origin["student"])):
        if model is not None and (signature := model.get("signature")) is not None:
            recorder.log(f"{what} {signature}")
    for note in trainer.teacher.notes if trainer.teacher is not None else []:
        recorder.log(f"teacher: {note}")
    if trainer.quantizer is not None:
        recorder.log(f"training into {config.qat}: {trainer.quantizer.describe()}")


def _log_unused_feature(recorder: Recorder, miss: features.Miss) -> None:
    """Logs a feature that turns out to be unusable during the run, for example because compilation fails."""
    recorder.record("not_used", asdict(miss))
    recorder.log(miss.text())
