"""The costs of stages: profile tables (CSV), the cost model that reads them and learns online, and the profiler.

Everything here is pure except `profiler.measure.run*`, which runs real pipelines and is imported by its name only.
"""

from profiler.cost_model import CostModel
from profiler.loading import diffuse_only, load_cost_model, load_tables
from profiler.memory import held_weights_bytes, stages_peak_bytes
from profiler.tables.links import DEFAULT_LINKS, INSTANT_LINKS, LinkSpeeds
from profiler.tables.rows import LinksRow, ProfileRow, ProfileTable, WeightsRow, read_table, shipped_table, write_table

__all__ = [
    "DEFAULT_LINKS",
    "INSTANT_LINKS",
    "CostModel",
    "LinkSpeeds",
    "LinksRow",
    "ProfileRow",
    "ProfileTable",
    "WeightsRow",
    "diffuse_only",
    "held_weights_bytes",
    "load_cost_model",
    "load_tables",
    "read_table",
    "shipped_table",
    "stages_peak_bytes",
    "write_table",
]
