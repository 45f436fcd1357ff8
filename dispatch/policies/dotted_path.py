"""Policies in code that is no part of TridentServe, named by a dotted path such as `my_package.my_module:MyPolicy`.

The path names a function that takes a `PolicyContext` and returns a `Policy`, decorated with `register_policy` or not,
or a class of dispatchers, which is called with the stage times and the options and used on the Orchestrator's
placement.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import cast

from dispatch.policies.policy import Policy, PolicyContext, PolicySpec, list_policies
from tridentserve.errors import ConfigError, TridentServeError
from tridentserve.protocols import Dispatcher

_DOTTED_PATH = re.compile(r"(?P<module>\w+(\.\w+)*)[:.](?P<name>\w+)")
_HELP = "docs/write-a-policy.md has an example"


def is_dotted_path(text: str) -> bool:
    """True when the text has the form `module:name` or `module.name`."""
    return _DOTTED_PATH.fullmatch(text) is not None


def load_policy(path: str) -> PolicySpec:
    """The policy that this dotted path names, whose `make` raises `ConfigError` for code that fails. Modules are looked
    for where Python looks (PYTHONPATH, installed packages), and then in the current directory. Raises `ConfigError`
    when the module cannot be imported, has no such name, or what has that name is no policy."""
    match = _DOTTED_PATH.fullmatch(path)
    if match is None:
        raise ConfigError(f"policy {path!r} is no dotted path such as my_package.my_module:MyPolicy")
    module, name = _import(path, match["module"]), match["name"]
    if not hasattr(module, name):
        raise ConfigError(f"policy {path!r}: {_describe(module)} has no {name!r}")
    found = getattr(module, name)
    spec = next((spec for spec in list_policies().values() if spec.make is found), None)
    if spec is not None:
        return replace(spec, name=path, make=partial(_build, path, found))
    if problem := _find_problem(found):
        raise ConfigError(f"policy {path!r}: {name} in {_describe(module)} is no policy: {problem}; {_HELP}")
    make = partial(_build_from_class, found) if inspect.isclass(found) else found
    return PolicySpec(path, partial(_build, path, make))


def _import(path: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"policy {path!r}: there is no module {error.name!r}; put its directory on PYTHONPATH, or start in it"
            ) from None
        raise ConfigError(f"policy {path!r}: {name} cannot be imported: {error}") from error
    except Exception as error:
        raise ConfigError(f"policy {path!r}: {name} cannot be imported: {type(error).__name__}: {error}") from error


def _describe(module: ModuleType) -> str:
    return f"{module.__name__} ({module.__file__})" if module.__file__ else module.__name__


def _find_problem(found: object) -> str | None:
    """The reason why this can be no policy; None where it can."""
    if inspect.isclass(found):
        lacking = [name for name in ("decide", "can_ever_run") if not callable(getattr(found, name, None))]
        if lacking:
            return f"the class has no method {' and no method '.join(lacking)}"
        return None if _takes(found, 2) else "the class is not built from two arguments, stage times and options"
    if not callable(found):
        return f"it is a {type(found).__name__}, neither a class nor a function"
    return None if _takes(found, 1) else "the function does not take one argument, a PolicyContext"


def _takes(found: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(found).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _build_from_class(dispatchers: Callable[..., object], context: PolicyContext) -> Policy:
    return Policy(cast(Dispatcher, dispatchers(context.times, context.options)))


def _build(path: str, make: Callable[[PolicyContext], object], context: PolicyContext) -> Policy:
    try:
        policy = make(context)
    except TridentServeError:
        raise
    except Exception as error:
        raise ConfigError(f"policy {path!r} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy {path!r} gave a {type(policy).__name__} instead of a Policy; {_HELP}")
    return policy
