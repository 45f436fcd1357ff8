"""The text encoders of published models, as the repositories have them that each comment names. No torch here."""

from __future__ import annotations

from profiler.published.parts import Component

# openai/clip-vit-large-patch14 and laion/CLIP-ViT-bigG-14, their text models.
CLIP_L = Component(
    "transformers",
    "CLIPTextModel",
    {
        "vocab_size": 49408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "projection_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    },
)
CLIP_L_PROJECTED = CLIP_L.changed("CLIPTextModelWithProjection")
CLIP_BIG_G = CLIP_L_PROJECTED.changed(
    hidden_size=1280,
    intermediate_size=5120,
    projection_dim=1280,
    num_hidden_layers=32,
    num_attention_heads=20,
    hidden_act="gelu",
)
# google/t5-v1_1-xxl, google/umt5-xxl and google/mt5-xl, their encoders.
T5_XXL = Component(
    "transformers",
    "T5EncoderModel",
    {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    cheap={"vocab_size": 1024, "d_ff": 64, "num_layers": 3, "num_heads": 1},
)
UMT5_XXL = T5_XXL.changed("UMT5EncoderModel", vocab_size=256384)
MT5_XL = T5_XXL.changed(vocab_size=250112, d_model=2048, d_ff=5120, num_heads=32)
# google/byt5-small, its encoder, with the colors and fonts of Glyph-SDXL-v2.
GLYPH_BYT5 = Component(
    "transformers",
    "T5EncoderModel",
    {**T5_XXL.config, "vocab_size": 1510, "d_model": 1472, "d_ff": 3584, "num_layers": 12, "num_heads": 6},
    tokenizer="ByT5",
)
# hfl/chinese-roberta-wwm-ext-large, with another vocabulary.
CHINESE_ROBERTA = Component(
    "transformers",
    "BertModel",
    {
        "vocab_size": 47020,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 512,
    },
)
# xtuner/llava-llama-3-8b, its language model.
LLAMA_3_8B = Component(
    "transformers",
    "LlamaModel",
    {
        "vocab_size": 128320,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "pad_token_id": 128258,
    },
)
# What a language model can have less of where layers in its middle make the condition.
_CHEAP_LAYERS = {
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1024,
}
# mistralai/Mistral-Small-3.2-24B-Instruct-2506: what transformers takes where a config says nothing.
MISTRAL_SMALL = Component(
    "transformers",
    "Mistral3ForConditionalGeneration",
    {"tie_word_embeddings": False},
    # The condition is of the layers 10, 20 and 30.
    cheap={
        "text_config": {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 30, **_CHEAP_LAYERS},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        },
    },
)
# Qwen/Qwen2.5-VL-7B-Instruct: its language model, and all of it.
QWEN_2_5_VL_TEXT = Component(
    "transformers",
    "Qwen2_5_VLTextModel",
    {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
)
QWEN_2_5_VL = Component(
    "transformers",
    "Qwen2_5_VLForConditionalGeneration",
    {"text_config": QWEN_2_5_VL_TEXT.config, "vision_config": {"hidden_size": 1280}},
    # The condition is of the last layer. Of the eyes, nothing is seen.
    cheap={
        "text_config": {
            **QWEN_2_5_VL_TEXT.config,
            "vocab_size": 1024,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        "vision_config": {"hidden_size": 64, "intermediate_size": 64, "depth": 1, "num_heads": 1},
    },
)
# Qwen/Qwen3-4B and Qwen/Qwen3-8B.
QWEN_3_4B = Component(
    "transformers",
    "Qwen3ForCausalLM",
    {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    # The condition is of the layers 9, 18 and 27.
    cheap={"num_hidden_layers": 27, **_CHEAP_LAYERS},
)
QWEN_3_8B = QWEN_3_4B.changed(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False)
