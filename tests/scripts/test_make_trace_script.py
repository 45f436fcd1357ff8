from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.traces.formats.sample_rows import SAMPLES
from traces.formats.ours import read_trace
from traces.workloads.named import make_workload

# Scripts are no package, so that they are run by their path.
main = runpy.run_path(str(SAMPLES.parents[2] / "scripts" / "make_trace.py"))["main"]


def test_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "light.csv"
    command = ["--workload", "light", "--model", "flux.1-dev", "--duration-s", "60", "--seed", "3", "--out", str(out)]
    assert main(command) == 0
    assert read_trace(out) == make_workload("light", "flux.1-dev", seed=3, duration_s=60.0)
    assert capsys.readouterr().out.startswith(f"{out}: 90 requests in 59 s")
    assert out.read_text().startswith("# make_trace --workload light --model flux.1-dev --duration-s 60.0 --seed 3\n")


def test_every_option_of_a_workload(tmp_path: Path) -> None:
    out = tmp_path / "tetri.txt"
    options = "--deadline-scale 1.5 --rate-scale 2 --arrivals gamma --cv 3 --steps 4 --duration-s 120 --requests 30"
    assert main(["--workload", "tetriserve-uniform", *options.split(), "--out", str(out)]) == 0
    requests = read_trace(out)
    assert len(requests) == 30
    assert {one.num_inference_steps for one in requests} == {4}
    assert {one.slo_ms for one in requests} <= {2250.0, 3000.0, 4500.0, 7500.0}
    head = "--arrivals gamma --cv 3.0 --deadline-scale 1.5 --steps 4 --duration-s 120.0 --seed 0; scaled from"
    assert head in out.read_text().splitlines()[0]


def test_a_trace_of_others(tmp_path: Path) -> None:
    out = tmp_path / "azure.txt"
    source = ["--from", str(SAMPLES / "azure-like.csv"), "--mix", "sd3-medium-light"]
    assert main([*source, "--start-s", "1", "--duration-s", "60", "--out", str(out)]) == 0
    assert [one.timestamp_s for one in read_trace(out)] == [1.1, 4.73, 4.9]
    assert "sizes too, drawn from the mix sd3-medium-light" in out.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--workload light", "needs a model"),
        ("--from no-such-file.csv --mix genserve", "cannot read the trace no-such-file.csv"),
        ("--from x.csv --mix nothing", "no mix is named 'nothing'"),
        ("--from x.csv", "--from and --mix go together"),
        ("--from x.csv --mix genserve --rate-scale 2", "--rate-scale 2.0 has no meaning with --from"),
        ("--workload genserve --start-s 3", "--start-s 3.0 has no meaning with --workload"),
        ("--workload genserve --cv 2", "--cv has no meaning without --arrivals gamma or weibull"),
        ("--workload genserve --steps 0", "'0' is not a whole number above 0"),
        ("--workload dit-serve --duration-s 0.001", "no request comes in so short a time"),
        ("--workload genserve --duration-s -1", "duration_s must be above 0"),
    ],
)
def test_bad_usage_exits_with_2(tmp_path: Path, command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status([*command.split(), "--out", str(tmp_path / "out.txt")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.txt").exists()


def _status(command: list[str]) -> object:
    """The exit status, also where argparse ends the script."""
    try:
        return main(command)
    except SystemExit as stopped:
        return stopped.code
