"""Messages come through a pickle as they were, whoever pickles them."""

from __future__ import annotations

import copy
import copyreg
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridentserve.engine.live.channels.compact_pickles import pickle_by_fields
from tridentserve.engine.live.messages import ExpectedPeak, PlanReport, ProgressNote
from tridentserve.engine.live.updates import CompletedUpdate, FailedUpdate, ProgressUpdate, QueuedUpdate
from tridentserve.plans import DispatchPlan, PlanMember, StageSpan
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

KINDS = (
    *(DispatchPlan, PlanMember, StageSpan, GenerationInputs, RequestSpec, Shape, ExpectedPeak, ProgressNote),
    *(PlanReport, QueuedUpdate, ProgressUpdate, CompletedUpdate, FailedUpdate),
)

# By itself hypothesis finds one path only.
st.register_type_strategy(Path, st.sampled_from(["/loras/ink.safetensors", "ink"]).map(Path))


def draw_message(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, outputs=st.tuples(st.binary())) if kind is CompletedUpdate else st.from_type(kind)


@given(st.sampled_from(KINDS).flatmap(draw_message))
def test_messages_come_through_as_they_were(message: Any) -> None:
    came = pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))  # noqa: S301  made here
    for one in (came, copy.deepcopy(message)):
        assert type(one) is type(message)
        assert repr(one) == repr(message)  # NaN is not equal to itself


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_takes_the_slow_way(kind: type[Any]) -> None:
    assert kind in copyreg.dispatch_table


@dataclass(frozen=True, slots=True)
class _Derived:
    value: int
    twice: int = field(init=False)


@dataclass(frozen=True, slots=True)
class _Named:
    value: int
    name: str = field(kw_only=True)


@pytest.mark.parametrize("kind", [_Derived, _Named])
def test_a_class_that_its_fields_do_not_make_is_refused(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} cannot be made of its fields"):
        pickle_by_fields(kind)
