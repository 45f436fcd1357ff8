"""The `args:` of this service, with its `user_config`, read from a Serve config file. No Ray."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from deployments.config.app import AppArgs
from deployments.config.base import describe_problems
from deployments.config.live import apply_user_config, find_user_config
from tridentserve.errors import ConfigError


def read_args(path: Path) -> AppArgs:
    """The `args` of the application that builds this service; others may be in the same file. Raises `ConfigError`
    for a file that cannot be read, holds no such application, or has wrong `args`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        applications = content["applications"]
        ours = [app for app in applications if "deployments.app" in app.get("import_path", "deployments.app")]
        args = ours[0]["args"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ConfigError(f"{path}: no application has the import_path deployments.app:build_app and args") from None
    try:
        return apply_user_config(AppArgs.model_validate(args), find_user_config(ours[0].get("deployments") or ()))
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(describe_problems(error, 'args'))}") from None
