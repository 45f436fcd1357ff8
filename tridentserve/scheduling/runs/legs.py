"""The plans of an assignment that are still to come."""

from __future__ import annotations

from dataclasses import dataclass

from tridentserve.plans import WorkerId
from tridentserve.protocols import Assignment
from tridentserve.stages import Stage


@dataclass(frozen=True, slots=True)
class Leg:
    """Consecutive stages of a run on one set of workers: a dispatch plan that is not due yet."""

    stages: tuple[Stage, ...]
    workers: tuple[WorkerId, ...]
    """In rank order."""


def merge_legs(assignment: Assignment, needs_encode: bool, finishing: int) -> list[Leg]:
    """Merge consecutive stages that have the same workers ("merging execute", section 5.2).

    `finishing`: how many members reach their last step. C of some members only is a plan of its own, and so are the
    stages that the assignment keeps apart.
    """
    legs: list[Leg] = []
    for stage, workers in (
        (Stage.ENCODE, assignment.encode if needs_encode else ()),
        (Stage.DIFFUSE, assignment.diffuse),
        (Stage.DECODE, assignment.decode if finishing else ()),
    ):
        is_for_all = stage is not Stage.DECODE or finishing == len(assignment.request_ids)
        if not workers:
            continue
        may_merge = is_for_all and not assignment.apart.intersection((stage, *(legs[-1].stages if legs else ())))
        if legs and legs[-1].workers == workers and may_merge:
            legs[-1] = Leg((*legs[-1].stages, stage), workers)
        else:
            legs.append(Leg((stage,), workers))
    return legs
