"""Checkpoints: they hold the live weights, survive a kill at any moment, and failures of a disk are told apart."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import demo_model
import pytest
import torch
import train_runs
from llama_peer import LlamaPeer
from safetensors.torch import save_file as save_safetensors
from train_children import forked
from train_runs import identity_of

import aprfmt
from aprfmt.canonical.metadata import apr_metadata_with
from aprfmt.errors import AprError, CorruptError, RunError, StorageError
from aprfmt.llama.client import Llama
from aprtrain.checkpoints import checkpoint
from aprtrain.checkpoints.checkpoint import BEST, LATEST, LINEAGE, HostBuffers, Saver, copy_state, save_model
from aprtrain.checkpoints.state import out_tensor, save_state
from aprtrain.network.decoder import Decoder
from aprtrain.network.weights import NetworkSource, load_decoder, open_network
from aprtrain.optim.flat import FlatOptimizer
from aprtrain.optim.rules import Settings
from aprtrain.optim.states import load_states, states


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkSource]:
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    demo_model.build(path)
    with open_network(path) as network:
        yield network


@pytest.fixture
def decoder(network: NetworkSource) -> Decoder:
    return load_decoder(network)


def train(decoder: Decoder, optimizer: FlatOptimizer, steps: int, seed: int = 0) -> list[float]:
    """A few updates of a loss that any network can lower; gives the losses."""
    tokens = torch.randint(0, 200, (2, 17), generator=torch.Generator().manual_seed(seed))
    losses = []
    for _ in range(steps):
        optimizer.clear()
        logits = decoder.logits(decoder(tokens[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step(1e-2)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("f32", torch.float32), ("f16", torch.float16)])
def test_a_checkpoint_holds_the_live_weights_and_not_the_initial_ones(
    tmp_path: Path, network: NetworkSource, decoder: Decoder, dtype: str, kind: torch.dtype
) -> None:
    before = {name: tensor.clone() for name, tensor in decoder.hf_tensors().items()}
    optimizer = FlatOptimizer(decoder)
    losses = train(decoder, optimizer, 8)
    assert losses[-1] < losses[0] / 2
    path = tmp_path / "m.apr"
    weights, _ = copy_state(optimizer, decoder, dtype, HostBuffers(), keeps=True, quantizer=None)
    save_model(weights, identity_of(network), path, {"step": 8, "teacher": "t"})
    live = decoder.hf_tensors()
    with aprfmt.open(path) as model:
        assert set(model.tensors) == set(live)
        for name, tensor in model.tensors.items():
            assert torch.equal(tensor.torch(), live[name].to(kind)), name
        moved = [n for n, t in model.tensors.items() if not torch.equal(t.torch(), before[n].to(kind))]
        assert len(moved) >= 0.99 * len(live)
        assert model.metadata[LINEAGE] == {"step": 8, "teacher": "t"}
        assert model.metadata["license"] == "mit"
        assert model.tokenizer is not None
        assert network.tokenizer is not None
        assert model.tokenizer.tokens == network.tokenizer.tokens
        assert model.hparams.num_layers == network.hparams.num_layers
    with open_network(path) as again:
        assert again.shape == network.shape


@pytest.mark.llama
def test_a_checkpoint_is_a_model_that_llama_cpp_runs_as_we_do(
    tmp_path: Path, network: NetworkSource, decoder: Decoder, llama_cpp: LlamaPeer
) -> None:
    train(decoder, FlatOptimizer(decoder), 8)
    save_model(train_runs.snapshot(decoder.hf_tensors(), "f32"), identity_of(network), tmp_path / "m.apr", {})
    aprfmt.export_model(tmp_path / "m.apr", tmp_path / "m.gguf")
    ids = [1, 20, 30, 40, 50, 60]
    theirs = torch.from_numpy(llama_cpp.logits(tmp_path / "m.gguf", ids))
    ours = decoder.logits(decoder(torch.tensor([ids])))[0]
    assert torch.allclose(theirs, ours, atol=2e-3)
    with Llama(tmp_path / "m.gguf") as llama:
        assert llama.generate("a").ids


def test_a_difference_between_file_and_live_weights_keeps_the_file_from_appearing(
    tmp_path: Path, network: NetworkSource, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = train_runs.snapshot(decoder.hf_tensors(), "bf16")

    def damaged(name: str, dtype: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> Any:
        return out_tensor(name, dtype, tensor * 0 if name == "model.layers.0.mlp.up_proj.weight" else tensor, shape)

    monkeypatch.setattr(checkpoint, "out_tensor", damaged)
    with pytest.raises(RunError) as caught:
        save_model(weights, identity_of(network), tmp_path / "m.apr", {})
    assert caught.value.tensor == "model.layers.0.mlp.up_proj.weight"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_or_broken_network_is_not_saved(tmp_path: Path, network: NetworkSource, decoder: Decoder) -> None:
    with pytest.raises(RunError, match="no tensor"):
        save_model(train_runs.snapshot({}, "bf16"), identity_of(network), tmp_path / "m.apr", {})
    decoder.hf_tensors()["model.norm.weight"][3] = float("nan")
    with pytest.raises(RunError, match="finite"):
        save_model(train_runs.snapshot(decoder.hf_tensors(), "bf16"), identity_of(network), tmp_path / "m.apr", {})
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_or_dims_that_do_not_come_back_are_noticed(
    tmp_path: Path, network: NetworkSource, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = train_runs.snapshot(decoder.hf_tensors(), "bf16")
    honest = apr_metadata_with
    for key, word in (("tokenizer.vocabulary", "tokenizer"), ("hidden_size", "hidden_size")):
        monkeypatch.setattr(
            checkpoint,
            "apr_metadata_with",
            lambda *a, key=key, **how: {k: v for k, v in honest(*a, **how).items() if k != key},
        )
        with pytest.raises(AprError, match=word):
            save_model(weights, identity_of(network), tmp_path / "m.apr", {})


def test_optimizer_state_goes_on_bitwise(tmp_path: Path, network: NetworkSource) -> None:
    whole = load_decoder(network)
    losses = train(whole, FlatOptimizer(whole), 6)
    part = load_decoder(network)
    optimizer = FlatOptimizer(part)
    first = train(part, optimizer, 3)
    _, state = copy_state(optimizer, part, "f32", HostBuffers(), keeps=True, quantizer=None)
    save_state(state, {"step": 3}, tmp_path / "s.state")
    resumed = load_decoder(network)
    fresh = FlatOptimizer(resumed)
    tensors, _ = train_runs.load_state(tmp_path / "s.state")
    load_states(fresh, tensors)
    assert [*first, *train(resumed, fresh, 3)] == losses
    for name, tensor in resumed.hf_tensors().items():
        assert torch.equal(tensor, whole.hf_tensors()[name]), name
    for other in ({**tensors, "mean.norm": torch.zeros(1)}, {k: t for k, t in tensors.items() if "down" not in k}):
        with pytest.raises(CorruptError, match="a different network"):
            load_states(fresh, other)


def test_pinned_copies_share_slabs_and_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's tensors are copied into; here the memory is not pinned."""
    made: list[torch.Tensor] = []

    def plain(self: HostBuffers, n_bytes: int) -> torch.Tensor:
        made.append(torch.empty(n_bytes, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(HostBuffers, "_pinned", plain)
    monkeypatch.setattr(checkpoint, "_SLAB", 1024)
    host = HostBuffers()
    tensors = [torch.rand(5, 7), torch.tensor(3.0), torch.rand(90, dtype=torch.float64), torch.rand(900)]
    rooms = [host._room(tensor).copy_(tensor) for tensor in tensors]
    assert [len(slab) for slab in made] == [1024, 4096]
    for tensor, room in zip(tensors, rooms, strict=True):
        assert torch.equal(tensor, room)


def test_damaged_states_and_pointers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.state"
    save_state({"a": torch.arange(3.0)}, {"step": 1}, path)
    assert train_runs.load_state(path)[1] == {"step": 1}
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError):
        train_runs.load_state(path)
    save_safetensors({"a": torch.zeros(2)}, path)
    with pytest.raises(CorruptError, match="not a training state file"):
        train_runs.load_state(path)
    assert checkpoint.read_pointer(tmp_path, LATEST) is None
    for text in ("", "{}", '{"step": "x"}', "[]"):
        (tmp_path / LATEST).write_text(text)
        with pytest.raises(CorruptError):
            checkpoint.read_pointer(tmp_path, LATEST)


def test_the_latest_and_the_best_are_kept_and_other_files_left_alone(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        for suffix in ("apr", "state"):
            (tmp_path / f"{checkpoint.step_name(step)}.{suffix}").touch()
    (tmp_path / "ckpt-step-x.apr").touch()
    checkpoint.write_pointer(tmp_path, BEST, 5)
    checkpoint.write_pointer(tmp_path, LATEST, 20)
    removed = checkpoint.prune(tmp_path, 2, (), lambda step: False)
    assert sorted(path.name for path in removed) == ["ckpt-step-000010.apr", "ckpt-step-000010.state"]
    assert (tmp_path / "ckpt-step-x.apr").exists()
    told = list[str]()
    saver = Saver(tmp_path, None, 2, told.append, saved=[15], left={20})  # type: ignore[arg-type]
    saver._tell_removed([tmp_path / f"{checkpoint.step_name(step)}.apr" for step in (10, 15, 20)])
    assert told == [
        "removed ckpt-step-000010: --keep 2 keeps the latest 2 and the best",
        "removed ckpt-step-000020: the run continues from an older one",
    ]


def test_a_kill_at_any_moment_leaves_a_latest_that_opens(
    tmp_path: Path, network: NetworkSource, decoder: Decoder
) -> None:
    weights, identity, rng = (train_runs.snapshot(decoder.hf_tensors(), "bf16"), identity_of(network), random.Random(1))
    state = {"master": torch.randn(50_000)}

    def save_on_and_on() -> None:
        for step in range(1, 10_000):
            name = checkpoint.step_name(step)
            save_model(weights, identity, tmp_path / f"{name}.apr", {"step": step})
            save_state(state, {"step": step}, tmp_path / f"{name}.state")
            checkpoint.write_pointer(tmp_path, LATEST, step)
            checkpoint.prune(tmp_path, 1, (), lambda step: False)

    checkpoint.write_pointer(tmp_path, LATEST, 0)
    step: int | None = 0
    for i in range(20):
        with forked(save_on_and_on) as child:
            time.sleep(rng.uniform(0.01, 0.06) * (1 if step else 1 + i))  # a busy machine takes longer
            child.kill()
            assert child.wait() == -signal.SIGKILL
        step = checkpoint.read_pointer(tmp_path, LATEST)
        assert step is not None
        if step:
            with aprfmt.open(tmp_path / f"{checkpoint.step_name(step)}.apr") as model:
                assert model.checksum()["footer"] == "ok"
                assert model.metadata[LINEAGE] == {"step": step}
            assert train_runs.load_state(tmp_path / f"{checkpoint.step_name(step)}.state")[1] == {"step": step}
    assert checkpoint.read_pointer(tmp_path, LATEST), "no save ever ended; give it more time"


def test_a_failing_save_is_tried_three_times_and_its_error_given_back() -> None:
    tries: list[int] = []
    told: list[str] = []

    def fail_twice() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")

    assert checkpoint.with_retries(fail_twice, told.append, 0) is None
    assert (len(tries), len(told)) == (3, 2)

    def fail() -> None:
        raise StorageError("disk full")

    error = checkpoint.with_retries(fail, told.append, 0)
    assert error is not None
    assert error.exit_code == 7
    assert told[-1] == "saving failed (attempt 3 of 3): disk full"


def test_gradients_are_clipped_decay_spares_vectors_and_a_nan_changes_nothing() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4)
    start = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = FlatOptimizer(layer, Settings(clip=0.5, weight_decay=0.1))
    peer = {name: p.clone().requires_grad_() for name, p in start.items()}
    theirs = torch.optim.AdamW(
        [{"params": [peer["weight"]], "weight_decay": 0.1}, {"params": [peer["bias"]], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for step in range(3):
        x = torch.full((2, 8), step + 3.0)
        optimizer.clear()
        torch.autograd.backward(layer(x).square().sum())
        for name, p in peer.items():
            p.grad = optimizer.grad_of(name).clone()
        norm = optimizer.step(1e-2)
        assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(list(peer.values()), 0.5)), rel=1e-5)
        for group in theirs.param_groups:
            group["lr"] = 1e-2
        theirs.step()
        for name, p in layer.named_parameters():
            assert torch.allclose(p, peer[name], atol=1e-6), name
    kept = optimizer.master.clone()
    steps = optimizer.updates.count.clone()
    optimizer.grad[1] = float("nan")
    assert not torch.isfinite(optimizer.step(1e-2))
    assert torch.equal(optimizer.master, kept)
    assert torch.equal(optimizer.updates.count, steps)


def test_a_bf16_network_computes_in_copies_of_float32_masters() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    optimizer = FlatOptimizer(layer, Settings(clip=0))
    first = optimizer.master.clone()
    for _ in range(20):
        assert {name: t.dtype for name, t in states(optimizer)}["master.weight"] == torch.float32
        before = optimizer.master.clone()
        optimizer.clear()
        torch.autograd.backward(layer(torch.ones(1, 16, dtype=torch.bfloat16)).sum())
        assert layer.weight.grad is None
        optimizer.step(1e-5)
        assert not torch.equal(optimizer.master, before)
    moved = optimizer.master[:256].view(16, 16)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight, moved.to(torch.bfloat16))
    assert (first - optimizer.master)[:256].mean().item() == pytest.approx(20 * 1e-5, rel=0.02)
    assert torch.equal(dict(optimizer.gather("master"))["weight"], moved)
