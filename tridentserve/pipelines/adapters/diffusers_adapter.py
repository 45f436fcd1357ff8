"""What the families share: a stock diffusers pipeline, run stage by stage with its own methods.

A family's file says how its pipeline encodes, starts, predicts and unpacks; see `sd3` for a short one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from numpy.typing import NDArray

from tridentserve.errors import CheckpointError, InvalidRequestError
from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import check_image
from tridentserve.parallel import is_first, rows
from tridentserve.pipelines.adapters import scheduler_state
from tridentserve.pipelines.base import DenoisingState, PipelineAdapter, Tensors
from tridentserve.pipelines.lora.lora_layers import Loras
from tridentserve.pipelines.tiling import tiled
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

_SCHEDULER = "scheduler."
_LORA = "lora"
# Where the request's generator stands, if its scheduler draws noise at each step.
_GENERATOR = "generator"


class DiffusersAdapter(PipelineAdapter):
    """A `diffusers` pipeline in stages. `pipe` holds real components for `stages` and stubs for the others.

    `passes_share_a_call` is False where the stock pipeline calls its transformer once for each pass.
    """

    passes_share_a_call: ClassVar[bool] = True
    # Of the folder that the model was loaded from, where it may be another one than the family's.
    size_multiple: int
    loras: Loras

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        self.pipe = pipe
        self.stages = stages
        self.device = device
        if Stage.DIFFUSE in stages:
            self._install_sequence_parallelism()
        if Stage.DECODE in stages:
            rows.install(pipe.vae.decoder)

    def encode_all(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        alike: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, inputs in enumerate(batch):
            check_image(FAMILIES[self.family], inputs)
            alike[self._encode_key(inputs)].append(index)
        conditions: dict[int, Tensors] = {}
        with self._running(Stage.ENCODE):
            for indices in alike.values():
                together = self._encode_together([batch[index] for index in indices])
                conditions.update(zip(indices, together, strict=True))
        return [conditions[index] for index in range(len(batch))]

    def prepare(self, condition: Tensors, inputs: GenerationInputs) -> DenoisingState:
        self._check_size(inputs.shape)
        self.loras.check(inputs.lora)
        with self._running(Stage.DIFFUSE):
            tensors = self._on_device(condition)
            # A CPU generator: the noise of a seed is the same on every device.
            generator = torch.Generator("cpu").manual_seed(inputs.seed)
            tensors |= self._initial_tensors(tensors, inputs, generator)
            scheduler = scheduler_state.new_scheduler(self.pipe.scheduler)
            try:
                self._set_timesteps(scheduler, tensors["latents"], inputs.num_inference_steps)
            except ValueError as error:  # LCM and TCD have a most, for one
                refused = f"this model's scheduler cannot make {inputs.num_inference_steps} steps: {error}"
                raise InvalidRequestError(refused, "num_inference_steps") from error
            tensors["latents"] = self._scaled_noise(tensors["latents"], scheduler)
            if scheduler_state.draws_noise(scheduler):
                tensors[_GENERATOR] = generator.get_state()
            scheduler_tensors, scheduler_values = scheduler_state.dump(scheduler, _SCHEDULER)
        return DenoisingState(
            step=0,
            num_steps=len(scheduler.timesteps),
            tensors=tensors | scheduler_tensors,
            values={
                "guidance_scale": inputs.guidance_scale,
                "size": str(inputs.shape),
                _LORA: inputs.lora,
                "scheduler": scheduler_values,
            },
        )

    def advance(self, states: Sequence[DenoisingState], n: int = 1) -> list[DenoisingState]:
        for state in states:
            if n < 1 or state.step + n > state.num_steps:
                raise ValueError(f"{n} more steps asked for, but {state.step} of {state.num_steps} are done")
        if len({self.batch_key(state) for state in states}) != 1:
            raise ValueError("these states cannot share a forward pass: they differ in size, format, guidance or LoRA")
        with self._running(Stage.DIFFUSE), self.loras.applied(states[0].values.get(_LORA)):
            requests = [_Denoising.of(state, self) for state in states]
            rows = self._join([request.rows for request in requests])
            for _ in range(n):
                self._step_together(requests, rows)
            return [request.state(n) for request in requests]

    def let_go(self) -> None:
        self.loras.drop()

    def batch_key(self, state: DenoisingState) -> Hashable:
        latents, num_outputs = state.tensors["latents"], state.tensors["latents"].shape[0]
        rows = self._rows(state.tensors, state.values, num_outputs)
        shapes = tuple((name, row.shape[0], *row.shape[2:], row.dtype) for name, row in sorted(rows.items()))
        # Packed latents of other proportions may have the same shape, but not the same positions.
        return (state.values["size"], *latents.shape[1:], latents.dtype, state.values.get(_LORA), shapes)

    def _step_together(self, requests: list[_Denoising], rows: Tensors) -> None:
        """One step of all: one forward pass, then each request's own scheduler."""
        passes = next(iter(rows.values())).shape[0]
        timesteps = [request.timestep() for request in requests]
        expanded = [
            timestep.expand(request.latents.shape[0]) for timestep, request in zip(timesteps, requests, strict=True)
        ]
        inputs = [request.model_input(timestep) for request, timestep in zip(requests, timesteps, strict=True)]
        together = passes if self.passes_share_a_call else 1
        noise = torch.cat(
            [
                self._predict_noise(
                    torch.cat(inputs * together),
                    torch.cat(expanded * together),
                    # Some transformers take a view, which a row repeated for each output is not ready for.
                    {name: row[first : first + together].flatten(0, 1).contiguous() for name, row in rows.items()},
                    requests[0].tensors,
                )
                for first in range(0, passes, together)
            ]
        )
        sizes = [request.latents.shape[0] for request in requests]
        per_request = torch.split(noise.reshape(passes, -1, *noise.shape[1:]), sizes, dim=1)
        for request, timestep, own in zip(requests, timesteps, per_request, strict=True):
            guided = self._guided(own, request.values)
            request.take_step(
                self._scheduler_step(request.scheduler, guided, timestep, request.latents, request.tensors)
            )

    @staticmethod
    def _join(rows: Sequence[Tensors]) -> Tensors:
        """The rows of several requests as those of one, (passes, outputs, ...)."""
        return rows[0] if len(rows) == 1 else {name: torch.cat([row[name] for row in rows], dim=1) for name in rows[0]}

    def latents(self, state: DenoisingState) -> Tensors:
        if state.step != state.num_steps:
            raise ValueError(f"the latents are not ready: {state.step} of {state.num_steps} steps are done")
        return {"latents": state.tensors["latents"]}

    def decode(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> NDArray[np.uint8]:
        with self._running(Stage.DECODE), tiled(self.pipe.vae, tile):
            unpacked = self._unpack(self._on_device(latents)["latents"], inputs.shape)
            decoded = self._decode(unpacked)
            if not is_first():
                return np.zeros((0, inputs.shape.height, inputs.shape.width, 3), np.uint8)
            # By way of PIL, as the stock pipeline does: its rounding is part of the result.
            images = self.pipe.image_processor.postprocess(decoded, output_type="pil")
        return np.stack([np.asarray(image, dtype=np.uint8) for image in images])

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        """Equal for requests whose prompts can be encoded together."""
        return inputs.guidance_scale > 1

    @abstractmethod
    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        """The conditions of requests with one `_encode_key`, in one pass; outputs of a request share one."""

    @abstractmethod
    def _initial_tensors(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        """`latents`, the noise of all outputs, and what else the family's transformer needs at each step. What no step
        needs may be taken out of the condition."""

    def _packed_noise(
        self, inputs: GenerationInputs, dtype: torch.dtype, generator: torch.Generator, *first: Any
    ) -> Any:
        """What the stock pipeline's `prepare_latents` gives where it packs latents 2 by 2, after the arguments `first`:
        the noise of all outputs, and of some families the positions."""
        return self.pipe.prepare_latents(
            *first,
            inputs.num_outputs,
            self.pipe.transformer.config.in_channels // 4,
            inputs.shape.height,
            inputs.shape.width,
            dtype,
            self.device,
            generator,
        )

    @abstractmethod
    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        """Give a fresh scheduler its timesteps."""

    @abstractmethod
    def _rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        """What the transformer takes beside latents, per pass (two with classifier-free guidance, else one) and output:
        (passes, num_outputs, ...)."""

    @abstractmethod
    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        """The transformer's output, shaped like `latents`. All but `shared` have a row per pass and output; that holds
        the tensors of one of the requests, for those that are the same for all (positions)."""

    def _guided(self, noise: torch.Tensor, values: dict[str, Any]) -> torch.Tensor:
        """The noise of one request, (passes, num_outputs, ...), with guidance applied: (num_outputs, ...)."""
        if noise.shape[0] == 1:
            return noise[0]
        unconditional, conditional = noise
        guided: torch.Tensor = unconditional + values["guidance_scale"] * (conditional - unconditional)
        return guided

    def _scheduler_step(
        self, scheduler: Any, noise: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor, tensors: Tensors
    ) -> torch.Tensor:
        """The latents of one request after a step. What the scheduler wants to be given back at the next step is put
        into the request's `tensors`."""
        generator = None
        if _GENERATOR in tensors:
            generator = torch.Generator("cpu")
            generator.set_state(tensors[_GENERATOR].cpu())
        arguments = {} if generator is None else {"generator": generator}
        if hasattr(self.pipe, "prepare_extra_step_kwargs"):
            # Pipelines that have it say eta = 0, whatever the scheduler's own default (TCD's is 0.3).
            arguments = self.pipe.prepare_extra_step_kwargs(generator, eta=0.0)
        stepped = self._call_scheduler(scheduler, noise, timestep, latents, tensors, **arguments)
        if generator is not None:
            tensors[_GENERATOR] = generator.get_state()
        return stepped

    def _call_scheduler(
        self,
        scheduler: Any,
        noise: torch.Tensor,
        timestep: torch.Tensor,
        latents: torch.Tensor,
        tensors: Tensors,
        **arguments: Any,
    ) -> torch.Tensor:
        """As `_scheduler_step`, with what else the scheduler is given as arguments (the generator for noise, eta)."""
        stepped: torch.Tensor = scheduler.step(noise, timestep, latents, return_dict=False, **arguments)[0]
        return stepped

    @abstractmethod
    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Latents as the VAE takes them, (num_outputs, channels, height / 8, width / 8), not yet scaled."""

    def _scaled_noise(self, noise: torch.Tensor, scheduler: Any) -> torch.Tensor:
        """The initial latents, of noise and a scheduler that has its timesteps."""
        return noise

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The VAE's output, (num_outputs, 3, height, width), for unpacked latents."""
        config = self.pipe.vae.config
        scaled = latents / config.scaling_factor
        if config.shift_factor is not None:
            scaled = scaled + config.shift_factor
        image: torch.Tensor = self.pipe.vae.decode(scaled, return_dict=False)[0]
        return image

    @abstractmethod
    def _install_sequence_parallelism(self) -> None:
        """Hook the transformer, once; without a group the hooks change nothing."""

    @contextmanager
    def _running(self, stage: Stage) -> Iterator[None]:
        if stage not in self.stages:
            held = ", ".join(sorted(self.stages)) or "none"
            raise CheckpointError(f"the {stage} stage of this {self.family} model was not loaded (loaded: {held})")
        with torch.no_grad():
            yield

    def _check_size(self, shape: Shape) -> None:
        family = FAMILIES[self.family]
        multiple = self.size_multiple
        if shape.height % multiple or shape.width % multiple:
            raise InvalidRequestError(f"size {shape} must be a multiple of {multiple} in both directions", "size")
        if not family.allows_frames(shape.num_frames):
            rule = f"{family.frame_multiple} * k + 1" if family.frame_multiple else "1"
            raise InvalidRequestError(
                f"{shape.num_frames} frames cannot be made by {family.name}; the number must be {rule}", "num_frames"
            )

    def _on_device(self, tensors: Tensors) -> Tensors:
        # Tensors of the scheduler stay where they are: scheduler_state knows which belong on the host.
        return {
            name: tensor if name.startswith(_SCHEDULER) else tensor.to(self.device) for name, tensor in tensors.items()
        }


class _Denoising:
    """One request while it is on the device: its latents, its scheduler, the rows it adds to a batch."""

    def __init__(self, before: DenoisingState, tensors: Tensors, scheduler: Any, rows: Tensors) -> None:
        self.before, self.tensors, self.scheduler, self.rows = before, tensors, scheduler, rows
        self.latents = tensors["latents"]
        self.values = before.values
        self._steps_done = before.step

    @classmethod
    def of(cls, state: DenoisingState, adapter: DiffusersAdapter) -> _Denoising:
        tensors = adapter._on_device(state.tensors)
        scheduler = scheduler_state.new_scheduler(adapter.pipe.scheduler)
        scheduler_state.load(scheduler, tensors, state.values["scheduler"], adapter.device)
        rows = adapter._rows(tensors, state.values, tensors["latents"].shape[0])
        return cls(state, tensors, scheduler, rows)

    def timestep(self) -> torch.Tensor:
        """Of the next step, one number."""
        timestep: torch.Tensor = self.scheduler.timesteps[self._steps_done].to(self.latents.device)
        return timestep

    def model_input(self, timestep: torch.Tensor) -> torch.Tensor:
        """The latents as the transformer takes them at this step."""
        if not hasattr(self.scheduler, "scale_model_input"):
            return self.latents
        scaled: torch.Tensor = self.scheduler.scale_model_input(self.latents, timestep)
        return scaled

    def take_step(self, latents: torch.Tensor) -> None:
        self.latents = latents
        self._steps_done += 1

    def state(self, n: int) -> DenoisingState:
        """After `n` steps."""
        scheduler_tensors, scheduler_values = scheduler_state.dump(self.scheduler, _SCHEDULER)
        kept = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(_SCHEDULER)}
        return DenoisingState(
            step=self.before.step + n,
            num_steps=self.before.num_steps,
            tensors=kept | {"latents": self.latents} | scheduler_tensors,
            values=self.values | {"scheduler": scheduler_values},
        )


def shift_mu(config: Any, image_tokens: int, max_shift: float) -> float:
    """The resolution-dependent timestep shift `mu`; `max_shift` is the family's default where `config` has none."""
    mu: float = calculate_shift(
        image_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )
    return mu


def per_output(row: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Rows of a condition, (passes, ...), for each output: (passes, num_outputs, ...)."""
    return row.unsqueeze(1).expand(row.shape[0], num_outputs, *row.shape[1:])
