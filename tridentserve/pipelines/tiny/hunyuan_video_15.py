"""A tiny HunyuanVideo 1.5."""

from __future__ import annotations

from typing import Any

import diffusers
import tokenizers
import transformers

from tridentserve.pipelines.tiny import parts

_TEXT_DIM = IMAGE_DIM = 32
_MAX_TOKENS = 2048
# Each block of the VAE must have a multiple of as many channels.
_LATENT_CHANNELS = 8
# As Qwen2.5-VL writes chats.
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def recipe() -> Any:
    """As HunyuanVideo 1.5 from text: two text encoders, tokens of an image that is absent, guidance by two passes."""
    return pipeline(diffusers.HunyuanVideo15Pipeline, "t2v")


def pipeline(pipeline_class: Any, task_type: str, **others: Any) -> Any:
    """`others`: components that it has beside those from text."""
    tokenizer, tokenizer_2 = qwen_tokenizer(), transformers.ByT5Tokenizer()
    made = pipeline_class(
        text_encoder=_qwen(tokenizer),
        tokenizer=tokenizer,
        transformer=_transformer(task_type),
        vae=_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=parts.t5_encoder(tokenizer_2),
        tokenizer_2=tokenizer_2,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        **others,
    )
    _shorten(tokenizer, made.system_message, made.prompt_template_encode_start_idx)
    return made


def qwen_tokenizer() -> Any:
    """One that writes chats; with as many tokens as characters before the prompt."""
    tokenizer = parts.qwen_tokenizer(_MAX_TOKENS)
    tokenizer.chat_template = _CHAT
    return tokenizer


def _shorten(tokenizer: Any, system_message: str, count: int) -> None:
    """Give it one token for the beginning of the text before the prompt, so that this has as many tokens as with the
    real tokenizer, which is how many the pipeline cuts off."""
    # After the system message: a mark, a line break, a mark, "user" and a line break.
    others = 1 + 1 + 1 + len("user") + 1
    beginning = "<|im_start|>system\n" + system_message[: len(system_message) - (count - 1 - others)]
    tokenizer.add_tokens([tokenizers.AddedToken(beginning, normalized=False, special=True)], special_tokens=True)


def _transformer(task_type: str) -> Any:
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


def _vae() -> Any:
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=_LATENT_CHANNELS, block_out_channels=(8, 8, 16, 16, 16), layers_per_block=1
    )
    parts.smooth(vae.decoder)
    return vae


def _qwen(tokenizer: Any) -> Any:
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
