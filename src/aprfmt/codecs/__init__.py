"""Tensor dtypes: one row each in `dtypes.DTYPES`, with their encoders and decoders."""

from aprfmt.codecs.dtypes import (
    DTYPES,
    Dtype,
    dtype_by_apr_id,
    dtype_by_ggml_id,
    dtype_by_safetensors,
    find_dtype,
)

__all__ = ["DTYPES", "Dtype", "dtype_by_apr_id", "dtype_by_ggml_id", "dtype_by_safetensors", "find_dtype"]
