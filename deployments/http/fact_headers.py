"""The facts about a request as headers, for answers that are a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deployments.plain_updates import to_plain
from tridentserve.engine.live.updates import CompletedUpdate

# Proxies refuse answers with longer headers. Only the timeline of a request that was stopped often is longer.
_MAX_HEADER_BYTES = 6144
_NOT_FACTS = ("type", "images", "videos", "timeline")


def make_fact_headers(update: CompletedUpdate, ignored: Mapping[str, Any]) -> dict[str, str]:
    """A header each for the facts that clients look for, and one for all; the timeline is left out where it is long."""
    plain = to_plain(update)
    facts = {key: value for key, value in plain.items() if key not in _NOT_FACTS} | dict(ignored)
    whole = json.dumps({**facts, "timeline": plain["timeline"]})
    return {
        "X-Request-Facts": whole if len(whole) <= _MAX_HEADER_BYTES else json.dumps(facts),
        "X-Model": update.model,
        "X-Seed": str(update.seed),
        "X-Inference-Time-S": str(update.latency_s),
        "X-Stage-Durations": json.dumps(update.stage_durations_s),
        "X-Peak-Memory-MB": str(facts["peak_memory_mb"]),
    }
