"""Exact attention over keys and values that lie on several ranks: each passes its own on, round by round (ring
attention, arXiv 2310.01889). The softmax is summed up as they come, so that nobody ever holds all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tridentserve.device import find_device
from tridentserve.parallel.collectives import CollectiveGroup, Shapes


class SoftmaxSum:
    """The attention of some queries to keys that come in parts, by the logarithms of the parts' sums of exponentials.

    Sums are in float32, whatever the numbers of the queries are."""

    def __init__(self) -> None:
        self._output: torch.Tensor | None = None
        self._log_sum: torch.Tensor | None = None

    def add(self, output: torch.Tensor, log_sum: torch.Tensor) -> None:
        """Take in the attention to one part, (batch, heads, queries, channels), with the logarithms of its sums,
        (batch, heads, queries): minus infinity where a query may see nothing of the part."""
        output = output.float().masked_fill(log_sum.isneginf()[..., None], 0.0)
        if self._output is None or self._log_sum is None:
            self._output, self._log_sum = output, log_sum
            return
        total = torch.logaddexp(self._log_sum, log_sum)
        # A query that has seen nothing yet has no share to give away: infinity less infinity is no number.
        shares = [(part - total).nan_to_num(nan=0.0, neginf=-torch.inf).exp() for part in (self._log_sum, log_sum)]
        self._output = self._output * shares[0][..., None] + output * shares[1][..., None]
        self._log_sum = total

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """The attention to all parts together."""
        assert self._output is not None, "attention to nothing"
        return self._output.to(dtype)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention, and the logarithm of each query's sum of exponentials, with the kernels that
    `scaled_dot_product_attention` has. `mask`: broadcast to (batch, heads, queries, keys), True or 0 where a key is
    seen. Shapes are those of `SoftmaxSum.add`."""
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        mask = mask.to(query.dtype)
    output, log_sum = find_device(query.device).attend(query, key, value, mask, scale)
    if mask is not None:
        # The kernels say 0 of a query that sees nothing.
        log_sum = log_sum.masked_fill(mask.isneginf().all(-1), -torch.inf)
    return output, log_sum


def pass_around(
    members: CollectiveGroup, parts: torch.Tensor, shapes: Shapes, use: Callable[[int, torch.Tensor], None]
) -> None:
    """Call `use` with the rank and the tensors of each of `members` in turn, this one's own first. `parts` are its own,
    and `shapes` those of all. The next ones are on their way while the present ones are used."""
    size, ahead, behind = members.size, (members.rank + 1) % members.size, (members.rank - 1) % members.size
    for turn in range(size):
        owner, finish = (members.rank - turn) % size, None
        if turn + 1 < size:
            finish = members.start_exchange(parts, ahead, behind, shapes[(owner - 1) % size])
        use(owner, parts)
        if finish is not None:
            parts = finish()
