"""Paints the previews of one worker, beside its device thread.

The worker that denoises need not hold the VAE. The map from latents to colours is fitted once for each model, to the
node's host copy of the VAE, on the CPU, and only when the first request asks for previews. Nothing waits for it:
previews come from the moment at which it is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import torch

from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.engine.live.worker.reporting.output_files import encode_outputs
from tridentserve.models.decoded_outputs import DecodedOutputs
from tridentserve.pipelines import weights
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.latent_colors import LatentColors, fit_colors
from tridentserve.pipelines.loading import load_adapter
from tridentserve.plans import Replica
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

logger = logging.getLogger(__name__)

# The report of a plan waits at most so long for the last of its previews.
_MOST_WAIT_S = 0.2

PreviewFiles = tuple[bytes, ...]


class PreviewPainter:
    """Fits and paints in a thread of its own. `prepare`, `paint` and `drop_model` are called in the device thread."""

    def __init__(self, host_copies: HostCopies) -> None:
        self._host_copies = host_copies
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="previews")
        self._colors: dict[str, Future[LatentColors]] = {}

    def prepare(self, model: str) -> None:
        """Begin to fit the colours of a model, where that has not begun before. Never raises."""
        if model in self._colors:
            return
        try:
            # Not in the other thread: while libraries build models, they change settings of the whole process.
            adapter = self._build_decoder(model)
            self._colors[model] = self._pool.submit(_fit, adapter, model)
        except Exception as error:  # previews are an extra: whatever fails here must not end a plan
            logger.exception("there are no previews of %s", model)
            self._colors[model] = Future()
            self._colors[model].set_exception(error)

    def paint(
        self, model: str, sketch: torch.Tensor, inputs: GenerationInputs, tell: Callable[[PreviewFiles], None]
    ) -> Future[None]:
        """Paint a sketch (see `PipelineAdapter.sketch`), and `tell` the files of the pictures, one for each output, in
        the painter's thread; nobody is told of a model without colours."""
        self.prepare(model)
        return self._pool.submit(_paint, self._colors[model], sketch, inputs, tell)

    async def finish(self, model: str, painting: list[Future[None]]) -> None:
        """Wait for these previews, if they take no longer than a moment."""
        if painting and self._colors[model].done():
            await asyncio.wait([asyncio.wrap_future(each) for each in painting], timeout=_MOST_WAIT_S)

    def drop_model(self, model: str) -> None:
        """Forget the colours of a model: another one may have its name later."""
        self._colors.pop(model, None)

    def _build_decoder(self, model: str) -> DiffusersAdapter:
        replica = Replica(model, Stage.DECODE)
        copy, folder = self._host_copies.get(replica), self._host_copies.source(replica).folder
        formats = self._host_copies.formats(replica)
        adapter = load_adapter(folder, frozenset({Stage.DECODE}), formats=formats, weights=False)
        weights.attach(adapter, copy.tensors(copy.buffer))
        return cast(DiffusersAdapter, adapter)


def _fit(adapter: DiffusersAdapter, model: str) -> LatentColors:
    began_s = time.perf_counter()
    try:
        adapter.pipe.vae.float()  # CPUs compute faster in it; weights that are in it already stay where they are
        colors = fit_colors(adapter)
    except Exception:
        logger.exception("there are no previews of %s", model)
        raise
    logger.info("fitted the colours of %s's latents in %.2f s", model, time.perf_counter() - began_s)
    return colors


def _paint(
    colors: Future[LatentColors],
    sketch: torch.Tensor,
    inputs: GenerationInputs,
    tell: Callable[[PreviewFiles], None],
) -> None:
    if colors.exception() is not None:  # it has been logged
        return
    try:
        pictures = DecodedOutputs(colors.result().paint(sketch))
        files = encode_outputs(pictures, replace(inputs, output_format=inputs.preview_format))
        tell(tuple(file for file in files if isinstance(file, bytes)))
    except Exception:
        logger.exception("a preview could not be painted")
