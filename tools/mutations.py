"""Faults that the trainer's tests must notice, a row each; `mutate.py` puts them in, one at a time."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault and what must notice it.

    Attributes:
        name: what is wrong with the mutant.
        file: below src/aprtrain.
        tests: of tests/train, separated by blanks; at least one must fail.
        old: text that stands there exactly once.
        new: what takes its place.
        cuda: whether the tests need a GPU.
    """

    name: str
    file: str
    tests: str
    old: str
    new: str
    cuda: bool = False


_FALLBACK = """def evaluate(*args, **options):
    try:
        return _evaluate(*args, **options)
    except RunError:
        return Scores(1, 1, 0.0, 1.0, 1.0)


def _evaluate(
    student: Decoder,
    windows: Windows,"""

# fmt: off
MUTATIONS = (
    # the loss
    Mutation("alpha swapped", "loss/objective.py",
        "test_objective.py::test_value_and_terms_are_those_of_the_definitions",
        "return 1 - self.kd_weight, self.kd_weight * self.temperature**2",
        "return self.kd_weight, (1 - self.kd_weight) * self.temperature**2"),
    Mutation("T^2 dropped", "loss/objective.py",
        "test_objective.py::test_value_and_terms_are_those_of_the_definitions",
        "return 1 - self.kd_weight, self.kd_weight * self.temperature**2",
        "return 1 - self.kd_weight, self.kd_weight"),
    Mutation("reverse KL logged, forward KL trained", "loss/objective.py",
        "test_objective.py::test_the_gradient_is_that_of_the_value",
        "return _times_log(q_NR, logq_NR - logp_NV[:, :shared]).sum(1), grad_NV",
        "return _reverse(logp_NV, logq_NR, beta)[0], grad_NV"),
    Mutation("student normalised over shared ids only", "loss/objective.py",
        "test_objective.py::test_value_and_terms_are_those_of_the_definitions "
        "test_head.py::test_student_padding_rows_are_pushed_down",
        "(s_NV / temperature).log_softmax(1), (t_NR",
        "s_NV / temperature - (s_NV[:, :shared] / temperature).logsumexp(1, keepdim=True), (t_NR"),
    Mutation("loss of the last position only", "loss/head.py",
        "test_head.py::test_every_position_contributes_and_no_position_touches_another",
        "dense(job.objective, s_CV, t_CR, job.labels_N[rows])",
        "dense(job.objective, s_CV, t_CR, job.labels_N[rows].where("
        "torch.arange(len(s_CV)) == len(s_CV) - 1, -100))"),
    Mutation("padding rows of the teacher count", "loss/head.py",
        "test_head.py::test_the_teachers_padding_rows_change_nothing",
        "shared_RE = job.wt_RE[: job.vocabulary.n_real]", "shared_RE = job.wt_RE[: job.vocabulary.n_real + 8]"),
    Mutation("soft cap missing in the gradient", "loss/head.py",
        "test_head.py::test_gradients_are_those_of_the_loss_by_finite_differences",
        "grad_CV = grad_CV * (1 - (s_CV / job.caps.student) ** 2)", "pass"),
    Mutation("mean over the micro-batch instead of the step", "data/batches.py",
        "test_batches.py::test_a_step_is_the_same_whatever_the_number_of_processes "
        "test_curve.py::test_the_curve_is_that_of_a_plain_loop",
        "index=self.cursor, n_valid=n_valid)", "index=self.cursor)"),
    Mutation("gradient of the last micro-batch only", "loop.py",
        "test_curve.py::test_the_curve_is_that_of_a_plain_loop",
        "        hidden, head = None, None\n",
        "        hidden, head = None, None\n        parts.optimizer.clear()\n"),
    Mutation("no sum over processes", "optim/adamw.py",
        "test_sharding.py::test_two_processes_train_what_one_trains[states-distill]",
        "self._sending.append(self._world.sum_parts(self._unsent.pop().of(self.grad)))", "self._unsent.pop()"),
    Mutation("divided weights get the mean gradient", "optim/adamw.py",
        "test_sharding.py::test_two_processes_train_what_one_trains[weights-distill]",
        "sharded.set_gradient_divide_factor(1.0)", "pass"),
    Mutation("weights are used before they have arrived", "optim/adamw.py",
        "test_sharding.py::test_processes_with_a_part_each_do_what_one_does",
        "network.register_forward_pre_hook(lambda *_: _wait(self._arriving))", "pass"),
    Mutation("each process clips by its own norm", "optim/adamw.py",
        "test_sharding.py::test_processes_with_a_part_each_do_what_one_does",
        "    world.add_up(square)\n", ""),
    Mutation("alpha swapped in the kernel's gradient", "loss/head.py", "test_head_cuda.py::test_a_real_vocabulary",
        "ce_weight / n_valid, kd_weight * inverse / n_valid,", "kd_weight / n_valid, ce_weight * inverse / n_valid,",
        cuda=True),
    Mutation("T dropped in the kernel's gradient", "loss/head.py", "test_head_cuda.py::test_a_real_vocabulary",
        "kd_weight * inverse / n_valid,", "kd_weight / n_valid,", cuda=True),
    Mutation("padding rows of the teacher count in the kernel", "loss/head.py",
        "test_head_cuda.py::test_the_teachers_padding_rows_change_nothing",
        "widths.student, widths.shared,", "widths.student, widths.shared + 8,", cuda=True),
    # the update
    Mutation("lr dropped", "loop.py", "test_fields.py::test_a_field_changes_what_a_run_does[lr]",
        "peak=config.lr,", "peak=5e-5,"),
    Mutation("lr not applied", "optim/adamw.py", "test_fields.py::test_a_field_changes_what_a_run_does[lr]",
        "maximize=False, lr=lr,", "maximize=False, lr=5e-5,"),
    Mutation("no schedule", "optim/adamw.py",
        "test_config.py::test_the_schedule_warms_up_and_falls_to_its_share",
        "return peak * (final + (1 - final) * (1 + math.cos(math.pi * min(1.0, done))) / 2)", "return peak"),
    Mutation("no clipping", "optim/adamw.py",
        "test_checkpoint.py::test_gradients_are_clipped_decay_spares_vectors_and_a_nan_changes_nothing",
        "(norm / s.clip).clamp(min=1.0) if s.clip else None", "None"),
    Mutation("decay of vectors", "optim/adamw.py",
        "test_checkpoint.py::test_gradients_are_clipped_decay_spares_vectors_and_a_nan_changes_nothing",
        "weight_decay=s.weight_decay if decays else 0.0", "weight_decay=s.weight_decay"),
    Mutation("a NaN is applied", "optim/adamw.py",
        "test_loop.py::test_a_nan_stops_the_run_and_the_weights_before_it_are_saved",
        "skip = (~finite).to(torch.float32)", "skip = torch.zeros_like(norm)"),
    Mutation("a NaN stops nothing", "loop.py",
        "test_loop.py::test_a_nan_stops_the_run_and_the_weights_before_it_are_saved",
        "raise _NotFiniteError(pending.step)", "pass"),
    Mutation("updates do not reach the network", "optim/adamw.py",
        "test_checkpoint.py::test_a_bf16_network_computes_in_copies_of_float32_masters",
        "        self._publish()\n        return norm", "        return norm"),
    # saving
    Mutation("the initial weights are saved", "loop.py",
        "test_loop.py::test_the_saved_model_is_the_one_that_was_evaluated",
        '        state["rng"] = torch.get_rng_state()\n',
        '        state["rng"], weights = torch.get_rng_state(), self.__dict__.setdefault("first", weights)\n'),
    Mutation("an empty model is saved", "checkpoints/checkpoint.py",
        "test_checkpoint.py::test_a_checkpoint_holds_the_live_weights_and_not_the_initial_ones",
        "outs = [_out(name, weights.dtype, tensor) for name, tensor in weights.tensors.items()]",
        "outs: list[OutTensor] = []"),
    Mutation("an empty network may be saved", "checkpoints/checkpoint.py",
        "test_checkpoint.py::test_an_empty_or_broken_network_is_not_saved",
        "if not outs:", "if False:"),
    Mutation("weights not compared after the save", "checkpoints/checkpoint.py",
        "test_checkpoint.py::test_a_difference_between_file_and_live_weights_keeps_the_file_from_appearing",
        "if not same or", "if False and"),
    Mutation("tokenizer dropped", "checkpoints/checkpoint.py",
        "test_checkpoint.py::test_a_checkpoint_holds_the_live_weights_and_not_the_initial_ones",
        "values |= tokenizer_apr.to_metadata(identity.tokenizer)", "pass"),
    Mutation("latest moves before the files are there", "checkpoints/checkpoint.py",
        "test_loop.py::test_latest_moves_when_model_and_state_are_there",
        "        name, began = step_name(snapshot.step), time.monotonic()\n",
        "        name, began = step_name(snapshot.step), "
        "write_pointer(self.folder, LATEST, snapshot.step) or 0.0\n"),
    Mutation("the best checkpoint is pruned", "checkpoints/checkpoint.py",
        "test_checkpoint.py::test_the_latest_and_the_best_are_kept_and_other_files_left_alone",
        "read_pointer(folder, BEST), read_pointer(folder, LATEST)}", "read_pointer(folder, LATEST)}"),
    Mutation("a failed save is not counted", "checkpoints/checkpoint.py",
        "test_loop.py::test_a_failed_periodic_save_is_told_and_counted_and_the_training_goes_on",
        "self.failed += 1", "pass"),
    Mutation("a failed final save is not an error", "checkpoints/checkpoint.py",
        "test_loop.py::test_a_failed_final_save_ends_with_exit_7_and_leaves_what_was_there",
        "        if error is None:\n            return path\n        raise StorageError(",
        "        return path\n        raise StorageError("),
    Mutation("two runs share a folder", "checkpoints/checkpoint.py",
             "test_saving.py::test_two_runs_do_not_share_a_folder",
        "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "        pass\n"),
    Mutation("signals are ignored", "guards.py",
        "test_loop.py::test_a_signal_ends_the_run_after_its_step_with_a_checkpoint",
        "stop.number = number", "pass"),
    # resuming
    Mutation("cursor lost", "run.py", "test_loop.py::test_deterministic_runs_repeat_and_resume_bit_by_bit",
        "saved.cursor if saved is not None else 0", "0"),
    Mutation("moments lost", "optim/adamw.py", "test_checkpoint.py::test_optimizer_state_goes_on_bitwise",
        "    for kind in KINDS:\n        optimizer.load(kind",
        "    for kind in KINDS[:1]:\n        optimizer.load(kind"),
    Mutation("another configuration may go on", "run.py",
        "test_loop.py::test_another_configuration_does_not_resume_unless_it_may",
        "_check_resumed(config, saved, origin)", "pass"),
    Mutation("metrics of undone steps stay", "report/metrics.py",
        "test_loop.py::test_metrics_after_the_resumed_step_are_dropped",
        "        if is_old:", "        if True:"),
    # data
    Mutation("labels are the tokens themselves", "data/batches.py", "test_packing.py::test_windows_by_hand",
        "labels[row, : len(piece) - 1] = piece[1:]", "labels[row, : len(piece) - 1] = piece[:-1]"),
    Mutation("a document predicts the next one", "data/batches.py", "test_packing.py::test_windows_by_hand",
        "labels[row, borders - 1] = IGNORED", "pass"),
    Mutation("documents see each other", "data/batches.py",
        "test_batches.py::test_a_document_sees_nothing_of_the_one_before_it",
        "if windows.is_packed:", "if False:"),
    Mutation("held out is what is trained on", "run.py",
        "test_loop.py::test_the_saved_model_is_the_one_that_was_evaluated",
        "held_out = Windows(corpus.held_out,", "held_out = Windows(corpus.train,"),
    Mutation("held out by place, so copies are on both sides", "data/corpus.py",
        "test_corpus.py::test_no_document_is_on_both_sides_and_none_is_lost",
        'part = "held_out" if below else side', 'part = "held_out" if self.read % 7 == 0 else side'),
    Mutation("degenerate data are taken", "run.py",
        "test_guards.py::test_data_that_are_missing_or_teach_nothing_are_refused",
        "    check_windows(windows)\n", ""),
    Mutation("data end unnoticed", "data/batches.py",
        "test_batches.py::test_every_window_comes_once_an_epoch_and_then_the_data_end",
        "if end is not None and cursor >= end:", "if False:"),
    Mutation("every epoch has the same order", "data/batches.py",
        "test_batches.py::test_repeating_goes_on_and_says_so",
        "shuffle_index(i % n, n, self.seed, i // n)", "shuffle_index(i % n, n, self.seed, 0)"),
    Mutation("data of another run are taken", "data/corpus.py",
        "test_saving.py::test_other_data_do_not_replace_those_of_the_run",
        "if wanted not in (None, key):", "if False:"),
    # the teacher
    Mutation("no look at the teacher", "run.py",
        "test_guards.py::test_a_teacher_of_random_weights_is_refused "
        "test_guards.py::test_a_requantized_copy_of_the_teacher_is_refused",
        "        _check_models(trainer)\n", "        trainer.evaluate()\n"),
    Mutation("no floor of the KL", "guards.py",
        "test_guards.py::test_a_requantized_copy_of_the_teacher_is_refused",
        "if not kl > KL_FLOOR:", "if False:"),
    Mutation("a teacher may be its own student", "guards.py",
        "test_guards.py::test_the_teacher_as_its_own_student_is_refused",
        "if teacher != student:", "if True:"),
    Mutation("the teacher is trained too", "teacher/teacher.py", "test_teacher.py::test_a_teacher_is_never_trained",
        "self.decoder.requires_grad_(False).eval()", "self.decoder.eval()"),
    Mutation("tokenizers are not compared", "loss/vocab.py",
        "test_vocab.py::test_spellings_of_the_same_bytes_are_the_same "
        "test_vocab.py::test_holes_are_no_tokens",
        "    _check_same(teacher, student, n_real)\n", ""),
    Mutation("narrow heads are taken", "loss/vocab.py",
        "test_vocab.py::test_a_head_narrower_than_the_vocabulary_is_refused",
        "if rows < n_real:", "if False:"),
    Mutation("a q4k teacher goes through float32", "teacher/teacher.py",
        "test_teacher.py::test_no_matrix_is_ever_float32",
        "            decode(blocks, target)\n",
        "            target.copy_(decode(blocks, torch.empty_like(target)).float())\n"),
    Mutation("a q4k teacher has scratch for every layer", "teacher/teacher.py",
        "test_teacher.py::test_resident_bytes_are_those_of_the_plan",
        "if name not in scratch:", "if True:"),
    Mutation("q4k of a wrong scale", "kernels/blocks.py",
        "test_block_kernels.py::test_random_blocks_decode_bit_by_bit",
        "torch.from_numpy(decode_values(blocks.dtype, data, (n,)))",
        "torch.from_numpy(decode_values(blocks.dtype, data, (n,)) * 1.01)"),
    Mutation("fp8 without its gate", "teacher/teacher.py",
        "test_teacher.py::test_e4m3_that_changes_too_much_is_refused",
        "if gate.passed:", "if True:"),
    Mutation("fp8 without the scale of rows", "kernels/fp8.py",
        "test_block_kernels.py::test_e4m3_products_are_near_those_in_bf16",
        "* scale_N1 * scale_1O)", "* scale_1O)"),
    Mutation("matrices of zeros are taken", "network/weights.py",
             "test_weights.py::test_a_damaged_tensor_is_refused_by_name",
        "if n_dims > 1 and not seen:", "if False:"),
    Mutation("damaged answers of a teacher are used", "teacher/cache.py",
        "test_teacher_cache.py::test_damaged_answers_are_computed_again_with_a_word",
        "if n == len(data) and _sum_of(window, data) == self._sum(window):", "if n == len(data):"),
    Mutation("answers of another teacher are used", "teacher/cache.py",
        "test_teacher_cache.py::test_other_answers_have_another_folder",
        '"teacher": byte_fingerprint(teacher),', '"teacher": "",'),
    Mutation("dropped tokens go unnoticed", "guards.py",
        "test_vocab_policy.py::test_a_teacher_that_uses_its_other_tokens_stops_the_run",
        "if mass is not None and not mass <= MOST_DROPPED:", "if False:"),
    # the device and time
    Mutation("the CPU when there is no GPU", "world.py",
        "test_guards.py::test_a_device_that_is_not_there_is_an_error_and_not_another_device",
        "    if not torch.cuda.is_available():\n",
        '    if not torch.cuda.is_available():\n        return torch.device("cpu")\n'),
    Mutation("no watchdog", "guards.py", "test_guards.py::test_a_step_that_hangs_is_ended_at_its_deadline",
        "if began is not None and time.monotonic() - began > limit:", "if False:"),
    Mutation("an idle GPU goes unnoticed", "guards.py",
        "test_guards.py::test_an_idle_gpu_stops_the_run_and_a_slow_one_warns_once",
        "if mean < 5:", "if False:"),
    Mutation("any peak of memory will do", "budget.py",
        "test_guards.py::test_more_memory_than_planned_and_a_plan_beyond_the_device_are_errors",
        "if peak_bytes > SLACK * total(rows):", "if False:"),
    Mutation("no lines of progress", "loop.py",
        "test_loop.py::test_progress_is_told_by_default_and_metrics_have_every_key",
        "logged = pending.step % self.config.log_every == 0 or pending.step in (1, self.config.stop)",
        "logged = False"),
    Mutation("a smoke run is a whole run", "config.py", "test_config.py::test_settled_fills_in_what_follows",
        "return min(self.steps, self.smoke or self.steps)", "return self.steps"),
    # options and scores
    Mutation("variables of the reference are passed over", "config.py",
        "test_config.py::test_other_variables_of_the_reference_are_refused_by_name",
        "        if row is None:\n", "        if row is None:\n            continue\n"),
    Mutation("a score without inference", "evaluate.py",
        "test_evaluate.py::test_a_failure_of_either_model_is_no_score "
        "test_eval_command.py::test_a_crash_of_the_forward_is_exit_8_and_no_number",
        "def evaluate(\n    student: Decoder,\n    windows: Windows,", _FALLBACK),
    Mutation("a score that is not a number", "evaluate.py", "test_evaluate.py::test_a_damaged_head_is_no_score",
        "if not all(map(math.isfinite, (ce, kl, teacher_ce))):", "if False:"),
    Mutation("padding rows of the teacher are scored", "evaluate.py",
        "test_evaluate.py::test_rows_of_the_teacher_beyond_the_tokens_change_nothing",
        "teacher.head_weight[: vocabulary.n_real], cap", "teacher.head_weight, cap"),
)
# fmt: on
