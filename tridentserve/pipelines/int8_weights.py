"""Linear layers whose weights are int8 numbers with a scale for each output, by torchao.

The weight of such a layer stays one parameter, a tensor that consists of others (torchao's `Int8Tensor`). In each call
the layer converts the int8 numbers to the format of its input, multiplies, and scales the outputs.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers

_LOADED = "torchao"
# torchao warns here of files for GPUs that do not load on a CPU, and of how it makes enumerations known to torch.
_NOISY = (_LOADED, "torch.utils._pytree")
# The tensors of which torchao makes an int8 weight: the numbers, and a scale and a zero for each output.
_PARTS = ("qdata", "scale", "zero_point")


def hide_torchao() -> None:
    """Have diffusers and transformers take torchao for not installed. Otherwise they import it with their first model,
    wherever it is installed: that takes time and warns in each process, and nothing that they do with it is used
    here."""
    import diffusers.utils.import_utils
    import transformers.utils.import_utils

    diffusers.utils.import_utils._torchao_available = False
    modules, find = cast(dict[str, Any], sys.modules), cast(Any, transformers.utils.import_utils.is_torchao_available)
    loaded = modules.get(_LOADED)
    modules[_LOADED] = None  # the mark of a module that there is not
    try:
        find.cache_clear()
        find()  # it remembers what it finds
    finally:
        del modules[_LOADED]
        if loaded is not None:
            modules[_LOADED] = loaded


def quantize(model: torch.nn.Module) -> None:
    """Give the linear layers of a model int8 weights, one layer after another: those that its library quantizes by
    default (`TorchAoConfig(Int8WeightOnlyConfig())`)."""
    quantize_layer, config = _import_torchao()
    is_text_encoder = isinstance(model, transformers.PreTrainedModel)
    is_kept = (_keep_as_transformers if is_text_encoder else _keep_as_diffusers)(model)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not is_kept(path):
            quantize_layer(module, config)


def _keep_as_diffusers(model: torch.nn.Module) -> Callable[[str], bool]:
    """diffusers quantizes all layers but those in modules that the model keeps in float32. Kept are also those of the
    pool of Hunyuan-DiT, whose weights go into a function that does not take such."""
    from diffusers.models.embeddings import HunyuanDiTAttentionPool

    pools = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, HunyuanDiTAttentionPool))
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return lambda path: path.startswith(pools) or bool(kept & set(path.split(".")))


def _keep_as_transformers(model: Any) -> Callable[[str], bool]:
    """transformers quantizes all layers of a text encoder but the last module, such as a projection of pooled texts,
    and the head that would predict the next token."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(model, keep_in_fp32_modules=model._keep_in_fp32_modules)
    return lambda path: not should_convert_module(f"{path}.weight", kept)


def is_part(name: str) -> bool:
    """True for the name of a tensor that is a part of an int8 weight."""
    return name.endswith(tuple(f".weight.{part}" for part in _PARTS))


@functools.cache
def _import_torchao() -> tuple[Any, Any]:
    """torchao's function, and what it is to do."""
    # torch warns so of each program that it compiles with such weights: its cache on disk does not keep it.
    warnings.filterwarnings("ignore", "Int8Tensor does not implement _stable_hash_for_caching", UserWarning)
    with _silence(*_NOISY):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    # By default torchao changes the compiler's settings for all models of the process.
    return quantize_, Int8WeightOnlyConfig(set_inductor_config=False)


@contextmanager
def _silence(*names: str) -> Iterator[None]:
    """Inside, these loggers tell errors only."""
    loggers = {name: logging.getLogger(name) for name in names}
    levels = {name: logger.level for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
