"""The `user_config` of the Scheduler: what it may change, and how it is put together with the `args`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config.app import AppArgs
from deployments.config.file import read_args
from deployments.config.live import apply_user_config
from deployments.validation.serve_file import check_config
from tridentserve.errors import ConfigError


def load(model: str) -> dict[str, Any]:
    return {"model": model, "width": 256, "height": 256, "num_inference_steps": 28}


SD3 = {"name": "tiny-sd3", "tiny": "sd3", "limits": {"max_side": 512}}
FLUX = {"name": "tiny-flux", "tiny": "flux", "limits": {"max_side": 512}}
ARGS: dict[str, Any] = {
    "models": [SD3],
    "cluster": {"workers_per_node": 2, "memory_mb": 512},
    "expected_load": [load("tiny-sd3")],
    "max_retries": 7,
}


def live(user_config: Any) -> AppArgs:
    return apply_user_config(AppArgs.model_validate(ARGS), user_config)


def test_without_anything_the_args_hold() -> None:
    args = AppArgs.model_validate(ARGS)
    assert live(None) == live({}) == args


def test_models_and_load_stand_for_those_of_the_args() -> None:
    args = live({"models": [SD3, FLUX], "expected_load": [load("tiny-sd3"), load("tiny-flux")]})
    assert [model.name for model in args.models] == ["tiny-sd3", "tiny-flux"]
    assert (args.max_retries, args.cluster.memory_mb) == (7, 512)


def test_the_load_of_a_model_that_is_left_out_falls_away() -> None:
    args = AppArgs.model_validate(
        {**ARGS, "models": [SD3, FLUX], "expected_load": [load("tiny-sd3"), load("tiny-flux")]}
    )
    assert [kind.model for kind in apply_user_config(args, {"models": [FLUX]}).expected_load] == ["tiny-flux"]


@pytest.mark.parametrize(
    ("user_config", "why"),
    [
        (
            {"cluster": {}, "max_retries": 1},
            r"user_config\.cluster: cannot change .*\nuser_config\.max_retries: cannot",
        ),
        ({"models": [{**SD3, "tiny": "x"}]}, r"user_config\.models\[0\]\.tiny: unknown family"),
        ({"models": []}, r"user_config\.models: "),
        ({"models": "tiny-sd3"}, r"user_config\.models: "),
        ([SD3], r"user_config: must be a mapping"),
    ],
)
def test_each_mistake_is_reported_with_its_key(user_config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        live(user_config)


def test_models_without_a_name_have_the_one_that_args_would_give_them() -> None:
    args = AppArgs.model_validate({**ARGS, "models": [{"tiny": "sd3"}, {"tiny": "flux"}]})
    changed = apply_user_config(args, {"models": [{"tiny": "flux"}, {"tiny": "sd3"}]})
    assert [model.name for model in changed.models] == ["tiny-flux", "tiny-sd3"]
    assert changed.expected_load == args.expected_load != []


def file_of(tmp_path: Path, user_config: Any) -> Path:
    args = {**ARGS, "cache_dir": str(tmp_path)}
    app = {"name": "a", "route_prefix": "/", "import_path": "deployments.app:build_app", "args": args}
    file = tmp_path / "config.yaml"
    overrides = [{"name": "Scheduler", "user_config": user_config}]
    file.write_text(yaml.safe_dump({"applications": [{**app, "deployments": overrides}]}))
    return file


def test_a_file_is_checked_and_read_with_its_user_config(tmp_path: Path) -> None:
    good = file_of(tmp_path, {"models": [FLUX], "expected_load": [load("tiny-flux")]})
    assert check_config(good) == []
    assert [model.name for model in read_args(good).models] == ["tiny-flux"]
    bad = file_of(
        tmp_path, {"models": [{"name": "other", "tiny": "sd3", "profile_as": "none"}], "expected_load": [load("other")]}
    )
    (problem,) = check_config(bad)
    assert problem.startswith("applications[0].deployments[0].user_config.models[0].profile_as: 'none' is in none")
    (unknown,) = check_config(file_of(tmp_path, {"max_retries": 1}))
    assert unknown.startswith("applications[0].deployments[0].user_config.max_retries: cannot change")
