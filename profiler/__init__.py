"""What stages cost: profile tables (CSV), the cost model that reads them and learns online, and the offline profiler.

Everything here is pure but `profiler.measure*`, which runs real pipelines and is imported by its name only.
"""

from profiler.cost_model import CostModel
from profiler.memory import held_weights_bytes, stages_peak_bytes
from profiler.tables import ProfileRow, ProfileTable, WeightsRow, read_table, shipped_table, write_table

__all__ = [
    "CostModel",
    "ProfileRow",
    "ProfileTable",
    "WeightsRow",
    "held_weights_bytes",
    "read_table",
    "shipped_table",
    "stages_peak_bytes",
    "write_table",
]
