"""A tiny Qwen-Image-Edit."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tridentserve.pipelines.processors import make_image_text_processor
from tridentserve.pipelines.tiny import parts, qwen_image

_MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
}


def build_pipeline(pipeline_class: Any = diffusers.QwenImageEditPipeline) -> Any:
    """Build a Qwen-Image-Edit whose image latents are about as large as noise and have an effect on the attention."""
    tokenizer = parts.build_qwen_tokenizer(1024)
    tokenizer.add_tokens([transformers.AddedToken(mark, special=True) for mark in _MARKS.values()], special_tokens=True)
    transformer, vae = qwen_image.build_transformer(), qwen_image.build_vae()
    parts.brighten(vae.encoder.conv_out, 8.0)
    for block in transformer.transformer_blocks:
        parts.brighten(block.attn.to_v, 8.0)
    token_ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in _MARKS.items()}
    return pipeline_class(
        transformer=transformer,
        scheduler=qwen_image.build_scheduler(),
        vae=vae,
        text_encoder=qwen_image.build_text_encoder(tokenizer, **token_ids),
        tokenizer=tokenizer,
        processor=_build_processor(tokenizer),
    )


def _build_processor(tokenizer: Any) -> Any:
    images = transformers.Qwen2VLImageProcessorPil()
    processor = make_image_text_processor(images, tokenizer)

    def save(folder: str) -> None:
        # The stock method would save the part for videos, which is absent.
        images.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    processor.save_pretrained = save
    return processor
