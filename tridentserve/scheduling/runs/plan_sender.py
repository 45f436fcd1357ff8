"""Puts runs together, and sends their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tridentserve.plans import CheckpointSteps, DispatchPlan, PlanMember
from tridentserve.protocols import Assignment
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.estimation.expected_times import ExpectedTimes
from tridentserve.scheduling.runs.auxiliary_queues import EncodeQueue
from tridentserve.scheduling.runs.checkpoint_schedule import CheckpointSchedule
from tridentserve.scheduling.runs.ledger import Ledger
from tridentserve.scheduling.runs.legs import Leg, merge_legs
from tridentserve.scheduling.runs.request import Request
from tridentserve.scheduling.runs.run import Inheritance, Run
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import Stage


class PlanSender:
    """Makes a run of an assignment, and plans of its legs."""

    def __init__(
        self,
        ledger: Ledger,
        pool: WorkerPool,
        times: ExpectedTimes,
        encodes: EncodeQueue,
        checkpoints: CheckpointSchedule,
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._times = times
        self._encodes = encodes
        self._checkpoints = checkpoints

    def build_run(
        self,
        assignment: Assignment,
        requests: list[Request],
        now_s: float,
        inherited: Mapping[str, Inheritance] | None = None,
        is_exact: bool = False,
    ) -> tuple[Run, list[tuple[Leg, float]]]:
        """Put a run together. Returns it, and the seconds of its legs after D, as `reserve` takes them. Raises
        `ProfileError` where those of any leg are not known. `inherited`: see `Run.inherited`. `is_exact`: the steps in
        it are no estimates."""
        if requests[0].spec.whole:
            assignment = _make_whole(assignment)
        inherited = inherited or {}
        begun = {name: part.steps_done for name, part in inherited.items()}
        left_of = [
            request.spec.num_inference_steps - begun.get(request.spec.request_id, request.steps_done)
            for request in requests
        ]
        left = min(left_of)
        num_steps = left if assignment.num_steps is None else min(assignment.num_steps, left)
        finishing = left_of.count(num_steps)
        if inherited and not is_exact:  # some may have another number of steps left: C is a plan of its own
            finishing = min(finishing, len(requests) - 1)
        is_encoded = all(request.encoded or request.spec.request_id in inherited for request in requests)
        specs = [request.spec for request in requests]
        step_s = self._times.step_s(specs, len(assignment.diffuse))
        run = Run(
            run_id=self._ledger.make_id(),
            requests=requests,
            assignment=assignment,
            num_steps=num_steps,
            legs=merge_legs(assignment, not is_encoded, finishing),
            step_s=step_s,
            diffuse_end_s=now_s + num_steps * step_s,
            inherited=inherited,
            is_mixed=len({spec.shape for spec in specs}) > 1,
        )
        self._times.leg_s(run.legs[0], run, len(requests))
        if Stage.DIFFUSE not in run.legs[0].stages:
            encode_s = self._times.encode_s(specs, len(assignment.encode))
            free_s = max(self._pool.free_at_s(worker, now_s) for worker in assignment.encode)
            run.expect_diffuse_end(run.diffuse_end_s + (encode_s + free_s - now_s))
        after = [leg for leg in run.legs[1:] if Stage.DIFFUSE not in leg.stages]
        return run, [(leg, self._times.leg_s(leg, run, finishing)) for leg in after]

    def reserve(self, run: Run, promises: Sequence[tuple[Leg, float]]) -> None:
        """Keep the workers of a run's D for it, and take its later legs into account."""
        self._pool.reserve(run.assignment.diffuse, run.run_id, run.diffuse_end_s)
        for leg, seconds in promises:
            self._pool.promise(leg.workers, run.run_id, seconds)

    def send_leg(self, runs: Sequence[Run], leg: Leg, now_s: float, reason: str) -> list[ev.Effect]:
        """One plan: of one run, or E of several."""
        run = max(runs, key=lambda run: run.spec.num_outputs)
        diffuses = Stage.DIFFUSE in leg.stages
        members: list[PlanMember] = []
        for each in runs:
            members += each.take_members(leg)
        saves = self._checkpoints.choose_steps(run, leg.workers, leg.workers[0]) if diffuses else None
        plan = self.make_plan(run.spec.model, leg, members, run.predecessor, saves)
        self._ledger.begin_plan(plan, runs)
        self._encodes.note_sent(plan)
        expected_s = self._times.leg_s(leg, run, len(members))
        if diffuses:
            run.expect_diffuse_end(now_s + expected_s)
            run.open_from(now_s)
        elif leg.stages == (Stage.DECODE,):
            self._pool.release(run.workers, run.run_id)
        self._pool.start(plan, expected_s, now_s)
        return [ev.RunPlan(plan, reason)]

    def make_plan(
        self,
        model: str,
        leg: Leg,
        members: Sequence[PlanMember],
        predecessor: DispatchPlan | None,
        saves: CheckpointSteps | None = None,
    ) -> DispatchPlan:
        """The plan of a leg, which takes over its predecessor if it has one."""
        return DispatchPlan(
            plan_id=self._ledger.make_id(),
            model=model,
            stages=leg.stages,
            workers=leg.workers,
            members=tuple(members),
            group=self._pool.group_name(leg.workers) if len(leg.workers) > 1 else None,
            decode_degree=self._times.decode_degree(model, leg),
            saves=saves,
            takes_over=predecessor.plan_id if predecessor is not None else None,
        )


def _make_whole(assignment: Assignment) -> Assignment:
    """The assignment with all steps of D, and C behind them, whatever a policy that counts on segments has decided."""
    return replace(assignment, num_steps=None, decode=assignment.decode or assignment.diffuse[:1])
