"""The exchanges of an attention whose heads several ranks share out (DeepSpeed Ulysses): all tokens for a rank's heads,
and then all heads for its tokens.

Between ranks tokens stand before everything else, so that what a rank gets from the others, put one behind the other,
is in the order of the tokens already. Queries, keys and values are copied once, into one tensor to send, and attention
reads them as they come in. Its output is copied once where it comes in, and once more before only if there is text,
which goes to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tridentserve.parallel.collectives import CollectiveGroup


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The exchanges of one attention."""

    peers: CollectiveGroup
    """The ranks that share out the heads."""
    sizes: Sequence[int]
    """Image tokens of each of them."""
    text: int
    """The number of text tokens, which every rank has."""
    text_first: bool
    """True where they stand before the image tokens."""

    def collect_tokens(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return tensors of all tokens for this rank's heads, (tensors, batch, share, tokens + text, channels), of
        tensors of its tokens for all heads, (batch, heads, local + text, channels) each."""
        batch, heads, _, channels = tensors[0].shape
        size, rank, count = self.peers.size, self.peers.rank, len(tensors)
        share, mine = heads // size, self.sizes[self.peers.rank]
        sent = tensors[0].new_empty(size, mine, count, batch, share, channels)
        whole = tensors[0].new_empty(self.text + sum(self.sizes), count, batch, share, channels)
        of_text, received = self._split_rows(whole)
        parts = [split_text(tensor, self.text, self.text_first) for tensor in tensors]
        for number, (_, image) in enumerate(parts):
            sent[:, :, number] = torch.unflatten(image, 1, (size, share)).permute(1, 3, 0, 2, 4)
        width = count * batch * share * channels
        finish = self.peers.start_all_to_all_into(
            received, [tokens * width for tokens in self.sizes], sent, [mine * width] * size
        )
        for number, (text, _) in enumerate(parts):
            of_text[:, number] = text.narrow(1, rank * share, share).permute(2, 0, 1, 3)
        finish()
        return whole.permute(1, 2, 3, 0, 4)

    def collect_heads(self, output: torch.Tensor) -> torch.Tensor:
        """Return the output of attention for all heads, (batch, heads, local + text, channels), of that of all tokens
        for this rank's heads, (batch, share, tokens + text, channels)."""
        batch, share, _, channels = output.shape
        size, length = self.peers.size, self.text + self.sizes[self.peers.rank]
        sent = self._repeat_text(output.permute(2, 0, 1, 3))
        received = output.new_empty(size, length, batch, share, channels)
        width = batch * share * channels
        self.peers.start_all_to_all_into(
            received, [length * width] * size, sent, [(self.text + tokens) * width for tokens in self.sizes]
        )()
        # In this order of the memory, stock processors make (batch, tokens, heads * channels) of it without a copy.
        heads = received.permute(2, 1, 0, 3, 4).reshape(batch, length, size * share, channels)
        return heads.transpose(1, 2)

    def _repeat_text(self, rows: torch.Tensor) -> torch.Tensor:
        """Contiguous rows of all tokens, with those of the text beside the image tokens of each rank."""
        if not self.text:
            return rows.contiguous()
        text, image = self._split_rows(rows)
        parts = [part for shard in torch.split(image, list(self.sizes)) for part in self._order(text, shard)]
        sent = rows.new_empty(sum(len(part) for part in parts), *rows.shape[1:])
        return torch.cat(parts, out=sent)

    def _split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of text tokens and of image tokens."""
        if self.text_first:
            return rows[: self.text], rows[self.text :]
        return rows[len(rows) - self.text :], rows[: len(rows) - self.text]

    def _order(self, text: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (text, image) if self.text_first else (image, text)


def split_text(tokens: torch.Tensor, text: int, text_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Split (..., tokens, channels) into its text tokens and its image tokens."""
    start = 0 if text_first else tokens.shape[-2] - text
    image = tokens.narrow(-2, text, tokens.shape[-2] - text) if text_first else tokens.narrow(-2, 0, start)
    return tokens.narrow(-2, start, text), image


def join_text(text: torch.Tensor, image: torch.Tensor, text_first: bool) -> torch.Tensor:
    """Join what `split_text` has split."""
    return torch.cat([text, image] if text_first else [image, text], dim=-2)
