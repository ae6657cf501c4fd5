"""The saliency of a model's experts on texts, in a process of its own.

`python -m aprtrain.rating` is the process of `apr prune --experts`. It answers the request {"path", "texts"} on stdin
with {"saliency": that of each layer's experts, "tokens": their number, "device"}, {"missing": why torch cannot be
imported} or {"error": [class, message, hint], "path", "tensor"}; before that, with {"part": [done, of]} for each batch.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from aprfmt.errors import AprError, UsageError


def rate_model(
    path: str, texts: Sequence[Path], progress: Callable[[int, int], None]
) -> tuple[list[list[float]], int, str]:
    """Rates the experts of the model `path` on texts, on a GPU if one is available.

    Returns the saliency of the experts of each layer, [] for a dense one; on how many tokens, and where.
    Raises UsageError for texts without tokens; what `open_network` and reading the texts raise.
    """
    import torch

    from aprfmt.running.evaluation import read_part, sequence_length
    from aprfmt.texts.encoding import Encoder
    from aprfmt.texts.sequences import Windows
    from aprfmt.tokenizer.alignment import align
    from aprtrain.evaluate import TOKENS_AT_ONCE
    from aprtrain.network.weights import open_network
    from aprtrain.reap import RATED_TOKENS, rate_experts
    from aprtrain.teacher.teacher import Teacher, residency_of, teacher_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with open_network(path) as network:
        positions, rows = network.hparams.max_position_embeddings, network.shape.vocab_rows
        length = sequence_length(None, None, {"model": positions} if positions else {})
        encoder = Encoder(network.tokenizer)
        part = read_part(texts, encoder, Counter(), lambda line: None)
        windows = Windows(part, length, encoder.separator)
        if not len(windows):
            raise UsageError(
                "the texts contain no tokens", path=texts[0], hint="pass texts that the model should master"
            )
        vocabulary, residency = align(network.tokenizer, network.tokenizer, rows, rows), residency_of(network)
        teacher = Teacher(network, vocabulary, residency, device, dtype=teacher_dtype(residency, device))
    at_once = max(1, TOKENS_AT_ONCE[device.type] // length)
    saliency = rate_experts(teacher, windows, at_once, progress)
    return saliency, min(len(part.tokens), RATED_TOKENS), str(device)


def main() -> None:
    """Answers one request."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout now and then

    def send(answer: object) -> None:
        print(json.dumps(answer), file=replies, flush=True)

    request = json.loads(sys.stdin.readline())
    try:
        texts = [Path(text) for text in request["texts"]]
        saliency, tokens, device = rate_model(request["path"], texts, lambda done, of: send({"part": [done, of]}))
        send({"saliency": saliency, "tokens": tokens, "device": device})
    except ImportError as error:
        send({"missing": str(error)})
    except AprError as error:
        words = [type(error).__name__, error.message, error.hint]
        send({"error": words, "path": error.path, "tensor": error.tensor})


if __name__ == "__main__":
    main()
