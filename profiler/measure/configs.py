"""Reads values from a config of diffusers, or the default of the class where the config has none."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import diffusers


def read_config_value(class_name: str, config: Mapping[str, Any], key: str) -> Any:
    """The value of an entry, else the default of the class of diffusers; None where there is neither."""
    if key in config:
        return config[key]
    component_class = getattr(diffusers, class_name, None)
    parameter = None if component_class is None else inspect.signature(component_class.__init__).parameters.get(key)
    return None if parameter is None or parameter.default is parameter.empty else parameter.default
