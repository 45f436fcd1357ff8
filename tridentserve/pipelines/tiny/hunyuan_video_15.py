"""A tiny HunyuanVideo 1.5."""

from __future__ import annotations

from typing import Any

import diffusers
import tokenizers
import transformers

from tridentserve.pipelines.tiny import parts

_TEXT_DIM = IMAGE_DIM = 32
_MAX_TOKENS = 2048
# The channels of each block of the VAE must be a multiple of this.
_LATENT_CHANNELS = 8
# The chat template of Qwen2.5-VL.
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_pipeline() -> Any:
    """Build a HunyuanVideo 1.5 from text: two text encoders, tokens of an absent image, guidance by two passes."""
    return assemble_pipeline(diffusers.HunyuanVideo15Pipeline, "t2v")


def assemble_pipeline(pipeline_class: Any, task_type: str, **others: Any) -> Any:
    """Assemble a pipeline. `others` are components in addition to those of the text-to-video pipeline."""
    tokenizer, tokenizer_2 = build_qwen_tokenizer(), transformers.ByT5Tokenizer()
    made = pipeline_class(
        text_encoder=_build_qwen(tokenizer),
        tokenizer=tokenizer,
        transformer=_build_transformer(task_type),
        vae=_build_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=parts.build_t5_encoder(tokenizer_2),
        tokenizer_2=tokenizer_2,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        **others,
    )
    _shorten(tokenizer, made.system_message, made.prompt_template_encode_start_idx)
    return made


def build_qwen_tokenizer() -> Any:
    """Build a tokenizer with a chat template, which makes one token of each character before the prompt."""
    tokenizer = parts.build_qwen_tokenizer(_MAX_TOKENS)
    tokenizer.chat_template = _CHAT
    return tokenizer


def _shorten(tokenizer: Any, system_message: str, count: int) -> None:
    """Add one token for the beginning of the text before the prompt, so that this text has as many tokens as with the
    real tokenizer. The pipeline cuts off that number of tokens."""
    # The system message is followed by a mark, a line break, a mark, "user" and a line break.
    others = 1 + 1 + 1 + len("user") + 1
    beginning = "<|im_start|>system\n" + system_message[: len(system_message) - (count - 1 - others)]
    tokenizer.add_tokens([tokenizers.AddedToken(beginning, normalized=False, special=True)], special_tokens=True)


def _build_transformer(task_type: str) -> Any:
    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=2 * _LATENT_CHANNELS + 1,
        out_channels=_LATENT_CHANNELS,
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=_TEXT_DIM,
        text_embed_2_dim=parts.T5_DIM,
        image_embed_dim=IMAGE_DIM,
        rope_axes_dim=(4, 6, 6),
        task_type=task_type,
    )


def _build_vae() -> Any:
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=_LATENT_CHANNELS, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1
    )
    parts.smooth(vae.decoder)
    return vae


def _build_qwen(tokenizer: Any) -> Any:
    config = transformers.Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer) + 1,
        hidden_size=_TEXT_DIM,
        intermediate_size=2 * _TEXT_DIM,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_scaling={"type": "mrope", "mrope_section": [4, 2, 2]},
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.pad_token_id,
    )
    return transformers.Qwen2_5_VLTextModel(config).eval()
