"""Denoising by several processes together equals denoising by one, whatever the shape, and across changes of degree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.members import Member, Pool
from tests.pipelines.models import (
    PARALLEL,
    QUICK,
    STARTING,
    WITH_IMAGES,
    WITH_ONE_IMAGE,
    families,
    family_of,
    final_latents,
    load_stage,
    make_inputs,
    start,
)
from tridentserve.errors import ConfigError
from tridentserve.models.kernels import Kernels
from tridentserve.parallel import SequenceGroup, sequence_parallel
from tridentserve.pipelines import DenoisingState, kernels, load_adapter
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]
TOLERANCE = 1e-4
OTHERS = (
    "sd3-medium",
    "flux-schnell",
    "qwen_image_edit_plus-2511",
    *WITH_IMAGES,
    *WITH_ONE_IMAGE,
    *(variant for variant in STARTING if family_of(variant).shares_tokens),
    "cogvideox-1.5",
    "cogvideox-2b",
    "wan-2.2",
    "cogvideox_i2v-1.0",
    "wan_i2v-2.2",
)
QUICK_VARIANTS = (*QUICK, "sd3-mask", "sd3-medium", "flux-schnell")
# Families whose stock pipelines call the transformer once for each pass, or for each half of the passes at least.
CALL_PER_PASS = (
    "ltx2",
    "wan",
    "wan_i2v",
    "qwen_image",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "flux2_klein",
    "hunyuan_video_15",
    "hunyuan_video_15_i2v",
)

# Z-Image fills up an image to 32 tokens, Qwen-Image-Edit has those of an input image beside every output, and LTX-2
# makes nothing of fewer than four.
NEVER_FEW_TOKENS = ("z_image", "qwen_image_edit", "qwen_image_edit_plus", "ltx2")

# Heights and widths in pixels; a token is 16 x 16 of them.
EVEN: dict[str, Any] = {"height": 64, "width": 96}
UNEVEN: dict[str, Any] = {"height": 112, "width": 80}  # 35 tokens
A_TOKEN_EACH = {"height": 32, "width": 32}
TWO_OUTPUTS = {"height": 48, "width": 80, "num_outputs": 2}


def run_steps(
    member: Member,
    folder: Path,
    state: dict[str, Any],
    steps: int,
    spoil: Callable[[SequenceGroup], None] | None = None,
) -> dict[str, Any]:
    """Some steps by all members; the state comes as plain data, and goes back so."""
    group = member.group("steps" if spoil is None else spoil.__name__)
    if spoil is not None:
        spoil(group)
    with sequence_parallel(group):
        return plain(member.adapter(folder).step(of_plain(state), steps))


def plain(state: DenoisingState) -> dict[str, Any]:
    """A state as the pipes between processes take it."""
    return asdict(state) | {"tensors": {name: tensor.numpy() for name, tensor in state.tensors.items()}}


def of_plain(data: dict[str, Any]) -> DenoisingState:
    return DenoisingState(**data | {"tensors": {k: torch.from_numpy(v.copy()) for k, v in data["tensors"].items()}})


def denoise(
    pool: Pool,
    folder: Path,
    inputs: GenerationInputs,
    degrees: list[int],
    spoil: Callable[[SequenceGroup], None] | None = None,
) -> np.ndarray[Any, Any]:
    """Latents after one step at each of the degrees in turn, which all members must agree on."""
    state = plain(start(folder, inputs))
    for degree in degrees:
        results = pool.run(run_steps, degree, folder, state, 1, spoil)
        for result in results:
            if isinstance(result, Exception):
                raise result
            assert np.array_equal(result["tensors"]["latents"], results[0]["tensors"]["latents"])
        state = results[-1]
    return load_stage(folder, Stage.DIFFUSE).latents(of_plain(state))["latents"].numpy()


def difference(folder: Path, inputs: GenerationInputs, latents: np.ndarray[Any, Any]) -> float:
    """The largest difference to what one process makes."""
    expected = final_latents(folder, inputs).numpy()
    assert np.abs(expected).max() > 0.1
    return float(np.abs(latents - expected).max())


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [EVEN, UNEVEN, A_TOKEN_EACH, TWO_OUTPUTS],
    ids=["even", "uneven", "a-token-each", "two-outputs"],
)
@pytest.mark.parametrize("variant", families(*PARALLEL, *OTHERS, quick=QUICK_VARIANTS))
def test_degree_does_not_change_the_result(
    pool: Pool, model: Model, variant: str, changes: dict[str, Any], degree: int
) -> None:
    inputs = make_inputs(**changes, steps=3, variant=variant)
    degrees = [degree] * inputs.computed_steps
    assert difference(model(variant), inputs, denoise(pool, model(variant), inputs, degrees)) <= TOLERANCE


@pytest.mark.parametrize("variant", families(*PARALLEL, *OTHERS, quick=QUICK_VARIANTS))
def test_a_degree_that_does_not_divide_the_heads_changes_nothing(pool: Pool, model: Model, variant: str) -> None:
    """All of these models have four heads."""
    inputs = make_inputs(**UNEVEN, steps=3, variant=variant)
    degrees = [3, 3, 2][: inputs.computed_steps]
    assert difference(model(variant), inputs, denoise(pool, model(variant), inputs, degrees)) <= TOLERANCE


@pytest.mark.families
@pytest.mark.parametrize("variant", ["wan-2.2-ti2v", "wan_i2v-2.2-ti2v"])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_timestep_for_each_token_is_shared_out_as_well(pool: Pool, model: Model, variant: str, degree: int) -> None:
    folder, inputs = model(variant), make_inputs(**EVEN, steps=3, variant=variant)
    assert difference(folder, inputs, denoise(pool, folder, inputs, [degree] * 3)) <= TOLERANCE


@pytest.mark.parametrize("degrees", [[2, 1, 1], [2, 4, 4], [1, 2, 4], [4, 2, 1]], ids=str)
@pytest.mark.parametrize("variant", families(*PARALLEL))
def test_degree_may_change_at_any_step(pool: Pool, model: Model, variant: str, degrees: list[int]) -> None:
    inputs = make_inputs(**UNEVEN, steps=3, variant=variant)
    assert difference(model(variant), inputs, denoise(pool, model(variant), inputs, degrees)) <= TOLERANCE


def disturb(group: SequenceGroup) -> None:
    """All that rank 0 receives from others in each all-to-all is 1 % too large."""
    _wrap(group, lambda received: [received[0], *(block * 1.01 for block in received[1:])])


def reorder(group: SequenceGroup) -> None:
    """Rank 0 takes what it receives in the wrong order where the shapes allow it."""

    def reverse(received: list[torch.Tensor]) -> list[torch.Tensor]:
        filled = [rank for rank, block in enumerate(received) if block.numel()]
        if len({received[rank].shape for rank in filled}) > 1:
            return received
        reversed_ = dict(zip(filled, reversed(filled), strict=True))
        return [received[reversed_.get(rank, rank)] for rank in range(len(received))]

    _wrap(group, reverse)


def _wrap(group: SequenceGroup, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
    start = SequenceGroup.start_all_to_all_into

    def start_wrong(received: Any, received_sizes: Any, *sent: Any) -> Callable[[], None]:
        finish = start(group, received, received_sizes, *sent)

        def finish_wrong() -> None:
            finish()
            run = received.view(-1)
            if group.rank == 0:
                run.copy_(torch.cat(change(list(torch.split(run, received_sizes)))))

        return finish_wrong

    group.start_all_to_all_into = start_wrong  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("spoil", [disturb, reorder], ids=["one-percent", "order"])
@pytest.mark.parametrize("variant", families(*PARALLEL))
def test_a_wrong_buffer_would_be_noticed(
    pool: Pool, model: Model, variant: str, spoil: Callable[[SequenceGroup], None]
) -> None:
    inputs = make_inputs(**EVEN, steps=2, variant=variant)
    state = plain(start(model(variant), inputs))
    spoiled, *_ = pool.run(run_steps, 4, model(variant), state, 2, spoil)
    assert difference(model(variant), inputs, spoiled["tensors"]["latents"]) > 10 * TOLERANCE


def test_outside_of_a_group_nothing_changes(model: Model) -> None:
    inputs = make_inputs(**EVEN)
    with sequence_parallel(None):
        inside = final_latents(model("sd3"), inputs)
    assert torch.equal(inside, final_latents(model("sd3"), inputs))


class _Untouchable(SequenceGroup):
    """A group of which no collective may be called."""

    def __init__(self, size: int) -> None:
        self.name, self.rank, self.size = "untouchable", 0, size


@pytest.mark.parametrize("variant", families(*(name for name in PARALLEL if name not in NEVER_FEW_TOKENS)))
def test_too_few_tokens_are_refused_before_any_collective(model: Model, variant: str) -> None:
    state = start(model(variant), make_inputs(16, 16, variant=variant, num_frames=1))
    tokens = 2 if variant == "flux_kontext" else 1  # one of the image
    refused = f"{tokens} tokens cannot be shared by [24]"
    with sequence_parallel(_Untouchable(4)), pytest.raises(ConfigError, match=refused):
        load_stage(model(variant), Stage.DIFFUSE).step(state)


@pytest.mark.families
@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("guidance_scale", [5.0, 1.0])
@pytest.mark.parametrize("variant", ["sdxl", "sdxl-start", "sdxl-mask"])
def test_a_unet_shares_out_its_passes_alone(
    pool: Pool, model: Model, variant: str, guidance_scale: float, degree: int
) -> None:
    inputs = make_inputs(**EVEN, steps=3, guidance_scale=guidance_scale, variant=variant)
    degrees = [degree] * inputs.computed_steps
    assert difference(model(variant), inputs, denoise(pool, model(variant), inputs, degrees)) <= TOLERANCE


@pytest.mark.parametrize("variant", families(*CALL_PER_PASS, quick=("wan",)))
def test_passes_that_are_a_call_each_are_the_same_bit_for_bit_on_two_workers(
    pool: Pool, model: Model, variant: str
) -> None:
    inputs = make_inputs(**UNEVEN, steps=3, variant=variant)
    assert difference(model(variant), inputs, denoise(pool, model(variant), inputs, [2, 2, 2])) == 0.0


@pytest.mark.parametrize("variant", families("sd3", "z_image", "ltx2"))
def test_without_guidance_all_workers_share_tokens(pool: Pool, model: Model, variant: str) -> None:
    scale = 0.0 if variant == "z_image" else 1.0
    inputs = make_inputs(**UNEVEN, steps=3, guidance_scale=scale, variant=variant)
    assert difference(model(variant), inputs, denoise(pool, model(variant), inputs, [2, 4, 3])) <= TOLERANCE


def test_an_attention_that_goes_around_sdpa_is_refused(model: Model) -> None:
    adapter: Any = load_adapter(model("flux"), frozenset({Stage.DIFFUSE}))
    adapter.pipe.transformer.transformer_blocks[0].attn.processor = lambda attn, image, text, mask, rope: (image, text)
    with sequence_parallel(_Untouchable(2)), pytest.raises(ConfigError, match="0 times, not once"):
        adapter.step(start(model("flux"), make_inputs(**EVEN)))


def run_compiled(member: Member, folder: Path, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Steps of a compiled model: alone, in the group, and alone again. The breaks of its graphs as well."""
    adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    kernels.install(adapter, Kernels(compiled=True))
    group = member.group("compiled")
    torch._dynamo.utils.counters.clear()
    now = adapter.step(of_plain(state))
    with sequence_parallel(group):
        now = adapter.step(now)
    return plain(adapter.step(now)), dict(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.slow
def test_compiled_blocks_run_alone_and_together(pool: Pool, model: Model) -> None:
    inputs = make_inputs(64, 96, variant="flux")
    results = pool.run(run_compiled, 2, model("flux"), plain(start(model("flux"), inputs)))
    for result in results:
        assert not isinstance(result, Exception), result
        state, breaks = result
        assert breaks == {}
        assert difference(model("flux"), inputs, state["tensors"]["latents"]) <= TOLERANCE
