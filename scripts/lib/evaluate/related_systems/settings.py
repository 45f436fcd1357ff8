"""The settings in which the papers of related systems evaluate them, on modelled GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lib.evaluate.cells import PAPER_NODE, Cell, find_own_model
from lib.evaluate.related_systems.fixed_degrees import FIXED_DEGREES
from placement.cluster_file import ClusterSpec
from profiler import ProfileRow, ProfileTable
from tridentserve.stages import Stage

# Layers and width of the transformers that the settings run in parallel (`profiler/data/published`): in each layer,
# Ulysses exchanges queries, keys, values and outputs among the members of a group.
_LAYERS = {"flux.1-dev": (57, 3072), "cogvideox1.5-5b": (42, 3072), "sd3-medium": (24, 1536)}
_EXCHANGES, _BYTES_PER_VALUE = 4, 2
# The time that an exchange takes whatever its size. A usual figure for NCCL within a node; no paper here states one.
_EXCHANGE_S = 25e-6


@dataclass(frozen=True, slots=True)
class ModelledGpu:
    """A GPU that was not profiled: its times are those of the L20 table, divided by one number."""

    name: str
    speed: float
    """Times as fast as an L20."""
    why: str
    """The source of `speed`."""
    memory_gb: float
    nvlink_gb_s: float | None = None
    """The speed at which one GPU sends to the others of its node, in GB/s: a step at degree k takes a k-th of one at
    degree 1, and the exchanges. None: wide degrees are as efficient as on L20, which has no NVLink."""

    def make_cluster(self) -> ClusterSpec:
        """One node of 8, as in all papers. Its GPUs bear the name that they have in the table."""
        return ClusterSpec(groups=(PAPER_NODE.model_copy(update={"memory_gb": self.memory_gb}),))

    def model_table(self, table: ProfileTable) -> ProfileTable:
        """The table of this GPU."""
        alone_s = {
            (row.model, row.shape, row.batch): row.seconds / self.speed
            for row in table.rows
            if row.stage is Stage.DIFFUSE and row.degree == 1 and row.model in _LAYERS
        }
        rows = []
        for row in table.rows:
            seconds = row.seconds / self.speed
            key = row.model, row.shape, row.batch
            if self.nvlink_gb_s and row.degree > 1 and row.stage is Stage.DIFFUSE and key in alone_s:
                seconds = alone_s[key] / row.degree + self._model_exchanges_s(row, self.nvlink_gb_s)
            rows.append(replace(row, seconds=seconds))
        return replace(table, rows=tuple(rows))

    def _model_exchanges_s(self, row: ProfileRow, gb_s: float) -> float:
        """Seconds of the exchanges of one step: each member sends all but its own part of what it holds."""
        layers, width = _LAYERS[row.model]
        sent = row.batch * row.shape.tokens * width * _BYTES_PER_VALUE / row.degree * (1 - 1 / row.degree)
        return layers * _EXCHANGES * (_EXCHANGE_S + sent / (gb_s * 1e9))


# Dense BF16 tensor throughput over the L20's 119.5 TFLOPS; NVLink in one direction.
_H100 = ModelledGpu("H100", 989 / 119.5, "dense BF16 throughput, 989 over 119.5 TFLOPS", 80, 450)
_A100 = ModelledGpu("A100", 312 / 119.5, "dense BF16 throughput, 312 over 119.5 TFLOPS", 80, 300)
# A step of the mix's largest video takes 2.66 s on one L20, interpolated.
_RTX = ModelledGpu("RTX PRO 6000", 2.66 / 0.7816, "the talk's step of 781.6 ms for its largest video (table 7)", 96)


@dataclass(frozen=True, slots=True)
class RelatedSetting:
    """A setting of one paper."""

    name: str
    system: str
    """The policy."""
    workload: str
    """The name of the workload (`traces.workloads.named`)."""
    gpu: ModelledGpu
    duration_s: float
    """For how long requests arrive."""
    slo_scales: tuple[float, ...] = (1.0,)
    rate_scales: tuple[float, ...] = (1.0,)
    """Each multiplies the rate of the workload; `Cell.index` counts them."""
    num_inference_steps: int | None = None
    """The steps of every request, where they are not those of the workload."""
    baselines: tuple[str, ...] = FIXED_DEGREES
    """The policies that the system is compared with, of which the best counts."""

    @property
    def policies(self) -> tuple[str, ...]:
        return (self.system, *self.baselines, "default")


_SWEEP = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)
RELATED = {
    setting.name: setting
    for setting in (
        # 300 requests at 12 a minute (sections 6.1 and 6.2). Table 1 has 24,965 TFLOP for an image of 2048x2048, which
        # is 50 steps of those that the L20 table has.
        *(
            RelatedSetting(f"{mix} on H100", "tetriserve", mix, _H100, 1500.0, _SWEEP, num_inference_steps=50)
            for mix in ("tetriserve-uniform", "tetriserve-skewed")
        ),
        RelatedSetting("genserve on RTX PRO 6000", "genserve", "genserve", _RTX, 600.0, (0.5, 1.0)),
        # "Moderate to heavy" rates: 55, 75 and 95 % of what the GPUs do at degree 1.
        RelatedSetting(
            *("dit-serve on A100", "dit-serve", "dit-serve", _A100, 1800.0),
            rate_scales=(0.4, 0.545, 0.69),
            baselines=("b3",),
        ),
        # 80 to 140 % of what the GPUs do at degree 1.
        RelatedSetting(
            *("patchedserve on H100", "patchedserve", "patchedserve", _H100, 120.0),
            rate_scales=(2.05, 2.56, 3.07, 3.58),
            baselines=FIXED_DEGREES[:1],
        ),
    )
}


def list_related_cells(seeds: int) -> Iterator[Cell]:
    """All cells of all settings, those of one trace beside one another."""
    for setting in RELATED.values():
        for seed in range(seeds):
            for index in range(len(setting.rate_scales)):
                for slo_scale in setting.slo_scales:
                    for policy in setting.policies:
                        yield Cell(find_own_model(setting.workload), setting.name, slo_scale, seed, policy, index)
