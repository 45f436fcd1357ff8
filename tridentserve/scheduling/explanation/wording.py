"""Explanations in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tridentserve.scheduling.explanation.explanation import Cause, ExplainedPlan, ExplainedWait, Explanation, Rerun

# Stretches of waiting, and of running on the same workers, that are told one by one at most.
_MOST_WAITS = 8
_MOST_PLANS = 6
_LEAST_SHARE = 0.01


def write_text(explanation: Explanation) -> str:
    """All that is known of the request, in lines."""
    return "\n".join(
        [
            _tell_end(explanation),
            *_tell_plans(explanation),
            *_tell_waits(explanation),
            *_tell_causes(explanation),
            *_tell_what_ifs(explanation),
            *_tell_trust(explanation),
        ]
    )


def _tell_end(each: Explanation) -> str:
    steps = f"{each.num_inference_steps} step{'s' if each.num_inference_steps != 1 else ''}"
    name = f"{each.request_id} ({each.model}, {each.size}, {steps})"
    if each.latency_s is None:
        return f"{name} has not ended."
    if each.outcome != "finished":
        return f"{name} ended without a result after {each.latency_s:.2f} s: {each.outcome}, {each.reason}."
    if each.slo_s is None or each.late_s is None:
        return f"{name} took {each.latency_s:.2f} s."
    verdict = f"{each.late_s:.2f} s late" if each.late_s > 0 else "on time"
    return f"{name} was {verdict}: it took {each.latency_s:.2f} s and had {each.slo_s:.2f} s."


def _tell_plans(each: Explanation) -> Iterator[str]:
    """Where, when and how wide it ran: plans in a row on the same workers are one line."""
    if not each.plans:
        yield "It never ran."
        return
    yield "Where and when it ran, in seconds from its arrival:"
    groups = [list(group) for _, group in groupby(each.plans, key=lambda plan: (plan.stages, plan.workers))]
    hidden = groups[_MOST_PLANS - 2 : -1] if len(groups) > _MOST_PLANS else []
    for plans in groups:
        if plans in hidden:
            if plans is hidden[0]:
                yield f"- and {len(hidden)} times on other workers"
            continue
        stages, workers = plans[0].stages, plans[0].workers
        where = f"{_join(workers)} ({_count(len(workers), 'worker')})"
        yield f"- {stages} on {where}, {_tell_time(plans)}{_tell_why(plans)}"


def _tell_time(plans: Sequence[ExplainedPlan]) -> str:
    start_s = plans[0].sent_s if plans[0].start_s is None else plans[0].start_s
    end_s = plans[-1].end_s
    parts = f" in {len(plans)} parts" if len(plans) > 1 else ""
    until = f"from {start_s:.2f} to {end_s:.2f}" if end_s is not None else f"since {start_s:.2f}"
    shared = sorted({name for plan in plans for name in plan.shared_with})
    together = f", together with {_join(shared)}" if shared else ""
    ends = [plan.outcome for plan in plans if plan.outcome in ("yielded", "stopped", "failed")]
    return f"{until}{parts}{together}{f', then {ends[-1]}' if ends else ''}"


def _tell_why(plans: Sequence[ExplainedPlan]) -> str:
    return f' (the scheduler: "{plans[0].reason}")' if plans[0].reason else ""


def _tell_waits(each: Explanation) -> Iterator[str]:
    if each.latency_s is None or not each.waits:
        return
    total_s = sum(wait.end_s - wait.start_s for wait in each.waits)
    long = [wait for wait in each.waits if wait.end_s - wait.start_s >= _LEAST_SHARE * each.latency_s]
    longest = sorted(long, key=lambda wait: wait.start_s - wait.end_s)[:_MOST_WAITS]
    listed = [
        f"- {wait.start_s:.2f} to {wait.end_s:.2f}: {_name_wait(wait)}"
        for wait in sorted(longest, key=lambda wait: wait.start_s)
    ]
    rest_s = total_s - sum(wait.end_s - wait.start_s for wait in longest)
    if rest_s > _LEAST_SHARE * each.latency_s:
        listed.append(f"- {rest_s:.2f} s in shorter stretches")
    listed += [f"- at {time_s:.2f} it had to wait again: {reason}" for time_s, reason in each.requeues]
    yield f"It computed for {each.computing_s:.2f} s and waited for {total_s:.2f} s{':' if listed else '.'}"
    yield from listed


def _name_wait(wait: ExplainedWait) -> str:
    verb = "was" if len(wait.workers) == 1 else "were"
    match wait.kind:
        case "busy":
            holders = f" with {_join(wait.request_ids)}" if wait.request_ids else ""
            return f"{_join(wait.workers)} {verb} busy{holders}"
        case "wider":
            return (
                f"fewer workers were free than the {len(wait.workers)} it ran on; others had {_join(wait.request_ids)}"
            )
        case "cores":
            return f"the cores of its node were taken, by {_join(wait.request_ids)}"
        case "held back":
            return f"{_join(wait.workers)} {verb} free, and the policy did not start it"
        case "loading":
            return f"{_join(wait.workers)} loaded weights"
        case "starting":
            return "its inputs and its plan reached the workers"
        case "reporting":
            return "its result was made ready and reported"


def _tell_causes(each: Explanation) -> Iterator[str]:
    if each.late_s is not None and each.late_s <= 0:
        return
    unchecked = [cause for cause in each.causes if cause.without is None]
    verified = [cause for cause in each.causes if cause.verified]
    others = [cause for cause in each.causes if cause.without is not None and not cause.verified]
    if verified:
        yield "Why it took so long; the log was run again without each:"
        yield from (f"- {_name_cause(cause, each)}; {_tell_check(cause)}" for cause in verified)
    if unchecked:
        yield "What it may be due to, not checked:"
        yield from (f"- {_name_cause(cause, each)}" for cause in unchecked)
    if others:
        yield "Looked at too, and no cause:"
        yield from (f"- {_name_cause(cause, each)}; {_tell_check(cause)}" for cause in others)


def _name_cause(cause: Cause, each: Explanation) -> str:
    match cause.kind:
        case "request":
            return f"it waited {cause.seconds:.2f} s for {cause.request_id} to be done"
        case "load":
            return f"it waited {cause.seconds:.2f} s in all for other requests to be done"
        case "order":
            return f"the policy let it wait {cause.seconds:.2f} s for later ones, or while workers were free"
        case "loading":
            return f"weights were loaded for {cause.seconds:.2f} s"
        case "overheads":
            return f"handing over, starting and reporting took {cause.seconds:.2f} s"
        case "own time":
            return f"its stages alone took {cause.seconds:.2f} s, longer than the {each.slo_s or 0.0:.2f} s it had"


def _tell_check(cause: Cause) -> str:
    assert cause.without is not None
    return f"{cause.without.change} {_tell_rerun(cause.without)}"


def _tell_what_ifs(each: Explanation) -> Iterator[str]:
    if each.what_ifs:
        yield "Other changes:"
    for rerun in each.what_ifs:
        yield f"- {rerun.change}: {_tell_rerun(rerun)}"


def _tell_rerun(rerun: Rerun) -> str:
    if rerun.latency_s is None or rerun.gain_s is None:
        return "it does not finish"
    verdict = {True: ", on time", False: ", still late", None: ""}[rerun.on_time]
    if not rerun.is_certain and abs(rerun.gain_s) < 0.005:
        return f"it ends at the same time{verdict}"
    sooner = "sooner" if rerun.gain_s >= 0 else "later"
    return f"it ends {abs(rerun.gain_s):.2f} s {sooner}, after {rerun.latency_s:.2f} s{verdict}"


def _tell_trust(each: Explanation) -> Iterator[str]:
    if each.deviation_s is not None:
        trust = "the changes are as good as that" if each.is_close else "take the changes as estimates of that accuracy"
        yield f"Run again without a change it ends within {abs(each.deviation_s):.2f} s of when it did: {trust}."
    if each.not_run:
        yield f"Not run again: {each.not_run}."


def _join(names: Sequence[str]) -> str:
    shown = list(names[:6])
    more = len(names) - len(shown)
    return "+".join(shown) + (f" and {more} more" if more else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
