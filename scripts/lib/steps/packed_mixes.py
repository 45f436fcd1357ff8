"""Steps of requests of three sizes: one after another, as one packed sequence or as patches, and padded."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from tridentserve.device import find_device
from tridentserve.parallel.attention_calls import RedirectedAttention
from tridentserve.pipelines import DenoisingState, PipelineAdapter
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.adapters.packed_sequence import NoiseCall, unpack_patches
from tridentserve.pipelines.adapters.sd3 import SD3Adapter
from tridentserve.requests import GenerationInputs, Shape

_PROMPTS = ("a red circle", "two small yellow stars on a gray background", "a large green heart on the left")


def measure_mix(
    adapter: DiffusersAdapter, sides: Sequence[int], steps: int, guidance_scale: float, rounds: int
) -> list[dict[str, Any]]:
    """Measure a request of each side in each way, by turns; the first round warms up. Ratios are of the same round."""
    states = [prepare_state(adapter, side, number, steps, guidance_scale) for number, side in enumerate(sides)]
    ways = {"alone": adapter, "packed": adapter}
    if type(adapter) is SD3Adapter:
        ways["padded"] = _make_padded(adapter)
    measured = [{way: _run(by, way, states) for way, by in ways.items()} for _ in range(rounds + 1)]
    return [{"family": adapter.family, **_summarize(way, sides, measured[1:])} for way in ways]


def prepare_state(
    adapter: PipelineAdapter, side: int, number: int, steps: int, guidance_scale: float
) -> DenoisingState:
    """The state before the first step of a request for a square image. `number` chooses its prompt, and is its seed."""
    prompt = _PROMPTS[number % len(_PROMPTS)]
    inputs = GenerationInputs(prompt, Shape(side, side), steps, guidance_scale, seed=number)
    return adapter.prepare(adapter.encode(inputs), inputs)


def _make_padded(adapter: SD3Adapter) -> SD3Adapter:
    """The same adapter, whose steps of different sizes are padded."""
    padded: Any = copy.copy(adapter)
    padded._install_packing = lambda: None
    padded._predict_noises = functools.partial(_predict_padded, adapter)
    return cast(SD3Adapter, padded)


def _predict_padded(adapter: SD3Adapter, calls: Sequence[NoiseCall]) -> list[torch.Tensor]:
    """Predict the noise of requests of different sizes as rows of one batch: all images have as many tokens as the
    largest, and masks hide those that are none."""
    transformer = adapter.pipe.transformer
    images = [image for call in calls for image in transformer.pos_embed(call.latents)]
    counts = torch.tensor([len(image) for image in images], device=adapter.device)
    image = pad_sequence(images, batch_first=True)
    text = transformer.context_embedder(torch.cat([call.rows["prompt_embeds"] for call in calls]))
    pooled = torch.cat([call.rows["pooled_prompt_embeds"] for call in calls])
    levels = transformer.time_text_embed(torch.cat([call.timesteps for call in calls]), pooled)
    real = torch.arange(image.shape[1], device=adapter.device) < counts[:, None]
    mask = torch.cat([real, real.new_ones(text.shape[:2])], dim=1)[:, None, None]

    def attend(sdpa: Callable[..., torch.Tensor], query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return sdpa(query, *args, **kwargs, attn_mask=mask[..., : query.shape[2]])

    with RedirectedAttention(attend):
        for block in transformer.transformer_blocks:
            text, image = block(hidden_states=image, encoder_hidden_states=text, temb=levels)
    rows = transformer.proj_out(transformer.norm_out(image, levels)).split([len(call.latents) for call in calls])
    patch = [transformer.config.patch_size] * 2
    noises = []
    for call, own in zip(calls, rows, strict=True):
        sizes = call.latents.shape[2:]
        tokens = sizes[0] * sizes[1] // patch[0] ** 2
        noises.append(unpack_patches(own[:, :tokens], sizes, patch))
    return noises


def _run(
    adapter: DiffusersAdapter, way: str, states: Sequence[DenoisingState]
) -> tuple[list[float], list[torch.Tensor]]:
    """Do all steps of all requests: the seconds after which each of them has ended, and their latents."""
    seconds, latents = [], []
    for together in [[state] for state in states] if way == "alone" else [states]:
        began_s = time.perf_counter()
        ended = adapter.advance(together, together[0].num_steps)
        find_device(adapter.device).wait_for_all_work()
        seconds += [time.perf_counter() - began_s]
        latents += [state.tensors["latents"] for state in ended]
    return list(accumulate(seconds)) if way == "alone" else seconds * len(states), latents


def _summarize(
    way: str, sides: Sequence[int], measured: Sequence[Mapping[str, tuple[list[float], list[torch.Tensor]]]]
) -> dict[str, Any]:
    ratios = [each[way][0][-1] / each["alone"][0][-1] for each in measured]
    exact = zip(measured[0][way][1], measured[0]["alone"][1], strict=True)
    seconds = statistics.median(each[way][0][-1] for each in measured)
    return {
        "sides": list(sides),
        "way": way,
        "requests_per_s": len(sides) / seconds,
        "mean_latency_s": statistics.median(statistics.mean(each[way][0]) for each in measured),
        "time_ratio": statistics.median(ratios),
        "time_ratio_range": [min(ratios), max(ratios)],
        "max_difference": max(float((one - other).abs().max()) for one, other in exact),
    }
