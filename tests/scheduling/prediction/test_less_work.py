"""A request that would be late has a lower quality where that is enough, and otherwise the most steps that end in time
with some to spare, never fewer than half."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.prediction.test_predictor import EMPTY, _estimate
from tridentserve.requests import RequestSpec
from tridentserve.scheduling.prediction.less_work import LEAST_SHARE, USED_SHARE, find_less_work
from tridentserve.scheduling.prediction.predictor import Quote
from tridentserve.testing import make_request


@given(steps=st.integers(1, 60), step_s=st.floats(0.01, 1.0), slo_s=st.floats(0.1, 60.0), is_known=st.booleans())
def test_the_most_steps_in_time(steps: int, step_s: float, slo_s: float, is_known: bool) -> None:
    asked: list[int] = []

    def predict(spec: RequestSpec) -> Quote | None:
        asked.append(spec.num_inference_steps)
        seconds = 0.05 + step_s * spec.num_inference_steps
        return Quote(seconds, slo_s, False, _estimate(seconds, EMPTY), seconds, 1) if is_known else None

    spec = replace(make_request("r"), num_inference_steps=steps)
    found = find_less_work(spec, None, predict)
    least = math.ceil(LEAST_SHARE * steps)
    able = [n for n in range(least, steps) if 0.05 + step_s * n <= (1.0 if n == least else USED_SHARE) * slo_s]
    if not able or not is_known:
        assert found is None
    else:
        assert found is not None
        assert found[0] == replace(spec, num_inference_steps=max(able))
        assert found[1].seconds == 0.05 + step_s * max(able)
    assert len(asked) <= 2 + math.ceil(math.log2(max(2, steps)))


def test_a_lower_quality_comes_before_fewer_steps() -> None:
    spec = replace(make_request("r"), num_inference_steps=20)
    cheaper = replace(spec, quality="fast", step_share=0.5)

    def find(slo_s: float) -> RequestSpec | None:
        def predict(each: RequestSpec) -> Quote:
            seconds = each.step_share * each.num_inference_steps
            return Quote(seconds, slo_s, False, _estimate(seconds, EMPTY), seconds, 1)

        found = find_less_work(spec, cheaper, predict)
        return found[0] if found is not None else None

    assert find(10.0 / USED_SHARE) == cheaper
    assert find(8.0 / USED_SHARE) == replace(cheaper, num_inference_steps=16)
    assert find(4.9) is None
