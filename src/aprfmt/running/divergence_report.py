"""The result of comparing a model with a reference: statistics of the KL divergence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LEAST_EXPONENT, BINS_PER_DECADE, HISTOGRAM_BINS = -8, 4, 40
"""The bins of a histogram of KL, of equal width in log10: from 10^-8 to 10^2 nats."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence of a model from a reference on text; divergences in nats, probabilities from 0 to 1.

    Attributes:
        file, reference: the models; the reference may be a logits file.
        engine: the package that provides llama.cpp.
        n_ctx, chunks, tokens: length and number of the chunks, and the scored positions.
        ce, reference_ce: cross entropies in nats per token.
        perplexity, reference_perplexity: e to their power.
        kl: mean KL(reference || model).
        kl_error: standard error of that mean.
        kl_quantiles: quantile -> KL; "0.5" is the median, "1" the maximum.
        kl_histogram: positions by KL, in the bins of `histogram`.
        agreement: fraction of the positions with the same most likely token.
        mean_dp, rms_dp: mean and root mean square of the change of the correct token's probability.
        dp_quantiles: quantile -> that change.
        seconds: of the whole comparison.
    """

    file: str
    reference: str
    engine: str
    n_ctx: int
    chunks: int
    tokens: int
    ce: float
    perplexity: float
    reference_ce: float
    reference_perplexity: float
    kl: float
    kl_error: float
    kl_quantiles: dict[str, float]
    kl_histogram: list[int]
    agreement: float
    mean_dp: float
    rms_dp: float
    dp_quantiles: dict[str, float]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The object of `apr eval --against --json`; only the second half of a window is scored."""
        return asdict(self) | {"window": self.n_ctx, "stride": self.n_ctx, "scored_from": self.n_ctx // 2}


def histogram(kl: npt.NDArray[np.float64]) -> list[int]:
    """The number of positions in each bin; a KL beyond the ends is counted in the bin at that end."""
    import numpy as np

    at = (np.log10(np.maximum(kl, 10.0**LEAST_EXPONENT)) - LEAST_EXPONENT) * BINS_PER_DECADE
    bins = np.clip(np.floor(at), 0, HISTOGRAM_BINS - 1).astype(int)
    return [int(n) for n in np.bincount(bins, minlength=HISTOGRAM_BINS)]
