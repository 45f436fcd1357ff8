"""Makes the denoising models of an adapter compute with the options of `tridentserve.models.kernels`.

The attention kernels are those of torch's scaled_dot_product_attention, which every family calls, also under sequence
parallelism. The attention backends of diffusers are not used, because half of the families ignore them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.compiler.config
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.nn.attention import SDPBackend, sdpa_kernel

from tridentserve.errors import ConfigError
from tridentserve.models.kernels import Attention, Kernels
from tridentserve.parallel import ulysses
from tridentserve.parallel.attention_calls import order_calls
from tridentserve.pipelines.adapters.diffusers_adapter import DiffusersAdapter
from tridentserve.pipelines.base import PipelineAdapter
from tridentserve.pipelines.compile_cache import remove_damaged

logger = logging.getLogger(__name__)

_BACKENDS: dict[Attention, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# Raised by a backend that does not fail, but asks torch to trace the code again, as where a number has to be a constant
# of the code, or to run the code as it is.
_REQUESTS_OF_TORCH = (RestartAnalysis, SkipFrame)
_DENOISERS = ("transformer", "transformer_2", "unet")


def install(adapter: PipelineAdapter, kernels: Kernels) -> None:
    """Apply the options to a new adapter, once. Only stage D changes.

    The forward pass raises `ConfigError` for attention that the kernel cannot compute, such as attention with a mask.
    """
    diffusers_adapter = cast(DiffusersAdapter, adapter)
    pipe = diffusers_adapter.pipe
    if kernels != Kernels():
        adapter.is_compiled = kernels.compiled
        diffusers_adapter.packs = False  # such steps call blocks past their model, and hooks that cannot be compiled
    for model in (getattr(pipe, name, None) for name in _DENOISERS):
        if not isinstance(model, torch.nn.Module):
            continue
        if kernels.compiled:
            # `weights.attach` leaves parameters without gradients too. Code compiled for one kind of parameter does not
            # fit the other kind.
            model.requires_grad_(False)
            for block in _find_blocks(model):
                block.forward = _compile_forward(block.forward, kernels.attention)
        if kernels.attention != "sdpa":
            model.forward = _restrict_forward(model.forward, kernels.attention, adapter.family)


def _find_blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The members of the model's lists of layers. The members of a list are alike, so that one compilation serves
    them."""
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child


def _compile_forward(stock: Callable[..., Any], attention: Attention) -> Callable[..., Any]:
    # One compilation serves all sizes and all blocks of a kind.
    compiled = torch.compile(stock, dynamic=True, backend=_make_backend(attention))

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        ulysses.note_group_for_compiled_code()
        return compiled(*args, **kwargs)

    return forward


@functools.cache
def _make_backend(attention: Attention) -> Callable[..., Any]:
    """A compiler backend for one attention kernel, which is Inductor.

    The kernel is chosen while code is compiled, and torch would run code compiled for one kernel under another. It
    tells compiled code apart by its backend in this process, and by the tag in its cache on disk.
    """
    inductor = torch._dynamo.lookup_backend("inductor")

    def compile_graph(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        """The compiled graph, or the graph itself where the compiler fails: slower code is better than none."""
        order_calls(graph)
        with cast(Any, torch.compiler.config).patch(cache_key_tag=f"attention {attention}"):
            try:
                return inductor(graph, *args, **kwargs)
            except _REQUESTS_OF_TORCH:
                raise
            except Exception as error:  # of a C++ compiler, a linker, a loader, or torch itself
                failure = error
            if remove_damaged():
                try:
                    return inductor(graph, *args, **kwargs)
                except _REQUESTS_OF_TORCH:
                    raise
                except Exception as error:
                    failure = error
        logger.warning(
            "torch.compile fails here, the model computes without it: %s: %s",
            type(failure).__name__,
            str(failure).strip().partition("\n")[0],
        )
        return graph.forward

    return compile_graph


def _restrict_forward(stock: Callable[..., Any], attention: Attention, family: str) -> Callable[..., Any]:
    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            with sdpa_kernel(_BACKENDS[attention]):
                return stock(*args, **kwargs)
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "no viable backend" not in str(error).lower():
                raise
            raise ConfigError(
                f"the attention kernel {attention!r} cannot compute the attention of {family} here (device, number "
                "format or a mask); use `sdpa`, which chooses by itself"
            ) from error

    return forward
