"""The profile of a model whose requests may start from an image, made of its profile without images."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from profiler import ProfileTable
from profiler.tables.rows import ProfileRow
from tridentserve.stages import Stage


def add_vae_to_encode(table: ProfileTable, models: Collection[str]) -> ProfileTable:
    """The table with the memory that E of these models needs for the VAE too: the weights are those of C, which has
    nothing else, and while an image is encoded there are no more activations than while one of its size is decoded. The
    times stay: those of requests with images are learned."""
    weights_bytes = {row.model: row.weights_bytes for row in table.weights if row.stage is Stage.DECODE}
    weights = (
        replace(row, weights_bytes=row.weights_bytes + weights_bytes.get(row.model, 0))
        if row.model in models and row.stage is Stage.ENCODE
        else row
        for row in table.weights
    )
    rows = (
        replace(row, peak_bytes=max(row.peak_bytes, _find_decode_peak(row, table)))
        if row.model in models and row.stage is Stage.ENCODE
        else row
        for row in table.rows
    )
    return replace(table, rows=tuple(rows), weights=tuple(weights))


def _find_decode_peak(encode: ProfileRow, table: ProfileTable) -> int:
    """The activations of C for one output of this size, else of the next larger size, else of the largest."""
    decodes = [
        row
        for row in table.rows
        if (row.model, row.gpu, row.stage, row.degree, row.batch) == (encode.model, encode.gpu, Stage.DECODE, 1, 1)
    ]
    ascending = sorted(decodes, key=lambda row: row.shape.tokens)
    larger = (row.peak_bytes for row in ascending if row.shape.tokens >= encode.shape.tokens)
    return next(larger, max((row.peak_bytes for row in decodes), default=0))
