"""Any pipeline of diffusers from text to images or videos: D calls the stock pipeline, E and C pass on what they get.

The call waits between its steps (`stepped_call`), so that a plan is told of them and can be stopped there. It cannot
move, and nothing of it is kept: a request that was stopped starts again.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.device import find_device
from tridentserve.errors import InvalidRequestError, ModelFolderError, WorkerError
from tridentserve.models.family import Family
from tridentserve.models.whole.pipeline_source import PipelineCall, read_pipeline_call
from tridentserve.models.whole.whole_family import CALLBACKS, FRAMES, OUTPUTS, WHOLE, find_parameter
from tridentserve.pipelines.adapters.stepped_call import SteppedCall
from tridentserve.pipelines.base import CACHE_LIMIT, SKIPPED_STEPS, DenoisingState, PipelineAdapter, Tensors
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

_PIXELS = "pixels"
_CALL = "call"
# The share of the work that is done after the last step, before the call has returned.
_BEFORE_THE_END = 0.999999
# Arguments of calls that would change the size or the text that was asked for.
_OFF = ("use_resolution_binning", "clean_caption")

OnShare = Callable[[float], None]
Pixels = NDArray[np.uint8]


class WholeAdapter(PipelineAdapter):
    """A pipeline that is called as a whole. `pipe` is None where D was not loaded."""

    family: ClassVar[str] = WHOLE
    is_rebuilt: ClassVar[bool] = True

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device, described: Family) -> None:
        self.pipe: Any = pipe if pipe is not None else SimpleNamespace(components={})
        self.stages = stages
        self.device = device
        self.size_multiple = described.size_multiple
        self._described = described
        call = read_pipeline_call(described.pipeline_class)
        assert call is not None, "the family was made of it"
        self._call: PipelineCall = call
        self._calls: dict[int, SteppedCall[Pixels]] = {}
        self._numbers = itertools.count()
        if pipe is not None:
            pipe.set_progress_bar_config(disable=True)

    def encode_all(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        self._require(Stage.ENCODE)
        for inputs in batch:
            self._check(inputs)
        # Workers get the texts with the plan; a condition only says that E is done.
        return [{"encoded": torch.ones(1, dtype=torch.uint8, device=self.device)} for _ in batch]

    def prepare(self, condition: Tensors, inputs: GenerationInputs) -> DenoisingState:
        self._require(Stage.DIFFUSE)
        self._check(inputs)
        number = next(self._numbers)
        self._calls[number] = SteppedCall(lambda on_share: self.generate(inputs, on_share), find_device(self.device))
        black = np.zeros(self._list_sizes(inputs), np.uint8)  # until the last step
        return DenoisingState(
            step=0,
            num_steps=inputs.num_inference_steps,
            tensors={_PIXELS: torch.from_numpy(black)},
            values={_CALL: number, CACHE_LIMIT: 0.0, SKIPPED_STEPS: 0.0},
        )

    def advance(self, states: Sequence[DenoisingState], n: int = 1) -> list[DenoisingState]:
        self._require(Stage.DIFFUSE)
        for state in states:
            if n < 1 or state.step + n > state.num_steps:
                raise ValueError(f"{n} more steps asked for, but {state.step} of {state.num_steps} are done")
        return [self._advance(state, n) for state in states]

    def _advance(self, state: DenoisingState, n: int) -> DenoisingState:
        call = self._calls.get(state.values[_CALL])
        if call is None:
            raise WorkerError(f"a call of {self._described.pipeline_class} cannot go on where it did not begin")
        step = state.step + n
        call.run_until(step / state.num_steps)
        tensors = state.tensors
        if step == state.num_steps:
            tensors = {_PIXELS: torch.from_numpy(call.result).to(self.device)}
            del self._calls[state.values[_CALL]]
        return DenoisingState(step, state.num_steps, tensors, state.values)

    def generate(self, inputs: GenerationInputs, on_share: OnShare) -> Pixels:
        """Call the stock pipeline: the pixels, in the form of `decode`. `on_share` is called after each of its steps
        with the share of them that is done."""
        pipe = copy.copy(self.pipe)
        for name, component in self.pipe.components.items():
            if isinstance(component, diffusers.SchedulerMixin):
                setattr(pipe, name, copy.deepcopy(component))
        arguments = self._build_arguments(inputs) | self._build_callback(pipe, on_share)
        try:
            made = pipe(**arguments)
        except ValueError as error:
            text = str(error)
            if not text or any(each and each in text for each in (inputs.prompt, inputs.negative_prompt)):
                raise  # the text of an error that quotes the prompt goes to this worker's log only
            raise InvalidRequestError(f"{self._described.pipeline_class} refuses this request: {text}") from error
        return self._round(made[0], inputs)

    def share_lora_cache(self, cache: LoraCache) -> None:
        """Share nothing: pipelines that are called whole take no LoRAs."""

    def hold_loras(self, states: Sequence[DenoisingState]) -> None:
        """Hold none: pipelines that are called whole take no LoRAs."""

    def end_steps(self) -> None:
        for call in self._calls.values():
            call.end()
        self._calls.clear()

    def batch_key(self, state: DenoisingState) -> Hashable:
        return int(state.values[_CALL])

    def pack_key(self, state: DenoisingState) -> Hashable | None:
        """None: nothing is packed with what is called whole."""
        return None

    def sketch(self, before: torch.Tensor, state: DenoisingState) -> torch.Tensor:
        self._refuse_sketches()

    def count_sketch_channels(self) -> int:
        self._refuse_sketches()

    def decode_sketch(self, sketch: torch.Tensor) -> torch.Tensor:
        self._refuse_sketches()

    def latents(self, state: DenoisingState) -> Tensors:
        if state.step != state.num_steps:
            raise ValueError(f"the pixels are not ready: {state.step} of {state.num_steps} steps are done")
        return state.tensors

    def decode(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> Pixels:
        self._require(Stage.DECODE)
        pixels: Pixels = latents[_PIXELS].cpu().numpy()
        return pixels

    def _require(self, stage: Stage) -> None:
        if stage not in self.stages:
            raise ModelFolderError(f"the {stage} stage of this {self._described.pipeline_class} was not loaded")

    def _refuse_sketches(self) -> NoReturn:
        raise ModelFolderError(f"there are no previews of a {self._described.pipeline_class}, which is served whole")

    def _check(self, inputs: GenerationInputs) -> None:
        described, shape = self._described, inputs.shape
        multiple = described.size_multiple
        if shape.height % multiple or shape.width % multiple:
            raise InvalidRequestError(f"size {shape} must be a multiple of {multiple} in both directions", "size")
        if not described.allows_frames(shape.num_frames):
            raise InvalidRequestError(
                f"{shape.num_frames} frames cannot be made by {described.pipeline_class}", "num_frames"
            )

    def _list_sizes(self, inputs: GenerationInputs) -> tuple[int, ...]:
        shape: Shape = inputs.shape
        frames = () if self._described.frame_multiple is None else (shape.num_frames,)
        return (inputs.num_outputs, *frames, shape.height, shape.width, 3)

    def _build_arguments(self, inputs: GenerationInputs) -> dict[str, Any]:
        """The arguments that a user of diffusers would write for this request."""
        parameters, shape = self._call.parameters, inputs.shape
        arguments: dict[str, Any] = {
            "prompt": inputs.prompt,
            "height": shape.height,
            "width": shape.width,
            "num_inference_steps": inputs.num_inference_steps,
            # The generator is the CPU's, so that the noise of a seed is the same on every device.
            "generator": torch.Generator("cpu").manual_seed(inputs.seed),
            "output_type": "np",
        }
        if "guidance_scale" not in self._described.absent_fields:
            arguments["guidance_scale"] = inputs.guidance_scale
        if inputs.negative_prompt and self._described.negative_prompt:
            arguments["negative_prompt"] = inputs.negative_prompt
        if (frames := find_parameter(self._call, FRAMES)) is not None:
            arguments[frames] = shape.num_frames
        if (outputs := find_parameter(self._call, OUTPUTS)) is not None:
            arguments[outputs] = inputs.num_outputs
        return arguments | {name: False for name in _OFF if name in parameters}

    def _build_callback(self, pipe: Any, on_share: OnShare) -> dict[str, Any]:
        """The argument through which the pipeline tells of its steps."""

        def tell(called: Any, number: int, order: int) -> None:
            timesteps = getattr(getattr(called, "scheduler", None), "timesteps", ())
            # The work is done when the call returns, after the last step.
            on_share(min((number + 1) * order / max(1, number + 1, len(timesteps)), _BEFORE_THE_END))

        def note_step_end(called: Any, number: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            tell(called, number, 1)
            return {}

        def note_step(number: int, timestep: Any, latents: Any) -> None:
            tell(pipe, number, getattr(pipe.scheduler, "order", 1))

        name = find_parameter(self._call, CALLBACKS)
        return {"callback_on_step_end": note_step_end} if name == CALLBACKS[0] else {"callback": note_step}

    def _round(self, made: Any, inputs: GenerationInputs) -> Pixels:
        """The pixels of the outputs as the stock pipeline rounds them for image files."""
        outputs = np.stack(made) if isinstance(made, list) else np.asarray(made)
        wanted = self._list_sizes(inputs)
        if outputs.ndim == len(wanted) - 1 and inputs.num_outputs == 1:
            outputs = outputs[None]
        if outputs.shape != wanted:
            raise InvalidRequestError(
                f"{self._described.pipeline_class} makes {'x'.join(map(str, outputs.shape))} of this request "
                f"instead of {'x'.join(map(str, wanted))} (outputs, frames of a video, height, width, channels); ask "
                "for another size, number of frames or of outputs"
            )
        pixels: Pixels = outputs if outputs.dtype == np.uint8 else (outputs * 255).round().astype(np.uint8)
        return pixels
