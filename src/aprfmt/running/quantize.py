"""`quantize_model`: a conversion to a preset, with an importance matrix if asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aprfmt.convert.options import QuantizeCall, options_of
from aprfmt.errors import UsageError
from aprfmt.running.imatrix import AUTO, cached_imatrix
from aprfmt.schema import takes
from aprfmt.types import paths_of

if TYPE_CHECKING:
    from aprfmt.convert.report import Report


@takes(QuantizeCall)
def quantize_model(call: QuantizeCall) -> Report:
    """Quantizes a model to the `.gguf` or `.apr` file `dst`.

    Args:
        src: the model.
        dst: the file to write.
        mix: a quantization preset of llama.cpp ("q4_k_m"); with `pure` also a single type.
        log: called with progress lines while an importance matrix is computed.
    """
    from aprfmt.convert.api import convert
    from aprfmt.convert.presets import require_quantized

    given = options_of(call, dtype=call.mix)
    texts = paths_of(call.data)
    if isinstance(call.mix, str):
        require_quantized(call.mix)
    warnings: list[str] = []
    if call.imatrix == AUTO:
        if call.plan:
            raise UsageError(
                f"--plan cannot be combined with --imatrix {AUTO}, which computes",
                hint="apr imatrix FILE --data TEXT -o OUT --plan reports the amount of text",
            )
        given["imatrix"], warnings = cached_imatrix(
            call.src, texts, chunks=call.chunks, text_field=call.text_field, log=call.log
        )
    else:
        auto_only = {"data": texts, "chunks": call.chunks is not None, "text-field": call.text_field != "text"}
        for name, is_given in auto_only.items():
            if is_given:
                raise UsageError(f"--{name} requires --imatrix {AUTO}")
    report = convert(call.src, call.dst, given, inputs=texts)
    report.warnings[:0] = warnings
    return report
