"""What published configurations are made of: their form, and the parts that several models share. No torch here."""

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


# openai/clip-vit-large-patch14 and laion/CLIP-ViT-bigG-14, their text models.
CLIP_L = Component(
    "transformers",
    "CLIPTextModel",
    {
        "vocab_size": 49408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "projection_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    },
)
CLIP_L_PROJECTED = CLIP_L.changed("CLIPTextModelWithProjection")
CLIP_BIG_G = CLIP_L_PROJECTED.changed(
    hidden_size=1280,
    intermediate_size=5120,
    projection_dim=1280,
    num_hidden_layers=32,
    num_attention_heads=20,
    hidden_act="gelu",
)
# google/t5-v1_1-xxl and google/umt5-xxl, their encoders.
T5_XXL = Component(
    "transformers",
    "T5EncoderModel",
    {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
)
UMT5_XXL = T5_XXL.changed("UMT5EncoderModel", vocab_size=256384)
# xtuner/llava-llama-3-8b, its language model.
LLAMA_3_8B = Component(
    "transformers",
    "LlamaModel",
    {
        "vocab_size": 128320,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "pad_token_id": 128258,
    },
)
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
FLOW_MATCHING = Component("diffusers", "FlowMatchEulerDiscreteScheduler", {"num_train_timesteps": 1000})


def diffusers_part(class_name: str, **config: Any) -> Component:
    """A component that a class of diffusers makes."""
    return Component("diffusers", class_name, config)
