"""A corpus and a teacher that has learnt it, made once for all tests of the trainer."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_memory
import pytest
import torch
import train_runs
from train_corpora import functions, write_jsonl
from train_models import Maker

from aprtrain.run import run

tmp_path_factory = in_memory.tmp_path_factory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU is skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing by threads, and a process that has none may be forked."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl of 160 short documents."""
    return train_runs.write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="session")
def teacher_file(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Path:
    """A tiny llama of two layers that has learnt the corpus; APR_TEST_TEACHER names one that was made before."""
    if made := os.environ.get("APR_TEST_TEACHER"):
        return Path(made)
    return train_runs.make_teacher(tmp_path_factory.mktemp("teacher"), corpus_file)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Maker:
    """Makes models of the cases, each once a file of tests."""
    pytest.importorskip("transformers")
    return Maker(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Functions, in a file of jsonl."""
    return write_jsonl(tmp_path_factory.mktemp("data") / "code.jsonl", functions(120))


@pytest.fixture
def distil(tmp_path: Path, corpus_file: Path, teacher_file: Path) -> Callable[..., dict[str, Any]]:
    """Runs a short distillation into tmp_path / `to`; the student is the teacher's first layer."""

    def start(to: str = "run", stream: io.StringIO | None = None, **given: Any) -> dict[str, Any]:
        how = {"teacher": str(teacher_file), "student_init": "layers:0,", "steps": 4, "lr": 3e-3, "repeat": True}
        data = given.pop("data", corpus_file)
        config = train_runs.options("distill", data, tmp_path / to, **{**how, **given})
        return {**run("distill", config, stream=stream)}

    return start
