"""Tiny pipelines of the real classes with random weights, made without a network: for a first start and for tests.

They are saved as any diffusers folder and loaded by the same code. Every tensor has the rank, the order of dimensions
and the number of tokens it has in the real family. The pictures mean nothing, but they are colored shapes rather than
gray noise (`_smooth`, `_untangle`), so that a person sees whether prompt, seed and steps have an effect.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from tridentserve.errors import ConfigError

# Part of the folder name: raise it when a recipe below changes, so that old folders are not taken for new ones.
VERSION = 1

_CLIP_TOKENS, _CLIP_DIM = 77, 32
_T5_TOKENS, _T5_DIM = 512, 64
_LATENT_CHANNELS = 16
# Four heads, so that they divide by the degrees 2 and 4; as wide in all as a patch of 2 x 2 latents.
_HEADS, _HEAD_DIM = 4, 16
_INNER_DIM = _HEADS * _HEAD_DIM


def ensure_tiny(family: str, cache_dir: Path) -> Path:
    """The folder of the tiny pipeline of a family (`sd3`, `flux`), made on first use.

    The same family gives the same bytes each time. Safe when several processes race: each builds beside the final
    place and the first rename wins. Raises `ConfigError` for a family without a recipe.
    """
    if family not in _RECIPES:
        raise ConfigError(f"there is no tiny pipeline of the family {family!r}; use one of {', '.join(_RECIPES)}")
    folder = cache_dir / f"tiny-{family}-v{VERSION}"
    if folder.is_dir():
        return folder
    transformers.utils.logging.disable_progress_bar()
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache_dir))
    try:
        _build(_RECIPES[family]).save_pretrained(building, safe_serialization=True)
        building.chmod(0o755)
        building.rename(folder)
    except OSError:
        # Another process was first: its folder has the same bytes. Anything else is an error of the disk.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _build(recipe: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(VERSION)
        return recipe()


def _sd3() -> Any:
    """As Stable Diffusion 3.5 medium: dual attention in the first block, normalized queries and keys."""
    tokenizer, tokenizer_3 = _clip_tokenizer(), _t5_tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=64,
        patch_size=2,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_layers=2,
        num_attention_heads=_HEADS,
        attention_head_dim=_HEAD_DIM,
        joint_attention_dim=_T5_DIM,
        caption_projection_dim=_INNER_DIM,
        pooled_projection_dim=2 * _CLIP_DIM,
        pos_embed_max_size=128,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    # The embedder takes a patch as (channel, row, column), the output projection gives (row, column, channel).
    order = torch.arange(_INNER_DIM).view(_LATENT_CHANNELS, 2, 2).permute(1, 2, 0).flatten()
    _untangle(transformer.pos_embed.proj, transformer.proj_out, order)
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=transformers.CLIPTextModelWithProjection(_clip_config(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=transformers.CLIPTextModelWithProjection(_clip_config(tokenizer)),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5_encoder(tokenizer_3),
        tokenizer_3=tokenizer_3,
    )


def _flux() -> Any:
    """As FLUX.1-dev: double and single blocks, guidance as an embedding."""
    tokenizer, tokenizer_2 = _clip_tokenizer(), _t5_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * _LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=2,
        num_attention_heads=_HEADS,
        attention_head_dim=_HEAD_DIM,
        joint_attention_dim=_T5_DIM,
        pooled_projection_dim=_CLIP_DIM,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    _untangle(transformer.x_embedder, transformer.proj_out, torch.arange(_INNER_DIM))
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=transformers.CLIPTextModel(_clip_config(tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=_t5_encoder(tokenizer_2),
        tokenizer_2=tokenizer_2,
    )


_RECIPES: dict[str, Callable[[], Any]] = {"sd3": _sd3, "flux": _flux}


def _vae(scaling_factor: float, shift_factor: float) -> Any:
    """An image VAE with factor 8, without the middle attention whose cost grows with the square of the pixels."""
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=512,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    _smooth(vae.decoder)
    return vae


@torch.no_grad()
def _smooth(decoder: Any) -> None:
    """Give every 3x3 convolution a blurring kernel per pair of channels: random ones add grain at every level."""
    row = torch.tensor([1.0, 2.0, 1.0])
    blur = torch.outer(row, row) / 8
    for module in decoder.modules():
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size == (3, 3):
            module.weight.copy_(module.weight.sum((2, 3), keepdim=True) * blur)
    decoder.conv_out.weight.mul_(1.5)


@torch.no_grad()
def _untangle(embedder: Any, proj_out: Any, order: torch.Tensor) -> None:
    """Make the output projection the inverse of the patch embedder, so that the velocity follows the noise and the
    steps remove most of it. `order`: the input feature that each output feature is."""
    rotation = torch.nn.init.orthogonal_(torch.empty(_INNER_DIM, _INNER_DIM))
    embedder.weight.copy_(rotation.view_as(embedder.weight))
    proj_out.weight.copy_(rotation.T[order])


def _clip_tokenizer() -> Any:
    """Byte-level, without merges: every text has tokens, one per byte."""
    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=_CLIP_TOKENS)


def _clip_config(tokenizer: Any) -> Any:
    return transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_CLIP_DIM,
        projection_dim=_CLIP_DIM,
        intermediate_size=2 * _CLIP_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5_tokenizer() -> Any:
    """One piece per printable ASCII character; other characters are the unknown token, as in T5's own."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = ["▁", *(chr(code) for code in range(33, 127))]
    vocab = special + [(piece, -float(rank)) for rank, piece in enumerate(pieces, start=2)]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=_T5_TOKENS)


def _t5_encoder(tokenizer: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=_T5_DIM,
        d_kv=16,
        d_ff=2 * _T5_DIM,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    # T5 models made from a config start in training mode, with dropout.
    return transformers.T5EncoderModel(config).eval()
