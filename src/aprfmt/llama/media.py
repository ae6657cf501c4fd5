"""Images and audio in a prompt, through mtmd, in the worker process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from aprfmt.llama.capi import Bitmap, InputText, MediaLibrary
from aprfmt.llama.engine import MEDIA_MARKER, EngineError, RoomError

Handle: TypeAlias = int | ctypes.c_void_p
"""A pointer of llama.cpp's, which is only passed on."""


class MediaContext:
    """A vision or audio tower for a language model.

    Args:
        package: a key of engine.ENGINES.
        path: the GGUF of the tower.
        model: llama.cpp's pointer to the language model.
        n_threads: compute threads.
        use_gpu: whether to compute it on a GPU, if the build supports it.
    """

    def __init__(self, package: str, path: str, model: Handle, n_threads: int, *, use_gpu: bool) -> None:
        self._c = MediaLibrary(package)
        params = self._c.params()
        params.use_gpu, params.n_threads, params.print_timings, params.warmup = use_gpu, n_threads, False, False
        params.media_marker = MEDIA_MARKER.encode()
        self._context = self._c.init_from_file(os.fsencode(path), model, params)
        if not self._context:
            raise EngineError(f"mtmd cannot load the tower {path}")

    def feed(self, context: Handle, prompt: str, files: Sequence[str], n_batch: int, room: int) -> int:
        """Computes a prompt with a marker per file, in an empty context; returns its number of tokens.

        Raises EngineError, also if it has more than `room` tokens.
        """
        data = prompt.encode()
        text = InputText(data, len(data), False, True)
        with self._bitmaps(files) as bitmaps, self._chunks() as chunks:
            pointers = (ctypes.c_void_p * len(bitmaps))(*bitmaps)
            if code := self._c.tokenize(self._context, chunks, ctypes.byref(text), pointers, len(bitmaps)):
                raise EngineError(f"mtmd cannot tokenize the prompt and its files (code {code})")
            n = int(self._c.helper_get_n_tokens(chunks))
            if n >= room:
                raise RoomError(f"the prompt has {n:,} tokens with its files, but the context has room for {room:,}")
            behind = ctypes.c_int32()
            if code := self._c.helper_eval_chunks(
                self._context, context, chunks, 0, 0, n_batch, True, ctypes.byref(behind)
            ):
                raise EngineError(f"llama.cpp failed to evaluate the prompt with its files (code {code})")
        return n

    @contextmanager
    def _chunks(self) -> Iterator[Handle]:
        chunks = self._c.input_chunks_init()
        try:
            yield chunks
        finally:
            self._c.input_chunks_free(chunks)

    @contextmanager
    def _bitmaps(self, files: Sequence[str]) -> Iterator[list[Handle]]:
        found: list[Handle] = []
        try:
            for file in files:
                found.append(self._read(file))
            yield found
        finally:
            for bitmap in found:
                self._c.bitmap_free(bitmap)

    def _read(self, file: str) -> Handle:
        read: Bitmap = self._c.helper_bitmap_init_from_file(
            self._context, os.fsencode(file), False, self._c.helper_init_opt_default()
        )
        if not read.bitmap:
            able = [what for what, can in self._abilities() if can]
            raise EngineError(
                f"mtmd cannot read {file}: the model's tower {' and '.join(able) or 'accepts neither images nor audio'}"
            )
        is_sound = self._c.bitmap_is_audio(read.bitmap)
        if not self._abilities()[is_sound][1]:
            self._c.bitmap_free(read.bitmap)
            raise EngineError(f"the model's tower does not accept {'audio' if is_sound else 'images'}: {file}")
        bitmap: Handle = read.bitmap
        return bitmap

    def _abilities(self) -> tuple[tuple[str, bool], tuple[str, bool]]:
        """Whether the tower accepts images, and whether it accepts audio."""
        return (
            ("accepts images", self._c.support_vision(self._context)),
            ("accepts audio", self._c.support_audio(self._context)),
        )
