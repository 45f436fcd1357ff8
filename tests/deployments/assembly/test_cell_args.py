"""The configuration of one cell: its nodes, its models, and its share of what is limited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.assembly.cell_args import name_workers, take_cell
from deployments.assembly.planning import list_service_workers, list_workers
from deployments.config.app import AppArgs
from deployments.config.live import apply_user_config, name_scheduler
from deployments.validation.args import check_args
from tests.deployments.serve.two_cells import TWO_CELLS, make_two_cells

FLUX = {"name": "tiny-flux", "tiny": "flux", "cells": [1]}
SD3 = TWO_CELLS["models"][0]


def test_one_cell_is_the_service() -> None:
    args = make_two_cells(scheduler={"cells": 1})
    assert take_cell(args, 0) is args
    assert name_workers(args, 0) == ""


def test_a_cell_is_a_service_by_itself(tmp_path: Path) -> None:
    args = make_two_cells(
        models=[SD3, FLUX],
        placement=[{"tiny-sd3": "EDC"}] * 2 + [{"tiny-sd3": "EDC", "tiny-flux": "EDC"}, {"tiny-sd3": "D"}],
        dispatch={"request_weights": {"tiny-sd3": 2.0, "tiny-flux": 1.0}, "fair_shares": {"tiny-flux": 1.0}},
        max_queued_requests=7,
        decision_log=str(tmp_path / "log.jsonl"),
    )
    cells = [take_cell(args, number) for number in range(2)]
    assert [[model.name for model in cell.models] for cell in cells] == [["tiny-sd3"], ["tiny-sd3", "tiny-flux"]]
    assert [cell.cluster.num_workers for cell in cells] == [2, 2]
    assert cells[0].placement == args.placement[:2]
    assert cells[1].placement == args.placement[2:]
    assert [cell.max_queued_requests for cell in cells] == [4, 4]
    assert [cell.dispatch.request_weights for cell in cells] == [{"tiny-sd3": 2.0}, {"tiny-sd3": 2.0, "tiny-flux": 1.0}]
    assert [cell.dispatch.fair_shares for cell in cells] == [None, {"tiny-flux": 1.0}]
    logs = [tmp_path / f"log.cell{number}.jsonl" for number in (0, 1)]
    assert [cell.decision_log for cell in cells] == logs
    for cell in cells:
        # What a cell is given can be written down as a configuration.
        assert AppArgs.model_validate(cell.model_dump(exclude_unset=True)) == cell
        assert cell.scheduler.cells == 1
    ids = [
        worker.worker_id
        for number, cell in enumerate(cells)
        for worker in list_workers(cell, ["a", "a"], name_workers(args, number))
    ]
    assert ids == ["c0n0w0", "c0n0w1", "c1n0w0", "c1n0w1"]


@given(st.integers(1, 40), st.integers(1, 4), st.data())
def test_no_worker_is_lost_and_none_is_in_two_cells(nodes: int, per_node: int, data: st.DataObject) -> None:
    num_cells = data.draw(st.integers(1, nodes))
    cluster = {"nodes": nodes, "workers_per_node": per_node, "memory_mb": 512}
    args = make_two_cells(cluster=cluster, scheduler={"cells": num_cells}, placement=["EDC"] * nodes * per_node)
    cells = [take_cell(args, number) for number in range(num_cells)]
    assert sum(cell.cluster.num_workers for cell in cells) == nodes * per_node
    assert all(len(cell.placement) == len(list_service_workers(cell)) for cell in cells)
    assert max(cell.cluster.nodes for cell in cells) - min(cell.cluster.nodes for cell in cells) <= 1


def test_a_user_config_moves_a_model_to_other_cells() -> None:
    args = make_two_cells()
    placement = [{"tiny-sd3": "EDC", "tiny-flux": "EDC"}, {"tiny-sd3": "EDC"}] + [{"tiny-sd3": "EDC"}] * 2
    moved = apply_user_config(args, {"models": [SD3, {**FLUX, "cells": [0]}], "placement": placement})
    assert [[model.name for model in take_cell(moved, number).models] for number in (0, 1)] == [
        ["tiny-sd3", "tiny-flux"],
        ["tiny-sd3"],
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"scheduler": {"cells": 3}}, r"scheduler\.cells: 3 is more than cluster\.nodes \(2\): a cell has whole nodes"),
        ({"scheduler": {"cells": 0}}, "scheduler"),
        ({"models": [{**SD3, "cells": [0, 1, 2]}]}, r"models\[0\]\.cells: there is no cell 2; .* from 0 to 1"),
        ({"models": [SD3, {**FLUX, "cells": []}]}, r"cells"),
        ({"models": [{**SD3, "cells": [0]}]}, r"models\[0\]\.cells: the first model is the default"),
        ({"placement": ["EDC"] * 3}, r"placement: lists 3 workers and there are 4"),
    ],
)
def test_cells_that_cannot_be(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        make_two_cells(**changes)


def test_a_problem_of_one_cell_is_reported_with_its_number(tmp_path: Path) -> None:
    args = {**TWO_CELLS, "models": [{**SD3, "limits": {"max_side": 512}}], "cache_dir": str(tmp_path)}
    assert check_args(args) == []
    (problem,) = check_args({**args, "placement": ["EDC", "EDC", "D", "D"]})
    assert problem.startswith("args.placement: ")
    assert problem.endswith("(cell 1)")


def test_the_first_scheduler_has_the_name_that_it_has_alone() -> None:
    assert [name_scheduler(cell) for cell in range(3)] == ["Scheduler", "Scheduler-1", "Scheduler-2"]
