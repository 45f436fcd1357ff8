"""Options of the measurement of models that no profile table has rows of."""

from __future__ import annotations

from pydantic import Field

from deployments.config.base import Args, LocalPath


class ProfilingArgs(Args):
    """Options of what happens at the start for a model without rows for its device in `profiles`."""

    budget_s: float = Field(
        default=30,
        ge=0,
        description="Time that the service spends at its start on measuring each such model, in seconds, "
        "loads not counted: no measurement begins that is expected to end later, but two sizes of each stage are "
        "always measured, and the default size where it alone takes no longer. With 0 none is measured, and such a "
        "model is refused.",
    )
    folder: LocalPath | None = Field(
        default=None,
        description="Directory in which the service writes the tables that it has measured, and from which its later "
        "starts read them; without it `profiles` in `cache_dir`.",
    )
