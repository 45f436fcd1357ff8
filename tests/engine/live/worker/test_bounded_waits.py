"""Plans bound the waits of their groups while they take steps, but for what may be compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.recording import CPU
from tests.pipelines.models import make_inputs, model_folder
from tests.support.waiting import PATIENCE_S
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.denoising import Denoising, StepControl
from tridentserve.models.kernels import Kernels
from tridentserve.parallel import connect_store, make_group
from tridentserve.pipelines import kernels, load_adapter
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.stages import Stage

STEPS, HANG_TIMEOUT_S = 4, 5.0


class LoneMember:
    """A worker that denoises in a group of one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.adapter = load_adapter(folder, frozenset({Stage.ENCODE, Stage.DIFFUSE}))
        self.group = make_group(connect_store(is_server=True), "alone", 0, 1, CPU, PATIENCE_S)
        self.limits = list[float | None]()
        limit = self.group.limit_waits

        def note_limit(timeout_s: float | None) -> None:
            self.limits.append(timeout_s)
            limit(timeout_s)

        monkeypatch.setattr(self.group, "limit_waits", note_limit)

    def run(self, control: StepControl | None = None, size: int = 16, num_steps: int = STEPS) -> list[float | None]:
        """The bounds during a plan of all steps, or the first ones."""
        self.limits.clear()
        plan = DispatchPlan(0, "m", (Stage.DIFFUSE,), ("w",), (PlanMember("r", (0, num_steps)),))
        inputs = make_inputs(size, size, STEPS, variant="sd3")
        denoising = Denoising(plan, self.adapter, self.group, control or StepControl(), HANG_TIMEOUT_S)
        denoising.share_states({"r": inputs}, {"r": Parcel(self.adapter.encode(inputs))})
        denoising.run_steps([])
        return list(self.limits)


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoneMember:
    return LoneMember(model_folder("sd3", tmp_path), monkeypatch)


def is_bounded(limits: list[float | None]) -> bool:
    """True where waits were bounded, and are no longer."""
    *bounds, last = limits or [None]
    return bool(bounds) and last is None and all(bound is not None and bound > HANG_TIMEOUT_S for bound in bounds)


def test_the_steps_of_a_model_that_is_not_compiled_are_bounded(member: LoneMember) -> None:
    assert is_bounded(member.run())


def test_those_of_a_compiled_model_are_when_all_of_its_code_has_run(member: LoneMember) -> None:
    member.adapter.is_compiled = True
    paused = StepControl()
    paused.ask_to_pause()
    assert member.run(paused) == []
    assert member.run(num_steps=STEPS - 1) == [], "the last steps may be computed by another model"
    assert member.run() == []
    assert is_bounded(member.run())
    assert member.run(size=32) == [], "other sizes may be compiled anew"


def test_a_model_that_is_to_be_compiled_says_so(tmp_path: Path) -> None:
    adapter = load_adapter(model_folder("sd3", tmp_path), frozenset({Stage.DIFFUSE}))
    kernels.install(adapter, Kernels(attention="math"))
    assert not adapter.is_compiled
    kernels.install(adapter, Kernels(compiled=True))
    assert adapter.is_compiled
