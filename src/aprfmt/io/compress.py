"""Whole-buffer zstd and LZ4, with a cap on what comes out. The libraries are imported on first use."""

from __future__ import annotations

import io

from aprfmt.errors import CorruptError, LimitError, TruncatedError
from aprfmt.io.source import Buffer
from aprfmt.limits import MAX_IMAGE_AHEAD, MAX_IMAGE_RATIO, MAX_UNCOMPRESSED_BYTES

# A block of a zstd frame takes at least 4 bytes and gives at most 128 KiB: 512 bytes of input give at most 16
# MiB, which is how far the output can run past the cap before it is looked at.
_ZSTD_STEP = 512
_LZ4_MAX_RATIO = 255
# An empty frame takes 9 bytes and some microseconds.
_MOST_FRAMES = 1 << 16


def _cap_of(data: Buffer, cap: int) -> int:
    """`cap`, or less where so little data cannot be what was packed."""
    return min(cap, MAX_IMAGE_RATIO * len(data) + MAX_IMAGE_AHEAD)


def _check_cap(n_bytes: int, cap: int, path: str) -> None:
    if n_bytes > cap:
        raise LimitError(f"the data unpacks to {n_bytes} bytes or more; the limit is {cap}", path=path)


def unzstd(data: Buffer, path: str, cap: int = MAX_UNCOMPRESSED_BYTES) -> bytes:
    """The content of one or more zstd frames laid end to end.

    Raises CorruptError for what is not zstd, TruncatedError where a frame ends early, LimitError beyond `cap`, for
    much more than `data` and for frames without end.
    """
    import zstandard

    view, out = memoryview(data), io.BytesIO()  # whose value is no copy
    if not view:
        raise CorruptError("there is no zstd data", path=path)
    cap = _cap_of(data, cap)
    decompressor, n_frames = zstandard.ZstdDecompressor(), 0
    while view:
        n_frames += 1
        if n_frames > _MOST_FRAMES:
            raise LimitError(f"the zstd data has more than {_MOST_FRAMES} frames", path=path)
        frame = decompressor.decompressobj()
        used = 0
        while used < len(view) and not frame.eof:
            step = view[used : used + _ZSTD_STEP]
            try:
                out.write(frame.decompress(step))
            except zstandard.ZstdError as error:
                raise CorruptError(f"damaged zstd data: {error}", path=path) from error
            used += len(step)
            _check_cap(out.tell(), cap, path)
        if not frame.eof:
            raise TruncatedError("the zstd data ends in the middle of a frame", path=path)
        view = view[used - len(frame.unused_data) :]
    return out.getvalue()


def unlz4(data: Buffer, path: str, cap: int = MAX_UNCOMPRESSED_BYTES) -> bytes:
    """The content of a size-prepended LZ4 block: u32 length, then the block.

    Raises CorruptError where it does not unpack to exactly that length, LimitError beyond `cap` bytes.
    """
    from lz4 import block

    view = memoryview(data)
    if len(view) < 4:
        raise TruncatedError("LZ4 data shorter than its length field", path=path)
    n_bytes = int.from_bytes(view[:4], "little")
    _check_cap(n_bytes, _cap_of(data, cap), path)
    if n_bytes > _LZ4_MAX_RATIO * (len(view) - 4):
        raise CorruptError(f"{len(view) - 4} bytes of LZ4 cannot unpack to {n_bytes}", path=path)
    try:
        out: bytes = block.decompress(view[4:], uncompressed_size=n_bytes)
    except (block.LZ4BlockError, ValueError) as error:
        raise CorruptError(f"damaged LZ4 data: {error}", path=path) from error
    if len(out) != n_bytes:
        raise CorruptError(f"the LZ4 data declares {n_bytes} bytes but holds {len(out)}", path=path)
    return out


def zstd(data: Buffer, level: int) -> bytes:
    """`data` as one zstd frame."""
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(data)


def lz4(data: Buffer) -> bytes:
    """`data` as a size-prepended LZ4 block."""
    from lz4 import block

    packed: bytes = block.compress(data, store_size=True)
    return packed
