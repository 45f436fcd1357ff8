"""Steps of requests of several sizes on several workers: each on a ring of its own, and padded to the longest on one
ring of all."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import torch

from lib.steps.packed_mixes import prepare_state
from profiler.measure.processes import choose_context
from tridentserve.models.model_folder import find_shipped_model
from tridentserve.parallel import connect_store, make_group, sequence_parallel
from tridentserve.parallel.collectives import CollectiveGroup
from tridentserve.pipelines import PipelineAdapter, load_adapter
from tridentserve.stages import Stage

_TIMEOUT_S = 600.0
# No even number of workers divides them, so that attention is a ring of all workers.
_HEADS = 3
# Without a second pass, which workers would share out instead.
_GUIDANCE_SCALE = 1.0


class _CountingGroup(CollectiveGroup):
    """A group that counts the bytes that this member sends to others."""

    def __init__(self, group: CollectiveGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.sent_bytes = 0

    def start_all_to_all_into(
        self, received: torch.Tensor, received_sizes: Sequence[int], sent: torch.Tensor, sent_sizes: Sequence[int]
    ) -> Callable[[], None]:
        numbers = sum(size for rank, size in enumerate(sent_sizes) if rank != self.rank)
        self.sent_bytes += numbers * sent.element_size()
        return self._group.start_all_to_all_into(received, received_sizes, sent, sent_sizes)


def make_model_for_rings(folder: Path) -> Path:
    """The shipped `shapes` with a transformer of random weights that has three heads, in `folder`."""
    shutil.copytree(find_shipped_model("shapes"), folder)
    target = folder / "transformer"
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config = {name: value for name, value in config.items() if not name.startswith("_")}
    channels = config["num_attention_heads"] * config["attention_head_dim"]
    config |= {"num_attention_heads": _HEADS, "attention_head_dim": channels // _HEADS}
    shutil.rmtree(target)
    torch.manual_seed(0)
    diffusers.SD3Transformer2DModel(**config).save_pretrained(target)
    return folder


def measure_rings(folder: Path, mixes: Sequence[Sequence[int]], workers: int, rounds: int) -> list[dict[str, Any]]:
    """Measure a step of each mix of sides (in pixels) in both ways, by turns, on so many workers of a CPU thread each.
    In the padded way all requests have the largest side, which is what padding makes of them."""
    store = connect_store(is_server=True)
    with ProcessPoolExecutor(workers, mp_context=choose_context(torch.device("cpu"))) as pool:
        runs = [pool.submit(_run_rank, folder, mixes, rank, workers, store.port, rounds) for rank in range(workers)]
        ranks = [run.result() for run in runs]
    return [_summarize(mix, [rank[index] for rank in ranks]) for index, mix in enumerate(mixes)]


def _run_rank(
    folder: Path, mixes: Sequence[Sequence[int]], rank: int, workers: int, port: int, rounds: int
) -> list[dict[str, list[tuple[float, int]]]]:
    """The seconds, and the bytes that this worker sends, of each measured step of each mix in each way."""
    torch.set_num_threads(1)
    adapter = load_adapter(folder, frozenset(Stage))
    group = make_group(connect_store(port=port), "rings", rank, workers, torch.device("cpu"), _TIMEOUT_S)
    measured = []
    for mix in mixes:
        samples: dict[str, list[tuple[float, int]]] = {"bricks": [], "padded": []}
        for _ in range(rounds + 1):
            for way, sides in (("bricks", list(mix)), ("padded", [max(mix)] * len(mix))):
                samples[way].append(_step(adapter, group, sides))
        measured.append({way: each[1:] for way, each in samples.items()})  # the first round warms up
    return measured


def _step(adapter: PipelineAdapter, group: CollectiveGroup, sides: Sequence[int]) -> tuple[float, int]:
    states = [prepare_state(adapter, side, number, 1, _GUIDANCE_SCALE) for number, side in enumerate(sides)]
    counting = _CountingGroup(group)
    counting.all_gather(torch.zeros(1), [(1,)] * group.size)  # all begin at once
    counting.sent_bytes = 0
    began_s = time.perf_counter()
    with sequence_parallel(counting):
        adapter.advance(states)
    return time.perf_counter() - began_s, counting.sent_bytes


def _summarize(mix: Sequence[int], ranks: Sequence[dict[str, list[tuple[float, int]]]]) -> dict[str, Any]:
    rounds = range(len(ranks[0]["bricks"]))
    seconds = {way: [max(rank[way][index][0] for rank in ranks) for index in rounds] for way in ranks[0]}
    sent = {way: sum(rank[way][0][1] for rank in ranks) for way in ranks[0]}
    ratios = [one / other for one, other in zip(seconds["bricks"], seconds["padded"], strict=True)]
    return {
        "sides": list(mix),
        "workers": len(ranks),
        "step_s": statistics.median(seconds["bricks"]),
        "time_over_padded": statistics.median(ratios),
        "time_over_padded_range": [min(ratios), max(ratios)],
        "sent_bytes": sent["bricks"],
        "sent_over_padded": sent["bricks"] / sent["padded"],
    }
