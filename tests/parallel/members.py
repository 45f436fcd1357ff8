"""Real processes that run posted functions together: the members of the groups under test.

Starting a process with torch and diffusers costs seconds, so a module's tests share one pool. A function gets its
`Member` first, then the arguments; it must be at the top level of a module.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from profiler.measure.processes import choose_context, end_with_parent
from tests.support.processes import signals_of_a_terminal
from tests.support.waiting import PATIENCE_S
from tridentserve.parallel import SequenceGroup, connect_store, make_group
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.stages import Stage

CPU = torch.device("cpu")
# Nobody waits as long for an answer: where a group's time ran out, the test that waits for it has failed.
TIMEOUT_S = 2 * PATIENCE_S


@dataclass
class Member:
    """The values that one process keeps between the functions it runs. `rank`, `size` and `generation` are those of the
    posted call; in each generation the processes are the same."""

    store: Store
    rank: int = 0
    size: int = 1
    generation: int = 0
    groups: dict[str, SequenceGroup] = field(default_factory=dict)
    adapters: dict[Path, PipelineAdapter] = field(default_factory=dict)
    decoders: dict[Path, PipelineAdapter] = field(default_factory=dict)

    def group(self, name: str, timeout_s: float = TIMEOUT_S) -> SequenceGroup:
        """The group of this call's members."""
        key = f"{name}/{self.size}" + (f"/{self.generation}" if self.generation else "")
        if key not in self.groups:
            self.groups[key] = make_group(self.store, key, self.rank, self.size, CPU, timeout_s)
        return self.groups[key]

    def adapter(self, folder: Path) -> PipelineAdapter:
        if folder not in self.adapters:
            self.adapters[folder] = load_adapter(folder, frozenset({Stage.DIFFUSE}))
        return self.adapters[folder]


class Pool:
    """`size` processes, which the tests' own process serves the store for. They end with it, whatever ends it."""

    def __init__(self, size: int, device: torch.device = CPU) -> None:
        """`device` is of the kind that the functions compute on."""
        self._context = choose_context(device)
        self.store = connect_store(is_server=True)
        self._generation = 0
        self._members = [self._start() for _ in range(size)]

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """Run on the first `size` members together; what each returned, or the exception it raised."""
        self.post(function, size, *arguments)
        return self.results(range(size))

    def post(self, function: Callable[..., Any], size: int, *arguments: Any) -> None:
        for rank in range(size):
            self._members[rank][1].send((function, rank, size, self._generation, arguments))

    def results(self, ranks: Sequence[int]) -> list[Any]:
        results = []
        for rank in ranks:
            connection = self._members[rank][1]
            if not connection.poll(PATIENCE_S):
                raise TimeoutError(f"member {rank} has not answered")
            results.append(connection.recv())
        return results

    def kill(self, rank: int) -> None:
        process = self._members[rank][0]
        process.kill()
        process.join()

    def replace(self, rank: int) -> None:
        """A new process instead of one that was killed. It is in none of the groups that the others have: they make
        new ones."""
        self._generation += 1
        self._members[rank] = self._start()

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.join()

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self.store.port), daemon=True)
        with signals_of_a_terminal():
            process.start()
        theirs.close()
        return process, ours


def _serve(connection: Connection, store_port: int) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    member = Member(connect_store(port=store_port))
    while True:
        try:
            function, member.rank, member.size, member.generation, arguments = connection.recv()
        except EOFError:
            return
        try:
            result = function(member, *arguments)
        except Exception as error:
            error.add_note(traceback.format_exc())
            result = error
        connection.send(result)
