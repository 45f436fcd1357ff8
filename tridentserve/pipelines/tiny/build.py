"""Tiny pipelines of the real classes with random weights, made without a network: for a first start and for tests.

They are saved as any diffusers folder and loaded by the same code. Every tensor has the rank, the order of dimensions
and the number of tokens it has in the real family. The images mean nothing, but they are colored shapes rather than
gray noise (`tiny_parts`), so that a person sees whether prompt, seed and steps have an effect. Videos of CogVideoX and
Mochi are noise in color.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tridentserve.errors import ConfigError
from tridentserve.models.cache import TINY_VERSION, tiny_folder
from tridentserve.pipelines.tiny import cogvideox as tiny_video_cogvideox
from tridentserve.pipelines.tiny import cogvideox_i2v as tiny_video_cogvideox_i2v
from tridentserve.pipelines.tiny import flux as tiny_flux
from tridentserve.pipelines.tiny import flux2 as tiny_flux2
from tridentserve.pipelines.tiny import flux2_klein as tiny_flux2_klein
from tridentserve.pipelines.tiny import flux_kontext as tiny_flux_kontext
from tridentserve.pipelines.tiny import hunyuan_dit as tiny_hunyuan_dit
from tridentserve.pipelines.tiny import hunyuan_video as tiny_video_hunyuan_video
from tridentserve.pipelines.tiny import hunyuan_video_15 as tiny_video_hunyuan_video_15
from tridentserve.pipelines.tiny import hunyuan_video_15_i2v as tiny_video_hunyuan_video_15_i2v
from tridentserve.pipelines.tiny import mochi as tiny_video_mochi
from tridentserve.pipelines.tiny import pixart_sigma as tiny_pixart_sigma
from tridentserve.pipelines.tiny import qwen_image as tiny_qwen_image
from tridentserve.pipelines.tiny import sd3 as tiny_sd3
from tridentserve.pipelines.tiny import sdxl as tiny_sdxl
from tridentserve.pipelines.tiny import wan as tiny_video_wan
from tridentserve.pipelines.tiny import wan_i2v as tiny_video_wan_i2v

_RECIPES: dict[str, Callable[[], Any]] = {
    "sd3": tiny_sd3.recipe,
    "flux": tiny_flux.recipe,
    "flux_kontext": tiny_flux_kontext.recipe,
    "pixart_sigma": tiny_pixart_sigma.recipe,
    "qwen_image": tiny_qwen_image.recipe,
    "sdxl": tiny_sdxl.recipe,
    "hunyuan_dit": tiny_hunyuan_dit.recipe,
    "flux2_klein": tiny_flux2_klein.recipe,
    "flux2": tiny_flux2.recipe,
    "cogvideox": tiny_video_cogvideox.recipe,
    "cogvideox_i2v": tiny_video_cogvideox_i2v.recipe,
    "wan": tiny_video_wan.recipe,
    "wan_i2v": tiny_video_wan_i2v.recipe,
    "hunyuan_video": tiny_video_hunyuan_video.recipe,
    "hunyuan_video_15": tiny_video_hunyuan_video_15.recipe,
    "hunyuan_video_15_i2v": tiny_video_hunyuan_video_15_i2v.recipe,
    "mochi": tiny_video_mochi.recipe,
}


def ensure_tiny(family: str, cache_dir: Path) -> Path:
    """The folder of the tiny pipeline of a family (`sd3`, `flux`), made on first use.

    The same family gives the same bytes each time. Safe when several processes race: each builds beside the final
    place and the first rename wins. Raises `ConfigError` for a family without a recipe.
    """
    if family not in _RECIPES:
        raise ConfigError(f"there is no tiny pipeline of the family {family!r}; use one of {', '.join(_RECIPES)}")
    folder = tiny_folder(family, cache_dir)
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
        torch.manual_seed(TINY_VERSION)
        return recipe()
