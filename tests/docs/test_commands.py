"""The commands of the documents. Those that take seconds on a CPU run here; the lists below say of all others why they
do not, and their options are read by the scripts' own parsers. What needs a service runs in
`tests/e2e/docs/test_docs_commands.py`, the line for edits in `tests/e2e/test_edits.py`. A line of a
block that none of them sees fails in `tests/docs/test_blocks.py`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from deployments.validation.serve_file import check_config
from tests.docs.commands import PROGRAMS, ShownCommand, indented_blocks, list_commands
from tests.docs.parsers import read_options
from tests.docs.test_paths import ROOT
from tests.support.policy_page import POLICY, write_policy
from tests.support.processes import output_of
from tridentserve.models.cache import CACHE_ENV

COMMANDS = list_commands()


def commands_of(*programs: str) -> list[ShownCommand]:
    """The commands of some programs, each once."""
    return list({command.text: command for command in COMMANDS if command.text.split()[0] in programs}.values())


def arguments_of_pytest(command: ShownCommand) -> list[str] | None:
    """What a command hands pytest; None when it runs something else."""
    words = shlex.split(command.text)
    for start in (["pytest"], ["python", "-m", "pytest"]):
        if words[: len(start)] == start:
            return words[len(start) :]
    return None


SCRIPTS = [command for command in commands_of("python") if arguments_of_pytest(command) is None]
RUNS_OF_PYTEST = [command for command in commands_of("python", "pytest") if arguments_of_pytest(command) is not None]

# Why a command of a page is not run as it stands: a script's commands as a whole, or those with one word. The options
# of all are read by the script's own parser.
NEEDS_LONG = "takes minutes to hours; its `--quick` run is a test, by `tests/scripts/quick_runs.py`"
NEEDS_GPU = "needs a GPU and the published configuration of a large model"
NEEDS_HOURS = "takes minutes to hours; runs in `tests/scripts/default_model/whole_run.py`"
NEEDS_FILES = "needs files of the reader: a model folder, a trace or a configuration"
SCRIPTS_NOT_RUN = {
    "scripts/bench_cells.py": NEEDS_LONG,
    "scripts/bench_console.py": NEEDS_LONG,
    "scripts/bench_dispatch.py": NEEDS_LONG,
    "scripts/bench_engine.py": NEEDS_LONG,
    "scripts/bench_overhead.py": NEEDS_LONG,
    "scripts/compare_commits.py": "runs in `tests/scripts/test_compare_commits.py`",
    "scripts/compare_kernels.py": NEEDS_GPU,
    "scripts/compare_policies.py": NEEDS_LONG,
    "scripts/compare_simulation.py": "needs a running service; runs in `tests/e2e/test_quick_runs.py`",
    "scripts/evaluate.py": NEEDS_LONG,
    "scripts/explain.py": "needs a log of a service; runs in `tests/e2e/test_service.py`",
    "scripts/fetch_model.py": "asks the Hugging Face hub; runs in `tests/hub/test_fetch_script.py`",
    "scripts/judge.py": NEEDS_HOURS,
    "scripts/judge_service.py": NEEDS_LONG,
    "scripts/make_tiny_models.py": "makes models of all families in the cache; tests of the families make them too",
    "scripts/picture_console.py": "starts a service and Chromium, and writes into docs/images",
    "scripts/profile_model.py": NEEDS_GPU,
    "scripts/replay_decisions.py": "needs a log of a service; runs in `tests/e2e/test_service.py`",
    "scripts/serve.py": "ends with Ctrl-C; runs in `tests/scripts/test_serve_script.py`",
    "scripts/train_cache_predictor.py": NEEDS_LONG,
    "scripts/train_default_model.py": NEEDS_HOURS,
}
WORDS_NOT_RUN = {
    ("scripts/check_config.py", "FILE"): NEEDS_FILES,
    ("scripts/check_config.py", "my-service.yaml"): NEEDS_FILES,
    ("scripts/check_config.py", "my_service.yaml"): NEEDS_FILES,
    ("scripts/make_trace.py", "AzureLLMInferenceTrace_code.csv"): NEEDS_FILES,
    ("scripts/plan.py", "24gb.yaml"): NEEDS_FILES,
    ("scripts/plan.py", "FILE"): NEEDS_FILES,
    ("scripts/plan.py", POLICY): "runs in `tests/scripts/test_docs_write_a_policy.py`",
    ("scripts/replay_trace.py", "--url"): "needs a running service; runs in `tests/e2e/docs/test_docs_commands.py`",
    ("scripts/replay_trace.py", "CLUSTER.yaml"): NEEDS_FILES,
    ("scripts/replay_trace.py", POLICY): "runs in `tests/scripts/test_docs_write_a_policy.py`",
}
TARGETS_NOT_RUN = {
    "gpu-check": "says that there is no GPU, or takes minutes; the script has tests",
    "demo": "takes a minute; the script runs in tests/e2e/test_quick_runs.py",
    "evaluate-quick": "takes minutes; scripts/evaluate.py has tests",
    "fuzz": "takes half an hour",
    "serve": "ends with Ctrl-C; scripts/serve.py, which it runs, has tests",
    "test": "runs these tests",
    "test-all": "runs these tests",
    "test-random": "runs these tests",
}


def reason_not_to_run(command: ShownCommand) -> str | None:
    """None when the command runs on a CPU in seconds, without files of the reader."""
    _, script, *words = shlex.split(command.text)
    return SCRIPTS_NOT_RUN.get(script) or next(
        (WORDS_NOT_RUN[script, word] for word in words if (script, word) in WORDS_NOT_RUN), None
    )


def test_the_pages_show_commands() -> None:
    assert {command.text.split()[0] for command in COMMANDS} == set(PROGRAMS)
    assert len(SCRIPTS) > 40


@pytest.mark.parametrize("command", SCRIPTS, ids=str)
def test_the_script_takes_the_options(command: ShownCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = shlex.split(command.text)
    if words[1] == "-c":
        compile(words[2], command.page, "exec")
        return
    write_policy(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    read_options(words[1:])


@pytest.mark.parametrize("command", RUNS_OF_PYTEST, ids=str)
def test_pytest_takes_the_options(command: ShownCommand, pytestconfig: pytest.Config) -> None:
    """The marks that it names exist too, and the files and directories."""
    options = pytestconfig._parser.parse(arguments_of_pytest(command) or [])
    marks = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert set(re.findall(r"\w+", options.markexpr or "")) <= {*marks, "and", "or", "not"}
    assert all((ROOT / path.partition("::")[0]).exists() for path in options.file_or_dir)


@pytest.mark.parametrize("command", commands_of("make"), ids=str)
def test_the_target_exists(command: ShownCommand) -> None:
    target = command.text.split()[1]
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert target in TARGETS_NOT_RUN


@pytest.mark.parametrize("command", commands_of("serve", "ray"), ids=str)
def test_the_program_of_ray_takes_the_options(command: ShownCommand) -> None:
    """They need a cluster; `tests/e2e/test_models_live.py` deploys by the same command. Sentences also name commands
    alone, such as `serve run`, without what these need."""
    from ray.scripts.scripts import cli as ray_cli
    from ray.serve.scripts import cli as serve_cli

    program, name, *words = shlex.split(command.text)
    found = (ray_cli if program == "ray" else serve_cli).commands[name]
    if words:
        assert found.make_context(name, words).params


@pytest.mark.parametrize("command", [one for one in SCRIPTS if not reason_not_to_run(one)], ids=str)
def test_the_command_runs(command: ShownCommand, tmp_path: Path) -> None:
    words = ["." if word == "BASE" else word for word in shlex.split(command.text)[1:]]
    if words == ["scripts/write_docs.py"]:  # it writes into the repository
        words.append("--check")
    if "--simulate" in words:
        words += ["--out", str(tmp_path)]
    if words[0] == "scripts/make_trace.py":
        words += ["--out", str(tmp_path / words[words.index("--out") + 1])]
    folder = tmp_path if words[0] == "-c" else ROOT  # which writes a table where it runs
    output_of([sys.executable, *words], folder, {**os.environ, "PYTHONPATH": str(ROOT)})


def test_enough_commands_run() -> None:
    assert sum(reason_not_to_run(command) is None for command in SCRIPTS) >= 10


def test_no_reason_is_left_over() -> None:
    shown = [shlex.split(command.text)[1:] for command in SCRIPTS]
    assert sorted(SCRIPTS_NOT_RUN.keys() - {words[0] for words in shown}) == []
    assert sorted(WORDS_NOT_RUN.keys() - {(words[0], word) for words in shown for word in words}) == []
    assert sorted(TARGETS_NOT_RUN.keys() - {command.text.split()[1] for command in commands_of("make")}) == []
    assert not SCRIPTS_NOT_RUN.keys() & {script for script, _ in WORDS_NOT_RUN}


def test_a_test_that_a_reason_names_is_about_the_script() -> None:
    reasons = [*SCRIPTS_NOT_RUN.items(), *((script, reason) for (script, _), reason in WORDS_NOT_RUN.items())]
    for script, reason in reasons:
        for path in re.findall(r"`(tests/\S+)`", reason):
            assert Path(script).stem in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["docs/configuration.md", "docs/tutorial.md"])
def test_the_configuration_of_a_page_is_good(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reports nothing, but for the missing files of the reader that the tutorial's configuration names."""
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    blocks = indented_blocks(page, "applications:")
    assert blocks
    for block in blocks:
        file = tmp_path / "service.yaml"
        file.write_text(block, encoding="utf-8")
        problems = check_config(file)
        readers = ("/models/", "profiles/")
        assert not [problem for problem in problems if not any(name in problem for name in readers)]
        assert bool(problems) == (page == "docs/tutorial.md")
