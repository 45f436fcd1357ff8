"""Profile tables as one device sees them: which points there are, and what is read for a size between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.tables.lengths import SizeCurve, StageLength, fit_length, fit_peak_length, make_size_curve
from profiler.tables.links import DEFAULT_LINKS, LinkSpeeds
from profiler.tables.rows import ProfileRow, ProfileTable, WeightsRow
from tridentserve.errors import ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

_Series = tuple[str, Stage, int, int]


@dataclass(frozen=True, slots=True)
class ProfiledSizes:
    """The profiled sizes of one model, stage, degree and batch: exact there, monotone curves between, of seconds and
    of memory (`make_size_curve`). A size is between them that has no fewer tokens than one and no more than another."""

    rows: dict[Shape, ProfileRow]
    seconds_curve: SizeCurve
    peak_bytes_curve: SizeCurve
    least_tokens: float
    most_tokens: float

    def covers(self, shape: Shape) -> bool:
        return shape in self.rows or self.least_tokens <= shape.tokens <= self.most_tokens

    def seconds(self, shape: Shape) -> float:
        row = self.rows.get(shape)
        return row.seconds if row else self._read(self.seconds_curve, shape)

    def peak_bytes(self, shape: Shape) -> float:
        row = self.rows.get(shape)
        return row.peak_bytes if row else self._read(self.peak_bytes_curve, shape)

    def _read(self, curve: SizeCurve, shape: Shape) -> float:
        if not self.covers(shape):
            raise ValueError(f"{shape} is outside the profiled sizes")
        return curve(shape)


class DeviceProfile:
    """The rows of the tables for one device. Every question raises `ProfileError`, which says what to profile, where no
    row answers it."""

    def __init__(self, tables: Sequence[ProfileTable], device: str) -> None:
        """Raises `ProfileError` when no row is for the device, when tables repeat a point or contradict each other, or
        when a model lacks a stage, degree 1, batch 1 or the weights of a stage."""
        self._device = device
        rows = _collect_rows(tables, device)
        if not rows:
            known = ", ".join(sorted({row.gpu for table in tables for row in table.rows})) or "none"
            raise ProfileError(f"no profile row is for device {device!r} (devices profiled: {known}); profile it")
        self.models = tuple(sorted({model for model, *_ in rows}))
        self.links = _find_links(tables, device)
        alone = {(model, stage): rows.get((model, stage, 1, 1), {}).values() for model, stage, *_ in rows}
        lengths = {key: (fit_length(found), fit_peak_length(found)) for key, found in alone.items()}
        self._sizes = {series: _build_sizes(by_shape, *lengths[series[:2]]) for series, by_shape in rows.items()}
        self._weights = _collect_weights(tables, device)
        degrees: defaultdict[tuple[str, Stage], list[int]] = defaultdict(list)
        batches: defaultdict[tuple[str, Stage, int], list[int]] = defaultdict(list)
        for model, stage, degree, batch in sorted(rows):
            batches[model, stage, degree].append(batch)
            if batch == 1:
                degrees[model, stage].append(degree)
        self._degrees = {key: tuple(found) for key, found in degrees.items()}
        self._batches = {key: tuple(found) for key, found in batches.items()}
        self._check_complete()

    def find(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int) -> tuple[ProfiledSizes, float]:
        """The sizes to read, of the largest batch up to `batch` that covers `shape`, and the factor from its batch to
        `batch`: DIFFUSE and DECODE grow in proportion beyond what was profiled, ENCODE does not grow (TridentServe,
        arXiv 2510.02838, appendix E.1)."""
        for profiled_batch in reversed(self._batches.get((model, stage, degree), ())):
            sizes = self._sizes[model, stage, degree, profiled_batch]
            if profiled_batch <= batch and sizes.covers(shape):
                return sizes, 1.0 if stage is Stage.ENCODE else batch / profiled_batch
        raise self.explain_not_covered(model, stage, shape, degree, batch)

    def covers(self, model: str, stage: Stage, shape: Shape, degree: int) -> bool:
        """True when a size was profiled at a profiled degree, or lies between those that were."""
        return self._sizes[model, stage, degree, 1].covers(shape)

    def find_weights(self, model: str, stage: Stage) -> WeightsRow:
        """The weights and outputs of one stage."""
        try:
            return self._weights[model, stage]
        except KeyError:
            raise self._explain_unknown_model(model) from None

    def degrees(self, model: str, stage: Stage) -> tuple[int, ...]:
        """Ascending."""
        try:
            return self._degrees[model, stage]
        except KeyError:
            raise self._explain_unknown_model(model) from None

    def list_batches(self, model: str, stage: Stage, shape: Shape, degree: int) -> list[int]:
        """The batches that were profiled around a size, ascending; at least batch 1."""
        found = [
            batch
            for batch in self._batches.get((model, stage, degree), ())
            if self._sizes[model, stage, degree, batch].covers(shape)
        ]
        if not found:
            raise self.explain_not_covered(model, stage, shape, degree, batch=1)
        return found

    def list_rows(self, model: str, stage: Stage, degree: int) -> list[ProfileRow]:
        """The rows of a stage at one degree, with all batches."""
        batches = self._batches.get((model, stage, degree), ())
        return [row for batch in batches for row in self._sizes[model, stage, degree, batch].rows.values()]

    def explain_not_covered(self, model: str, stage: Stage, shape: Shape, degree: int, batch: int) -> ProfileError:
        """Says why a point cannot be answered, and what to profile."""
        degrees = self.degrees(model, stage)
        if degree not in degrees:
            return ProfileError(f"{model} {stage} was not profiled at degree {degree} (only at {degrees}); profile it")
        if batch < 1:
            return ProfileError(f"a batch of {batch} cannot be timed; it must be at least 1")
        sizes = sorted(self._sizes[model, stage, degree, 1].rows, key=lambda size: size.tokens)
        return ProfileError(
            f"{model} {stage} at degree {degree}: {shape} is outside the profiled sizes, {sizes[0]} to {sizes[-1]}; "
            f"profile it with scripts/profile_model.py --sizes {shape}"
        )

    def _check_complete(self) -> None:
        for model, stage, degree in self._batches:
            if degree not in self._degrees.get((model, stage), ()):
                raise ProfileError(f"{model} {stage} at degree {degree} has no batch 1 rows; profile it at batch 1 too")
        for model in self.models:
            for stage in Stage:
                if (model, stage, 1, 1) not in self._sizes:
                    raise ProfileError(
                        f"{model} has no {stage} rows at degree 1 and batch 1 for device {self._device!r}; "
                        f"profile it with scripts/profile_model.py"
                    )
                if (model, stage) not in self._weights:
                    raise ProfileError(f"{model} has no weights_bytes for {stage}; add it to the table's .weights.csv")

    def _explain_unknown_model(self, model: str) -> ProfileError:
        return ProfileError(
            f"model {model!r} is not in the profile tables of device {self._device!r} (there: "
            f"{', '.join(self.models)}); profile it with scripts/profile_model.py"
        )


def _collect_rows(tables: Sequence[ProfileTable], device: str) -> dict[_Series, dict[Shape, ProfileRow]]:
    grouped: defaultdict[_Series, dict[Shape, ProfileRow]] = defaultdict(dict)
    for table in tables:
        for row in table.rows:
            if row.gpu != device:
                continue
            series = grouped[row.model, row.stage, row.degree, row.batch]
            if row.shape in series:
                point = f"{row.model} {row.stage} {row.shape} at degree {row.degree}, batch {row.batch}"
                raise ProfileError(f"{table.name}: {point} is in another table too; keep it in one")
            series[row.shape] = row
    return grouped


def _collect_weights(tables: Sequence[ProfileTable], device: str) -> dict[tuple[str, Stage], WeightsRow]:
    """Weights have no column of the device: they count where their table has rows for it."""
    weights: dict[tuple[str, Stage], WeightsRow] = {}
    for table in tables:
        for held in table.weights if any(row.gpu == device for row in table.rows) else ():
            other = weights.setdefault((held.model, held.stage), held)
            for column in ("weights_bytes", "output_bytes", "output_bytes_per_token"):
                if getattr(other, column) != getattr(held, column):
                    raise ProfileError(f"{table.name}: {held.model} {held.stage} has other {column} elsewhere")
    return weights


def _find_links(tables: Sequence[ProfileTable], device: str) -> LinkSpeeds:
    found = [(table.name, row.speeds) for table in tables for row in table.links if row.gpu == device]
    for name, speeds in found[1:]:
        if speeds != found[0][1]:
            raise ProfileError(f"{name}: the links of {device!r} are faster or slower in {found[0][0]}; keep one")
    return found[0][1] if found else DEFAULT_LINKS


def _build_sizes(rows: dict[Shape, ProfileRow], length: StageLength, peak_length: StageLength) -> ProfiledSizes:
    tokens = [shape.tokens for shape in rows]
    return ProfiledSizes(
        rows=rows,
        seconds_curve=make_size_curve({shape: row.seconds for shape, row in rows.items()}, length),
        peak_bytes_curve=make_size_curve({shape: row.peak_bytes for shape, row in rows.items()}, peak_length),
        least_tokens=min(tokens),
        most_tokens=max(tokens),
    )
