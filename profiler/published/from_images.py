"""Published models that start from a picture, by those from text that they resemble. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from profiler.published.parts import Component, PublishedModel

# laion/CLIP-ViT-H-14, its model of pictures: what Wan 2.1 sees of its first one.
_CLIP_H_VISION = Component(
    "transformers",
    "CLIPVisionModel",
    {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "projection_dim": 1024,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
    },
)
_CLIP_PICTURES = Component("transformers", "CLIPImageProcessor", {"image_processor_type": "CLIPImageProcessor"})
# google/siglip-so400m-patch14-384, its model of pictures: what HunyuanVideo 1.5 sees of its first one.
_SIGLIP_VISION = Component(
    "transformers",
    "SiglipVisionModel",
    {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    },
)
_SIGLIP_PICTURES = Component(
    "transformers",
    "SiglipImageProcessor",
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}},
)


def from_pictures(published: Mapping[str, PublishedModel]) -> dict[str, PublishedModel]:
    """By name, from the models that are published of the same families from text."""
    kontext = replace(published["flux.1-dev"], pipeline_class="FluxKontextPipeline")
    return {
        "flux.1-kontext-dev": kontext.changed("huggingface.co/black-forest-labs/FLUX.1-Kontext-dev"),
        **_cogvideox(published["cogvideox-5b"], published["cogvideox1.5-5b"]),
        **_wan(published["wan2.1-14b"]),
        "hunyuanvideo-1.5-i2v": _hunyuan_video_15(published["hunyuanvideo-1.5"]),
    }


def _cogvideox(first: PublishedModel, later: PublishedModel) -> dict[str, PublishedModel]:
    pipeline_class = "CogVideoXImageToVideoPipeline"
    return {
        "cogvideox-5b-i2v": replace(first, pipeline_class=pipeline_class).changed(
            "huggingface.co/zai-org/CogVideoX-5b-I2V",
            transformer=first.components["transformer"].changed(in_channels=32, use_learned_positional_embeddings=True),
        ),
        "cogvideox1.5-5b-i2v": replace(later, pipeline_class=pipeline_class).changed(
            "huggingface.co/zai-org/CogVideoX1.5-5B-I2V",
            transformer=later.components["transformer"].changed(in_channels=32, ofs_embed_dim=512),
        ),
    }


def _wan(text: PublishedModel) -> dict[str, PublishedModel]:
    model = replace(text, pipeline_class="WanImageToVideoPipeline")
    # The picture's latents and a mask beside those of the video.
    transformer = text.components["transformer"].changed(in_channels=36)
    scheduler = text.components["scheduler"].changed(flow_shift=3.0)
    return {
        "wan2.1-i2v-14b-480p": model.changed(
            "huggingface.co/Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
            transformer=transformer.changed(image_dim=1280, added_kv_proj_dim=5120),
            scheduler=scheduler,
            image_encoder=_CLIP_H_VISION,
            image_processor=_CLIP_PICTURES,
        ),
        "wan2.2-i2v-a14b": model.changed(
            "huggingface.co/Wan-AI/Wan2.2-I2V-A14B-Diffusers",
            {"boundary_ratio": 0.9},
            transformer=transformer,
            transformer_2=transformer,
            scheduler=scheduler,
        ),
    }


def _hunyuan_video_15(text: PublishedModel) -> PublishedModel:
    """The transformer is the same: that from text is given zeros in the place of pictures."""
    return replace(text, pipeline_class="HunyuanVideo15ImageToVideoPipeline").changed(
        "huggingface.co/hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
        transformer=text.components["transformer"].changed(task_type="i2v"),
        image_encoder=_SIGLIP_VISION,
        feature_extractor=_SIGLIP_PICTURES,
    )
