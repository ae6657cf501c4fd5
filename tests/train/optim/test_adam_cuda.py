"""AdamW's kernel on a GPU, beside torch's in float64."""

from __future__ import annotations

import pytest
from train_adam import check_updates

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_updates_are_those_of_torch(clip: float) -> None:
    check_updates(clip, "cuda")
