"""A tiny Qwen-Image-Edit 2509."""

from __future__ import annotations

from typing import Any

import diffusers

from tridentserve.pipelines.tiny import qwen_image_edit


def build_pipeline() -> Any:
    """Build a Qwen-Image-Edit of the later pipeline, whose components are the same."""
    return qwen_image_edit.build_pipeline(diffusers.QwenImageEditPlusPipeline)
