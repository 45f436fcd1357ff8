"""The ways by which each worker comes to each of its stages before it takes requests."""

from __future__ import annotations

from collections.abc import Sequence

from tridentserve.engine.live.warming.warm_up_runs import (
    WarmUpOrder,
    WarmUpPhase,
    WarmUpRun,
    join_on_nodes,
    list_first_phases,
    list_runs_again,
)
from tridentserve.plans import FIRST_WARM_UP_ID, PlanMember, Replica, WorkerId
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.scheduling.estimation.hot_groups import HotGroup
from tridentserve.stages import Stage

E, D, C = Stage.ENCODE, Stage.DIFFUSE, Stage.DECODE
SMALL, LARGE = (GenerationInputs("a lighthouse", Shape(side, side), 2, 1.0, 0) for side in (64, 512))
PAIR = HotGroup("pair", ("w0", "w1"))


def make_order(*degrees: int, is_compiled: bool = False) -> WarmUpOrder:
    return WarmUpOrder("m", (SMALL, LARGE), degrees, is_compiled)


def hold(**stages: str) -> dict[WorkerId, frozenset[Replica]]:
    letters = {stage.letter: stage for stage in Stage}
    return {worker: frozenset(Replica("m", letters[letter]) for letter in held) for worker, held in stages.items()}


def on_nodes(*workers: WorkerId, node: str = "n") -> dict[WorkerId, str]:
    return dict.fromkeys(workers, node)


def describe(run: WarmUpRun) -> str:
    legs = ("".join(stage.letter for stage in leg.stages) + "@" + "+".join(leg.workers) for leg in run.legs)
    return " ".join(legs)


def describe_phases(phases: Sequence[WarmUpPhase]) -> list[list[str]]:
    """The way of each sequence, which is the same for all of its sizes."""
    for phase in phases:
        for runs in phase:
            assert [run.inputs for run in runs] == [SMALL, LARGE]
            assert len({describe(run) for run in runs}) == 1
    return [[describe(runs[0]) for runs in phase] for phase in phases]


def test_workers_with_all_stages_run_them_alone_and_then_in_their_groups() -> None:
    held, nodes = hold(w0="EDC", w1="EDC"), on_nodes("w0", "w1")
    phases = list_first_phases([make_order(1, 2)], held, nodes, [PAIR])
    assert describe_phases(phases) == [["EDC@w0", "EDC@w1"], ["EDC@w0+w1"]]
    assert describe_phases(list_first_phases([make_order(1)], held, nodes, [PAIR])) == [["EDC@w0", "EDC@w1"]]
    wide = list_first_phases([make_order(2)], held, nodes, [PAIR])
    assert describe_phases(wide) == [["EDC@w0+w1"], ["E@w1", "ED@w0+w1 C@w1"]], "who leads no group runs E and C too"


def test_one_worker_of_each_node_compiles_before_the_others() -> None:
    held = hold(w0="EDC", w1="EDC", w2="EDC", w3="EDC")
    nodes = {**on_nodes("w0", "w1"), **on_nodes("w2", "w3", node="other")}
    phases = list_first_phases([make_order(1, is_compiled=True)], held, nodes, [])
    assert describe_phases(phases) == [["EDC@w0", "EDC@w2"], ["EDC@w1", "EDC@w3"]]


def test_beside_requests_the_workers_of_a_node_take_turns() -> None:
    held = hold(w0="EDC", w1="EDC", w2="EDC")
    nodes = on_nodes("w0", "w1") | on_nodes("w2", node="other")
    (phase,) = list_first_phases([make_order(1)], held, nodes, [])
    calm = join_on_nodes(phase, nodes)
    assert [[describe(run) for run in runs] for runs in calm] == [["EDC@w0"] * 2 + ["EDC@w1"] * 2, ["EDC@w2"] * 2]


def test_stages_on_other_workers_are_reached_through_handoffs() -> None:
    held = hold(w0="D", w1="D", e="E", c="C", far="EC")
    nodes = {**on_nodes("w0", "w1", "e", "c"), "far": "other"}
    phases = list_first_phases([make_order(1, 2)], held, nodes, [PAIR])
    assert describe_phases(phases) == [
        ["E@e D@w0 C@c", "E@e D@w1 C@c"],
        ["E@e D@w0+w1 C@c"],
        ["E@far", "E@e D@w1 C@far"],
    ]


def test_what_has_no_way_is_left_out() -> None:
    assert list_first_phases([make_order(1)], hold(w0="DC"), on_nodes("w0"), []) == []
    assert list_first_phases([], hold(w0="EDC"), on_nodes("w0"), []) == []
    no_sizes = WarmUpOrder("m", (), (1,), is_compiled=True)
    assert list_first_phases([no_sizes], hold(w0="EDC"), on_nodes("w0"), []) == []


def test_a_worker_that_comes_back_asks_others_for_e_alone() -> None:
    held, nodes = hold(w0="D", w1="EDC", c="C", e="E"), on_nodes("w0", "w1", "c", "e")
    orders = [make_order(1, 2)]

    def again(worker_id: WorkerId) -> list[list[str]]:
        runs = list_runs_again(orders, held, nodes, worker_id)
        return describe_phases([(runs,)] if runs else [])

    assert again("w0") == [["E@w1 D@w0"]]
    assert again("w1") == [["EDC@w1"]]
    assert again("e") == [["E@e"]]
    assert again("c") == []


def test_the_plans_of_a_run_hand_their_outputs_on() -> None:
    held, nodes = hold(w0="ED", w1="D", c="C"), on_nodes("w0", "w1", "c")
    ((_, large),) = list_first_phases([make_order(2)], held, nodes, [PAIR])[0]
    first, last = large.make_plans("r", FIRST_WARM_UP_ID)
    assert (first.stages, first.workers, first.group) == ((E, D), ("w0", "w1"), "pair")
    assert first.members == (PlanMember("r", steps=(0, 2), push_to="c"),)
    assert (last.stages, last.workers, last.group) == ((C,), ("c",), None)
    assert last.members == (PlanMember("r", input_id=first.plan_id, source="w0"),)
    assert first.is_warm_up
    assert last.is_warm_up
    assert large.workers == ("w0", "w1", "c")
