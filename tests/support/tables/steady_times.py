"""Times of tiny-sd3 that stay when the tables of the package are measured anew, for scenes that need them."""

from __future__ import annotations

from pathlib import Path

# An entry of `profiles`. Measured in November 2026: a step of 256x256 takes 16 ms, and no less on two workers.
STEADY_TIMES = str(Path(__file__).with_name("steady.csv"))
