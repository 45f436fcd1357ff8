"""The parts of the default model: those of Stable Diffusion 3 in small, with tokenizers that know its few words."""

from __future__ import annotations

import string
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from lib.default_model import words
from tridentserve.pipelines.tiny import parts

# Tokens of one caption: the longest has as many, with CLIP's two marks.
TEXT_TOKENS = 20
LATENT_CHANNELS = 8
# Pixels a side of one latent, and of one token of the transformer.
LATENT_PIXELS, TOKEN_PIXELS = 8, 16
MAX_SIDE = 512
_CLIP_DIM, _T5_DIM = 96, 192
# Few wide heads, and no norm of queries and keys: a step of training on a CPU takes a fifth less time.
_HEADS, _HEAD_DIM = 4, 48


def build_vae() -> Any:
    """Build the image VAE. Encodes (n, 3, height, width) from -1 to 1 as (n, 8, height / 8, width / 8)."""
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=2,
        sample_size=256,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    _ease(vae)
    return vae


@torch.no_grad()
def _ease(vae: torch.nn.Module) -> None:
    """Let colors pass through all levels from the first step on: blocks begin as identities, and resampling as means
    and copies. With random kernels colors are learned late (hundreds of steps)."""
    for name, module in vae.named_modules():
        if not isinstance(module, torch.nn.Conv2d):
            continue
        if name.endswith("conv2"):
            torch.nn.init.zeros_(module.weight)
        elif "samplers" in name:
            torch.nn.init.zeros_(module.weight)
            taps = (slice(0, 2), slice(0, 2)) if "down" in name else (1, 1)
            for channel in range(module.out_channels):
                module.weight[channel, channel][taps] = 0.25 if "down" in name else 1.0
        elif name.endswith("conv_shortcut"):
            torch.nn.init.orthogonal_(module.weight)
        elif name.endswith(("conv_in", "conv_out")):
            kernel = torch.empty(module.weight.shape[:2])
            torch.nn.init.orthogonal_(kernel, gain=2.0 if name.startswith("encoder.conv_in") else 1.0)
            torch.nn.init.zeros_(module.weight)
            module.weight[:, :, 1, 1] = kernel
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)


def build_transformer() -> Any:
    """Build the transformer. Its output and the gates of its blocks begin at zero, so that training starts from the
    mean and not from noise."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=256 // LATENT_PIXELS,
        patch_size=TOKEN_PIXELS // LATENT_PIXELS,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=6,
        num_attention_heads=_HEADS,
        attention_head_dim=_HEAD_DIM,
        joint_attention_dim=_T5_DIM,
        caption_projection_dim=_HEADS * _HEAD_DIM,
        pooled_projection_dim=2 * _CLIP_DIM,
        pos_embed_max_size=MAX_SIDE // TOKEN_PIXELS,
    )
    outputs = [transformer.proj_out, transformer.norm_out.linear]
    outputs += [block.norm1.linear for block in transformer.transformer_blocks]
    outputs += [block.norm1_context.linear for block in transformer.transformer_blocks]
    for layer in outputs:
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return transformer


def list_words() -> list[str]:
    """All words of captions, each once, and the letters, digits and marks of others."""
    texts = [*words.COLORS, *words.BACKGROUNDS, *words.SIZES, *words.POSITIONS, *words.NUMBERS.values()]
    texts += [noun for nouns in words.SHAPES.values() for noun in nouns]
    texts += [words.plural(noun) for nouns in words.SHAPES.values() for noun in nouns]
    texts += [wording for wordings in words.RELATION_WORDINGS.values() for wording in wordings]
    texts += ["a an and the of with on background picture image drawing", *string.digits]
    return sorted({word for text in texts for word in text.split()})


def build_clip_tokenizer() -> Any:
    """Build a byte-pair tokenizer of CLIP's class in which each known word is one token; others are spelled."""
    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    untrained = transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=TEXT_TOKENS)
    # Far more merges than the words need: learning ends when each word is one token.
    return untrained.train_new_from_iterator(
        [[*list_words(), *map(chr, range(33, 127))]],
        vocab_size=4096,
        initial_alphabet=letters,
        show_progress=False,
    )


def build_t5_tokenizer() -> Any:
    """Build a tokenizer of T5's class in which each known word is one piece; others are spelled, in ASCII."""
    letters = [(letter, -20.0) for letter in ("▁", *map(chr, range(33, 127)))]
    return parts.make_t5_tokenizer([*((f"▁{word}", -1.0) for word in list_words()), *letters], TEXT_TOKENS)


def build_clip_encoder(tokenizer: Any) -> Any:
    """Build one of the two CLIP text encoders."""
    return transformers.CLIPTextModelWithProjection(parts.build_clip_config(tokenizer, _CLIP_DIM, expansion=4))


def build_t5_encoder(tokenizer: Any) -> Any:
    """Build the T5 encoder. It is built in evaluation mode, so that it is trained without dropout."""
    return parts.build_t5_encoder(tokenizer, dim=_T5_DIM, num_layers=3)


def count_image_tokens(width: int, height: int) -> int:
    """Count the transformer's tokens of a picture."""
    return (width // TOKEN_PIXELS) * (height // TOKEN_PIXELS)
