"""scripts/plan.py: a table that adds up, and one line on stderr for what cannot be planned."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "deployments" / "clusters"
main = runpy.run_path(str(ROOT / "scripts" / "plan.py"))["main"]
GROUP = "nodes: 1\ngpus_per_node: 2\ngpu: NVIDIA L20\nmemory_gb: {}\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    written = capsys.readouterr()
    return code, written.out, written.err


def test_the_table_shows_every_gpu_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--cluster", str(CLUSTERS / "l20-128.yaml"), "--workload", "flux.1-dev-heavy")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "1.5 requests/s of flux.1-dev" in out
    assert "the load needs 100% of their GPU-seconds" in out
    lines = out.splitlines()
    table = lines[lines.index("Type and GB free in addition to the weights, per GPU:") + 2 : lines.index("", 4)]
    nodes = 0
    for line in table:
        assert line.count(".") == 8  # one number per GPU
        names = line.split("  ")[0].split(" to ")
        nodes += int(names[-1][1:]) - int(names[0][1:]) + 1
    assert nodes == 16
    assert "every worker holds all stages" in out
    _, split, _ = run(capsys, *arguments, "--policy", "wo-pooling")
    assert "flux.1-dev V0 brings " in split


def test_several_models_are_numbered(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--cluster", str(CLUSTERS / "l20-8.yaml"), "--workload", "genserve")
    assert code == 0
    assert "1: cogvideox1.5-5b\n2: sd3-medium\n" in out
    assert "1:EDC+2:EDC 15.3" in out


def test_the_placement_is_that_of_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--cluster", str(CLUSTERS / "l20-8.yaml"), "--workload", "flux.1-dev-medium", "--policy")
    whole, stages = (run(capsys, *arguments, policy) for policy in ("b3", "b6"))
    assert (whole[0], stages[0]) == (0, 0)
    assert whole[1].count("EDC 14.2") == 8
    assert "EDC" not in stages[1]


@pytest.mark.parametrize(
    ("cluster", "arguments", "message"),
    [
        (GROUP.format(12), ["--workload", "flux.1-dev-heavy"], "weights of diffuse alone are 24000000000 bytes"),
        (GROUP.format(20), ["--workload", "flux.1-dev-heavy"], "fits on no worker: stage C alone needs 20515218688"),
        (GROUP.format(-1), ["--workload", "flux.1-dev-heavy"], "memory_gb: Input should be greater than 0"),
        (GROUP.format(48).replace("2", "0", 1), ["--workload", "flux.1-dev-heavy"], "gpus_per_node: Input should be"),
        (GROUP.format(48).replace("L20", "L21"), ["--workload", "flux.1-dev-heavy"], "NVIDIA L21"),
        (GROUP.format(48), ["--workload", "nothing"], "no mix is named 'nothing'"),
        (
            GROUP.format(48),
            ["--workload", "genserve", "--profiles", "none"],
            "no shipped profile table is named 'none'",
        ),
        (GROUP.format(48), ["--workload", "genserve", "--handoff-mb", "-1"], "--handoff-mb is -1; "),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cluster: str, arguments: list[str], message: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(cluster, encoding="utf-8")
    code, out, err = run(capsys, "--cluster", str(path), *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("plan: ")
    assert message in err
