"""A tiny FLUX.2 dev."""

from __future__ import annotations

from typing import Any

import diffusers
import tokenizers
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from tridentserve.pipelines.tiny.flux2_klein import TEXT_DIM, build_transformer, build_vae

_TOKENS = 512
# The condition comes from the layers 10, 20 and 30.
_TEXT_LAYERS = 30
_MARKS = ("<s>", "</s>", "<pad>", "[IMG]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}[SYSTEM_PROMPT]"
    "{{ message.content[0].text }}[/SYSTEM_PROMPT]{% else %}[INST]{{ message.content[0].text }}[/INST]"
    "{% endif %}{% endfor %}"
)


def build_pipeline() -> Any:
    """Build a FLUX.2 dev: guidance as an embedding, a text encoder that could read images too."""
    tokenizer = build_mistral_tokenizer()
    return diffusers.Flux2Pipeline(
        transformer=build_transformer(guidance_embeds=True),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=build_vae(),
        text_encoder=_build_text_encoder(tokenizer),
        tokenizer=tokenizer,
    )


def build_mistral_tokenizer() -> Any:
    """Build a byte-level tokenizer without merges, with the marks of a chat."""
    vocab = {token: index for index, token in enumerate((*_MARKS, *sorted(ByteLevel.alphabet())))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in _MARKS])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=_TOKENS
    )
    tokenizer.chat_template = _CHAT
    return tokenizer


def _build_text_encoder(tokenizer: Any) -> Any:
    text = transformers.MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        num_hidden_layers=_TEXT_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = transformers.PixtralVisionConfig(
        hidden_size=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    image_token = tokenizer.convert_tokens_to_ids("[IMG]")
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=image_token)
    return transformers.Mistral3ForConditionalGeneration(config).eval()
