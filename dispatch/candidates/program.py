"""The parts in which the program of one dispatcher's ticks differs from another's: the values of groups, and the
workers and requests that groups are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dispatch.candidates.candidate import Candidate
from dispatch.candidates.values import Appraisal, Pressure
from dispatch.candidates.work import Work
from dispatch.options import ValueOptions

# Called with the work, its candidates, the widest group of each pool, the time, the pressure, and the options of
# values.
AppraiseWork = Callable[[Work, Sequence[Candidate], Sequence[int], float, Pressure, ValueOptions], Appraisal]


def appraise_by_value(
    work: Work,
    candidates: Sequence[Candidate],
    idle: Sequence[int],
    now_s: float,
    pressure: Pressure,
    options: ValueOptions,
) -> Appraisal:
    """The default's values (`dispatch.candidates.values`)."""
    return Appraisal(candidates, idle, now_s, pressure, options)


@dataclass(frozen=True, slots=True)
class Program:
    """The parts of a tick's program that can be others. The defaults are those of the policy `default`."""

    appraise: AppraiseWork = appraise_by_value
    """Gives the values of groups for requests with some work."""
    order_share: float = 1e-4
    """The order of deadlines decides between requests that are worth the same to within this share, and nothing else.
    """
    per_node: bool = True
    """True: groups are counted by what the idle workers of each node can form. False: by all idle workers of a pool, so
    that a group may be chosen that no node has room for, and the request waits for the next tick."""
    urgent_decodes: bool = True
    """True: a C at an auxiliary is expected to go before all that wait there, as the scheduler has the most urgent one
    go first. False: after them."""
    batches_first: bool = False
    """True: requests that are alike are put into batches before the solve, which counts a batch as one request. False:
    requests that got no group join others after it."""


DEFAULT_PROGRAM = Program()
