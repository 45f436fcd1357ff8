"""The differences between the policy `default` and the paper's, as switches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from tridentserve.errors import ConfigError

PAPER_POLICY = "tridentserve-paper"
_ALL = "all"
_NAME = re.compile(rf"{PAPER_POLICY}(?P<switches>([+-]\w+)+)")


@dataclass(frozen=True, slots=True)
class Deviations:
    """The ways in which a policy is the default and not the paper's. With none it is the policy `tridentserve-paper`;
    with all it decides as `default` does."""

    pooling: bool
    """All requests of a model use one virtual replica. The paper: each request its own first one."""
    together: bool
    """Every worker holds all stages where that serves at least as much. The paper: as Algorithm 2 says."""
    shares: bool
    """The virtual replicas of a model share its workers by the GPU-seconds of their requests. The paper: by the number
    of these. Models always share by GPU-seconds; the paper has one model at a time."""
    apart: bool
    """E and C may be plans of their own on the workers of D, with weights that leave and come back. The paper: a type
    without the memory for all of its stages at once is not used, unless nothing else would run the request."""
    values: bool
    """Groups are worth urgency x share per second, and a request with time to spare uses efficient ones. The paper: the
    rewards of appendix C.2."""
    calm: bool
    """While nothing is lost, values go by the deadline alone. It says nothing without `values`, and the paper has no
    such rule."""
    degrees: bool
    """A request has any degree that meets its deadline. The paper: efficient degrees only (constraint C0)."""
    hopeless: bool
    """Requests that cannot be in time run at their optimal degree alone. The paper: at any efficient one."""
    foresight: bool
    """The time to the end counts stages on auxiliaries, the queues there, transfers and loads of weights, and a request
    waits for busy workers with which it can be in time. The paper: the runtime of the stages on the primary, now."""
    nodes: bool
    """The program counts the groups that each node can form. The paper: idle workers of the whole cluster (C2); a group
    that no node has room for waits for the next tick."""
    segments: bool
    """D is assigned for about a second at a time. The paper: to its end."""
    reserve: bool
    """Workers are kept free for requests that cannot wait until long steps end. The paper keeps none."""
    gathering: bool
    """Idle workers of a node may wait for its others, so that a request gets several at once. The paper: idle workers
    are given away at each tick."""
    overdue: bool
    """The longest overdue request goes first. The paper: late requests compete by their rewards."""
    batches: bool
    """Requests run alone unless `max_batch` says otherwise, and then those that got no group join others after the
    solve. The paper: batches of the optimal size of D are formed before it (appendix E.1)."""
    decode: bool
    """C is bound to an auxiliary when D has ended, the most urgent first. The paper: it waits at the one that was
    chosen with D, first in, first out."""

    @property
    def name(self) -> str:
        """The name of the policy with these deviations, which `parse_deviations` understands."""
        on = [name for name in NAMES if getattr(self, name)]
        if len(on) * 2 <= len(NAMES):
            return PAPER_POLICY + "".join(f"+{name}" for name in on)
        return f"{PAPER_POLICY}+{_ALL}" + "".join(f"-{name}" for name in NAMES if name not in on)


NAMES = tuple(field.name for field in fields(Deviations))
NO_DEVIATION = Deviations(**dict.fromkeys(NAMES, False))
EVERY_DEVIATION = Deviations(**dict.fromkeys(NAMES, True))


def list_alone() -> Iterator[tuple[str, Deviations]]:
    """Each deviation alone, with its name."""
    return ((name, replace(NO_DEVIATION, **{name: True})) for name in NAMES)


def list_without() -> Iterator[tuple[str, Deviations]]:
    """All deviations but one, with its name."""
    return ((name, replace(EVERY_DEVIATION, **{name: False})) for name in NAMES)


def is_variant(policy: str) -> bool:
    """True for a name such as `tridentserve-paper+values+segments` or `tridentserve-paper+all-reserve`."""
    return _NAME.fullmatch(policy) is not None


def parse_deviations(policy: str) -> Deviations:
    """The deviations that a name states, from left to right. Raises `ConfigError` for one that does not exist."""
    match = _NAME.fullmatch(policy)
    found = NO_DEVIATION
    for sign, name in re.findall(r"([+-])(\w+)", match["switches"] if match is not None else ""):
        if name == _ALL:
            found = EVERY_DEVIATION if sign == "+" else NO_DEVIATION
        elif name in NAMES:
            found = replace(found, **{name: sign == "+"})
        else:
            raise ConfigError(f"policy {policy!r}: {name!r} is no deviation; use {_ALL}, {', '.join(NAMES)}")
    return found
