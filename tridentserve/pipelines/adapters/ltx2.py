"""LTX-2 (arXiv 2601.03233): a Gemma 3 and connectors read the prompt; one transformer denoises the tokens of a video
and those of its sound, which attend to one another; a 3-D VAE for the video, a VAE of spectrograms and a vocoder for
the sound.

The guidance is that of the stock pipeline by default. A step with guidance has up to four passes: those of the negative
prompt and of the prompt, in one call; one in which the self-attention of a block is left out (spatio-temporal
guidance), by transformers that are made for it; and one in which video and sound do not see each other (modality
guidance).

An input image is optional. It is the first latent frame, which no step changes, at timestep 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift, rescale_noise_cfg
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
from diffusers.video_processor import VideoProcessor
from PIL import Image

from tridentserve.errors import InvalidRequestError, ModelFolderError
from tridentserve.models.decoded_outputs import Sound
from tridentserve.models.families import FAMILIES
from tridentserve.models.input_image import check_sides, open_input_image
from tridentserve.parallel import is_first, ulysses
from tridentserve.pipelines.adapters.conditions import list_negative_prompts, list_prompts, repeat_rows, split_rows
from tridentserve.pipelines.adapters.denoising_request import DenoisingRequest
from tridentserve.pipelines.adapters.timestep_shift import set_shifted_timesteps
from tridentserve.pipelines.adapters.video_adapter import VideoAdapter
from tridentserve.pipelines.base import Tensors
from tridentserve.pipelines.tiling import decode_tiled
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

# The stock pipeline's default. Longer prompts are cut.
_MAX_TEXT_TOKENS = 1024
_TEXTS = ("prompt_embeds", "prompt_embeds_audio", "prompt_embeds_mask")
# The input image in a condition, and the tokens of the state that are its own.
_IMAGE, _GIVEN = "image_latents", "given"
# The VAE reflects an image at its edges, for which a row or column beside the outermost one is needed.
_LEAST_LATENTS = 2
# The ways in which a pass computes: without guidance, as one of the two of texts, and as one of the others.
_SOLE, _OF_TEXTS, _PERTURBED, _ISOLATED = range(4)
# The stock pipeline's defaults for guidance, but for the guidance scale of the video, which is the request's.
_AUDIO_SCALE, _PERTURBED_SCALE, _ISOLATED_SCALE, _RESCALE = 7.0, 1.0, 3.0, 0.7
_PERTURBED_BLOCKS = [28]


class LTX2Adapter(VideoAdapter):
    """`LTX2Pipeline`, and with an input image `LTX2ImageToVideoPipeline`. With guidance, the condition has two rows:
    negative, then positive.

    Condition: prompt_embeds (rows, 1024, dim) for the video, prompt_embeds_audio (rows, 1024, dim) for the sound,
    prompt_embeds_mask (rows, 1024); with an input image image_latents (1, tokens of a frame, channels), scaled.
    Latents: (num_outputs, tokens, channels) in float32, the tokens of the sound behind those of the video, which are
    equally wide. State: video_coords (1, 3, tokens, 2) and audio_coords (1, 1, tokens, 2), where each token begins and
    ends in frames, rows and columns, or in time; with an input image given (1, tokens), 1 for the tokens of the video
    that are the image's.
    """

    family = "ltx2"

    def __init__(self, pipe: Any, stages: frozenset[Stage], device: torch.device) -> None:
        super().__init__(pipe, stages, device)
        config, vae = pipe.transformer.config, pipe.vae.config
        if config.in_channels != config.audio_in_channels:
            raise ModelFolderError(
                f"the tokens of the video have {config.in_channels} channels, those of the sound "
                f"{config.audio_in_channels}; only transformers with as many for both are served"
            )
        if vae.timestep_conditioning or np.any(vae.decoder_inject_noise):
            raise ModelFolderError("the VAE adds noise to what it decodes, which is not served")

    def _encode_together(self, batch: Sequence[GenerationInputs]) -> list[Tensors]:
        guided, count = bool(self._encode_key(batch[0])), len(batch)
        embeds, mask, negative_embeds, negative_mask = self.pipe.encode_prompt(
            list_prompts(batch),
            list_negative_prompts(batch),
            do_classifier_free_guidance=guided,
            max_sequence_length=_MAX_TEXT_TOKENS,
            device=self.device,
        )
        if guided:
            embeds, mask = torch.cat([negative_embeds, embeds]), torch.cat([negative_mask, mask])
        made = self.pipe.connectors(embeds, mask, padding_side=self.pipe.tokenizer.padding_side)
        texts = split_rows(**{name: tensor.split(count) for name, tensor in zip(_TEXTS, made, strict=True)})
        return [condition | self._encode_image(inputs) for condition, inputs in zip(texts, batch, strict=True)]

    def _encode_image(self, inputs: GenerationInputs) -> Tensors:
        """Encode the input image: the tensor that it adds to the condition, none without an image."""
        if inputs.image is None:
            return {}
        self._check_size(inputs.shape)
        check_sides(FAMILIES[self.family], image := open_input_image(inputs))
        pipe, vae, size = self.pipe, self.pipe.vae, {"height": inputs.shape.height, "width": inputs.shape.width}
        # The models were trained with frames of compressed videos.
        compressed = apply_image_conditioning_crf(np.array(image), resolve_default_image_crf(pipe.text_encoder))
        processor = VideoProcessor(vae_scale_factor=pipe.vae_spatial_compression_ratio, resample="bilinear")
        (frame,) = processor.preprocess(Image.fromarray(compressed), **size).to(self.device, vae.dtype)
        # This is the mode of the VAE's distribution, so nothing is drawn.
        latents = vae.encode(frame.unsqueeze(0).unsqueeze(2)).latent_dist.mode().float()
        return {_IMAGE: pipe._pack_latents(pipe._normalize_latents(latents, vae.latents_mean, vae.latents_std))}

    def _initialize(self, condition: Tensors, inputs: GenerationInputs, generator: torch.Generator) -> Tensors:
        pipe, rope = self.pipe, self.pipe.transformer.rope
        fps = inputs.fps or float(FAMILIES[self.family].default_fps or 0)
        per_second = pipe.audio_sampling_rate / pipe.audio_hop_length / float(pipe.audio_vae_temporal_compression_ratio)
        audio_tokens = round(inputs.shape.num_frames / fps * per_second)
        if audio_tokens < 1:
            raise InvalidRequestError(f"{inputs.shape.num_frames} frames at {fps:g} per second are too short", "fps")
        video, given = self._draw_noise(inputs, torch.float32, generator), dict[str, torch.Tensor]()
        if _IMAGE in condition:
            image, (frames, *_) = condition.pop(_IMAGE), self._find_grid(inputs.shape)
            given[_GIVEN] = video.new_zeros(1, video.shape[1])
            given[_GIVEN][:, : image.shape[1]] = 1
            kept = given[_GIVEN].unsqueeze(-1)
            video = image.repeat(1, frames, 1) * kept + video * (1 - kept)
        audio = pipe.prepare_audio_latents(
            inputs.num_outputs,
            num_channels_latents=pipe.audio_vae.config.latent_channels,
            audio_latent_length=audio_tokens,
            num_mel_bins=pipe.audio_vae.config.mel_bins,
            dtype=torch.float32,
            device=self.device,
            generator=generator,
        )
        return {
            "latents": torch.cat([video, audio], dim=1),
            "video_coords": rope.prepare_video_coords(1, *self._find_grid(inputs.shape), self.device, fps=fps),
            "audio_coords": pipe.transformer.audio_rope.prepare_audio_coords(1, audio_tokens, self.device).contiguous(),
            **given,
        }

    def _check_size(self, shape: Shape) -> None:
        super()._check_size(shape)
        least = _LEAST_LATENTS * self.size_multiple
        if min(shape.height, shape.width) < least:
            raise InvalidRequestError(f"size {shape} cannot be made: the sides must be {least} at least", "size")

    def _find_grid(self, shape: Shape) -> tuple[int, int, int]:
        """The latent frames, rows and columns of a video, each of which is a token."""
        side, frames = self.pipe.vae_spatial_compression_ratio, self.pipe.vae_temporal_compression_ratio
        return (shape.num_frames - 1) // frames + 1, shape.height // side, shape.width // side

    def _select_timed(self, tensors: Tensors) -> torch.Tensor:
        return tensors["latents"][:, : tensors["video_coords"].shape[2]]

    def _set_timesteps(self, scheduler: Any, latents: torch.Tensor, num_inference_steps: int) -> None:
        config = scheduler.config
        if num_inference_steps < 2 and config.get("shift_terminal"):  # the first noise level is not the last
            raise InvalidRequestError("this model needs at least 2 steps", "num_inference_steps")
        mu = calculate_shift(
            latents.shape[1],
            config.get("base_image_seq_len", 1024),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.95),
            config.get("max_shift", 2.05),
        )
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        set_shifted_timesteps(scheduler, num_inference_steps, self.device, sigmas, mu)

    def _build_rows(self, tensors: Tensors, values: dict[str, Any], num_outputs: int) -> Tensors:
        ways, texts = [_SOLE], [0]
        if len(tensors["prompt_embeds"]) == 2:
            further = [_PERTURBED, _ISOLATED] if self.pipe.transformer.config.perturbed_attn else [_ISOLATED]
            ways, texts = [_OF_TEXTS, _OF_TEXTS, *further], [0, 1, *(1 for _ in further)]
        rows = {name: repeat_rows(tensors[name][texts], num_outputs) for name in _TEXTS}
        for name in tensors.keys() & {"video_coords", "audio_coords", _GIVEN}:
            rows[name] = tensors[name].expand(len(ways), num_outputs, *tensors[name].shape[1:])
        # On the host, where it is looked at.
        return rows | {"way": repeat_rows(torch.tensor(ways), num_outputs)}

    def _predict_noise(
        self, latents: torch.Tensor, timesteps: torch.Tensor, rows: Tensors, shared: Tensors
    ) -> torch.Tensor:
        transformer, coords, way = self.pipe.transformer, rows["video_coords"], int(rows["way"][0])
        sizes = [coords.shape[2], latents.shape[1] - coords.shape[2]]
        video, audio = torch.split(latents.to(transformer.dtype), sizes, dim=1)
        of_video = timesteps
        if _GIVEN in rows:
            of_video = ulysses.share(timesteps.unsqueeze(-1) * (1 - rows[_GIVEN]), dim=1)
        noises = transformer(
            hidden_states=video.contiguous() if way == _OF_TEXTS else _store_by_channel(video),
            audio_hidden_states=audio.contiguous(),
            encoder_hidden_states=rows["prompt_embeds"],
            audio_encoder_hidden_states=rows["prompt_embeds_audio"],
            timestep=of_video,
            audio_timestep=timesteps,
            sigma=timesteps,
            encoder_attention_mask=rows["prompt_embeds_mask"],
            audio_encoder_attention_mask=rows["prompt_embeds_mask"],
            video_coords=ulysses.share(coords, dim=2),
            audio_coords=rows["audio_coords"],
            isolate_modalities=way == _ISOLATED,
            spatio_temporal_guidance_blocks=_PERTURBED_BLOCKS if way == _PERTURBED else None,
            use_cross_timestep=True,
            return_dict=False,
        )
        return torch.cat([noise.float() for noise in noises], dim=1)

    def _guide(self, request: DenoisingRequest, noise: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        tokens = request.tensors["video_coords"].shape[2]
        sizes, scales = [tokens, noise.shape[2] - tokens], (request.values["guidance_scale"], _AUDIO_SCALE)
        video, audio = torch.split(request.latents, sizes, dim=1)
        latents = _store_by_channel(video), audio.contiguous()
        parts = zip(torch.split(noise, sizes, dim=2), latents, scales, strict=True)
        return torch.cat([self._guide_part(request, *part) for part in parts], dim=1)

    def _guide_part(
        self, request: DenoisingRequest, noise: torch.Tensor, latents: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Apply guidance to the noise of the video or of the sound, (passes, num_outputs, tokens, channels), by what
        each pass predicts that the latents become."""
        at = (request.steps_done, request.scheduler)
        clean = [self.pipe.convert_velocity_to_x0(latents, each.contiguous(), *at) for each in noise]
        result = clean[0]
        if len(clean) > 1:
            negative, positive, *perturbed, isolated = clean
            guided = positive + (scale - 1) * (positive - negative)
            for weaker in perturbed:
                guided = guided + _PERTURBED_SCALE * (positive - weaker)
            guided = guided + (_ISOLATED_SCALE - 1) * (positive - isolated)
            result = rescale_noise_cfg(guided, positive, guidance_rescale=_RESCALE)
        velocity: torch.Tensor = self.pipe.convert_x0_to_velocity(latents, result, *at)
        return velocity

    def _call_scheduler(
        self,
        scheduler: Any,
        noise: torch.Tensor,
        timestep: torch.Tensor,
        latents: torch.Tensor,
        tensors: Tensors,
        **arguments: Any,
    ) -> torch.Tensor:
        stepped = super()._call_scheduler(scheduler, noise, timestep, latents, tensors, **arguments)
        if _GIVEN not in tensors:
            return stepped
        given, tokens = tensors[_GIVEN].bool().unsqueeze(-1), tensors[_GIVEN].shape[1]
        video = torch.where(given, latents[:, :tokens], stepped[:, :tokens])
        return torch.cat([video, stepped[:, tokens:]], dim=1)

    def _take_latents(self, latents: Tensors) -> torch.Tensor:
        # They are scaled in the number format of D, and then go into the VAE.
        return latents["latents"].to(self.device, self._denoising_dtype)

    def _unpack(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return self._scale(self._unpack_video(latents, shape))

    def _unpack_video(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        grid = self._find_grid(shape)
        unpacked: torch.Tensor = self.pipe._unpack_latents(latents[:, : np.prod(grid)].contiguous(), *grid)
        return unpacked

    def _scale(self, video: torch.Tensor) -> torch.Tensor:
        vae = self.pipe.vae
        statistics = vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        scaled: torch.Tensor = self.pipe._denormalize_latents(video, *statistics).to(vae.dtype)
        return scaled

    def _decode_tiled(self, shape: Shape, tile: int | None) -> AbstractContextManager[None]:
        side = self.pipe.vae_spatial_compression_ratio
        strides = {
            name: side * _choose_stride((tile or 0) // side, length // side)
            for name, length in (("height", shape.height), ("width", shape.width))
        }
        return decode_tiled(self.pipe.vae, tile, strides)

    def _select_frame(self, latents: torch.Tensor, shape: Shape) -> torch.Tensor:
        return super()._select_frame(self._unpack_video(latents, shape), shape)

    def _decode_frame(self, latents: torch.Tensor) -> torch.Tensor:
        video: torch.Tensor = self.pipe.vae.decode(self._scale(self._make_video(latents)), return_dict=False)[0]
        return video[:, :, 0]

    def decode_sound(self, latents: Tensors, inputs: GenerationInputs) -> Sound | None:
        pipe, vae = self.pipe, self.pipe.audio_vae
        with self._run_stage(Stage.DECODE):
            if not is_first():
                return None
            tokens = latents["latents"].to(self.device)[:, np.prod(self._find_grid(inputs.shape)) :]
            scaled = pipe._denormalize_audio_latents(tokens, vae.latents_mean, vae.latents_std)
            mel_bins = vae.config.mel_bins // pipe.audio_vae_mel_compression_ratio
            packed = pipe._unpack_audio_latents(scaled, tokens.shape[1], num_mel_bins=mel_bins)
            samples = pipe.vocoder(vae.decode(packed.to(vae.dtype), return_dict=False)[0])
        return Sound(samples.float().cpu().numpy(), pipe.vocoder.config.output_sampling_rate)

    def _install_sequence_parallelism(self) -> None:
        transformer = self.pipe.transformer
        blocks = transformer.transformer_blocks
        stock = [block.attn1.forward for block in blocks]
        ulysses.install_blocks(
            blocks[0],
            [block.attn1 for block in blocks],
            transformer.proj_out,
            text_first=False,
            readers=[block.video_to_audio_attn for block in blocks],
        )
        for block, forward in zip(blocks, stock, strict=True):
            block.attn1.forward = _leave_out(forward, block.attn1.forward)


def _store_by_channel(tokens: torch.Tensor) -> torch.Tensor:
    """Store the tokens of a video channel by channel, as the stock pipeline does, which packs latents without moving
    them: a kernel may sum up in another order what is stored in another one."""
    return tokens.mT.contiguous().mT


def _choose_stride(tile: int, latents: int) -> int:
    """The latents from one tile to the next, so that the last of a row or column has as many as the VAE needs: three
    quarters of a tile, or the next number that does it."""
    usual = tile * 3 // 4
    fitting = (stride for stride in (*range(usual, 0, -1), *range(usual + 1, tile + 1)) if (latents - 1) % stride)
    return next(fitting, tile)


def _leave_out(stock: Callable[..., Any], shared: Callable[..., Any]) -> Callable[..., Any]:
    """Choose the stock forward of a self-attention in passes that leave it out: no token sees another one there."""

    def forward(*args: Any, all_perturbed: Any = None, **kwargs: Any) -> Any:
        return (stock if all_perturbed else shared)(*args, all_perturbed=all_perturbed, **kwargs)

    return forward


ADAPTER = LTX2Adapter
