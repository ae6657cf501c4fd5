"""Tiny models, built once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import BYTES, CASES, build

Built = tuple[Path, Any]


@pytest.fixture(scope="session")
def tiny_model(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Built]:
    """Gives (folder, transformers model) of a case of tiny_models.CASES."""
    pytest.importorskip("transformers")
    made: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in made:
            case = CASES[name]
            tokenizers = request.getfixturevalue("real_tokenizers") if case.tokenizer != BYTES else None
            folder = tmp_path_factory.mktemp("models") / name
            made[name] = folder, build(case, folder, tokenizers)
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Built]) -> Path:
    """A small llama-architecture GGUF with a tokenizer, 320 tokens."""
    import aprfmt

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    aprfmt.export_model(tiny_model("mistral")[0], path)
    return path
