"""The part of the configuration that can change while the service runs: the `user_config` of the Scheduler deployment.

Its keys replace those of `args`; a key that it leaves out is as in `args`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from deployments.config.app import AppArgs
from deployments.config.base import describe_problems
from deployments.config.names import name_models
from tridentserve.errors import ConfigError

LIVE_KEYS = ("models", "expected_load", "placement", "profiles", "drain_timeout_s")
SCHEDULER = "Scheduler"


def name_scheduler(cell: int) -> str:
    """The name of the deployment that is the scheduler of a cell. The first one's `user_config` is that of all."""
    return f"{SCHEDULER}-{cell}" if cell else SCHEDULER


def apply_user_config(args: AppArgs, user_config: Any, key: str = "user_config") -> AppArgs:
    """The `args` with what `user_config` says instead. Kinds of expected load that are not of its models fall away,
    where they are those of `args`. Raises `ConfigError`, one line per problem, each beginning with the path of a
    key."""
    if user_config is None:
        return args
    if not isinstance(user_config, Mapping):
        raise ConfigError(f"{key}: must be a mapping with some of the keys {', '.join(LIVE_KEYS)}")
    if wrong := [str(name) for name in user_config if name not in LIVE_KEYS]:
        known = ", ".join(LIVE_KEYS)
        raise ConfigError(
            "\n".join(f"{key}.{name}: cannot change while the service runs; only {known} can" for name in wrong)
        )
    together = {**args.model_dump(exclude_unset=True), **user_config}
    if "models" in user_config and "expected_load" not in user_config and isinstance(user_config["models"], list):
        together["models"] = name_models(user_config["models"])
        names = [model.get("name") for model in together["models"] if isinstance(model, Mapping)]
        together["expected_load"] = [load for load in together.get("expected_load", ()) if load["model"] in names]
    try:
        return AppArgs.model_validate(together)
    except ValidationError as error:
        raise ConfigError("\n".join(describe_problems(error, key))) from None


def find_user_config(deployments: Sequence[Mapping[str, Any]]) -> Any:
    """The Scheduler's `user_config` among the `deployments:` of an application; None when there is none."""
    return next((one.get("user_config") for one in deployments if one.get("name") == SCHEDULER), None)
