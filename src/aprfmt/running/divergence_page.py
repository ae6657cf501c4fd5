"""The page of `apr eval --against`: the distribution of the KL divergence, and the error of the weights by layer."""

from __future__ import annotations

from pathlib import Path

from aprfmt.errors import AprError
from aprfmt.html.charts import Chart, Mark, Series, draw
from aprfmt.html.page import grid, heading, headline, page, paragraph, table, tiles
from aprfmt.inspection.comparison import Comparison
from aprfmt.running.divergence_report import BINS_PER_DECADE, HISTOGRAM_BINS, LEAST_EXPONENT, Divergence
from aprfmt.text import format_seconds, plural

NO_WEIGHTS = "The reference is a logits file, without weights to compare."


def weight_errors(file: str, reference: str) -> Comparison | str:
    """The weights of `file` compared with those of `reference`, or the reason why they are not."""
    from aprfmt.inspection.diff import diff

    try:
        return diff(reference, file, values=True)
    except AprError as error:
        return f"The weights were not compared: {error.message}."


def divergence_html(found: Divergence, weights: Comparison | str) -> str:
    """The page."""
    parts = [
        headline(f"KL divergence of {Path(found.file).name}"),
        paragraph(f"{found.file} against {found.reference}"),
        paragraph(
            f"{plural(found.tokens, 'position')} in {plural(found.chunks, 'chunk')} of {found.n_ctx:,} tokens, "
            f"{format_seconds(found.seconds)} in llama.cpp ({found.engine}).",
            "lead",
        ),
        _tiles(found),
        heading("Distribution"),
        grid([draw(_histogram(found)), draw(_quantiles(found)), draw(_changes(found))]),
        _table(found),
        heading("Error of the weights by layer"),
    ]
    if isinstance(weights, str):
        parts.append(paragraph(weights))
    else:
        from aprfmt.inspection.diff_page import layer_figures

        figures = layer_figures(weights.tensors or ())
        parts += [paragraph("A is the reference, B the model."), *figures] if figures else [paragraph("No layers.")]
    return page(f"KL divergence: {Path(found.file).name}", parts)


def _tiles(found: Divergence) -> str:
    ratio = found.perplexity / found.reference_perplexity
    return tiles(
        [
            ("mean KL", f"{found.kl:.4g}", f"\N{PLUS-MINUS SIGN}{found.kl_error:.2g} nats per token", ""),
            ("median KL", f"{found.kl_quantiles['0.5']:.4g}", "", ""),
            ("99 % below", f"{found.kl_quantiles['0.99']:.4g}", "", ""),
            ("same top token", f"{found.agreement:.2%}", "of positions", ""),
            ("RMS \N{GREEK CAPITAL LETTER DELTA}p", f"{found.rms_dp:.3%}", "of the correct token", ""),
            ("perplexity", f"{found.perplexity:.4g}", f"{ratio:.4f} times the reference", ""),
        ]
    )


def _histogram(found: Divergence) -> Chart:
    """Shares of the positions over the logarithm of their KL; the mean is a mark."""
    from math import log10

    counts = found.kl_histogram
    middles = [LEAST_EXPONENT + (i + 0.5) / BINS_PER_DECADE for i in range(HISTOGRAM_BINS)]
    used = [i for i, n in enumerate(counts) if n] or [0]
    first, last = max(0, used[0] - 1), min(HISTOGRAM_BINS, used[-1] + 2)
    shares = [n / max(1, found.tokens) for n in counts]
    marks = [Mark(log10(found.kl), f"mean {found.kl:.4g}")] if found.kl > 0 else []
    series = [Series("positions", middles[first:last], shares[first:last], "exact")]
    return Chart(
        "Distribution of KL", series, "log10 of the KL in nats", "share of the positions", kind="percent", latest=False,
        zero=True, marks=marks,
    )  # fmt: skip


def _quantiles(found: Divergence) -> Chart:
    points = sorted((100 * float(q), max(value, 0.0) or None) for q, value in found.kl_quantiles.items())
    series = [Series("KL", [x for x, _ in points], [y for _, y in points], "points")]
    return Chart("KL by percentile", series, "percentile of the positions", "KL, nats", latest=False)


def _changes(found: Divergence) -> Chart:
    points = sorted((100 * float(q), value) for q, value in found.dp_quantiles.items())
    series = [Series("change", [x for x, _ in points], [y for _, y in points], "points", 1)]
    return Chart(
        "Change of the correct token's probability", series, "percentile of the positions", "change", kind="percent",
        latest=False,
    )  # fmt: skip


def _table(found: Divergence) -> str:
    header = ["percentile", "KL, nats", "change of probability"]
    cells = [
        [f"{100 * float(q):g} %", f"{found.kl_quantiles[q]:.4g}", f"{found.dp_quantiles[q]:+.3%}"]
        for q in sorted(found.kl_quantiles, key=float)
    ]
    return table(header, cells, right="|".join(header))
