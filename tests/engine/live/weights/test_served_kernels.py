"""The models of workers use the attention and compilation that the deployment names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.live.weights.test_replica_store import loads_of, make_store
from tests.pipelines.models import final_latents, make_inputs, start
from tridentserve.engine.live.messages import ModelSource
from tridentserve.engine.live.weights.host_copies import HostCopies
from tridentserve.models.kernels import Kernels
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.plans import Replica
from tridentserve.stages import Stage

D = Replica("flux", Stage.DIFFUSE)


@pytest.mark.parametrize("kernels", [Kernels(), Kernels("math")], ids=str)
async def test_a_worker_runs_the_attention_kernel_of_its_model(
    tiny_cache: Path, tmp_path: Path, kernels: Kernels
) -> None:
    folder, inputs = ensure_tiny("flux", tiny_cache), make_inputs(64, 64, steps=2, variant="flux")
    host = HostCopies(tmp_path, {"flux": ModelSource("flux", folder, kernels=kernels)}, torch.device("cpu"))
    store = make_store(host)
    await loads_of(store, D)
    adapter, state = store.adapter(D), start(folder, inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        state = adapter.step(state, 2)
    ran = {event.key for event in profile.key_averages()}
    assert ("aten::_scaled_dot_product_attention_math" in ran) is (kernels.attention == "math")
    assert torch.allclose(adapter.latents(state)["latents"], final_latents(folder, inputs), atol=1e-4)
