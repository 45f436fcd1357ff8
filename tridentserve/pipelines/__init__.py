"""Pipelines: one adapter per family turns a `diffusers` pipeline into three stages and a resumable denoising loop.

`load_adapter` reads a model folder; `tiny.build` makes small ones with random weights. This package imports torch and
diffusers.
"""

import os

# The libraries read these variables when they are imported. Models come from local directories (those of the hub are
# brought there by `tridentserve.hub`, in other processes), so no library needs the hub; and every worker would print a
# warning that image processors, which no pipeline here uses, need torchvision.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tridentserve.pipelines.int8_weights import hide_torchao

hide_torchao()

from tridentserve.pipelines.base import DenoisingState, PipelineAdapter, Tensors  # noqa: E402
from tridentserve.pipelines.loading import load_adapter  # noqa: E402

__all__ = ["DenoisingState", "PipelineAdapter", "Tensors", "load_adapter"]
