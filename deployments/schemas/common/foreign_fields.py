"""Fields of other servers' APIs that have no meaning here. Public clients send some of them in every request, and print
no more than "0 of N" where they are refused: unless the service is strict they are taken, and the answer names them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache

logger = logging.getLogger(__name__)

_OF_OPENAI = (
    "complexity",
    "frame_count",
    "frame_duration_ms",
    "markup",
    "moderation",
    "safety_identifier",
    "style",
    "svg",
)
_OF_VLLM_OMNI = (
    "aspect_ratio",
    "bot_task",
    "boundary_ratio",
    "enable_frame_interpolation",
    "extra_args",
    "extra_params",
    "frame_interpolation_exp",
    "frame_interpolation_model_path",
    "frame_interpolation_scale",
    "generate_sound",
    "infer_align_image_size",
    "layers",
    "resolution",
    "short_edge",
    "sound_duration",
    "start_time_seconds",
    "sys_type",
    "system_prompt",
    "use_system_prompt",
    "vae_slicing",
    "vae_tiling",
    "vae_use_slicing",
    "vae_use_tiling",
)
_OF_SGLANG = (
    "audio_flow_shift",
    "diffusers_kwargs",
    "enable_teacache",
    "enable_upscaling",
    "generator_device",
    "guidance_rescale",
    "max_sequence_length",
    "num_profiled_timesteps",
    "output_compression",
    "output_path",
    "output_quality",
    "perf_dump_path",
    "profile",
    "profile_all_stages",
    "progressive_delta",
    "progressive_levels",
    "progressive_mode",
    "reference_url",
    "rollout",
    "rollout_sde_type",
    "task",
    "upscaling_model_path",
    "upscaling_scale",
)
FOREIGN_FIELDS = frozenset((*_OF_OPENAI, *_OF_VLLM_OMNI, *_OF_SGLANG))
# What they ask for is in every answer: the times of the stages.
GRANTED_FIELDS = frozenset(("return_stage_metrics",))


# What fields of ours are called elsewhere, and by people. No client sends these, so they are not taken for the field.
_COMMON_NAMES = {
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "deadline_ms": "slo_ms",
    "denoising_steps": "num_inference_steps",
    "duration": "seconds",
    "frame_rate": "fps",
    "frames": "num_frames",
    "guidance": "guidance_scale",
    "lora_name": "lora",
    "lora_path": "lora",
    "num_images": "n",
    "num_images_per_prompt": "n",
    "num_steps": "num_inference_steps",
    "num_videos": "n",
    "scale": "guidance_scale",
    "steps": "num_inference_steps",
    "text": "prompt",
    "true_cfg": "true_cfg_scale",
}
# How alike two names are (from 0 to 1) of which one may be meant by the other.
_CUTOFF = 0.75


def suggest_names(name: str, own: Iterable[str], others: Iterable[str] = ()) -> str:
    """The field that may be meant by a name that is not known, or else all fields that have a meaning (`own`), as the
    end of an error. `others` are known, and have no meaning here."""
    there = sorted(own)
    near = find_own_name(name, there) or _find_alike(name, sorted({*FOREIGN_FIELDS, *others}))
    return f"did you mean {near}?" if near is not None else "there are " + ", ".join(there)


def find_own_name(name: str, own: Iterable[str]) -> str | None:
    """The field of `own` that may be meant by a name that is not known."""
    there = sorted(own)
    common = [called for called, meant in _COMMON_NAMES.items() if meant in there]
    if name in common:
        return _COMMON_NAMES[name]
    if (near := _find_alike(name, there)) is not None:
        return near
    called = _find_alike(name, common)
    return None if called is None else _COMMON_NAMES[called]


def _find_alike(name: str, names: Sequence[str]) -> str | None:
    return next(iter(get_close_matches(name, names, n=1, cutoff=_CUTOFF)), None)


def describe_ignored(names: Iterable[str]) -> dict[str, list[str]]:
    """The entry of an answer that names the fields without effect; none where there are none."""
    found = list(names)
    return {"ignored": found} if found else {}


@cache
def log_ignored(name: str) -> None:
    """Say once in the log of this process that a field has no effect."""
    logger.warning("clients send the field %s, which has no effect here", name)
