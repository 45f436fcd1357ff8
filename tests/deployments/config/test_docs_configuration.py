"""docs/configuration.md tells of every key of the `args:`, with its type and default, and of nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lib.docs.configuration import SECTIONS, fill_tables

from deployments.assembly.planning import assemble_service, list_workers
from deployments.assembly.profiles import make_cost_model
from deployments.config.app import AppArgs
from dispatch.policies import POLICIES
from tridentserve.errors import ConfigError
from tridentserve.models.cache import CACHE_ENV

TEXT = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    assert fill_tables(TEXT) == TEXT, "the page is out of date; run python scripts/write_docs.py"


def test_a_table_has_every_key_with_its_type_and_default() -> None:
    page = fill_tables(TEXT)
    for row in (
        "| `workers_per_node` | integer | required | Number of workers on each node, one per GPU. |",
        "| `capacity_mb` | integer | `64` | Size of the handoff buffer of one worker, in MiB;",
        "| `profiles` | list of text | `[tiny-cpu]` |",
        f"| `cache_dir` | text | `${CACHE_ENV}` |",
    ):
        assert row in page


def test_a_stale_page_is_put_right() -> None:
    stale = TEXT.replace("| `capacity_mb` | integer | `64` |", "| `capacity_mb` | integer | `32` |")
    stale = re.sub(r"\n\| `every_steps` .*", "", stale)
    assert stale != TEXT
    assert fill_tables(stale) == TEXT
    with pytest.raises(ConfigError, match=r"no table in a section `handoff`"):
        fill_tables(TEXT.replace("## `handoff`", "## Handing off"))


def test_every_model_of_the_args_has_a_table() -> None:
    models = {"AppArgs", *AppArgs.model_json_schema()["$defs"]}
    assert models == {model.__name__ for model in SECTIONS.values()}


@pytest.mark.parametrize("section", SECTIONS)
def test_descriptions_are_sentences(section: str) -> None:
    """They begin with a capital letter (or a name in lower case) and end with a full stop."""
    for name, field in SECTIONS[section].model_fields.items():
        text = field.description or ""
        assert text.endswith("."), (section, name)
        assert text[:1].isupper() or text.startswith("fsspec"), (section, name)


def follows_the_load(name: str) -> bool:
    """True when a policy wants its placement replanned."""
    args = AppArgs.model_validate(
        {
            "models": [{"name": "tiny-sd3", "tiny": "sd3"}],
            "cluster": {"workers_per_node": 4, "memory_mb": 1024},
            "expected_load": [{"model": "tiny-sd3", "width": 512, "height": 512, "num_inference_steps": 8}],
            "dispatch": {"policy": name},
        }
    )
    specs, times = list_workers(args, ["node"] * 4), make_cost_model(args)
    return assemble_service(args, times, specs).policy.replanner_wanted


def test_the_policies_that_follow_the_load_are_named() -> None:
    (meaning,) = re.findall(r"^\| `enabled` \| boolean \| none \| (.+?) \|$", TEXT, re.MULTILINE)
    named = re.findall(r"`([\w-]+)`", meaning.partition("follows the load")[2])
    assert sorted(named) == sorted(name for name in POLICIES if follows_the_load(name))


def test_every_policy_is_explained_once() -> None:
    table = TEXT.partition("\nPolicies:\n")[2].partition("\n\nAll but")[0]
    named = [name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)]
    assert sorted(named) == sorted(POLICIES)
