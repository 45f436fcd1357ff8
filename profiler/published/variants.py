"""More published models: those that differ from another one of their family in some entries."""

from __future__ import annotations

from collections.abc import Mapping

from profiler.published.parts import FLOW_MATCHING, PublishedModel


def variants(first: Mapping[str, PublishedModel]) -> dict[str, PublishedModel]:
    """By name, from the models that they resemble."""
    return _pictures(first) | _videos(first)


def _pictures(first: Mapping[str, PublishedModel]) -> dict[str, PublishedModel]:
    sd3, flux = first["sd3-medium"], first["flux.1-dev"]
    transformer = sd3.components["transformer"].changed(qk_norm="rms_norm")
    return {
        "sd3.5-medium": sd3.changed(
            "huggingface.co/stabilityai/stable-diffusion-3.5-medium",
            transformer=transformer.changed(pos_embed_max_size=384, dual_attention_layers=list(range(13))),
        ),
        "sd3.5-large": sd3.changed(
            "huggingface.co/stabilityai/stable-diffusion-3.5-large",
            transformer=transformer.changed(num_layers=38, num_attention_heads=38, caption_projection_dim=2432),
        ),
        "flux.1-schnell": flux.changed(
            "huggingface.co/black-forest-labs/FLUX.1-schnell",
            transformer=flux.components["transformer"].changed(guidance_embeds=False),
            scheduler=FLOW_MATCHING.changed(shift=1.0, use_dynamic_shifting=False),
        ),
    }


def _videos(first: Mapping[str, PublishedModel]) -> dict[str, PublishedModel]:
    return _cogvideox(first["cogvideox1.5-5b"]) | _wan(first["wan2.1-14b"])


def _cogvideox(later: PublishedModel) -> dict[str, PublishedModel]:
    transformer = later.components["transformer"].changed(
        patch_size_t=None, patch_bias=True, sample_frames=49, sample_height=60, sample_width=90
    )
    scheduler = later.components["scheduler"].changed(snr_shift_scale=3.0)
    return {
        "cogvideox-2b": later.changed(
            "huggingface.co/zai-org/CogVideoX-2b",
            transformer=transformer.changed(
                num_layers=30, num_attention_heads=30, use_rotary_positional_embeddings=False
            ),
            scheduler=scheduler.changed("CogVideoXDDIMScheduler"),
            vae=later.components["vae"].changed(scaling_factor=1.15258426, invert_scale_latents=False),
        ),
        "cogvideox-5b": later.changed(
            "huggingface.co/zai-org/CogVideoX-5b",
            transformer=transformer,
            scheduler=scheduler.changed(snr_shift_scale=1.0),
            vae=later.components["vae"].changed(invert_scale_latents=False),
        ),
    }


def _wan(large: PublishedModel) -> dict[str, PublishedModel]:
    transformer, scheduler = large.components["transformer"], large.components["scheduler"]
    return {
        "wan2.1-1.3b": large.changed(
            "huggingface.co/Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            transformer=transformer.changed(num_layers=30, num_attention_heads=12, ffn_dim=8960),
            scheduler=scheduler.changed(flow_shift=3.0),
        ),
        "wan2.2-t2v-a14b": large.changed(
            "huggingface.co/Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            {"boundary_ratio": 0.875},
            transformer_2=transformer,
            scheduler=scheduler.changed(flow_shift=3.0),
        ),
        "wan2.2-ti2v-5b": large.changed(
            "huggingface.co/Wan-AI/Wan2.2-TI2V-5B-Diffusers",
            {"expand_timesteps": True},
            transformer=transformer.changed(
                num_layers=30, num_attention_heads=24, ffn_dim=14336, in_channels=48, out_channels=48
            ),
            vae=large.components["vae"].changed(
                base_dim=160,
                decoder_base_dim=256,
                z_dim=48,
                is_residual=True,
                in_channels=12,
                out_channels=12,
                patch_size=2,
                scale_factor_spatial=16,
                # No shapes: the statistics of latents, 48 numbers each.
                latents_mean=[0.0] * 48,
                latents_std=[1.0] * 48,
            ),
        ),
    }
