"""The processes of the profiler: one per rank, kept for all points, joined by gloo (CPU) or NCCL (CUDA) per point."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.context import ForkServerContext, SpawnContext

import torch

from profiler.measure.checks import ProfilePoint, explain_too_large
from profiler.measure.stages import (
    MeasuredMember,
    Sample,
    Source,
    build_inputs,
    compute_condition,
    count_steps,
    release,
    sample_decode,
    sample_diffuse,
    sample_encode,
    set_up_process,
)
from tridentserve.device import find_device
from tridentserve.device.memory_errors import is_out_of_memory
from tridentserve.errors import ProfileError
from tridentserve.parallel import connect_store
from tridentserve.requests import GenerationInputs, Shape
from tridentserve.stages import Stage

# The beginning of the reason of a point for which the device has no room.
OUT_OF_MEMORY = "out of memory"
_NO_CONDITION = "its encode stage could not be measured"


class Processes:
    """One process per rank above 0; rank 0 and degree 1 run in this process."""

    def __init__(self, source: Source, max_degree: int, repeats: int, num_threads: int) -> None:
        self._source = _move_to_rank(source, 0)
        self._repeats = repeats
        self._stack = ExitStack()
        self._store = connect_store(is_server=True)
        self._groups_made = 0
        context = choose_context(torch.device(source.device))
        self._ranks = [
            self._stack.enter_context(ProcessPoolExecutor(1, context, initializer=_start_rank, initargs=(num_threads,)))
            for _ in range(1, max_degree)
        ]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        release()
        self._stack.close()

    def take_samples(
        self, wanted: Sequence[ProfilePoint], admit: Callable[[ProfilePoint], str | None]
    ) -> Iterator[tuple[ProfilePoint, Sample | str]]:
        """Measure points, given stage by stage. What cannot be measured gives the reason instead of a sample, and so
        does what `admit` gives one for when its turn has come."""
        conditions: dict[Shape, bytes] = {}
        without_condition: set[Shape] = set()
        stage = Stage.ENCODE
        for point in wanted:
            if point.stage is not stage:
                stage = point.stage
                self._free_ranks()
                # Now, while no other stage needs the memory.
                self._add_conditions(conditions, {later.shape for later in wanted} - without_condition)
            if (reason := explain_too_large(self._source, point.shape)) is not None:
                yield point, reason
                continue
            if stage is not Stage.ENCODE and point.shape not in conditions:
                yield point, _NO_CONDITION
                continue
            if (reason := admit(point)) is not None:
                yield point, reason
                continue
            try:
                yield point, self._sample(point, conditions)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if stage is Stage.ENCODE and point.batch == 1 and self._source.condition_folder is None:
                    without_condition.add(point.shape)
                yield point, f"{OUT_OF_MEMORY} ({str(error).partition('. ')[0]})"

    def _add_conditions(self, conditions: dict[Shape, bytes], shapes: set[Shape]) -> None:
        for shape in sorted(shapes - set(conditions)):
            if explain_too_large(self._source, shape) is None:
                with _silence_memory_errors():
                    conditions[shape] = compute_condition(self._source, self._build_inputs(shape), cheap=True)

    def _sample(self, point: ProfilePoint, conditions: dict[Shape, bytes]) -> Sample:
        """Measure one point. The condition of its shape is added by ENCODE and used by the others."""
        inputs = self._build_inputs(point.shape, count_steps(self._repeats) if point.stage is Stage.DIFFUSE else 2)
        if point.stage is Stage.ENCODE:
            sample = sample_encode(self._source, inputs, self._repeats, point.batch)
            if point.shape not in conditions:
                conditions[point.shape] = compute_condition(self._source, inputs)
            return sample
        run = sample_decode if point.stage is Stage.DECODE else sample_diffuse
        return self._run_together(run, point, inputs, conditions[point.shape])

    def _build_inputs(self, shape: Shape, steps: int = 2) -> GenerationInputs:
        return build_inputs(self._source, shape, steps)

    def _run_together(
        self, run: Callable[..., Sample], point: ProfilePoint, inputs: GenerationInputs, condition: bytes
    ) -> Sample:
        """A point of D or C, by as many processes as its degree says."""
        if point.degree == 1:
            return run(self._source, inputs, condition, self._repeats, point.batch)
        self._groups_made += 1
        group, degree = f"profile-{self._groups_made}", point.degree
        members = [MeasuredMember(self._store.port, group, rank, degree) for rank in range(degree)]
        futures = [
            self._ranks[member.rank - 1].submit(
                run, _move_to_rank(self._source, member.rank), inputs, condition, self._repeats, point.batch, member
            )
            for member in members[1:]
        ]
        try:
            leader = run(self._source, inputs, condition, self._repeats, point.batch, members[0])
            peaks = [leader.peak_bytes, *(future.result().peak_bytes for future in futures)]
        except Exception as error:
            # All ranks must be done before the next point; and of their errors, the others follow a lack of memory.
            errors = [error, *(future.exception() for future in futures)]
            if any(isinstance(failure, BrokenProcessPool) for failure in errors):
                raise ProfileError(f"a process of degree {degree} died at {point}; see the system's log") from error
            raise next((failure for failure in errors if failure and is_out_of_memory(failure)), error) from None
        return replace(leader, peak_bytes=max(peaks))

    def _free_ranks(self) -> None:
        for future in [rank.submit(release) for rank in self._ranks]:
            future.result()


def choose_context(device: torch.device) -> ForkServerContext | SpawnContext:
    """The way in which processes are started that compute on devices of this kind: forked from one that has imported
    torch and diffusers, which takes them a tenth of the time. Those with a GPU import all by themselves: what the
    imports do to CUDA before a fork was not tried."""
    if not find_device(device).is_host:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["profiler.measure.stages"])
    return context


def end_with_parent() -> None:
    """End this process, which multiprocessing started, as soon as its parent has ended, however it ended.

    A killed parent cannot stop its processes, and a process that itself holds the other end of its queue never sees
    that nobody is left to write to it.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process is not started by multiprocessing"

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def _start_rank(num_threads: int) -> None:
    end_with_parent()
    set_up_process(num_threads)


def _move_to_rank(source: Source, rank: int) -> Source:
    """One GPU per rank; ranks on the CPU share it."""
    return replace(source, device=find_device(source.device).find_of_rank(rank))


@contextmanager
def _silence_memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
