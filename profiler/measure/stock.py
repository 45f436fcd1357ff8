"""Times the denoising steps of the stock diffusers pipeline, on the weights of an adapter.

The stock pipeline is called as its users call it, with a prompt; a callback at the end of each step takes the times.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from profiler.measure.stages import WARM_UP, Source, build_inputs, load_stage
from tridentserve.device import find_device
from tridentserve.errors import ProfileError
from tridentserve.models.model_folder import detect_family
from tridentserve.models.number_formats import NumberFormat
from tridentserve.pipelines import PipelineAdapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.int8_weights import quantize
from tridentserve.pipelines.weights import attach, named_tensors
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage


class StockPipeline:
    """A stock pipeline with its text encoders and the denoising models of an adapter; its VAE is not used."""

    def __init__(self, source: Source, denoiser: PipelineAdapter) -> None:
        """Raises `ProfileError` for a family that starts from an image, and for a pipeline that is served whole."""
        family = detect_family(source.folder)
        if family.whole:
            raise ProfileError(
                f"a {family.pipeline_class} is served as its stock pipeline, which nothing compares with"
            )
        if family.needs_image:
            raise ProfileError(f"the stock pipeline of {family.name} starts from an image and is not timed here")
        self._source = source
        self._device = torch.device(source.device)
        of_encoders = replace(source, folder=source.condition_folder or source.folder)
        self._pipe: Any = cast(DiffusersAdapter, load_stage(of_encoders, Stage.ENCODE)).pipe
        scheduler = copy.deepcopy(cast(DiffusersAdapter, denoiser).pipe.scheduler)
        self._pipe.register_modules(scheduler=scheduler, **_make_stock_denoisers(denoiser, source.find_formats()))
        self._pipe.set_progress_bar_config(disable=True)

    def time_steps(self, shape: Shape, num_steps: int) -> list[float]:
        """The seconds of `num_steps` denoising steps of one request, after a few that do not count."""
        ends_s: list[float] = []

        def note_end(*_: Any) -> dict[str, Any]:
            find_device(self._device).wait_for_all_work()
            ends_s.append(time.perf_counter())
            return {}

        inputs = build_inputs(self._source, shape, 1 + WARM_UP + num_steps)
        with torch.inference_mode():
            self._pipe(**self._list_arguments(inputs), callback_on_step_end=note_end)
        took_s = [end_s - begin_s for begin_s, end_s in itertools.pairwise(ends_s)]
        return took_s[WARM_UP:]

    def _list_arguments(self, inputs: GenerationInputs) -> dict[str, Any]:
        """A user's call, as far as this pipeline has these arguments."""
        wanted = {
            "prompt": inputs.prompt,
            "negative_prompt": " ",
            "guidance_scale": inputs.guidance_scale,
            "height": inputs.shape.height,
            "width": inputs.shape.width,
            "num_frames": inputs.shape.num_frames,
            "num_inference_steps": inputs.num_inference_steps,
            "generator": torch.Generator("cpu").manual_seed(inputs.seed),
            "output_type": "latent",
            "use_resolution_binning": False,
            "clean_caption": False,
        }
        if detect_family(self._source.folder).name == "qwen_image":  # elsewhere it would be a second pass
            wanted["true_cfg_scale"] = inputs.guidance_scale
        known = inspect.signature(self._pipe.__call__).parameters
        return {name: value for name, value in wanted.items() if name in known}


def _make_stock_denoisers(denoiser: PipelineAdapter, formats: Mapping[str, NumberFormat]) -> dict[str, torch.nn.Module]:
    """The denoising models as diffusers makes them, without our attention, with the adapter's own tensors."""
    models = {}
    for name, model in cast(DiffusersAdapter, denoiser).pipe.components.items():
        if isinstance(model, torch.nn.Module):
            with torch.device("meta"):
                models[name] = type(model).from_config(model.config).eval()  # type: ignore[attr-defined]
            if formats[name] == "int8":
                quantize(torch.nn.Module.to(models[name], model.dtype))  # type: ignore[arg-type]
    stock = copy.copy(denoiser)
    cast(Any, stock).pipe = SimpleNamespace(components=models)
    attach(stock, named_tensors(denoiser))
    return models
