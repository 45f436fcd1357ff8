"""The cost model: stage times and memory from profile tables, corrected by what stages really take."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from profiler.memory import MemoryTable
from profiler.packed_cost import PackedCost, fit_packed_cost
from profiler.tables.device_profile import DeviceProfile
from profiler.tables.links import LinkSpeeds
from profiler.tables.rows import ProfileRow, ProfileTable, WeightsRow, collect_rows
from tridentserve.errors import ProfileError
from tridentserve.plans import Replica
from tridentserve.protocols import LoadSource
from tridentserve.requests import Shape
from tridentserve.stages import Stage
from tridentserve.weights_share import LayerSizes, WeightsShare

# A degree is efficient while T(1) / (k T(k)) stays above this (TridentServe, arXiv 2510.02838, section 6.2). For a size
# that degree 1 does not cover, the narrowest degree k0 that does stands in: T(k0) k0 / (k T(k)).
EFFICIENCY_THRESHOLD = 0.8
# A batch is worth it while it takes less than this many times what one output takes (appendix E.1).
BATCH_LATENCY_GROWTH = 1.2
# The largest batch that is profiled, and formed, where nobody names another. The paper and the related systems name no
# limit beside the optimal batch.
LARGEST_BATCH = 8
# Weight of the newest observation, and the furthest a correction may move a table: one stalled run must not make a
# size look unservable, yet a table from another machine has to converge.
OBSERVATION_WEIGHT = 0.2
MAX_CORRECTION = 32.0
# Points are remembered, up to this many: a service can be asked for any size.
_MAX_REMEMBERED = 100_000

# Sizes as plain numbers, and stages by identity: their own hashes run in Python and would take most of a call.
_DIFFUSE, _DECODE = Stage.DIFFUSE, Stage.DECODE
_Point = tuple[str, int, int, int, int, int]
_OctaveKey = tuple[str, Stage, int]


@dataclass(slots=True)
class _Correction:
    ratio: float = 1.0
    observations: int = 0


@dataclass(slots=True)
class _Octave:
    """The corrections of a stage at sizes of one octave."""

    by_degree: dict[int, _Correction] = field(default_factory=dict)
    latest_ratio: float = 1.0
    """The ratio of the degree that was observed last."""

    def find(self, degree: int) -> _Correction:
        if degree not in self.by_degree:
            self.by_degree[degree] = _Correction(self.latest_ratio)
        return self.by_degree[degree]

    def spread(self, ratio: float) -> None:
        """Give this ratio to the degrees of which nothing was observed."""
        self.latest_ratio = ratio
        for correction in self.by_degree.values():
            if not correction.observations:
                correction.ratio = ratio


@dataclass(frozen=True, slots=True)
class _SharedWeights:
    """A stage of which workers do not keep all weights."""

    share: WeightsShare
    sizes: LayerSizes
    kept_bytes: int
    """Bytes that a worker keeps."""
    bytes_per_s: float
    """The speed of the link by which layers come."""

    def compute_supply_s(self, degree: int) -> float:
        """Seconds in which all layers come to each of so many workers once."""
        return self.sizes.count_supplied_bytes(self.share, degree) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class _Cost:
    """One point as tabled, with the correction that its octave of sizes shares."""

    tabled_s: float
    peak_bytes: int
    correction: _Correction
    octave: _Octave


class CostModel:
    """Expected seconds and memory of stages on one kind of device (the protocol `tridentserve.protocols.StageTimes`).

    Exact at profiled points, a monotone curve in tokens between them, `ProfileError` outside them. A batch that was
    profiled counts as it was; beyond it, DIFFUSE and DECODE grow in proportion to the batch and ENCODE, which takes
    light inputs, does not grow (TridentServe, arXiv 2510.02838, section 5.1 and appendix E.1). `observe` corrects the
    table: per (model, stage, degree, octave of size) an exponentially weighted ratio of observed to tabled seconds. A
    degree of which nothing was observed has the ratio of the one that was last: on a device that is slower than the
    table says, or shared, the degrees in use would else look dear beside those that are not.

    Where workers do not keep all weights of a stage (`share`), each run of its model takes at least as long as its
    layers are under way, from the other workers of the unit or from the host copy: the next layer comes while one
    computes. Where they are divided among a unit of workers, DIFFUSE has the degrees from the unit on; ENCODE and
    DECODE take what the widest profiled degree up to the unit takes.

    A cost model belongs to one thread. Other threads use what `take_snapshot` or `build_memory_table` gives.
    """

    def __init__(self, tables: Iterable[ProfileTable], device: str, links: LinkSpeeds | None = None) -> None:
        """`device` is the `gpu` column to use. Weights have no such column: they count where their table has rows for
        the device (another device may hold the same model in another precision). `links` replace those of the tables.
        Raises `ProfileError` when no row is for the device, when tables repeat a point or contradict each other, or
        when a model lacks a stage, degree 1, batch 1 or the weights of a stage."""
        self._tables = tuple(tables)
        self._device = device
        self._profile = DeviceProfile(self._tables, device)
        self._links = links if links is not None else self._profile.links
        self._octaves: defaultdict[_OctaveKey, _Octave] = defaultdict(_Octave)
        self._encode: dict[_Point, _Cost] = {}
        self._diffuse: dict[_Point, _Cost] = {}
        self._decode: dict[_Point, _Cost] = {}
        self._by_degree: dict[tuple[str, Stage, Shape], tuple[tuple[int, _Cost], ...]] = {}
        self._shared: dict[Replica, _SharedWeights] = {}
        self._packed: dict[str, PackedCost] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the tables cover on this device, sorted."""
        return self._profile.models

    def share(self, shares: Mapping[Replica, WeightsShare], layers: Mapping[Replica, LayerSizes]) -> CostModel:
        """A model of the same tables, which has learned nothing, where workers keep these shares of stages, with units
        that are powers of two (`placement.units` says which are needed). `layers`: the layers of the stages, in
        whatever number format. A stage that is not in it counts as if layers were all that it has."""
        other = CostModel(self._tables, self._device, self._links)
        for replica, share in shares.items():
            total_bytes = self._profile.find_weights(replica.model, replica.stage).weights_bytes
            sizes, kept_bytes = LayerSizes(0, (total_bytes,)), -(-total_bytes // share.unit)
            if replica in layers:
                sizes = layers[replica].scale(total_bytes)
                kept_bytes = sizes.count_kept_bytes(share)
            speed = self._links.host_bytes_per_s if share.streamed else self._links.intra_node_bytes_per_s
            other._shared[replica] = _SharedWeights(share, sizes, kept_bytes, speed)
        return other

    @property
    def shares(self) -> dict[Replica, WeightsShare]:
        """The stages of which workers do not keep all weights."""
        return {replica: shared.share for replica, shared in self._shared.items()}

    def collect_rows(self, model: str) -> frozenset[ProfileRow | WeightsRow]:
        """All that the tables hold of a model, on whatever device."""
        return collect_rows(self._tables, model)

    def extend(self, tables: Iterable[ProfileTable]) -> None:
        """Cover further models. What is known of the others stays, with what was learned of them. Raises `ProfileError`
        as the constructor does, and has changed nothing then."""
        together = (*self._tables, *tables)
        self._profile = DeviceProfile(together, self._device)
        self._tables = together
        self._packed = {}

    def take_snapshot(self) -> CostModel:
        """A copy with all that has been learned so far, which another thread may use."""
        other = copy.copy(self)
        other._octaves = copy.deepcopy(self._octaves)
        other._encode, other._diffuse, other._decode, other._by_degree = {}, {}, {}, {}
        return other

    def build_memory_table(self) -> MemoryTable:
        """The memory of all stages that the tables cover now, which any thread may use."""
        return MemoryTable(self._profile)

    @property
    def links(self) -> LinkSpeeds:
        """The speeds at which outputs and weights move."""
        return self._links

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        """Expected seconds per denoising step (DIFFUSE) or per call, as corrected so far. `ProfileError` if unknown."""
        cost = self._find_cost(model, stage, shape, degree, batch)
        return cost.tabled_s * cost.correction.ratio

    def packed_seconds(self, model: str, shapes: Sequence[Shape]) -> float:
        """Expected seconds of a packed step of outputs of these shapes at degree 1: those of a step of each, times the
        share of them that packing leaves by the profiled batches. `ProfileError` if unknown."""
        each_s = sum(self.seconds(model, _DIFFUSE, shape) for shape in shapes)
        if model not in self._packed:
            self._packed[model] = fit_packed_cost(self._profile.list_rows(model, _DIFFUSE, degree=1))
        return each_s * self._packed[model].compute_share([shape.tokens for shape in shapes])

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        """Peak activation bytes on one worker, weights not counted. `ProfileError` if unknown."""
        return self._find_cost(model, stage, shape, degree, batch).peak_bytes

    def unit(self, model: str, stage: Stage) -> int:
        """The number of workers that hold the weights of a stage together; 1 unless `divide` was given more."""
        shared = self._shared.get(Replica(model, stage)) if self._shared else None
        return shared.share.unit if shared is not None else 1

    def weights_bytes(self, model: str, stage: Stage) -> int:
        """Bytes of the weights of one stage on a worker that holds it. `ProfileError` if the model is unknown."""
        shared = self._shared.get(Replica(model, stage)) if self._shared else None
        return self._profile.find_weights(model, stage).weights_bytes if shared is None else shared.kept_bytes

    def output_bytes(self, model: str, stage: Stage, shape: Shape, batch: int = 1) -> int:
        """Bytes that a stage hands on for `batch` outputs. `ProfileError` if the model is unknown."""
        held = self._profile.find_weights(model, stage)
        return math.ceil(batch * (held.output_bytes + held.output_bytes_per_token * shape.tokens))

    def transfer_seconds(self, model: str, stage: Stage, shape: Shape, batch: int = 1, same_node: bool = True) -> float:
        """Seconds to move the outputs of a stage to another worker. `ProfileError` if the model is unknown."""
        return self._links.transfer_seconds(self.output_bytes(model, stage, shape, batch), same_node)

    def load_seconds(self, model: str, stage: Stage, source: LoadSource = "host") -> float:
        """Seconds to make the weights of a stage resident on a worker, from a worker of the node (`peer`), the host's
        copy or the model folder. `ProfileError` if the model is unknown."""
        return self._links.load_seconds(self.weights_bytes(model, stage), source)

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        """The degrees that were profiled, ascending, from the unit on: for E and C at least the unit itself, for D none
        where it is wider than all. `ProfileError` if the model is unknown."""
        degrees, unit = self._profile.degrees(model, stage), self.unit(model, stage)
        if unit == 1:
            return degrees
        wide = tuple(degree for degree in degrees if degree >= unit)
        return wide if wide or stage is _DIFFUSE else (unit,)

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        """The highest degree with efficiency T(k0) k0 / (k T(k)) above 0.8 (section 6.2, where k0 is 1), k0 being the
        narrowest degree that covers the size; k0 when no other has it. `ProfileError` when none covers it."""
        point = (model, stage, shape)
        costs = self._by_degree.get(point)
        if costs is None:
            if len(self._by_degree) >= _MAX_REMEMBERED:
                self._by_degree.clear()
            costs = self._by_degree[point] = self._find_costs_by_degree(model, stage, shape)
        narrowest, first = costs[0]
        least = narrowest * first.tabled_s * first.correction.ratio
        best = narrowest
        for k, cost in costs:
            if least > EFFICIENCY_THRESHOLD * k * cost.tabled_s * cost.correction.ratio:
                best = k
        return best

    def optimal_batch(self, model: str, stage: Stage, shape: Shape, degree: int = 1) -> int:
        """The largest profiled batch that takes less than 1.2 times what one output takes (appendix E.1); 1 when there
        is none. `ProfileError` when the size is not covered."""
        batches = self._profile.list_batches(model, stage, shape, self._find_profiled_degree(model, stage, degree))
        limit_s = BATCH_LATENCY_GROWTH * self.seconds(model, stage, shape, degree)
        return max((b for b in batches if self.seconds(model, stage, shape, degree, b) < limit_s), default=1)

    def observe(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int, seconds: float) -> None:
        """Learn from one finished stage (seconds per step for DIFFUSE). Times that are not positive are ignored, and a
        stage that the table takes for free stays so."""
        cost = self._find_cost(model, stage, shape, degree, batch)
        if not (math.isfinite(seconds) and seconds > 0 and cost.tabled_s > 0):
            return
        ratio = min(max(seconds / cost.tabled_s, 1 / MAX_CORRECTION), MAX_CORRECTION)
        correction = cost.correction
        correction.observations += 1
        # The table counts as one observation, and the first few as a plain mean: a wrong table converges at once.
        weight = max(OBSERVATION_WEIGHT, 1 / (correction.observations + 1))
        correction.ratio += weight * (ratio - correction.ratio)
        cost.octave.spread(correction.ratio)

    def _find_cost(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int) -> _Cost:
        known = self._diffuse if stage is _DIFFUSE else self._decode if stage is _DECODE else self._encode
        point = (model, shape.height, shape.width, shape.num_frames, degree, batch)
        cost = known.get(point)
        if cost is None:
            if len(known) >= _MAX_REMEMBERED:
                known.clear()
            cost = known[point] = self._look_up(model, stage, shape, degree, batch)
        return cost

    def _find_costs_by_degree(self, model: str, stage: Stage, shape: Shape) -> tuple[tuple[int, _Cost], ...]:
        """The degrees that cover a size with their costs, ascending; at least one."""
        degrees = self.degrees(model, stage)
        profile = self._profile
        covering = [
            k for k in degrees if profile.covers(model, stage, shape, self._find_profiled_degree(model, stage, k))
        ]
        if not covering:
            raise self._profile.explain_not_covered(model, stage, shape, degrees[0], batch=1)
        return tuple((k, self._find_cost(model, stage, shape, k, 1)) for k in covering)

    def _find_profiled_degree(self, model: str, stage: Stage, degree: int) -> int:
        """The degree whose rows say what a stage takes at this degree."""
        unit = self.unit(model, stage)
        if unit == 1:
            return degree
        if stage is not _DIFFUSE:
            return max(k for k in self._profile.degrees(model, stage) if k <= max(degree, unit))
        if degree < unit:
            raise ProfileError(f"{model}: {unit} workers hold the weights of {stage} together, {degree} cannot run it")
        return degree

    def _look_up(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int) -> _Cost:
        sizes, scale = self._profile.find(model, stage, shape, self._find_profiled_degree(model, stage, degree), batch)
        degree = max(degree, self.unit(model, stage))
        octave = self._octaves[model, stage, round(math.log2(shape.tokens))]
        peak_bytes = math.ceil(scale * sizes.peak_bytes(shape))
        shared = self._shared.get(Replica(model, stage))
        seconds = max(scale * sizes.seconds(shape), shared.compute_supply_s(degree) if shared is not None else 0.0)
        return _Cost(seconds, peak_bytes, octave.find(degree), octave)
