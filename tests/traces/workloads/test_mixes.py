from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import CostModel, read_shipped_table
from traces.workloads.mixes import Mix, MixShape, draw, load_figure, load_mix, mix_names
from traces.workloads.named import LEVELS, MODELS
from tridentserve.errors import ConfigError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

LOADS = {"light": 0.5, "medium": 0.75, "heavy": 1.0}


@pytest.fixture(scope="module")
def l20() -> CostModel:
    return CostModel([read_shipped_table("l20")], "NVIDIA L20")


@pytest.mark.parametrize("name", mix_names())
def test_a_shipped_mix_states_its_load(name: str, l20: CostModel) -> None:
    mix = load_mix(name)
    assert (mix.name, mix.gpu) == (name, "NVIDIA L20")
    assert load_figure(mix, l20) == pytest.approx(mix.load, rel=0.1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_the_papers_mixes(model: str, level: str, l20: CostModel) -> None:
    mix = load_mix(f"{model}-{level}")
    rates = {"sd3-medium": (20, 20), "flux.1-dev": (1.5, 4), "cogvideox1.5-5b": (1, 6), "hunyuanvideo": (0.5, 6)}
    assert (mix.rate_per_s, mix.num_inference_steps, mix.num_gpus) == (*rates[model], 128)
    assert load_figure(mix, l20) == pytest.approx(LOADS[level], rel=0.1)
    profiled = {
        row.shape for row in read_shipped_table("l20").rows if row.model == model and row.stage == Stage.DIFFUSE
    }
    assert {shape.shape for shape in mix.shapes} <= profiled
    assert max(profiled, key=lambda shape: shape.tokens) in {shape.shape for shape in mix.shapes}


def test_84_percent_of_flux_requests_are_smaller_than_4096() -> None:
    """The share agrees with the paper's figure 13, over the three mixes that its Dynamic workload consists of."""
    largest = Shape(4096, 4096)
    weights = [
        shape.weight for level in LEVELS for shape in load_mix(f"flux.1-dev-{level}").shapes if shape.shape == largest
    ]
    assert sum(weights) / 3 == 16


def mix_of(*shapes: MixShape, **fields: object) -> Mix:
    common = {"name": "m", "about": "", "model": "a", "num_inference_steps": 4, "rate_per_s": 1.0, "num_gpus": 2}
    return Mix.model_validate({**common, "gpu": "g", "load": 1.0, "shapes": shapes, **fields})


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 60), st.integers(0, 2**32))
def test_a_draw_has_the_proportions_of_the_mix(weights: list[float], count: int, seed: int) -> None:
    sizes = [MixShape(height=16 * (index + 1), width=16, weight=weight) for index, weight in enumerate(weights)]
    requests = draw(mix_of(*sizes), [float(index) for index in range(count)], seed, first_id=5)
    assert [request.timestamp_s for request in requests] == list(range(count))
    assert [request.request_id for request in requests] == [str(5 + index) for index in range(count)]
    drawn = Counter(request.height for request in requests)
    for size in sizes:
        assert drawn[size.height] == pytest.approx(size.weight / sum(weights) * count, abs=1)
    assert requests == draw(mix_of(*sizes), [float(index) for index in range(count)], seed, first_id=5)


def test_a_size_may_have_its_own_model_steps_and_deadline() -> None:
    mix = mix_of(
        MixShape(height=16, width=16, weight=1, model="b", num_inference_steps=(2, 3), slo_s=1.5),
        MixShape(height=32, width=16, weight=1),
    )
    requests = draw(mix, [0.0] * 8, seed=0)
    drawn = Counter((request.model, request.num_inference_steps, request.slo_ms) for request in requests)
    assert drawn == {("b", 2, 1500.0): 2, ("b", 3, 1500.0): 2, ("a", 4, None): 4}
    assert mix.models == ("a", "b")


def test_the_load_of_a_mix_by_hand(l20: CostModel) -> None:
    shape = Shape(1024, 1024)
    mix = mix_of(
        MixShape(height=1024, width=1024, weight=3), model="flux.1-dev", num_inference_steps=[10, 20], rate_per_s=0.5
    )
    encode, step, decode = (l20.seconds("flux.1-dev", stage, shape) for stage in Stage)
    assert load_figure(mix, l20) == pytest.approx(0.5 * (encode + 15 * step + decode) / 2)
    assert load_figure(mix, l20, num_gpus=8) == pytest.approx(load_figure(mix, l20) / 4)


GOOD = """
about: mine
model: tiny
num_inference_steps: 4
rate_per_s: 2
num_gpus: 1
gpu: CPU
load: 0.5
shapes: [{height: 64, width: 64, weight: 1}]
"""


def test_a_mix_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    mix = load_mix(str(path))
    assert (mix.name, mix.arrivals, mix.shapes[0].shape) == ("mine", "constant", Shape(64, 64))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("weight: 1", "weight: 0", r"shapes.0.weight: .*greater than 0"),
        ("weight: 1", "wieght: 1", r"shapes.0.w.*"),
        ("load: 0.5", "loud: 0.5", "load: Field required|loud"),
        ("model: tiny", "", "model is given neither for the mix nor for 64x64"),
        ("rate_per_s: 2", "rate_per_s: .nan", "rate_per_s"),
        ("rate_per_s: 2", "arrivals: sometimes", "arrivals|rate_per_s"),
        ("shapes: [{", "shapes: [{{", "cannot read the mix"),
        (GOOD, "- 1", "must hold keys and values"),
    ],
)
def test_a_malformed_mix_says_where(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_mix(str(path))


def test_an_unknown_mix_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no mix is named 'flux'.*flux\.1-dev-light"):
        load_mix("flux")
    with pytest.raises(ConfigError, match="cannot read the mix"):
        load_mix("/nonexistent/mix.yaml")
