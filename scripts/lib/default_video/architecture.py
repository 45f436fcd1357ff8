"""The parts of the default video model: those of Wan 2.1 in small, with a tokenizer that knows its few words."""

from __future__ import annotations

import string
from typing import Any

import diffusers
import torch
import transformers

from lib.default_model.architecture import list_words
from lib.default_video.motion import DIRECTION_WORDINGS
from lib.training.autoencoder import spread_channels_last
from tridentserve.pipelines.tiny import parts

TEXT_TOKENS = 24
"""Tokens of one caption while the model is trained: the longest has as many, with the mark of its end."""
PIPELINE_TOKENS = 512
"""Tokens to which Wan's pipeline fills each caption up with zeros."""
LATENT_CHANNELS = 12
# Pixels a side of one latent, and of one token of the transformer; frames of one latent but the first.
LATENT_PIXELS, TOKEN_PIXELS, LATENT_FRAMES = 8, 16, 4
MOTION_SHIFT = 6.0
"""The shift of the noise levels, in training and in the scheduler. The frames of a clip are alike, so that noise of the
same level hides less of it than of a picture of as many tokens."""
_TEXT_DIM = 192
_HEADS, _HEAD_DIM = 4, 48
# Of queries and keys of captions at the beginning. With 1, the zeros that fill a caption up have nearly all of the
# attention, by their number, and words are learned late.
_CAPTION_GAIN = 2.0


def build_vae() -> Any:
    """Build the video VAE. Encodes (n, 3, 1 + 4 f, height, width) from -1 to 1 as (n, 12, 1 + f, height / 8, width /
    8)."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=16,
        z_dim=LATENT_CHANNELS,
        num_res_blocks=1,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )
    _ease(vae)
    return spread_channels_last(vae)


@torch.no_grad()
def _ease(vae: torch.nn.Module) -> None:
    """Let colors pass through all levels from the first step on: blocks begin as identities, and resampling as means
    and copies, over frames too. With random kernels colors are learned late."""
    for name, module in vae.named_modules():
        if not isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            continue
        if name.endswith(("conv2", "proj")):
            torch.nn.init.zeros_(module.weight)
        elif "resample" in name:
            torch.nn.init.zeros_(module.weight)
            down = module.stride[-1] == 2
            taps = (slice(0, 2), slice(0, 2)) if down else (1, 1)
            for channel in range(module.out_channels):
                module.weight[channel, channel][taps] = 0.25 if down else 1.0
        elif name.endswith("time_conv"):
            torch.nn.init.zeros_(module.weight)
            down = module.stride[0] == 2
            for channel in range(module.out_channels):
                module.weight[channel, channel % module.in_channels][1 if down else 2 :] = 0.5 if down else 1.0
        elif name.endswith(("conv_in", "conv_out", "conv_shortcut", "quant_conv")):
            kernel = torch.empty(module.weight.shape[:2])
            torch.nn.init.orthogonal_(kernel, gain=2.0 if name == "encoder.conv_in" else 1.0)
            torch.nn.init.zeros_(module.weight)
            # The last frame is the present one.
            middle = module.kernel_size[-1] // 2
            module.weight[:, :, -1, middle, middle] = kernel
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)


def build_transformer() -> Any:
    """Build the transformer. Its output and those of its blocks begin at zero, so that training starts from the mean
    and not from noise; attention to captions begins sharp."""
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=_HEADS,
        attention_head_dim=_HEAD_DIM,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=_TEXT_DIM,
        freq_dim=128,
        ffn_dim=4 * _HEADS * _HEAD_DIM,
        num_layers=6,
        rope_max_seq_len=64,
    )
    outputs = [transformer.proj_out]
    for block in transformer.blocks:
        outputs += [block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]]
        for norm in (block.attn2.norm_q, block.attn2.norm_k):
            torch.nn.init.constant_(norm.weight, _CAPTION_GAIN)
    for layer in outputs:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return transformer


def list_motion_words() -> list[str]:
    """All words of captions of clips, each once, and those of pictures."""
    texts = [wording for wordings in DIRECTION_WORDINGS.values() for wording in wordings]
    words = {word for text in texts for word in text.split()}
    return sorted(words | {"and", "slowly", "video", "clip", *string.digits, *list_words()})


def build_tokenizer() -> Any:
    """Build a tokenizer of T5's class in which each known word is one piece; others are spelled, in ASCII."""
    letters = [(letter, -20.0) for letter in ("▁", *map(chr, range(33, 127)))]
    pieces = [*((f"▁{word}", -1.0) for word in list_motion_words()), *letters]
    return parts.make_t5_tokenizer(pieces, PIPELINE_TOKENS)


def build_text_encoder(tokenizer: Any) -> Any:
    """Build the UMT5 encoder. It is built in evaluation mode, so that it is trained without dropout."""
    return parts.build_t5_encoder(
        tokenizer, transformers.UMT5Config, transformers.UMT5EncoderModel, dim=_TEXT_DIM, num_layers=3
    )


def count_clip_tokens(width: int, height: int, frames: int) -> int:
    """Count the transformer's tokens of a clip."""
    return (width // TOKEN_PIXELS) * (height // TOKEN_PIXELS) * (1 + (frames - 1) // LATENT_FRAMES)
