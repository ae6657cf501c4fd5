"""Tensor dtypes: one row each in `dtypes.DTYPES`, with their encoders and decoders."""

from aprfmt.codecs.dtypes import DTYPES, Dtype, find_dtype

__all__ = ["DTYPES", "Dtype", "find_dtype"]
