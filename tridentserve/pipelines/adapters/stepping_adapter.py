"""The denoising steps that all families have in common: of one request, of a batch, and of a packed sequence.

A family's file defines how its transformer is called; `sd3` is a short example.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from tridentserve.errors import ModelFolderError
from tridentserve.models.families import FAMILIES
from tridentserve.models.lora_files import LoraUse
from tridentserve.parallel import sequence_parallel
from tridentserve.parallel.guidance import share_passes
from tridentserve.parallel.ulysses import get_current_group
from tridentserve.pipelines.adapters.bricked_sequence import packed_over
from tridentserve.pipelines.adapters.denoising_request import GENERATOR, LORAS, SCHEDULER_PREFIX, DenoisingRequest
from tridentserve.pipelines.adapters.packed_sequence import NoiseCall, PackingAdapter
from tridentserve.pipelines.adapters.step_caches import RequestCaches, StepCaches, may_skip
from tridentserve.pipelines.base import DenoisingState, PipelineAdapter, Tensors
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.pipelines.reuse import block_cache
from tridentserve.requests import Quality
from tridentserve.stages import Stage


class SteppingAdapter(PipelineAdapter):
    """The steps of D of a `diffusers` pipeline. `pipe` holds real components for `stages` and stubs for the others."""

    denoiser: ClassVar[str] = "transformer"
    """The pipeline's name for the denoising model."""
    passes_share_a_call: ClassVar[bool] = True
    """False where the stock pipeline calls its transformer once for each pass."""
    mixes_loras: ClassVar[bool] = True
    """False where layers see the rows of a batch in pieces of different lengths: only requests of the same LoRAs share
    a forward pass there."""
    packs_caches: ClassVar[bool] = False
    """True where these steps may be those of requests that need not compute all of them."""
    packs: bool
    """True where requests of different sizes can share steps (`pack_key`)."""

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        self.pipe = pipe
        self.stages = stages
        self.device = device
        self._is_cache_installed = self._is_packing_installed = False
        self.packs = FAMILIES[self.family].packs_sizes

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
        if not self.packs or _read_loras(state) or (may_skip(state.values) and not self.packs_caches):
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
            stepped = self._scheduler_step(request.scheduler, guided, timestep, request.latents, request.tensors)
            request.take_step(self._keep_given(request, stepped))

    def _predict_packed(
        self, requests: list[DenoisingRequest], timesteps: list[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Predict the noise of each request, (passes, outputs, ...), with all passes of all of them in one sequence."""
        assert isinstance(self, PackingAdapter), self.family
        if not self._is_packing_installed:
            self._install_packing()
            self._is_packing_installed = True
        calls = []
        for request, levels, latents in zip(requests, timesteps, inputs, strict=True):
            passes = next(iter(request.rows.values())).shape[0]
            rows = {name: row.flatten(0, 1) for name, row in request.rows.items()}
            calls.append(NoiseCall(torch.cat([latents] * passes), levels.repeat(passes), rows, request.tensors))
        # The group shares out whole requests and their tokens here, and not the tokens of one forward pass.
        with packed_over(get_current_group()), sequence_parallel(None):
            predicted = self._predict_noises(calls)
        noises = zip(predicted, inputs, strict=True)
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
                with nullcontext() if caches is None else caches.run(call.start, len(call)):
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

    def _open_caches(self, requests: list[DenoisingRequest], passes: int) -> RequestCaches | None:
        """The caches of requests of which some need not compute all steps."""
        if not any(may_skip(request.values) for request in requests):
            return None
        if not self._is_cache_installed:
            block_cache.install(self._list_cached_blocks())
            self._is_cache_installed = True
        return StepCaches(requests, passes, self._find_joined_stream(requests[0].tensors))

    def _choose_limit(self, quality: Quality, tensors: Tensors) -> float:
        """The limit of change for a request with these tensors; 0 where all of its steps are computed whole."""
        return self.step_cache.find_limit(quality) if self._list_cached_blocks() else 0.0

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

    def _guide(self, request: DenoisingRequest, noise: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Apply guidance to the noise of one request as `_apply_guidance` does, which most families override, where
        its latents matter too."""
        return self._apply_guidance(noise, request.values, timestep)

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
        if GENERATOR in tensors:
            generator = torch.Generator("cpu")
            generator.set_state(tensors[GENERATOR].cpu())
        arguments = {} if generator is None else {"generator": generator}
        if hasattr(self.pipe, "prepare_extra_step_kwargs"):
            # Pipelines with this method pass eta = 0, whatever the scheduler's own default is (TCD's is 0.3).
            arguments = self.pipe.prepare_extra_step_kwargs(generator, eta=0.0)
        stepped = self._call_scheduler(scheduler, noise, timestep, latents, tensors, **arguments)
        if generator is not None:
            tensors[GENERATOR] = generator.get_state()
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

    def _keep_given(self, request: DenoisingRequest, stepped: torch.Tensor) -> torch.Tensor:
        """Put what no step changes, such as a part of an image, into the latents of a request after its next step."""
        return stepped

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

    @contextmanager
    def _run_stage(self, stage: Stage) -> Iterator[None]:
        if stage not in self.stages:
            held = ", ".join(sorted(self.stages)) or "none"
            raise ModelFolderError(f"the {stage} stage of this {self.family} model was not loaded (loaded: {held})")
        with torch.no_grad():
            yield

    def _move_to_device(self, tensors: Tensors) -> Tensors:
        # Tensors of the scheduler are not moved: `scheduler_state` knows which of them belong on the host.
        return {
            name: tensor if name.startswith(SCHEDULER_PREFIX) else tensor.to(self.device)
            for name, tensor in tensors.items()
        }


def _read_loras(state: DenoisingState) -> tuple[LoraUse, ...]:
    return tuple(LoraUse.from_plain(plain) for plain in state.values[LORAS])
