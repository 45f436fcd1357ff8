"""A tiny HunyuanDiT."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from tridentserve.pipelines.tiny import parts

_CHANNELS = 4
_BERT_DIM, _BERT_TOKENS = 32, 77


def build_pipeline() -> Any:
    """Build a HunyuanDiT 1.1: sizes and style are inputs, and every step draws noise."""
    tokenizer, tokenizer_2 = build_bert_tokenizer(), parts.build_t5_tokenizer()
    transformer = diffusers.HunyuanDiT2DModel(
        num_attention_heads=parts.HEADS,
        attention_head_dim=parts.HEAD_DIM,
        in_channels=_CHANNELS,
        patch_size=2,
        sample_size=64,
        hidden_size=parts.INNER_DIM,
        # With four layers, one of them has a skip connection.
        num_layers=4,
        cross_attention_dim=_BERT_DIM,
        cross_attention_dim_t5=parts.T5_DIM,
        pooled_projection_dim=_BERT_DIM,
    )
    parts.untangle_with_variance(transformer.pos_embed.proj, transformer.proj_out, _CHANNELS)
    return diffusers.HunyuanDiTPipeline(
        transformer=transformer,
        scheduler=diffusers.DDPMScheduler(
            beta_start=0.00085,
            beta_end=0.03,
            beta_schedule="scaled_linear",
            clip_sample=False,
            prediction_type="v_prediction",
            steps_offset=1,
        ),
        vae=parts.build_image_vae(scaling_factor=0.13025, latent_channels=_CHANNELS),
        text_encoder=_build_bert(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=parts.build_t5_encoder(tokenizer_2),
        tokenizer_2=tokenizer_2,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def build_bert_tokenizer() -> Any:
    """Build a tokenizer with two pieces per printable ASCII character, one for the start of a word and one for the
    inside. Other characters are the unknown token."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return transformers.BertTokenizer(vocab=vocab, model_max_length=_BERT_TOKENS)


def _build_bert(tokenizer: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=_BERT_DIM,
        intermediate_size=2 * _BERT_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_BERT_TOKENS,
    )
    # Models made from a config start in training mode, with dropout.
    return transformers.BertModel(config).eval()
