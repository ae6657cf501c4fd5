"""Sampling on a GPU: the CUDA graph that replays a step gives the tokens of steps launched one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from train_models import Maker, load

from aprtrain import sampler
from aprtrain.sampler import continue_prompts

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("case", ["llama/biases", "gemma2", "mistral/window", "smollm3"])
def test_a_replayed_step_gives_the_tokens_of_a_launched_one(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(Maker(tmp_path)(case).folder).to("cuda")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 900, n).astype(np.uint32) for n in (1, 9, 4, 17)]
    found = []
    for is_replayed in (True, False):
        monkeypatch.setattr(sampler._Generation, "_is_replayable", is_replayed)
        drawn = torch.Generator("cuda").manual_seed(3)
        found.append([continue_prompts(decoder, prompts, 24, 2, drawn, temperature=t) for t in (0.0, 1.0)])
    assert found[0] == found[1]
