"""Sampling on a GPU: attention over the cache, and the CUDA graph that replays a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from train_models import Maker, error, load

from aprtrain import sampler
from aprtrain.kernels.decode import attend_one
from aprtrain.sampler import continue_prompts

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(
            (case, torch.float32)
            for case in ("llama/biases", "gemma2", "mistral/window", "smollm3", "lfm2", "qwen3_5_text")
        ),
        ("deepseek_v3", torch.bfloat16),  # float32 products of experts are not captured
    ],
)
def test_a_replayed_step_gives_the_tokens_of_a_launched_one(
    tmp_path: Path, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(Maker(tmp_path)(case).folder, dtype).to("cuda")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 900, n).astype(np.uint32) for n in (1, 9, 4, 17)]
    found = []
    for is_launched in (False, True):
        if is_launched:
            monkeypatch.setattr(sampler._Generation, "_is_replayable", False)
        drawn = torch.Generator("cuda").manual_seed(3)
        found.append([continue_prompts(decoder, prompts, 24, 2, drawn, temperature=t) for t in (0.0, 1.0)])
    assert found[0] == found[1]


@pytest.mark.parametrize(("heads", "n_kv", "size", "values"), [(9, 3, 64, 64), (4, 4, 80, 80), (16, 1, 192, 128)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_attention_over_the_cache_is_that_of_the_positions_a_row_sees(
    heads: int, n_kv: int, size: int, values: int, dtype: torch.dtype, most: float
) -> None:
    drawn = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(shape, generator=drawn, device="cuda", dtype=dtype)
        for shape in ((5, 1, heads, size), (5, 200, n_kv, size), (5, 200, n_kv, values))
    )
    first_N, place = torch.tensor([0, 1, 64, 136, 137], device="cuda"), 137
    k[:, place + 1 :] = v[:, place + 1 :] = float("nan")  # not yet written
    found = attend_one(q, k, v, first_N, torch.tensor([place], device="cuda"), size**-0.5)
    for row, first in enumerate(first_N.tolist()):
        q_H1E, k_HTE, v_HTE = (x.transpose(0, 1).double() for x in (q[row], k[row, first:138], v[row, first:138]))
        k_HTE, v_HTE = (x.repeat_interleave(heads // n_kv, 0) for x in (k_HTE, v_HTE))
        expected = functional.scaled_dot_product_attention(q_H1E, k_HTE, v_HTE, scale=size**-0.5)
        assert error(found[row].transpose(0, 1).double(), expected) < most


def test_compiled_steps_give_the_tokens_of_uncompiled_ones(tmp_path: Path) -> None:
    decoder = load(Maker(tmp_path)("llama/biases").folder).to("cuda")
    prompts = [np.arange(5, 5 + n, dtype=np.uint32) for n in (1, 9, 4, 17)]
    plain = continue_prompts(decoder, prompts, 24, 2, torch.Generator("cuda"), temperature=0.0)
    decoder.compile_blocks()
    assert continue_prompts(decoder, prompts, 24, 2, torch.Generator("cuda"), temperature=0.0) == plain
