"""The cost of a packed step, in which requests of different sizes are one sequence, from the measured batches.

A batch of equal requests is such a sequence too. So the batches that were profiled say what a step costs once, for each
request (its text), for each token, and for each pair of tokens of one request (TridentServe, arXiv 2510.02838, section
5.1, has the last two for one request).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profiler.fitting import fit_sum
from profiler.tables.rows import ProfileRow

# With fewer different lengths nobody knows what grows with the tokens.
_LEAST_LENGTHS = 3


@dataclass(frozen=True, slots=True)
class PackedCost:
    """Seconds of a denoising step at degree 1."""

    once_s: float
    request_s: float
    """For each request, whatever its size."""
    token_s: float
    """For each token."""
    pair_s: float
    """For each token, and each token of the same request."""

    def compute_share(self, lengths: Sequence[float]) -> float:
        """Compute the seconds of a packed step of requests with so many tokens, over those of a step of each."""
        each_s = sum(self._estimate_seconds([length]) for length in lengths)
        return self._estimate_seconds(lengths) / each_s if each_s > 0 else 1.0

    def _estimate_seconds(self, lengths: Sequence[float]) -> float:
        pairs = sum(length * length for length in lengths)
        return self.once_s + self.request_s * len(lengths) + self.token_s * sum(lengths) + self.pair_s * pairs


# Where the table does not say what is saved, nothing is.
UNKNOWN_COST = PackedCost(once_s=0.0, request_s=0.0, token_s=1.0, pair_s=0.0)


def fit_packed_cost(rows: Iterable[ProfileRow]) -> PackedCost:
    """Fit the rows of D of one model at degree 1, of all batches. Those of batches above 1 are needed: they tell
    what a step costs once from what it costs for each request."""
    measured = [row for row in rows if row.seconds > 0]
    batches, lengths = {row.batch for row in measured}, {row.shape.tokens for row in measured}
    if len(batches) < 2 or len(lengths) < _LEAST_LENGTHS:
        return UNKNOWN_COST
    terms = [(1.0, row.batch, row.batch * row.shape.tokens, row.batch * row.shape.tokens**2) for row in measured]
    return PackedCost(*fit_sum(terms, [row.seconds for row in measured], most_terms=len(terms[0])))
