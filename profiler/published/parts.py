"""What published configurations are made of: their form, and the VAEs and schedulers that several models
share. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a pipeline: the class that makes it, by library and name, and its `config.json`."""

    library: str
    class_name: str
    config: Mapping[str, Any]
    # The class of a text encoder's tokenizer where that does not follow of its own.
    tokenizer: str = ""
    # Changes that make a text encoder cheap, but for its output's shape, where fewer layers do not.
    cheap: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, class_name: str | None = None, **changes: Any) -> Component:
        """The same with another class, or with some entries changed."""
        return replace(self, class_name=class_name or self.class_name, config={**self.config, **changes})


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A pipeline of `diffusers` as its authors published it. Tokenizers are not here: vocabularies are no shapes."""

    pipeline_class: str
    components: Mapping[str, Component]
    source: str
    # Entries of `model_index.json` that are no components.
    options: Mapping[str, Any] = field(default_factory=dict)

    def changed(self, source: str, options: Mapping[str, Any] | None = None, **components: Component) -> PublishedModel:
        """Another model of the same pipeline, some of whose components differ."""
        return PublishedModel(self.pipeline_class, {**self.components, **components}, source, options or {})


IMAGE_VAE = Component(
    "diffusers",
    "AutoencoderKL",
    {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 16,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "mid_block_add_attention": True,
    },
)
# stabilityai/sdxl-vae.
SDXL_VAE = IMAGE_VAE.changed(latent_channels=4, scaling_factor=0.13025, use_quant_conv=True, use_post_quant_conv=True)
FLOW_MATCHING = Component("diffusers", "FlowMatchEulerDiscreteScheduler", {"num_train_timesteps": 1000})
# The larger the picture, the more of the time goes to strong noise.
SHIFTED_FLOW_MATCHING = FLOW_MATCHING.changed(
    use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
)


def diffusers_part(class_name: str, **config: Any) -> Component:
    """A component that a class of diffusers makes; what `config` leaves out is the class's default, as published."""
    return Component("diffusers", class_name, config)
