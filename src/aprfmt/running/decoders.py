"""Loads text generation models of any format in llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Callable

from aprfmt.errors import UnsupportedError
from aprfmt.llama.client import Llama, encoder_pooling
from aprfmt.running.generate import check_reads_text, metadata_of
from aprfmt.running.prepared import prepare
from aprfmt.types import PathLike


def open_decoder(
    file: PathLike,
    *,
    n_ctx: int,
    n_threads: int = 0,
    gpu_layers: int = 0,
    watched: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Llama:
    """The model `file`, exported first unless it is a GGUF. Use in `with`.

    Raises:
        UnsupportedError: an encoder, which has no next token, or an encoder-decoder.
        RefusedError: an adapter, a tower or an importance matrix.
        AprError: as prepare and Llama.
    """
    prepared = prepare(file, say=say)
    check_reads_text(metadata_of(prepared.path), os.fspath(file))
    pooling, n_bytes = encoder_pooling(prepared.path)
    if pooling is not None:
        raise UnsupportedError(
            "the model is an encoder: it does not predict a next token", path=file, hint="apr run FILE --embed TEXT"
        )
    llama = Llama(
        prepared.path, n_ctx=n_ctx, name=file, n_bytes=n_bytes, n_threads=n_threads, gpu_layers=gpu_layers,
        watched=watched,
    )  # fmt: skip
    if llama.facts.has_encoder:
        llama.close()
        raise UnsupportedError(
            "the model is an encoder-decoder: it cannot score plain text", path=file, hint="apr run FILE PROMPT"
        )
    return llama
