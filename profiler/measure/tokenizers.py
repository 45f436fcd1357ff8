"""Stand-ins for the tokenizers of published models: without their vocabularies, and with as many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
import transformers

from profiler.published_models import Component
from tridentserve.pipelines.tiny import parts as tiny_parts
from tridentserve.pipelines.tiny.flux2 import build_mistral_tokenizer
from tridentserve.pipelines.tiny.hunyuan_dit import build_bert_tokenizer
from tridentserve.pipelines.tiny.hunyuan_video import build_llama_tokenizer
from tridentserve.pipelines.tiny.hunyuan_video_15 import build_qwen_tokenizer
from tridentserve.pipelines.tiny.ltx2 import build_gemma_tokenizer

_MAX_WORDS = 2048


def build_word_tokenizer() -> Any:
    """A token per word, line break and run of other signs, all but marks of a chat the same: for models whose prompts
    are not padded, so that a prompt has about as many tokens as by the real tokenizer."""
    # The config of an encoder that sees images names the second.
    vocab = {"<|word|>": 0, "<|image_pad|>": 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=vocab, unk_token="<|word|>"))
    words = tokenizers.Regex(r"\n|\w+|[^\w\s]+")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(words, "removed", invert=True)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<|word|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
        model_max_length=_MAX_WORDS,
    )


def build_chat_tokenizer() -> Any:
    """The same for prompts that are messages of a chat."""
    tokenizer = build_word_tokenizer()
    tokenizer.chat_template = tiny_parts.QWEN3_CHAT
    return tokenizer


# By how the class of the encoder begins. Prompts are padded to a fixed length in all published models but Qwen-Image
# and Z-Image, so that a vocabulary of letters costs the same.
_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "CLIP": tiny_parts.build_clip_tokenizer,
    "Bert": build_bert_tokenizer,
    "T5": tiny_parts.build_t5_tokenizer,
    "UMT5": tiny_parts.build_t5_tokenizer,
    "Llama": build_llama_tokenizer,
    "Mistral3": build_mistral_tokenizer,
    "Gemma3": build_gemma_tokenizer,
    "Qwen3": tiny_parts.build_qwen3_tokenizer,
    "Qwen3Model": build_chat_tokenizer,
    "Qwen2_5_VLText": build_qwen_tokenizer,
    "Qwen2_5_VLForConditionalGeneration": build_word_tokenizer,
    "ByT5": transformers.ByT5Tokenizer,
}


def build_stand_in(encoder: Component) -> Any:
    """The tokenizer of a text encoder."""
    kinds = (kind for kind in _TOKENIZERS if encoder.class_name.startswith(kind))
    return _TOKENIZERS[encoder.tokenizer or max(kinds, key=len)]()
