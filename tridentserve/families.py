"""What is known of each pipeline family without loading it: no torch here, so the API can validate early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class Family:
    """One family of `diffusers` pipelines.

    `size_multiple`: height and width must be multiples of it (VAE factor times patch size).
    `components`: the pipeline components each stage needs, by their names in `model_index.json`.
    `optional`: those of them that a model folder may leave out.
    """

    name: str
    pipeline_class: str
    size_multiple: int
    default_steps: int
    default_guidance_scale: float
    components: Mapping[Stage, tuple[str, ...]]
    optional: frozenset[str] = frozenset()


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="sd3",
            pipeline_class="StableDiffusion3Pipeline",
            size_multiple=16,
            default_steps=28,
            default_guidance_scale=7.0,
            components={
                Stage.ENCODE: (
                    "text_encoder",
                    "text_encoder_2",
                    "text_encoder_3",
                    "tokenizer",
                    "tokenizer_2",
                    "tokenizer_3",
                ),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
            optional=frozenset({"text_encoder_3", "tokenizer_3"}),
        ),
        Family(
            name="flux",
            pipeline_class="FluxPipeline",
            size_multiple=16,
            default_steps=28,
            default_guidance_scale=3.5,
            components={
                Stage.ENCODE: ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"),
                Stage.DIFFUSE: ("transformer", "scheduler"),
                Stage.DECODE: ("vae",),
            },
        ),
    )
}


def family_of_pipeline(class_name: str) -> Family | None:
    """The family whose `model_index.json` holds this `_class_name`, or None."""
    return next((family for family in FAMILIES.values() if family.pipeline_class == class_name), None)
