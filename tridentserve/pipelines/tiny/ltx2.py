"""A tiny LTX-2, as of version 2.3."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2VocoderWithBWE

from tridentserve.pipelines.tiny import parts

_TEXT_DIM, _TEXT_LAYERS, _MAX_TOKENS = 32, 2, 1024
_AUDIO_HEAD_DIM = 8
_AUDIO_DIM = parts.HEADS * _AUDIO_HEAD_DIM
# The mel bins of a latent have as many numbers as a video token: both kinds of tokens are equally wide.
_AUDIO_CHANNELS = 4
_MEL_BINS = 4 * parts.LATENT_CHANNELS // _AUDIO_CHANNELS


def build_pipeline() -> Any:
    """Build an LTX-2.3 from text: video and sound in one transformer with guidance by four passes, a vocoder that
    extends the bandwidth."""
    return diffusers.LTX2Pipeline(**build_components())


def build_components() -> dict[str, Any]:
    """Build the components."""
    tokenizer = build_gemma_tokenizer()
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
        "vae": _build_vae(),
        "audio_vae": _build_audio_vae(),
        "text_encoder": _build_text_encoder(tokenizer),
        "tokenizer": tokenizer,
        "connectors": _build_connectors(),
        "transformer": _build_transformer(),
        "vocoder": _build_vocoder(),
    }


def build_gemma_tokenizer() -> Any:
    """Build Gemma's tokenizer, with one token per printable ASCII character."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *(chr(code) for code in range(33, 127))]
    vocab = {token: index for index, token in enumerate(tokens)}
    return transformers.GemmaTokenizer(vocab=vocab, merges=[], model_max_length=_MAX_TOKENS)


def _build_transformer() -> Any:
    model = diffusers.LTX2VideoTransformer3DModel(
        in_channels=parts.LATENT_CHANNELS,
        out_channels=parts.LATENT_CHANNELS,
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        cross_attention_dim=parts.INNER_DIM,
        audio_in_channels=parts.LATENT_CHANNELS,
        audio_out_channels=parts.LATENT_CHANNELS,
        audio_num_attention_heads=parts.HEADS,
        audio_attention_head_dim=_AUDIO_HEAD_DIM,
        audio_cross_attention_dim=_AUDIO_DIM,
        num_layers=2,
        caption_channels=_TEXT_DIM,
        gated_attn=True,
        cross_attn_mod=True,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        rope_type="split",
        use_prompt_embeddings=False,
        perturbed_attn=True,
    )
    order = torch.arange(parts.LATENT_CHANNELS)
    parts.untangle(model.proj_in, model.proj_out, order)
    parts.untangle(model.audio_proj_in, model.audio_proj_out, order)
    return model


def _build_connectors() -> Any:
    return LTX2TextConnectors(
        caption_channels=_TEXT_DIM,
        text_proj_in_factor=_TEXT_LAYERS + 1,
        video_connector_num_attention_heads=parts.HEADS,
        video_connector_attention_head_dim=parts.HEAD_DIM,
        video_connector_num_layers=1,
        video_gated_attn=True,
        audio_connector_num_attention_heads=parts.HEADS,
        audio_connector_attention_head_dim=_AUDIO_HEAD_DIM,
        audio_connector_num_layers=1,
        audio_gated_attn=True,
        rope_type="split",
        per_modality_projections=True,
        video_hidden_dim=parts.INNER_DIM,
        audio_hidden_dim=_AUDIO_DIM,
        proj_bias=True,
    )


def _build_vae() -> Any:
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=parts.LATENT_CHANNELS,
        block_out_channels=(8, 16, 32, 64),
        decoder_block_out_channels=(16, 32, 64),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_causal=False,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    parts.smooth(vae.decoder)
    vae.latents_mean.copy_(torch.linspace(-0.2, 0.2, parts.LATENT_CHANNELS))
    vae.latents_std.copy_(torch.linspace(0.8, 1.2, parts.LATENT_CHANNELS))
    return vae


def _build_audio_vae() -> Any:
    vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=parts.LATENT_CHANNELS, num_res_blocks=1, latent_channels=_AUDIO_CHANNELS, mel_bins=_MEL_BINS
    )
    vae.latents_mean.copy_(torch.linspace(-0.3, 0.3, parts.LATENT_CHANNELS))
    vae.latents_std.copy_(torch.linspace(0.7, 1.3, parts.LATENT_CHANNELS))
    return vae


def _build_vocoder() -> Any:
    """Build a vocoder of 16 kHz, as the spectrogram has 100 frames a second, and its extension to 48 kHz."""
    own = {"hidden_channels": 8, "resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]]}
    vocoder = LTX2VocoderWithBWE(
        in_channels=2 * _MEL_BINS,
        upsample_factors=[10, 16],
        upsample_kernel_sizes=[20, 32],
        bwe_in_channels=2 * 8,
        bwe_upsample_factors=[15, 16],
        bwe_upsample_kernel_sizes=[31, 32],
        num_mel_channels=8,
        **own,
        **{f"bwe_{name}": value for name, value in own.items()},
    )
    # Its tables come with the weights.
    for table in (vocoder.mel_stft.mel_basis, vocoder.mel_stft.stft_fn.forward_basis):
        torch.nn.init.normal_(table, std=0.1)
    return vocoder


def _build_text_encoder(tokenizer: Any) -> Any:
    config = transformers.Gemma3Config(
        text_config={
            "vocab_size": len(tokenizer) + 8,
            "hidden_size": _TEXT_DIM,
            "intermediate_size": 2 * _TEXT_DIM,
            "num_hidden_layers": _TEXT_LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": _TEXT_DIM // 2,
        },
        # It sees no images.
        vision_config={
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
        },
        mm_tokens_per_image=4,
        boi_token_index=len(tokenizer),
        eoi_token_index=len(tokenizer) + 1,
        image_token_index=len(tokenizer) + 2,
    )
    return transformers.Gemma3ForConditionalGeneration(config).eval()
