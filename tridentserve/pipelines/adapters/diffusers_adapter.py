"""The common part of all families: a stock diffusers pipeline runs stage by stage, with its own methods.

A family's file defines how its pipeline encodes, starts, predicts and unpacks; `sd3` is a short example.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from tridentserve.errors import InvalidRequestError, ModelFolderError
from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import check_images
from tridentserve.models.lora_files import LoraUse
from tridentserve.parallel import is_first, rows, sequence_parallel
from tridentserve.parallel.guidance import share_passes
from tridentserve.parallel.ulysses import get_current_group
from tridentserve.pipelines import block_cache
from tridentserve.pipelines.adapters import scheduler_state
from tridentserve.pipelines.adapters.clean_latents import predict_clean
from tridentserve.pipelines.adapters.denoising_request import FLOW_SHIFT, SCHEDULER_PREFIX, DenoisingRequest
from tridentserve.pipelines.adapters.packed_sequence import NoiseCall
from tridentserve.pipelines.adapters.step_caches import StepCaches, may_skip
from tridentserve.pipelines.base import CACHE_LIMIT, SKIPPED_STEPS, DenoisingState, PipelineAdapter, Tensors
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.pipelines.pixels import round_pixels
from tridentserve.pipelines.tiling import decode_tiled
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

_LORAS = "loras"
# The state of the request's random generator, where its scheduler draws noise at each step.
_GENERATOR = "generator"
# The names of a condition's tensors that were made of texts begin with these.
_TEXTS = ("prompt_embeds", "pooled_prompt_embeds")


class DiffusersAdapter(PipelineAdapter):
    """A `diffusers` pipeline in stages. `pipe` holds real components for `stages` and stubs for the others."""

    denoiser: ClassVar[str] = "transformer"
    """The pipeline's name for the denoising model."""
    passes_share_a_call: ClassVar[bool] = True
    """False where the stock pipeline calls its transformer once for each pass."""
    size_multiple: int
    """Height and width must be multiples of this many pixels. Some model folders differ in it from their family."""
    mixes_loras: ClassVar[bool] = True
    """False where layers see the rows of a batch in pieces of different lengths: only requests of the same LoRAs share
    a forward pass there."""
    packs: bool
    """True where requests of different sizes can share steps (`pack_key`)."""

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        self.pipe = pipe
        self.stages = stages
        self.device = device
        self._is_cache_installed = self._is_packing_installed = False
        self.packs = FAMILIES[self.family].packs_sizes
        if Stage.DIFFUSE in stages:
            self._install_sequence_parallelism()
        if Stage.DECODE in stages:
            rows.install(pipe.vae.decoder)

    def encode_all(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        alike: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, inputs in enumerate(batch):
            check_images(FAMILIES[self.family], inputs)
            alike[self._encode_key(inputs)].append(index)
        conditions: dict[int, Tensors] = {}
        with self._run_stage(Stage.ENCODE):
            for indices in alike.values():
                together = self._encode_together([batch[index] for index in indices])
                conditions.update(zip(indices, map(self._hand_on, together), strict=True))
        return [conditions[index] for index in range(len(batch))]

    @property
    def _denoising_dtype(self) -> torch.dtype:
        """The number format of D, where D is on another worker too."""
        dtype: torch.dtype = getattr(self.pipe, self.denoiser).dtype
        return dtype

    def _hand_on(self, condition: Tensors) -> Tensors:
        """Convert what the texts became to the number format of D. The stock pipelines do so too, or else can only run
        with both in one format."""
        return {
            name: tensor.to(self._denoising_dtype) if name.startswith(_TEXTS) and tensor.is_floating_point() else tensor
            for name, tensor in condition.items()
        }

    def prepare(self, condition: Tensors, inputs: GenerationInputs) -> DenoisingState:
        self._check_size(inputs.shape)
        with self._run_stage(Stage.DIFFUSE):
            tensors = self._move_to_device(condition)
            # The generator is the CPU's, so that the noise of a seed is the same on every device.
            generator = torch.Generator("cpu").manual_seed(inputs.seed)
            tensors |= self._initialize(tensors, inputs, generator)
            scheduler = scheduler_state.make_scheduler(self.pipe.scheduler, inputs.flow_shift)
            try:
                self._set_timesteps(scheduler, self._select_timed(tensors), inputs.num_inference_steps)
            except ValueError as error:  # LCM and TCD, for example, have an upper limit.
                refused = f"this model's scheduler cannot make {inputs.num_inference_steps} steps: {error}"
                raise InvalidRequestError(refused, "num_inference_steps") from error
            tensors["latents"] = self._scale_noise(tensors["latents"], scheduler)
            if scheduler_state.draws_noise(scheduler):
                tensors[_GENERATOR] = generator.get_state()
            scheduler_tensors, scheduler_values = scheduler_state.dump(scheduler, SCHEDULER_PREFIX)
        return DenoisingState(
            step=0,
            num_steps=len(scheduler.timesteps),
            tensors=tensors | scheduler_tensors,
            values={
                "guidance_scale": inputs.guidance_scale,
                "guidance_scale_2": inputs.guidance_scale_2,
                FLOW_SHIFT: inputs.flow_shift,
                "size": str(inputs.shape),
                _LORAS: [use.to_plain() for use in inputs.loras],
                CACHE_LIMIT: self.step_cache.find_limit(inputs.quality) if self._list_cached_blocks() else 0.0,
                SKIPPED_STEPS: 0.0,
                "scheduler": scheduler_values,
            },
        )

    def advance(self, states: Sequence[DenoisingState], n: int = 1) -> list[DenoisingState]:
        for state in states:
            if n < 1 or state.step + n > state.num_steps:
                raise ValueError(f"{n} more steps asked for, but {state.step} of {state.num_steps} are done")
        packed = len({self.batch_key(state) for state in states}) != 1
        pack_keys = {self.pack_key(state) for state in states}
        if packed and (None in pack_keys or len(pack_keys) > 1):
            raise ValueError("these states cannot share a forward pass: they differ in size, format, guidance or LoRAs")
        with self._run_stage(Stage.DIFFUSE), self.loras.applied([_read_loras(state) for state in states]):
            requests = [DenoisingRequest.resume(state, self) for state in states]
            rows = None if packed else self._join_rows([request.rows for request in requests])
            for _ in range(n):
                self._step_together(requests, rows)
            return [request.make_state(n) for request in requests]

    def end_steps(self) -> None:
        """Free nothing: states and LoRAs are all that steps keep."""

    def share_lora_cache(self, cache: LoraCache) -> None:
        self.loras.cache = cache

    def hold_loras(self, states: Sequence[DenoisingState]) -> None:
        self.loras.hold([_read_loras(state) for state in states])

    def batch_key(self, state: DenoisingState) -> Hashable:
        latents, num_outputs = state.tensors["latents"], state.tensors["latents"].shape[0]
        rows = self._build_rows(state.tensors, state.values, num_outputs)
        shapes = tuple((name, row.shape[0], *row.shape[2:], row.dtype) for name, row in sorted(rows.items()))
        # Packed latents of different proportions may have the same shape, but their positions differ.
        loras = () if self.mixes_loras else _read_loras(state)
        return (
            state.values["size"],
            *latents.shape[1:],
            latents.dtype,
            loras,
            shapes,
            self._list_image_sizes(state.tensors),
        )

    def _list_image_sizes(self, tensors: Tensors) -> Hashable:
        """The sizes of the input images of a state, where requests of one size may differ in them."""
        return ()

    def pack_key(self, state: DenoisingState) -> Hashable | None:
        cannot = not self.packs or get_current_group() is not None
        if cannot or _read_loras(state) or may_skip(state.values):
            return None
        return ("packed", state.tensors["latents"].dtype)

    def _step_together(self, requests: list[DenoisingRequest], rows: Tensors | None) -> None:
        """Run one step of all requests: a forward pass together, then each request's own scheduler. `rows` are those of
        one batch; None where the requests are packed into one sequence."""
        timesteps = [request.next_timestep() for request in requests]
        expanded = [
            timestep.expand(request.latents.shape[0]) for timestep, request in zip(timesteps, requests, strict=True)
        ]
        inputs = [request.scale_input(timestep) for request, timestep in zip(requests, timesteps, strict=True)]
        noises = (
            self._predict_packed(requests, expanded, inputs)
            if rows is None
            else self._predict_batch(requests, expanded, inputs, rows)
        )
        for request, timestep, own in zip(requests, timesteps, noises, strict=True):
            guided = self._guide(request, own, timestep)
            request.take_step(
                self._scheduler_step(request.scheduler, guided, timestep, request.latents, request.tensors)
            )

    def _predict_packed(
        self, requests: list[DenoisingRequest], timesteps: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Predict the noise of each request, (passes, outputs, ...), with all passes of all of them in one sequence."""
        if not self._is_packing_installed:
            self._install_packing()
            self._is_packing_installed = True
        calls = []
        for request, levels, latents in zip(requests, timesteps, inputs, strict=True):
            passes = next(iter(request.rows.values())).shape[0]
            rows = {name: row.flatten(0, 1) for name, row in request.rows.items()}
            calls.append(NoiseCall(torch.cat([latents] * passes), levels.repeat(passes), rows, request.tensors))
        noises = zip(self._predict_noises(calls), inputs, strict=True)
        return [noise.reshape(-1, *latents.shape) for noise, latents in noises]

    def _predict_batch(
        self,
        requests: list[DenoisingRequest],
        timesteps: list[torch.Tensor],
        inputs: list[torch.Tensor],
        rows: Tensors,
    ) -> Sequence[torch.Tensor]:
        """Predict the noise of each request, (passes, outputs, ...), with all of them as rows of one batch."""
        passes = next(iter(rows.values())).shape[0]
        sizes = [request.latents.shape[0] for request in requests]
        share = share_passes(passes)
        caches = self._open_caches(requests, passes)
        noises = []
        with sequence_parallel(share.members if FAMILIES[self.family].shares_tokens else None):
            for call in self._list_calls(share.passes):
                self.loras.lay_out(sizes, len(call))
                # Some transformers call `view`, which a row repeated for each output does not support.
                inputs_of_call = {
                    name: row[call.start : call.stop].flatten(0, 1).contiguous() for name, row in rows.items()
                }
                with block_cache.use_block_cache(caches.begin(call.start, len(call)) if caches is not None else None):
                    latents, levels = torch.cat(inputs * len(call)), torch.cat(timesteps * len(call))
                    noises.append(self._predict_noise(latents, levels, inputs_of_call, requests[0].tensors))
        noise = share.gather(torch.cat(noises))
        if caches is not None:
            caches.keep(share)
        return torch.split(noise.reshape(passes, -1, *noise.shape[1:]), sizes, dim=1)

    def _list_calls(self, passes: range) -> list[range]:
        """The passes of each call of the transformer. Passes beyond the two of classifier-free guidance have their own
        calls."""
        together = range(passes.start, min(passes.stop, 2) if self.passes_share_a_call else passes.start)
        alone = range(max(passes.start, together.stop), passes.stop)
        return [*([together] if together else []), *(range(index, index + 1) for index in alone)]

    def _open_caches(self, requests: list[DenoisingRequest], passes: int) -> StepCaches | None:
        """The caches of requests of which some need not compute all steps."""
        if not any(may_skip(request.values) for request in requests):
            return None
        if not self._is_cache_installed:
            block_cache.install(self._list_cached_blocks())
            self._is_cache_installed = True
        return StepCaches(requests, passes, self._find_joined_stream(requests[0].tensors))

    def _list_cached_blocks(self) -> list[torch.nn.Module]:
        """The blocks of the transformer in the order in which they run, where all but the first can be left out."""
        if not FAMILIES[self.family].caches_steps:
            return []
        lists = [child for child in self.pipe.transformer.children() if isinstance(child, torch.nn.ModuleList)]
        blocks = [block for each in lists for block in each]
        return blocks if len(blocks) > 1 else []

    def _find_joined_stream(self, tensors: Tensors) -> block_cache.JoinedStream | None:
        """The place of the image tokens in the blocks, for a state with these tensors; None where no block has text
        among them."""
        return None

    @staticmethod
    def _join_rows(rows: Sequence[Tensors]) -> Tensors:
        """Join the rows of several requests into those of one batch, (passes, outputs, ...)."""
        return rows[0] if len(rows) == 1 else {name: torch.cat([row[name] for row in rows], dim=1) for name in rows[0]}

    def sketch(self, before: torch.Tensor, state: DenoisingState) -> torch.Tensor:
        with self._run_stage(Stage.DIFFUSE):
            clean = predict_clean(self.pipe.scheduler, before, state)
            return self._select_frame(clean, Shape.parse(state.values["size"])).float().cpu()

    def _select_frame(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Select the latents of one frame of each output, (num_outputs, channels, height, width)."""
        return self._unpack(latents, shape)

    def count_sketch_channels(self) -> int:
        config = self.pipe.vae.config
        channels: int = config.get("latent_channels") or config["z_dim"]
        return channels

    def decode_sketch(self, sketch: torch.Tensor) -> torch.Tensor:
        with self._run_stage(Stage.DECODE):
            decoded = self._decode_frame(sketch.to(self.device, self.pipe.vae.dtype))
            return (decoded.float() / 2 + 0.5).clamp(0, 1).cpu()

    def _decode_frame(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode what `_select_frame` gives: the VAE's output, (num_outputs, 3, height, width)."""
        return self._decode(latents)

    def latents(self, state: DenoisingState) -> Tensors:
        if state.step != state.num_steps:
            raise ValueError(f"the latents are not ready: {state.step} of {state.num_steps} steps are done")
        return {"latents": state.tensors["latents"]}

    def decode(self, latents: Tensors, inputs: GenerationInputs, tile: int | None = None) -> NDArray[np.uint8]:
        with self._run_stage(Stage.DECODE), decode_tiled(self.pipe.vae, tile):
            unpacked = self._unpack(self._take_latents(latents), inputs.shape)
            decoded = self._decode(unpacked)
            if not is_first():
                return np.zeros((0, inputs.shape.height, inputs.shape.width, 3), np.uint8)
            return round_pixels(self.pipe.image_processor.postprocess(decoded, output_type="pt"))

    def _take_latents(self, latents: Tensors) -> torch.Tensor:
        """Take over the latents that D hands on, in the number format of the VAE. As with texts, the stock pipelines do
        so too, or else can only run with D and C in one format."""
        return latents["latents"].to(self.device, self.pipe.vae.dtype)

    def _encode_key(self, inputs: GenerationInputs) -> Hashable:
        """Return a key that is equal for requests whose prompts can be encoded together."""
        return inputs.guidance_scale > FAMILIES[self.family].unguided_scale

    @abstractmethod
    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        """Encode the conditions of requests with one `_encode_key` in one pass. The outputs of a request share one."""

    @abstractmethod
    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        """Make `latents`, the noise of all outputs, and the other tensors that each step needs in addition to the
        condition. Tensors that no step needs may be removed from the condition."""

    def _draw_packed_noise(
        self, inputs: GenerationInputs, dtype: torch.dtype, generator: torch.Generator, *first: Any
    ) -> Any:
        """Call the stock pipeline's `prepare_latents` where it packs latents 2 by 2. `first` are arguments before the
        common ones. The result is the noise of all outputs, with the positions in some families."""
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

    def _select_timed(self, tensors: Tensors) -> torch.Tensor:
        """Select the latents whose number sets the noise levels, where it does."""
        return tensors["latents"]

    @abstractmethod
    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        """Give a fresh scheduler its timesteps."""

    @abstractmethod
    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        """Build the inputs of the transformer other than latents, for each pass (two with classifier-free guidance,
        otherwise one) and output: (passes, num_outputs, ...)."""

    @abstractmethod
    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        """Run the transformer; the result has the shape of `latents`. All arguments but `shared` have a row for each
        pass and output. `shared` holds the tensors of one request, for those that all requests have in common
        (positions).
        """

    def _guide(self, request: DenoisingRequest, noise: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Apply guidance to the noise of one request as `_apply_guidance` does, which most families override, where
        its latents matter too."""
        return self._apply_guidance(noise, request.values, timestep)

    def _predict_noises(self, calls: Sequence[NoiseCall]) -> list[torch.Tensor]:
        """Do what `_predict_noise` does for requests of different sizes at once, as one packed sequence."""
        raise NotImplementedError(self.family)

    def _install_packing(self) -> None:
        """Hook the transformer for packed sequences, once. Without one the hooks change nothing."""
        raise NotImplementedError(self.family)

    def _apply_guidance(self, noise: torch.Tensor, values: dict[str, Any], timestep: torch.Tensor) -> torch.Tensor:
        """Apply guidance to the noise of one request, (passes, num_outputs, ...), at a `timestep`. The result is
        (num_outputs, ...)."""
        if noise.shape[0] == 1:
            return noise[0]
        unconditional, conditional = noise
        guided: torch.Tensor = unconditional + values["guidance_scale"] * (conditional - unconditional)
        return guided

    def _scheduler_step(
        self, scheduler: Any, noise: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor, tensors: Tensors
    ) -> torch.Tensor:
        """Return the latents of one request after a step. Tensors that the scheduler needs again at the next step are
        put into the request's `tensors`."""
        generator = None
        if _GENERATOR in tensors:
            generator = torch.Generator("cpu")
            generator.set_state(tensors[_GENERATOR].cpu())
        arguments = {} if generator is None else {"generator": generator}
        if hasattr(self.pipe, "prepare_extra_step_kwargs"):
            # Pipelines with this method pass eta = 0, whatever the scheduler's own default is (TCD's is 0.3).
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
        """Call the scheduler for `_scheduler_step`; `arguments` are its further ones (the generator for noise, eta)."""
        stepped: torch.Tensor = scheduler.step(noise, timestep, latents, return_dict=False, **arguments)[0]
        return stepped

    @abstractmethod
    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Unpack latents as the VAE takes them, (num_outputs, channels, height / 8, width / 8), without scaling
        them."""

    def _scale_noise(self, noise: torch.Tensor, scheduler: Any) -> torch.Tensor:
        """Scale the noise to the initial latents. `scheduler` has its timesteps."""
        return noise

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode unpacked latents: the VAE's output, (num_outputs, 3, height, width)."""
        config = self.pipe.vae.config
        scaled = latents / config.scaling_factor
        if config.shift_factor is not None:
            scaled = scaled + config.shift_factor
        image: torch.Tensor = self.pipe.vae.decode(scaled, return_dict=False)[0]
        return image

    @abstractmethod
    def _install_sequence_parallelism(self) -> None:
        """Hook the transformer once. Without a group the hooks change nothing."""

    @contextmanager
    def _run_stage(self, stage: Stage) -> Iterator[None]:
        if stage not in self.stages:
            held = ", ".join(sorted(self.stages)) or "none"
            raise ModelFolderError(f"the {stage} stage of this {self.family} model was not loaded (loaded: {held})")
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

    def _move_to_device(self, tensors: Tensors) -> Tensors:
        # Tensors of the scheduler are not moved: `scheduler_state` knows which of them belong on the host.
        return {
            name: tensor if name.startswith(SCHEDULER_PREFIX) else tensor.to(self.device)
            for name, tensor in tensors.items()
        }


def _read_loras(state: DenoisingState) -> tuple[LoraUse, ...]:
    return tuple(LoraUse.from_plain(plain) for plain in state.values[_LORAS])
