"""Processors of images and texts, for text encoders that see: those of transformers, without their part for videos.

transformers makes such a processor only where torchvision is installed, which the part for videos needs. Here Pillow
prepares the images, whether torchvision is there or not, so that the pixels are the same everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers


def load_image_text_processor(folder: Path) -> Any:
    """Load a `Qwen2VLProcessor` from its folder."""
    options: dict[str, Any] = {"local_files_only": True}
    image_processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(str(folder), **options)
    return make_image_text_processor(
        image_processor, transformers.AutoTokenizer.from_pretrained(str(folder), **options)
    )


def make_image_text_processor(image_processor: Any, tokenizer: Any) -> Any:
    """Make a `Qwen2VLProcessor` for images and texts. Its constructor would look for the part for videos."""
    processor = object.__new__(transformers.Qwen2VLProcessor)
    processor.image_processor, processor.tokenizer = image_processor, tokenizer
    processor.video_processor = processor.video_token = processor.video_token_id = processor.chat_template = None
    processor.image_token = "<|image_pad|>"
    processor.image_token_id = tokenizer.convert_tokens_to_ids(processor.image_token)
    return processor
