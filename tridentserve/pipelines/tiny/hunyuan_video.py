"""A tiny HunyuanVideo."""

from __future__ import annotations

from typing import Any

import diffusers
import tokenizers
import transformers
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers.pre_tokenizers import ByteLevel

from tridentserve.pipelines.tiny import parts

_LLAMA_DIM, _LLAMA_TOKENS = 64, 512


def build_pipeline() -> Any:
    """Build a HunyuanVideo: double and single blocks, a refiner of the text, guidance as an embedding."""
    tokenizer, tokenizer_2 = build_llama_tokenizer(), parts.build_clip_tokenizer()
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=parts.LATENT_CHANNELS,
        out_channels=parts.LATENT_CHANNELS,
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=_LLAMA_DIM,
        pooled_projection_dim=parts.CLIP_DIM,
        rope_axes_dim=(4, 6, 6),
    )
    vae = diffusers.AutoencoderKLHunyuanVideo(
        block_out_channels=(8, 8, 16, 16),
        latent_channels=parts.LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
    )
    parts.smooth(vae.decoder)
    return diffusers.HunyuanVideoPipeline(
        text_encoder=_build_llama(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=transformers.CLIPTextModel(parts.build_clip_config(tokenizer_2)),
        tokenizer_2=tokenizer_2,
    )


def build_llama_tokenizer() -> Any:
    """Build a byte-level tokenizer without merges. One further token makes the text before the prompt as many tokens as
    Llama's own tokenizer does; the pipeline cuts off that number of tokens."""
    letters = sorted(ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    before, _, _ = DEFAULT_PROMPT_TEMPLATE["template"].partition("{}")
    beginning = before[: 1 - DEFAULT_PROMPT_TEMPLATE["crop_start"]]
    backend.add_special_tokens([tokenizers.AddedToken(beginning, normalized=False)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end_of_text|>",
        model_max_length=_LLAMA_TOKENS,
        padding_side="right",
    )


def _build_llama(tokenizer: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_LLAMA_DIM,
        intermediate_size=2 * _LLAMA_DIM,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_LLAMA_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaModel(config).eval()
