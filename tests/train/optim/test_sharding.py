"""Several processes: each owns its part of the states, or of the weights, and together they train what one trains."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from torch import Tensor, nn
from train_runs import lines, weights
from train_worlds import Threads, together

from aprfmt.errors import RunError, UsageError
from aprtrain import loop
from aprtrain.budget import plan
from aprtrain.checkpoints import checkpoint
from aprtrain.evaluate import evaluate
from aprtrain.loss.head import distill_head
from aprtrain.loss.objective import Objective
from aprtrain.network.decoder import Decoder
from aprtrain.network.names import hf_parts
from aprtrain.network.weights import fill, open_network
from aprtrain.optim import flat
from aprtrain.optim.flat import FlatOptimizer, unfused
from aprtrain.optim.rules import ADAMW, RULES, Settings, UpdateRule
from aprtrain.optim.sharded import ShardedOptimizer, shard_weights
from aprtrain.optim.states import Optimizer, load_states, states
from aprtrain.run import run
from aprtrain.world import ReportedByFirst, World, join_world

SETTINGS = Settings(clip=0.5, weight_decay=0.1)
Found = dict[str, Tensor]


def network(dtype: torch.dtype) -> nn.Module:
    """Sizes that nothing divides."""
    net = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 19), nn.Linear(19, 5, bias=False))
    generator = torch.Generator().manual_seed(3)  # threads share the usual one
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return net.to(dtype)


def grow(
    world: World,
    dtype: torch.dtype,
    *,
    steps: int = 3,
    start: Found | None = None,
    passes: int = 12,
    rule: UpdateRule = ADAMW,
) -> tuple[Found, FlatOptimizer, nn.Module]:
    """Some updates by a loss of which each process has its share of all `passes`; gives all states."""
    net = network(dtype)
    optimizer = FlatOptimizer(net, SETTINGS, world, rule=rule)
    if start is not None:
        load_states(optimizer, start)
    begin = int(optimizer.updates.count)
    for step in range(begin, begin + steps):
        inputs = torch.rand(12, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.clear()
        mine = inputs.chunk(world.size)[world.rank].chunk(passes // world.size)
        for i, some in enumerate(mine):
            if i == len(mine) - 1:
                optimizer.sync_next_backward()
            torch.autograd.backward(net(some).float().square().sum() * 10)
        optimizer.step(1e-2)
    net(torch.zeros(1, 7, dtype=dtype))  # a call waits for the weights
    return {name: tensor.clone() for name, tensor in states(optimizer)}, optimizer, net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "passes"), [(2, 2), (2, 4), (3, 3), (4, 12)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_processes_with_a_part_each_do_what_one_does(
    rule: UpdateRule, dtype: torch.dtype, size: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "_BUCKET", 300)
    alone, one, net = grow(World(torch.device("cpu")), dtype, passes=passes, rule=rule)
    together = Threads(size).run(lambda world: grow(world, dtype, passes=passes, rule=rule))
    for found, optimizer, mine in together:
        assert found.keys() == alone.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, together[0][0][name]), name
            assert torch.allclose(tensor, alone[name], atol=1e-6), name
        for a, b in zip(mine.parameters(), net.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-6 if dtype == torch.float32 else 1e-2)
        held = [optimizer.master, *(state for each in optimizer.updates.states for state in each.values())]
        most = 3 * (one.master.numel() // size + 64 * len(optimizer.updates.states))
        assert sum(tensor.numel() for tensor in held) <= most


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1), (2, 4)])
def test_states_do_not_depend_on_the_number_of_processes(first: int, then: int) -> None:
    def half(world: World) -> Found:
        return grow(world, torch.bfloat16, steps=2)[0]

    saved = Threads(first).run(half)[0]
    for found in Threads(then).run(lambda world: grow(world, torch.bfloat16, steps=0, start=saved)[0]):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)
    on = Threads(then).run(lambda world: grow(world, torch.bfloat16, steps=1, start=saved)[0])[0]
    whole = grow(World(torch.device("cpu")), torch.bfloat16, steps=3)[0]
    assert on["step"] == whole["step"] == 3
    assert all(torch.allclose(on[name], whole[name], atol=1e-6) for name in whole)


def test_gradients_that_are_not_finite_in_one_process_change_nothing_in_any() -> None:
    def poisoned(world: World) -> bool:
        found, optimizer, net = grow(world, torch.float32)
        optimizer.clear()
        if world.rank == 1:
            optimizer.grad_of("0.weight")[0, 0] = float("inf")
        norm = optimizer.step(1e-2)
        net(torch.zeros(1, 7))
        after = {name: tensor.clone() for name, tensor in states(optimizer)}
        assert not bool(torch.isfinite(norm))
        assert torch.equal(net[0].weight, found["master.0.weight"])  # type: ignore[index]
        return all(torch.equal(after[name], tensor) for name, tensor in found.items())

    assert Threads(2).run(poisoned) == [True, True]


def test_buckets_are_sent_while_the_backward_pass_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second update on: the last layer's gradient is on its way when the first layer's is formed."""
    monkeypatch.setattr(flat, "_BUCKET", 1)
    threads = Threads(2)
    seen: list[int] = []

    def work(world: World) -> None:
        _, optimizer, net = grow(world, torch.float32, steps=1, passes=2)
        if world.rank == 0:
            assert len(threads.sent) == 5  # matrices and vectors
            threads.sent.clear()
            net[0].weight.register_hook(lambda grad: seen.append(len(threads.sent)))  # type: ignore[index]
        optimizer.clear()
        for is_last in (False, True):
            if is_last:
                optimizer.sync_next_backward()
            torch.autograd.backward(net(torch.ones(2, 7)).sum())
        optimizer.step(1e-2)
        assert world.rank or len(threads.sent) == 5

    threads.run(work)
    assert seen == [0, 2]


# --- whole runs ---


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose head is apart and has a number of rows that two processes cannot halve."""
    shape = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 50, "vocab_size": 355,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(shape))
    return path


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def train(teacher_file: Path, corpus_file: Path, config_file: Path, tmp_path: Path) -> Run:
    """Runs six steps into tmp_path / `to`."""

    def start(to: str, command: str = "distill", **given: Any) -> dict[str, Any]:
        how: dict[str, Any] = {"steps": 6, "total_steps": 8, "warmup_steps": 0, "lr": 3e-3, "repeat": True}
        if command == "distill":
            how |= {"teacher": str(teacher_file), "student_init": "layers:0,"}
        else:
            how |= {"like": str(teacher_file), "shape": str(config_file)}
        config = train_runs.options(command, corpus_file, tmp_path / to, **{**how, **given})
        return {**run(command, config, stream=None)}

    return start


def assert_close(a: Path, b: Path) -> None:
    """Whether two runs have ended with the same model after the same losses."""
    assert train_runs.same_model(a / "model.apr", b / "model.apr")
    values = [[line[key] for line in lines(to) for key in ("loss", "grad_norm")] for to in (a, b)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


@pytest.mark.parametrize("command", ["distill", "pretrain"])
@pytest.mark.parametrize("shard", ["states", "weights"])
def test_two_processes_train_what_one_trains(train: Run, tmp_path: Path, command: str, shard: str) -> None:
    train("one", command)
    together(lambda rank: train("two", command, shard=shard))
    assert_close(tmp_path / "one", tmp_path / "two")
    one, two = (lines(tmp_path / to, "evaluation") for to in ("one", "two"))
    assert [s["ce"] for s in one] == pytest.approx([s["ce"] for s in two], rel=1e-4)
    (a, _), (b, _) = (train_runs.load_state(tmp_path / to / "ckpt-step-000006.state") for to in ("one", "two"))
    assert {name.split(".")[0] for name in a} == {"master", *ADAMW.states, "step", "rng"}
    assert torch.equal(a["step"], b["step"])
    for kind in ("master", *ADAMW.states):
        assert train_runs.close(*({name: t for name, t in of.items() if name.startswith(kind)} for of in (a, b))), kind


@pytest.mark.parametrize("shard", ["states", "weights"])
def test_two_processes_orient_matrices_as_one(train: Run, tmp_path: Path, shard: str) -> None:
    train("one", optimizer="muon")
    together(lambda rank: train("two", optimizer="muon", shard=shard))
    assert_close(tmp_path / "one", tmp_path / "two")


def test_a_run_goes_on_however_it_was_divided(train: Run, tmp_path: Path) -> None:
    train("one", steps=8)
    train("two", steps=3)
    together(lambda rank: train("two", steps=5, resume=True, shard="weights"))
    together(lambda rank: train("two", steps=7, resume=True))
    train("two", steps=8, resume=True)
    assert_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("shard", ["states", "weights"])
def test_divided_runs_repeat_and_go_on_bit_by_bit(train: Run, tmp_path: Path, shard: str) -> None:
    together(lambda rank: train("whole", shard=shard))
    together(lambda rank: train("parts", shard=shard, steps=2))
    together(lambda rank: train("parts", shard=shard, resume=True))
    assert weights(tmp_path / "whole/model.apr") == weights(tmp_path / "parts/model.apr")
    a, b = (train_runs.load_state(tmp_path / to / "ckpt-step-000006.state")[0] for to in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_divided_weights_compute_in_bf16_what_whole_ones_do(teacher_file: Path) -> None:
    def learn(decoder: Decoder, optimizer: Optimizer, rank: int, step: int) -> None:
        tokens = torch.randint(0, 300, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))
        for some in torch.split(tokens, 2):
            x_ND = decoder(some[:, :-1]).flatten(0, 1)
            labels = some[:, 1:].flatten()
            grad_w = optimizer.grad_of("embed" if decoder.shape.tied else "head")
            out = distill_head(
                x_ND, decoder.head_weight, None, None, labels, Objective(0.0), None, n_valid=64, grad_w=grad_w
            )
            assert x_ND.dtype == decoder.head_weight.dtype == torch.bfloat16
            torch.autograd.backward(out.loss)

    def work(rank: int) -> None:
        with join_world("cpu") as world, open_network(teacher_file) as network:

            def write(parameter: str, whole: Tensor) -> None:
                for name, target in hf_parts(network.shape, parameter, whole):
                    fill(network, name, target)

            one = Decoder(network.shape, torch.bfloat16)
            two = shard_weights(network.shape, torch.bfloat16, world)
            optimizers: tuple[Optimizer, Optimizer] = (
                FlatOptimizer(one, SETTINGS, world),
                ShardedOptimizer(two, SETTINGS, world, ADAMW, unfused),
            )
            for optimizer in optimizers:
                optimizer.load("master", write)
            start = {name: tensor.clone() for name, tensor in states(optimizers[0])}
            for step in range(3):
                for decoder, optimizer in zip((one, two), optimizers, strict=True):
                    optimizer.clear()
                    learn(decoder, optimizer, rank, step)
                    optimizer.step(1e-3)
            found = [{name: tensor.clone() for name, tensor in states(optimizer)} for optimizer in optimizers]
            for kind, bound in (("mean", 0.02), ("master", 0.1)):  # other kernels round a product in bf16 otherwise
                a, b = ([each[name] - start[name] for name in start if name.startswith(kind)] for each in found)
                apart = torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)])
                assert float(apart.norm()) <= bound * float(torch.cat([x.flatten() for x in a]).norm()), kind
            held: list[Any] = list(two.parameters())
            assert sum(p.to_local().numel() for p in held) <= 0.51 * network.shape.n_params

    together(work)


@pytest.mark.turns(first=False)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_recomputed_and_compiled_blocks_of_divided_weights(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "compile_blocks", partialmethod(Decoder.compile_blocks, "aot_eager"))
    train("one")
    together(lambda rank: train("two", shard="weights", recompute="block", compile="on"))
    assert_close(tmp_path / "one", tmp_path / "two")


def test_a_nan_leaves_the_weights_before_it_in_divided_runs(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, shard: str) -> None:
        if rank == 1:
            monkeypatch.setattr(loop, "distill_head", train_runs.poisoned(3))
        with pytest.raises(RunError, match="step 3 is not finite"):
            train(shard, shard=shard)

    train("one", steps=2)
    for shard in ("states", "weights"):
        together(partial(work, shard=shard))
        assert train_runs.same_model(tmp_path / "one/model.apr", tmp_path / shard / "ckpt-step-000003.apr")


def test_a_failed_evaluation_does_not_lose_the_weights_of_several_processes(
    train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def failing_late(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RunError("no score")
        return evaluate(*args, **options)

    def work(rank: int) -> None:
        if rank == 0:
            monkeypatch.setattr("aprtrain.run.evaluate", failing_late)
        with pytest.raises(RunError, match="no score") as caught:
            train("run")
        assert isinstance(caught.value.__cause__, ReportedByFirst) is (rank == 1)

    together(work)
    assert checkpoint.read_pointer(tmp_path / "run", checkpoint.LATEST) == 6


@pytest.mark.parametrize("shard", ["states", "weights"])
def test_a_signal_to_the_first_process_stops_the_evaluation_of_all(train: Run, tmp_path: Path, shard: str) -> None:
    def interrupted(*args: Any, progress: Callable[[int, int], None], **options: Any) -> Any:
        def send(done: int, of: int) -> None:
            assert done == 0, "the evaluation goes on"
            os.kill(os.getpid(), signal.SIGTERM)

        return evaluate(*args, progress=send, **options)

    def work(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr("aprtrain.run.evaluate", interrupted)
            summary = train("run", shard=shard)
        assert (summary["interrupted"], summary["steps"]) == (signal.SIGTERM, 0)

    together(work)
    assert checkpoint.read_pointer(tmp_path / "run", checkpoint.LATEST) == 0


def test_an_evaluation_reads_as_much_at_once_as_a_step(train: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def seen(*args: Any, **options: Any) -> Any:
        rows.append(options["rows"])
        return evaluate(*args, **options)

    def work(rank: int) -> None:
        monkeypatch.setattr("aprtrain.run.evaluate", seen)
        train("two", steps=1, micro_tokens=128)
        assert rows == [] if rank else rows == [2, 2], "128 tokens a step, 32 a window, two processes"

    together(work)


def test_the_first_process_says_when_it_is_time_to_save(train: Run, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        train("run", save_every=0, save_minutes=1e-6 if rank == 0 else 0.0, keep=9)

    together(work)
    assert len(list((tmp_path / "run").glob("ckpt-*.state"))) == 6


def test_one_process_has_nobody_to_share_weights_with(train: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--shard weights") as caught:
        train("run", shard="weights")
    assert "torchrun" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_the_plan_knows_of_the_other_processes(
    teacher_file: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_runs.options(
        "distill", corpus_file, None, smoke=1, teacher=str(teacher_file), student_init="layers:0,", device="cuda"
    )

    def rows(size: int, **given: Any) -> dict[str, int]:
        monkeypatch.setenv("WORLD_SIZE", str(size))
        return {row["name"]: row["bytes"] for row in plan("distill", replace(config, **given))["memory"]}

    states_row, gradient = "student: master weights, moments", "student: gradient"
    one, two, four = rows(1), rows(2), rows(4, shard="weights")
    assert one[states_row] == 2 * two[states_row] == 4 * four[states_row]
    assert one[gradient] == two[gradient]
    assert one["student: activations"] == two["student: activations"] == 2 * four["student: activations"]
    with pytest.raises(UsageError, match="--shard weights"):
        rows(1, shard="weights")
