"""The cost model: stage times and memory from profile tables, corrected by what stages really take."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from profiler.curves import TokenCurve
from profiler.tables import ProfileRow, ProfileTable
from tridentserve.errors import ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

# A degree is efficient while T(1) / (k T(k)) stays above this (TridentServe, arXiv 2510.02838, section 6.2). For a size
# that degree 1 does not cover, the narrowest degree k0 that does stands in: T(k0) k0 / (k T(k)).
EFFICIENCY_THRESHOLD = 0.8
# Weight of the newest observation, and the furthest a correction may move a table: one stalled run must not make a
# size look unservable, yet a table from another machine has to converge.
OBSERVATION_WEIGHT = 0.2
MAX_CORRECTION = 32.0

_Series = tuple[str, Stage, int, int]
_CorrectionKey = tuple[str, Stage, int, int]


@dataclass(frozen=True, slots=True)
class _Profiled:
    """The profiled sizes of one model, stage, degree and batch."""

    rows: dict[Shape, ProfileRow]
    seconds: TokenCurve
    peak_bytes: TokenCurve

    def covers(self, shape: Shape) -> bool:
        return shape in self.rows or self.seconds.covers(shape.tokens)


@dataclass(slots=True)
class _Correction:
    ratio: float = 1.0
    observations: int = 0


class CostModel:
    """Expected seconds and memory of stages on one kind of device (the protocol `tridentserve.protocols.StageTimes`).

    Exact at profiled points, a monotone curve in tokens between them, `ProfileError` outside them. A batch that was
    profiled counts as it was; beyond it, DIFFUSE and DECODE grow in proportion to the batch and ENCODE, which takes
    light inputs, does not grow (TridentServe, arXiv 2510.02838, section 5.1 and appendix E.1). `observe` corrects the
    table: per (model, stage, degree, octave of size) an exponentially weighted ratio of observed to tabled seconds.
    """

    def __init__(self, tables: Iterable[ProfileTable], device: str) -> None:
        """`device` is the `gpu` column to use. Weights have no such column: they count where their table has rows for
        the device (another device may hold the same model in another precision). Raises `ProfileError` when no row is
        for the device, when tables repeat a point or contradict each other, or when a model lacks a stage, degree 1,
        batch 1 or the weights of a stage."""
        self._device = device
        grouped: defaultdict[_Series, dict[Shape, ProfileRow]] = defaultdict(dict)
        self._weights: dict[tuple[str, Stage], int] = {}
        known_devices: set[str] = set()
        for table in tables:
            known_devices |= {row.gpu for row in table.rows}
            for row in table.rows:
                if row.gpu != device:
                    continue
                series = grouped[row.model, row.stage, row.degree, row.batch]
                if row.shape in series:
                    point = f"{row.model} {row.stage} {row.shape} at degree {row.degree}, batch {row.batch}"
                    raise ProfileError(f"{table.name}: {point} is in another table too; keep it in one")
                series[row.shape] = row
            is_for_device = any(row.gpu == device for row in table.rows)
            for held in table.weights if is_for_device else ():
                if self._weights.setdefault((held.model, held.stage), held.weights_bytes) != held.weights_bytes:
                    raise ProfileError(f"{table.name}: {held.model} {held.stage} has other weights_bytes elsewhere")
        if not grouped:
            known = ", ".join(sorted(known_devices)) or "none"
            raise ProfileError(f"no profile row is for device {device!r} (devices profiled: {known}); profile it")
        self._profiled = {series: _profiled(rows) for series, rows in grouped.items()}
        self._degrees: defaultdict[tuple[str, Stage], list[int]] = defaultdict(list)
        for model, stage, degree, batch in sorted(grouped):
            if batch == 1:
                self._degrees[model, stage].append(degree)
        self._batches: defaultdict[tuple[str, Stage, int], list[int]] = defaultdict(list)
        for model, stage, degree, batch in sorted(grouped, reverse=True):
            self._batches[model, stage, degree].append(batch)
        self._corrections: defaultdict[_CorrectionKey, _Correction] = defaultdict(_Correction)
        self._check_complete()

    @property
    def models(self) -> tuple[str, ...]:
        """The models that the tables cover on this device, sorted."""
        return tuple(sorted({model for model, *_ in self._profiled}))

    def seconds(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> float:
        """Expected seconds per denoising step (DIFFUSE) or per call, as corrected so far. `ProfileError` if unknown."""
        ratio = 1.0
        if (correction := self._corrections.get(_correction_key(model, stage, shape, degree))) is not None:
            ratio = correction.ratio
        return ratio * self._tabled_seconds(model, stage, shape, degree, batch)

    def peak_bytes(self, model: str, stage: Stage, shape: Shape, degree: int = 1, batch: int = 1) -> int:
        """Peak activation bytes on one worker, weights not counted. `ProfileError` if unknown."""
        profiled, scale = self._find(model, stage, shape, degree, batch)
        row = profiled.rows.get(shape)
        return math.ceil(scale * (row.peak_bytes if row else profiled.peak_bytes.at(shape.tokens)))

    def weights_bytes(self, model: str, stage: Stage) -> int:
        """Bytes of the weights of one stage. `ProfileError` if the model is unknown."""
        if (model, stage) not in self._weights:
            raise self._unknown_model(model)
        return self._weights[model, stage]

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        """The degrees that were profiled, ascending. `ProfileError` if the model is unknown."""
        if (model, stage) not in self._degrees:
            raise self._unknown_model(model)
        return tuple(self._degrees[model, stage])

    def optimal_degree(self, model: str, stage: Stage, shape: Shape) -> int:
        """The highest degree with efficiency T(k0) k0 / (k T(k)) above 0.8 (section 6.2, where k0 is 1), k0 being the
        narrowest degree that covers the size; k0 when no other has it. `ProfileError` when none covers it."""
        covering = [k for k in self.degrees(model, stage) if self._profiled[model, stage, k, 1].covers(shape)]
        if not covering:
            raise self._not_covered(model, stage, shape, degree=self.degrees(model, stage)[0], batch=1)
        gpu_seconds = {degree: degree * self.seconds(model, stage, shape, degree) for degree in covering}
        narrowest = covering[0]
        efficient = (k for k in covering if gpu_seconds[narrowest] / gpu_seconds[k] > EFFICIENCY_THRESHOLD)
        return max(efficient, default=narrowest)

    def observe(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int, seconds: float) -> None:
        """Learn from one finished stage (seconds per step for DIFFUSE). Times that are not positive are ignored."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        ratio = seconds / self._tabled_seconds(model, stage, shape, degree, batch)
        ratio = min(max(ratio, 1 / MAX_CORRECTION), MAX_CORRECTION)
        correction = self._corrections[_correction_key(model, stage, shape, degree)]
        correction.observations += 1
        # The table counts as one observation, and the first few as a plain mean: a wrong table converges at once.
        weight = max(OBSERVATION_WEIGHT, 1 / (correction.observations + 1))
        correction.ratio += weight * (ratio - correction.ratio)

    def _tabled_seconds(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int) -> float:
        profiled, scale = self._find(model, stage, shape, degree, batch)
        row = profiled.rows.get(shape)
        return scale * (row.seconds if row else profiled.seconds.at(shape.tokens))

    def _find(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int) -> tuple[_Profiled, float]:
        """The profiled sizes to read, of the largest batch up to `batch` that covers the size, and the factor from its
        batch to `batch`."""
        for profiled_batch in self._batches.get((model, stage, degree), ()):
            profiled = self._profiled[model, stage, degree, profiled_batch]
            if profiled_batch <= batch and profiled.covers(shape):
                return profiled, 1.0 if stage is Stage.ENCODE else batch / profiled_batch
        raise self._not_covered(model, stage, shape, degree, batch)

    def _check_complete(self) -> None:
        for model, stage, degree in self._batches:
            if degree not in self._degrees[model, stage]:
                raise ProfileError(f"{model} {stage} at degree {degree} has no batch 1 rows; profile it at batch 1 too")
        for model in self.models:
            for stage in Stage:
                if (model, stage, 1, 1) not in self._profiled:
                    raise ProfileError(
                        f"{model} has no {stage} rows at degree 1 and batch 1 for device {self._device!r}; "
                        f"profile it with scripts/profile_model.py"
                    )
                if (model, stage) not in self._weights:
                    raise ProfileError(f"{model} has no weights_bytes for {stage}; add it to the table's .weights.csv")

    def _unknown_model(self, model: str) -> ProfileError:
        return ProfileError(
            f"model {model!r} is not in the profile tables of device {self._device!r} (there: "
            f"{', '.join(self.models)}); profile it with scripts/profile_model.py"
        )

    def _not_covered(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int) -> ProfileError:
        degrees = self.degrees(model, stage)
        if degree not in degrees:
            return ProfileError(f"{model} {stage} was not profiled at degree {degree} (only at {degrees}); profile it")
        if batch < 1:
            return ProfileError(f"a batch of {batch} cannot be timed; it must be at least 1")
        sizes = sorted(self._profiled[model, stage, degree, 1].rows, key=lambda size: size.tokens)
        return ProfileError(
            f"{model} {stage} at degree {degree}: {shape} is outside the profiled sizes, {sizes[0]} to {sizes[-1]}; "
            f"profile it with scripts/profile_model.py --sizes {shape}"
        )


def _profiled(rows: dict[Shape, ProfileRow]) -> _Profiled:
    return _Profiled(
        rows=rows,
        seconds=TokenCurve((shape.tokens, row.seconds) for shape, row in rows.items()),
        peak_bytes=TokenCurve((shape.tokens, row.peak_bytes) for shape, row in rows.items()),
    )


def _correction_key(model: str, stage: Stage, shape: Shape, degree: int) -> _CorrectionKey:
    return model, stage, degree, round(math.log2(shape.tokens))
