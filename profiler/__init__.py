"""The costs of stages: profile tables (CSV), the cost model that reads them and learns online, and the profiler.

Everything here is pure except `profiler.measure.run*`, which runs real pipelines and is imported by its name only.
"""

from profiler.cost_model import CostModel
from profiler.loading import keep_diffuse_only, load_cost_model, load_tables
from profiler.memory import compute_stages_peak_bytes, sum_weights_bytes
from profiler.tables.links import DEFAULT_LINKS, INSTANT_LINKS, LinkSpeeds
from profiler.tables.rows import (
    LinksRow,
    ProfileRow,
    ProfileTable,
    WeightsRow,
    read_shipped_table,
    read_table,
    write_table,
)

__all__ = [
    "DEFAULT_LINKS",
    "INSTANT_LINKS",
    "CostModel",
    "LinkSpeeds",
    "LinksRow",
    "ProfileRow",
    "ProfileTable",
    "WeightsRow",
    "compute_stages_peak_bytes",
    "keep_diffuse_only",
    "load_cost_model",
    "load_tables",
    "read_shipped_table",
    "read_table",
    "sum_weights_bytes",
    "write_table",
]
