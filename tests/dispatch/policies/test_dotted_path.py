"""Policies that are named by a dotted path: what may stand there, and what is said of all else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dispatch import DispatchOptions
from dispatch.policies import POLICIES, find_policy, make_policy
from dispatch.policies.policy import register_policy
from tests.dispatch.cluster import request, workers
from tests.dispatch.policies.scenes import LARGE, LOAD, cluster, started
from tests.profiler.synthetic import cost_model
from tridentserve.errors import ConfigError, PlacementError

TIMES = cost_model()
CODE = """
from dispatch import IlpDispatcher
from dispatch.policies import Policy, PolicyContext, register_policy
from tridentserve.errors import PlacementError


class Narrow(IlpDispatcher):
    pass


class Deaf:
    def __init__(self, times, options):
        pass

    def decide(self, view):
        pass


class Greedy(IlpDispatcher):
    def __init__(self, times, options, speed):
        super().__init__(times, options)


def plain(context):
    return Policy(Narrow(context.times, context.options), replanner_wanted=False)


@register_policy(
    "custom-one", needs_load=True, supports_units=True, default_max_batch=4, one_load=True, runs_whole=True
)
def decorated(context: PolicyContext) -> Policy:
    return plain(context)


def two(times, options):
    return plain


def wrong(context):
    return "a policy"


def broken(context):
    return 1 / 0


def refused(context):
    raise PlacementError("too few workers")


NUMBER = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the current directory, which is no part of the repository."""
    path = tmp_path / "my_policies" / "ours.py"
    path.parent.mkdir()
    (path.parent / "__init__.py").touch()
    path.write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("dispatch.policies.policy._SPECS", dict(POLICIES))
    yield path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_policies"]:
        del sys.modules[name]


@pytest.mark.parametrize("path", ["my_policies.ours:Narrow", "my_policies.ours.Narrow"])
def test_a_class_of_dispatchers_is_used_on_the_orchestrators_placement(path: str) -> None:
    policy = make_policy(path, TIMES, cluster(4), LOAD, DispatchOptions(max_degree=2))
    assert (policy.name, policy.placement, policy.replanner_wanted) == (path, None, True)
    found = started(policy.dispatcher, [request("r", LARGE)], workers(4, "EDC"))
    assert len(found["r"].diffuse) == 2


def test_a_function_may_say_more() -> None:
    assert not make_policy("my_policies.ours:plain", TIMES, cluster(4), LOAD).replanner_wanted
    plain, decorated = find_policy("my_policies.ours:plain"), find_policy("my_policies.ours:decorated")
    assert plain == replace(POLICIES["wo-stage-aware"], name="my_policies.ours:plain", make=plain.make)
    assert (decorated.needs_load, decorated.supports_units, decorated.one_load) == (True, True, True)
    assert decorated.runs_whole
    assert decorated.default_max_batch == 4
    assert "custom-one" not in POLICIES


def test_a_module_on_the_path_comes_before_one_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "elsewhere" / "my_policies"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    (other / "ours.py").write_text(CODE.replace("class Narrow", "class Other"))
    monkeypatch.syspath_prepend(other.parent)
    assert find_policy("my_policies.ours:Other").name == "my_policies.ours:Other"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("b7", "'b7' is no policy; use one of default, b1"),
        ("my_policies/ours.py:Narrow", r"no policy; .* or a dotted path such as my_module:MyPolicy"),
        ("nowhere.ours:Narrow", "there is no module 'nowhere'; put its directory on PYTHONPATH, or start in it"),
        ("my_policies.theirs:Narrow", r"there is no module 'my_policies\.theirs'"),
        ("my_policies.ours:Wide", r"my_policies\.ours \(.*ours\.py\) has no 'Wide'"),
        ("my_policies.ours:Deaf", "is no policy: the class has no method can_ever_run; docs/write-a-policy.md has"),
        ("my_policies.ours:Greedy", "the class is not built from two arguments, stage times and options"),
        ("my_policies.ours:two", "the function does not take one argument, a PolicyContext"),
        ("my_policies.ours:NUMBER", "it is a int, neither a class nor a function"),
    ],
)
def test_what_is_no_policy_is_said(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_policy(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import no_such_library", "cannot be imported: No module named 'no_such_library'"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("def broken(:", "cannot be imported: SyntaxError: "),
    ],
)
def test_a_module_that_fails_is_said(module: Path, line: str, message: str) -> None:
    module.write_text(line)
    with pytest.raises(ConfigError, match=message):
        find_policy("my_policies.ours:Narrow")


def test_a_policy_that_cannot_be_built_is_said() -> None:
    with pytest.raises(ConfigError, match=r"'my_policies\.ours:broken' cannot be built: ZeroDivisionError"):
        make_policy("my_policies.ours:broken", TIMES, cluster(4), LOAD)
    with pytest.raises(ConfigError, match="gave a str instead of a Policy"):
        make_policy("my_policies.ours:wrong", TIMES, cluster(4), LOAD)
    with pytest.raises(PlacementError, match="too few workers"):
        make_policy("my_policies.ours:refused", TIMES, cluster(4), LOAD)


def test_a_name_is_given_once() -> None:
    with pytest.raises(ConfigError, match=r"a policy of dispatch\.policies\.edf is named 'edf' already"):
        register_policy("edf")(POLICIES["default"].make)
