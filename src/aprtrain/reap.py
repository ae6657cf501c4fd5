"""Selects the experts of a student that is pruned by `--student-init experts:N`, by router statistics on its data.

The saliency of an expert is the mean, over the tokens that are routed to it, of its router weight times the norm of its
output (REAP: Lasby et al. 2025, arXiv 2510.13999, eq. 9). The N most salient experts of each layer are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from aprfmt.canonical.expert_pruning import most_salient
from aprfmt.errors import CorruptError
from aprfmt.io.sink import AtomicFile
from aprfmt.texts.sequences import Windows
from aprtrain.data.batches import batch_of
from aprtrain.network.decoder import Decoder
from aprtrain.teacher.teacher import Teacher
from aprtrain.world import World

RATED_TOKENS = 1 << 18
"""Training tokens on which experts are rated, at most."""

FILE = "experts.json"
"""File of the run's folder with the kept experts of each layer of the teacher, and the saliency of all."""


def rate_experts(
    teacher: Teacher, windows: Windows, rows: int, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[list[float]]:
    """The saliency of each expert of each layer of the teacher, [] for a dense layer; `rows` sequences at a time.

    `progress` is called with the number of sequences done and the total.
    """
    count = max(1, min(len(windows), RATED_TOKENS // windows.seq_len))
    ids = [i * len(windows) // count for i in range(count)]
    decoder: Decoder = teacher.decoder
    with decoder.running(), decoder.rating_experts() as sums:
        for start in range(0, count, rows):
            progress(start, count)
            batch = batch_of(windows, ids[start : start + rows]).to(decoder.norm.device)
            teacher.hidden(batch.tokens_NT, batch.documents)
    return [[] if each is None else saliency_of(each).tolist() for each in sums]


def saliency_of(sums_2E: Tensor) -> Tensor:
    """The saliency of the experts of a layer, [E], from `Decoder.rating_experts`; 0 without a token."""
    return sums_2E[0] / sums_2E[1].clamp(min=1)


def keep_experts(
    n: int, folder: Path, world: World, *, resumes: bool, rate: Callable[[], list[list[float]]]
) -> list[list[int]]:
    """The `n` most salient experts of each layer of the teacher, [] of a dense one: by `rate` on rank 0, saved in the
    run's folder, from which a run that `resumes` takes them.

    Raises CorruptError for a file of another selection.
    """
    chosen: list[list[int]] = []
    if world.is_first:
        if not (resumes and (folder / FILE).exists()):
            saliency = rate()
            with AtomicFile(folder / FILE) as sink:
                sink.write(json.dumps({"kept": most_salient(saliency, n), "saliency": saliency}).encode())
        chosen = _read(folder / FILE, n)
    world.wait_for_first()
    return world.gather(chosen)[0]


def _read(path: Path, n: int) -> list[list[int]]:
    try:
        found: list[list[int]] = json.loads(path.read_bytes())["kept"]
        if any(len(of) not in (0, n) or of != sorted({int(e) for e in of}) for of in found):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise CorruptError(
            f"the file does not list {n} experts of each layer", path=path, hint="start the run in another folder"
        ) from None
    return found
