"""The parts of tiny pipelines that several families share: sizes, text encoders with their tokenizers, an image VAE."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

CLIP_TOKENS, CLIP_DIM = 77, 32
T5_TOKENS, T5_DIM = 512, 64
LATENT_CHANNELS = 16
# The degrees 2 and 4 divide four heads, which together are as wide as a patch of 2 x 2 latents.
HEADS, HEAD_DIM = 4, 16
INNER_DIM = HEADS * HEAD_DIM
# The chat template of Qwen3, as far as prompts go: it thinks unless it is asked not to.
QWEN3_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


def build_image_vae(
    scaling_factor: float, shift_factor: float | None = None, latent_channels: int = LATENT_CHANNELS
) -> Any:
    """Build an image VAE with factor 8, without the middle attention, whose cost grows with the square of the
    pixels."""
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=512,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    smooth(vae.decoder)
    brighten(vae.decoder.conv_out, 1.5)
    return vae


@torch.no_grad()
def smooth(decoder: Any) -> None:
    """Give every convolution over 3x3 pixels a blurring kernel per pair of channels, since random kernels add grain at
    every level. Over frames, kernels stay random."""
    row = torch.tensor([1.0, 2.0, 1.0])
    blur = torch.outer(row, row) / 8
    for module in decoder.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d) and module.kernel_size[-2:] == (3, 3):
            module.weight.copy_(module.weight.sum((-2, -1), keepdim=True) * blur)


@torch.no_grad()
def brighten(output: Any, factor: float = 2.0) -> None:
    """Scale the output of a layer, such as the last one of a decoder, so that pixels use more of their range."""
    output.weight.mul_(factor)


@torch.no_grad()
def untangle(embedder: Any, proj_out: Any, order: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Make the output projection the inverse of the patch embedder, so that the velocity follows the noise and the
    steps remove most of it.

    `order` names the input feature that each output feature is. `rows` are the features of the projection to set; None
    sets all of them.
    """
    rotation = torch.nn.init.orthogonal_(torch.empty(len(embedder.weight), len(order)))
    embedder.weight.copy_(rotation.view_as(embedder.weight))
    proj_out.weight[slice(None) if rows is None else rows] = rotation.T[order]


def untangle_with_variance(embedder: Any, proj_out: Any, channels: int) -> None:
    """Untangle a model with patches of 2 x 2 and twice the channels in its output, of which the first half is noise."""
    order = torch.arange(4 * channels).view(channels, 2, 2).permute(1, 2, 0).flatten()
    rows = torch.arange(8 * channels).view(2, 2, 2 * channels)[..., :channels].flatten()
    untangle(embedder, proj_out, order, rows)


def build_clip_tokenizer() -> Any:
    """Build a byte-level tokenizer without merges: every text has one token per byte."""
    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=CLIP_TOKENS)


def build_clip_config(tokenizer: Any, dim: int = CLIP_DIM, expansion: int = 2) -> Any:
    """Build the config of a CLIP text encoder for as many tokens as the tokenizer makes at most. Its blocks widen `dim`
    by `expansion`."""
    return transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=dim,
        projection_dim=dim,
        intermediate_size=expansion * dim,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_t5_tokenizer() -> Any:
    """Build a tokenizer with one piece per printable ASCII character. As in T5's own tokenizer, other characters are
    the unknown token."""
    letters = ["▁", *(chr(code) for code in range(33, 127))]
    return make_t5_tokenizer([(letter, -float(rank)) for rank, letter in enumerate(letters, start=2)], T5_TOKENS)


def make_t5_tokenizer(pieces: list[tuple[str, float]], max_tokens: int) -> Any:
    """Make a tokenizer of T5's class of pieces, each with the logarithm of its likelihood."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=max_tokens)


def build_t5_encoder(
    tokenizer: Any,
    config_class: Any = transformers.T5Config,
    model_class: Any = transformers.T5EncoderModel,
    dim: int = T5_DIM,
    num_layers: int = 2,
) -> Any:
    """Build an encoder of T5 or of a model with the same config (UMT5)."""
    config = config_class(
        vocab_size=len(tokenizer),
        d_model=dim,
        d_kv=dim // 4,
        d_ff=2 * dim,
        num_layers=num_layers,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    # T5 models made from a config start in training mode, with dropout.
    return model_class(config).eval()


def build_qwen_tokenizer(max_tokens: int) -> Any:
    """Build the tokenizer of the Qwen encoders: byte-level, without merges, with the marks of a chat."""
    tokens = sorted(ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(tokens)}
    marks = ["<|im_start|>", "<|im_end|>"]
    return transformers.Qwen2Tokenizer(
        vocab=vocab, merges=[], model_max_length=max_tokens, additional_special_tokens=marks
    )


def build_qwen3_tokenizer() -> Any:
    """Build the tokenizer of the Qwen3 encoders, with a chat template."""
    tokenizer = build_qwen_tokenizer(512)
    tokenizer.chat_template = QWEN3_CHAT
    return tokenizer


def build_qwen3_config(tokenizer: Any, dim: int, num_layers: int) -> Any:
    """Build the config of a Qwen3 encoder."""
    return transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=dim // 2,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.pad_token_id,
    )
