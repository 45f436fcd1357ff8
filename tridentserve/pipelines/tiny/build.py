"""Tiny pipelines of the real classes with random weights, made without a network: for a first start and for tests.

They are saved as model folders of diffusers and loaded by the same code. Every tensor has the rank, the order of
dimensions and the number of tokens of the real family. The images mean nothing, but they are colored shapes rather than
gray noise (see `parts`), so that a person can see the effect of prompt, seed and steps. Videos of CogVideoX and Mochi
are noise in color.
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
from tridentserve.pipelines.tiny import (
    cogvideox,
    cogvideox_i2v,
    flux,
    flux2,
    flux2_klein,
    flux_fill,
    flux_kontext,
    hunyuan_dit,
    hunyuan_video,
    hunyuan_video_15,
    hunyuan_video_15_i2v,
    ltx2,
    mochi,
    pixart_sigma,
    qwen_image,
    qwen_image_edit,
    qwen_image_edit_plus,
    sd3,
    sdxl,
    wan,
    wan_i2v,
    z_image,
)

_RECIPES: dict[str, Callable[[], Any]] = {
    "sd3": sd3.build_pipeline,
    "flux": flux.build_pipeline,
    "flux_kontext": flux_kontext.build_pipeline,
    "flux_fill": flux_fill.build_pipeline,
    "pixart_sigma": pixart_sigma.build_pipeline,
    "qwen_image": qwen_image.build_pipeline,
    "qwen_image_edit": qwen_image_edit.build_pipeline,
    "qwen_image_edit_plus": qwen_image_edit_plus.build_pipeline,
    "sdxl": sdxl.build_pipeline,
    "hunyuan_dit": hunyuan_dit.build_pipeline,
    "flux2_klein": flux2_klein.build_pipeline,
    "flux2": flux2.build_pipeline,
    "z_image": z_image.build_pipeline,
    "cogvideox": cogvideox.build_pipeline,
    "cogvideox_i2v": cogvideox_i2v.build_pipeline,
    "wan": wan.build_pipeline,
    "wan_i2v": wan_i2v.build_pipeline,
    "hunyuan_video": hunyuan_video.build_pipeline,
    "hunyuan_video_15": hunyuan_video_15.build_pipeline,
    "hunyuan_video_15_i2v": hunyuan_video_15_i2v.build_pipeline,
    "mochi": mochi.build_pipeline,
    "ltx2": ltx2.build_pipeline,
}


def ensure_tiny(family: str, cache_dir: Path) -> Path:
    """Return the model folder of a family's tiny pipeline (`sd3`, `flux`, ...), which is built on first use.

    A family has the same bytes each time. Several processes may call this at once: each builds in a directory of its
    own, and the first rename wins. Raises `ConfigError` for a family without a recipe.
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
        # If the folder exists, another process was first, and its folder has the same bytes. Otherwise the disk failed.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _build(recipe: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_VERSION)
        return recipe()
