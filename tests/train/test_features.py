"""What a run uses and what it does not use: noted once, in the log, the metrics and the plan; failures are injected."""

from __future__ import annotations

import importlib
import io
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from packaging.requirements import Requirement
from train_corpora import shape_of_config, student_alone

from aprfmt.errors import MissingDependencyError, RefusedError
from aprtrain import features
from aprtrain.config import Config
from aprtrain.features import TABLE, KernelRecord, Verdict, importable, recording
from aprtrain.kernels import gated
from aprtrain.loss.head import note_kernel
from aprtrain.network.decoder import Decoder
from aprtrain.optim.rules import note_adamw
from aprtrain.selection import expect_kernels
from aprtrain.teacher.teacher import check_residency

Distil = Callable[..., dict[str, Any]]
GPU = torch.device("cuda")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Makes the import of an installed package fail with a text."""
    importable.cache_clear()

    def fail(name: str, text: str) -> None:
        real = importlib.import_module

        def import_module(module: str) -> Any:
            if module == TABLE[name].module:
                raise ImportError(text)
            return real(module)

        monkeypatch.setattr(features, "find_spec", lambda module: object())
        monkeypatch.setattr(importlib, "import_module", import_module)

    yield fail
    importable.cache_clear()


def test_a_package_that_is_missing_and_one_that_fails_are_told_apart(broken: Callable[[str, str], None]) -> None:
    assert importable("quack") == Verdict(False, "not installed")
    importable.cache_clear()
    broken("quack", "cannot import name 'gemm_gated'\nfrom 'quack'")
    assert importable("quack") == Verdict(False, "ImportError: cannot import name 'gemm_gated' from 'quack'")


def test_the_extra_pins_what_the_mend_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    pins = project["optional-dependencies"]["flash4"]
    assert [Requirement(pin).name for pin in pins] == ["flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl"]
    assert shlex.split(TABLE["flash4"].mend) == shlex.split(TABLE["quack"].mend) == ["pip", "install", *pins]


def test_each_reason_is_told_once() -> None:
    record, told = KernelRecord(), list[str]()
    record.tell = lambda miss: told.append(miss.text())
    for _ in range(3):
        assert not record.check("quack", Verdict(False, "ImportError: no libcute"))
    assert record.check("flash4", Verdict(True))
    (text,) = told
    assert text == (
        "quack is not used: ImportError: no libcute. It is for gated feed-forward layers, with less "
        "activation memory. To fix: pip install 'flash-attn-4[cu13]==4.0.0b36' quack-kernels==0.6.5 "
        "'nvidia-cutlass-dsl[cu13]==4.7.1'"
    )
    assert len(record.missed) == 1


def test_the_line_names_who_uses_what() -> None:
    record = KernelRecord()
    record.use("attention", "FlashAttention 4 4.0.0b36", "student")
    record.use("attention", "cuDNN", "teacher")
    record.use("gated", "quack 0.6.5", "student")
    record.use("gated", "quack 0.6.5", "teacher")
    record.use("loss", "Triton")
    assert record.line() == (
        "kernels: attention FlashAttention 4 4.0.0b36 (student) and cuDNN (teacher), gated quack 0.6.5, loss Triton"
    )


def test_a_run_on_the_cpu_says_what_it_uses(distil: Distil, tmp_path: Path, broken: Callable[[str, str], None]) -> None:
    broken("isal", "libisal.so.2: cannot open shared object file")
    stream = io.StringIO()
    distil(stream=stream)
    lines = stream.getvalue().splitlines()
    (line,) = (line for line in lines if line.startswith("kernels: "))
    assert (
        "attention masked torch, gated torch, loss torch, AdamW torch, compile off (not requested), "
        "fp8 off (not requested)" in line
    )
    assert "dtype f32" in line
    assert "checksums zlib" in line
    (isal,) = (line for line in lines if line.startswith("isal is not used"))
    assert "ImportError: libisal.so.2: cannot open shared object file" in isal
    assert isal.endswith("To fix: pip install isal")
    (start,) = train_runs.lines(tmp_path / "run", "start")
    missed = {miss["feature"]: miss for miss in start["kernels"]["not_used"]}
    assert {"isal", "bf16"} <= missed.keys()
    assert missed["isal"]["mend"] == "pip install isal"
    assert start["kernels"]["used"]["loss"] == "torch"


def test_a_disk_without_locks_is_said(distil: Distil, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("aprtrain.checkpoints.checkpoint.fcntl.flock", no_locks)
    stream = io.StringIO()
    distil(stream=stream)
    assert "a lock on the folder is not used: OSError: [Errno 37] No locks available" in stream.getvalue()


def test_a_compiler_that_fails_is_said_and_the_run_goes_on(
    distil: Distil, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Decoder.compile_blocks

    def no_compiler(*args: Any) -> Any:
        raise RuntimeError("g++ was not found")

    monkeypatch.setattr(Decoder, "compile_blocks", lambda self: real(self, no_compiler))
    stream = io.StringIO()
    try:
        distil(stream=stream, compile="on")
    finally:
        torch._dynamo.reset()
    assert stream.getvalue().count("torch.compile is not used: BackendCompilerFailed: ") == 1
    assert "g++ was not found" in stream.getvalue()
    (event,) = train_runs.lines(tmp_path / "run", "not_used")
    assert event["feature"] == "compile"


def test_a_disabled_compiler_is_said(distil: Distil) -> None:
    stream = io.StringIO()
    with torch._dynamo.config.patch(disable=True):  # torch hides an option that monkeypatch has restored
        distil(stream=stream, compile="on")
    assert "torch.compile is not used: disabled by the environment" in stream.getvalue()
    assert "compile off (see below)" in stream.getvalue()


def test_a_loss_that_no_kernel_knows_is_computed_by_torch() -> None:
    with recording() as record:
        assert not note_kernel("skewed", GPU, has_files=False)
    (miss,) = record.missed
    assert miss.reason == "it does not compute the loss 'skewed'"
    assert record.to_json()["used"] == {"loss": "torch"}


def test_without_triton_torch_computes_the_loss_and_adamw(broken: Callable[[str, str], None]) -> None:
    broken("triton", "libcuda.so.1: cannot open shared object file")
    with recording() as record:
        assert not note_kernel("forward", GPU, has_files=False)
        assert not note_adamw(GPU)
    (miss,) = record.missed
    assert miss.feature == "triton"
    assert (miss.reason, miss.mend) == (
        "ImportError: libcuda.so.1: cannot open shared object file",
        "pip install triton",
    )
    assert record.to_json()["used"] == {"loss": "torch", "AdamW": "torch"}


class _OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = property(lambda self: True)


def test_without_triton_autograd_gives_the_gradient_of_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kind in (torch.Tensor, _OnGpu):
        monkeypatch.setattr(gated, "_HAS_TRITON", False)
        both = torch.linspace(-2, 2, 16).bfloat16().as_subclass(kind).requires_grad_()
        assert both.is_cuda is (kind is _OnGpu)
        out = gated.silu_gated(both)
        assert "Gated" not in type(out.grad_fn).__name__
        found.append(torch.autograd.grad(out.sum(), both)[0])
    assert torch.equal(found[0], found[1].as_subclass(torch.Tensor))


@pytest.mark.parametrize("residency", ["q4k", "fp8"])
def test_a_packed_teacher_on_a_gpu_without_triton_is_refused(
    residency: str, broken: Callable[[str, str], None]
) -> None:
    broken("triton", "no libtriton")
    check_residency("bf16", GPU)
    check_residency(residency, torch.device("cpu"))
    with pytest.raises(MissingDependencyError) as caught:
        check_residency(residency, GPU)
    assert caught.value.message == f"a teacher in {residency} needs Triton on a GPU: ImportError: no libtriton"
    assert (caught.value.exit_code, caught.value.hint) == (6, "pip install triton")


def test_e4m3_on_a_gpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprtrain.teacher.teacher.importable", lambda name: Verdict(True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    check_residency("q4k", GPU)
    with pytest.raises(RefusedError, match=r"this GPU has 8\.6"):
        check_residency("fp8", GPU)


def test_a_run_checks_its_teacher_before_it_reads_data(
    distil: Distil, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(residency: str, device: torch.device) -> None:
        raise MissingDependencyError(f"{residency} on {device}")

    monkeypatch.setattr("aprtrain.run.check_residency", refuse)
    with pytest.raises(MissingDependencyError, match="bf16 on cpu"):
        distil(teacher_residency="bf16", data=tmp_path / "absent")
    assert not (tmp_path / "run").exists()


def test_a_plan_names_what_a_gpu_would_lack(broken: Callable[[str, str], None]) -> None:
    broken("quack", "no libcute")
    pair = student_alone(
        shape_of_config(
            model_type="qwen2", num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=128, vocab_size=256, rms_norm_eps=1e-6, tie_word_embeddings=True,
        )
    )  # fmt: skip
    with recording() as record:
        expect_kernels(Config(), pair, GPU)
    assert {"quack": "ImportError: no libcute"}.items() <= {m.feature: m.reason for m in record.missed}.items()
    with recording() as record:
        expect_kernels(Config(compile="off"), pair, GPU)
    assert "quack" not in {miss.feature for miss in record.missed}
    with recording() as record:
        expect_kernels(Config(deterministic=True), pair, GPU)
    assert ("flash4", "leave out --deterministic") in {(miss.feature, miss.mend) for miss in record.missed}
