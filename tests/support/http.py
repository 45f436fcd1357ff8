"""HTTP requests of tests: patient ones, which no proxy of the environment takes part in."""

from __future__ import annotations

from functools import partial

import httpx

from tests.support.waiting import PATIENCE_S

get = partial(httpx.get, timeout=PATIENCE_S, trust_env=False)
post = partial(httpx.post, timeout=PATIENCE_S, trust_env=False)
delete = partial(httpx.delete, timeout=PATIENCE_S, trust_env=False)
stream = partial(httpx.stream, timeout=PATIENCE_S, trust_env=False)
