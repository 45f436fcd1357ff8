"""Attention kernels and compilation change how fast a denoising model is, and what it gives by rounding only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pipelines.models import families, final_latents, make_inputs, start
from tridentserve.errors import ConfigError
from tridentserve.models.kernels import ATTENTIONS, Kernels
from tridentserve.pipelines import PipelineAdapter, kernels, load_adapter
from tridentserve.pipelines.weights import attach, detach, named_tensors
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

Model = Callable[[str], Path]


def adapter_with(folder: Path, chosen: Kernels) -> PipelineAdapter:
    adapter = load_adapter(folder, frozenset({Stage.DIFFUSE}))
    kernels.install(adapter, chosen)
    return adapter


def difference(adapter: PipelineAdapter, folder: Path, inputs: GenerationInputs) -> float:
    """To what the model gives without any choice."""
    state = start(folder, inputs)
    latents = adapter.latents(adapter.step(state, state.num_steps))["latents"]
    return float((latents - final_latents(folder, inputs)).abs().max())


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("family", families("sd3", "flux", "wan", "mochi", "sdxl", quick=("sd3", "wan")))
def test_every_attention_kernel_gives_the_same(model: Model, family: str, attention: str) -> None:
    assert attention in ATTENTIONS
    adapter = adapter_with(model(family), Kernels(attention))
    assert difference(adapter, model(family), make_inputs(64, 96, variant=family)) < 1e-4


@pytest.mark.parametrize(("attention", "kernel"), [("flash", 1), ("math", 0)])
def test_the_kernel_that_was_named_is_the_one_that_runs(model: Model, attention: str, kernel: int) -> None:
    adapter, inputs = adapter_with(model("sd3"), Kernels(attention)), make_inputs(64, 64)  # type: ignore[arg-type]
    state = start(model("sd3"), inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        adapter.step(state)
    ran = {event.key for event in profile.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) is (kernel == 1)
    assert ("aten::_scaled_dot_product_attention_math" in ran) is (kernel == 0)


def test_attention_that_a_kernel_cannot_compute_is_reported(model: Model) -> None:
    adapter = adapter_with(model("sd3"), Kernels("cudnn"))
    with pytest.raises(ConfigError, match=r"kernel 'cudnn' cannot compute the attention of sd3 here.*use `sdpa`"):
        adapter.step(start(model("sd3"), make_inputs(64, 64)))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The compiled graphs. They are traced as for the compiler, whose own work takes minutes on a small CPU and is left
    out."""
    graphs: list[object] = []

    @functools.cache
    def backend(attention: str) -> Callable[..., object]:
        def compile_graph(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
            graphs.append(graph)
            compiled: Callable[..., object] = torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)
            return compiled

        return compile_graph

    monkeypatch.setattr(kernels, "_make_backend", backend)
    return graphs


@pytest.mark.slow
def test_compiled_models_of_one_kind_run_the_kernel_that_each_names(model: Model, traced: list[object]) -> None:
    """The code of their blocks is the same; the kernel is chosen while it is compiled."""
    folder, inputs = model("sd3"), make_inputs(64, 64)
    ran = []
    for attention in ("sdpa", "math", "sdpa"):
        adapter = adapter_with(folder, Kernels(attention, compiled=True))
        state = adapter.step(start(folder, inputs))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            adapter.step(state)
        operators = {event.key for event in profile.key_averages()}
        ran.append("aten::_scaled_dot_product_flash_attention_for_cpu" in operators)
    assert ran == [True, False, True]
    assert traced


def test_the_compiler_keeps_what_it_makes_for_each_kernel_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk too, where other processes find it."""
    tags: list[tuple[str, str]] = []

    def lookup(name: str) -> Callable[..., None]:
        return lambda *_: tags.append((name, torch.compiler.config.cache_key_tag))

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lookup)
    graph = torch.fx.symbolic_trace(lambda x: x)
    kernels._make_backend.cache_clear()
    try:
        for attention in ATTENTIONS:
            assert kernels._make_backend(attention) is kernels._make_backend(attention)
            kernels._make_backend(attention)(graph, [])
    finally:
        kernels._make_backend.cache_clear()
    assert len(set(tags)) == len(ATTENTIONS)
    assert {name for name, _ in tags} == {"inductor"}
    assert not torch.compiler.config.cache_key_tag


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_at_any_size_and_after_its_weights_were_away(
    model: Model, traced: list[object]
) -> None:
    folder = model("flux")
    adapter = adapter_with(folder, Kernels(compiled=True))
    assert not traced
    for width in (64, 96):
        assert difference(adapter, folder, make_inputs(64, width, variant="flux")) < 1e-4
    # Two kinds of blocks, for the first size and then for all.
    num_traced = len(traced)
    assert num_traced >= 2
    tensors = named_tensors(load_adapter(folder, frozenset({Stage.DIFFUSE})))
    detach(adapter)
    attach(adapter, tensors)
    assert difference(adapter, folder, make_inputs(64, 128, variant="flux")) < 1e-4
    assert len(traced) == num_traced


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_gives_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
        raise OSError("there is no C++ compiler")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: fail)
    kernels._make_backend.cache_clear()
    try:
        adapter = adapter_with(model("sd3"), Kernels(compiled=True))
        for width in (64, 96):
            assert difference(adapter, model("sd3"), make_inputs(64, width)) < 1e-4
    finally:
        kernels._make_backend.cache_clear()
