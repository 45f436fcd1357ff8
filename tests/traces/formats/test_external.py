from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.formats.sample_rows import SAMPLES, write
from traces.formats import alibaba, azure, servegen
from traces.formats.external import read_external
from traces.formats.ours import read_trace, write_trace
from traces.workloads.mixes import load_mix
from tridentserve.errors import ConfigError, TraceError

MIX = load_mix("flux.1-dev-medium")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ALIBABA = "gmt_create,predict_type,num_images_per_prompt,num_inference_steps\n"
BIN = "0,0.5,1.0,Gamma,1.0,2.0\n"


def test_azure_times_count_from_the_first() -> None:
    drawn = read_external(SAMPLES / "azure-like.csv", MIX, seed=3)
    assert [one.timestamp_s for one in drawn.requests] == [0.0, 0.45, 0.46, 2.1, 5.73, 5.9]
    assert {one.model for one in drawn.requests} == {"flux.1-dev"}
    assert drawn.requests == read_external(SAMPLES / "azure-like.csv", MIX, seed=3).requests
    assert "times from azure-like.csv (Azure LLM 2023)" in drawn.provenance
    assert "sizes too, drawn from the mix flux.1-dev-medium with seed 3" in drawn.provenance


def test_a_window_of_a_trace() -> None:
    drawn = read_external(SAMPLES / "azure-like.csv", MIX, start_s=0.46, duration_s=5.3)
    assert [one.timestamp_s for one in drawn.requests] == [0.0, 1.64, 5.27]
    with pytest.raises(TraceError, match=r"no request came from 100 s to 101 s \(6 came at all\)"):
        read_external(SAMPLES / "azure-like.csv", MIX, start_s=100, duration_s=1)
    with pytest.raises(ConfigError, match="start must not be negative"):
        read_external(SAMPLES / "azure-like.csv", MIX, duration_s=0)


def test_alibaba_requests_keep_their_steps_and_are_one_per_image() -> None:
    drawn = read_external(SAMPLES / "alibaba-like.csv", MIX)
    assert [(one.timestamp_s, one.num_inference_steps) for one in drawn.requests] == [
        *((0.0, 20), (3.0, 30), (3.0, 30)),
        *[(9.0, 25)] * 4,
        (12.0, 4),
    ]
    assert drawn.provenance.startswith("times and steps from alibaba-like.csv")


@pytest.mark.parametrize(
    ("kind", "status"), [("IMG_2_IMG", "SUCCEED"), ("inpainting", "SUCCEED"), ("TXT_2_IMG", "PENDING")]
)
def test_requests_that_made_no_image_from_text_alone_are_left_out(tmp_path: Path, kind: str, status: str) -> None:
    head = "gmt_create,num_inference_steps,num_images_per_prompt,predict_type,predict_status\n"
    row = f"2024-05-01 10:00:03,30,1,{kind},{status}\n"
    drawn = read_external(write(tmp_path, f"{head}2024-05-01 10:00:00,20,1,TXT_2_IMG,SUCCEED\n{row}"), MIX)
    assert [one.num_inference_steps for one in drawn.requests] == [20]
    with pytest.raises(TraceError, match=r"line 2: each of the 1 requests failed, waited, or starts"):
        read_external(write(tmp_path, head + row), MIX)


def test_servegen_bins_are_sampled_at_their_rate() -> None:
    counts = [len(read_external(SAMPLES / "servegen-like.csv", MIX, seed).requests) for seed in range(30)]
    assert fmean(counts) == pytest.approx(600 * (0.05 + 0.2 + 0.1), rel=0.1)
    times_s = [one.timestamp_s for one in read_external(SAMPLES / "servegen-like.csv", MIX).requests]
    assert not [time_s for time_s in times_s if 1200 <= time_s < 1800]


def test_a_directory_of_servegen_chunks_is_many_clients(tmp_path: Path) -> None:
    for client in ("a", "b"):
        (tmp_path / f"{client}.csv").write_text(BIN)
    drawn = read_external(tmp_path, MIX)
    assert len(drawn.requests) == pytest.approx(600, abs=100)
    assert len({one.timestamp_s for one in drawn.requests}) > 590, "the clients are not copies of each other"
    assert "2 clients" in drawn.provenance
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"holds no \.csv"):
        read_external(tmp_path / "empty", MIX)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE + "2023-11-16 18:17:03.97,1,2\nsoon,1,2\n", "line 3: TIMESTAMP must be a date and time, not 'soon'"),
        (AZURE + "2023-11-16 18:17:03.97,1\n", "line 2: 2 cells where the header has 3"),
        (AZURE + "2023-11-16 18:17:03.97,1,many\n", "line 2: GeneratedTokens must be a number"),
        (AZURE + '2023-11-16 18:17:03.97,1,"2\n', "line 2: not well-formed CSV"),
        (AZURE, "no request came"),
        (ALIBABA + "2024-05-01 10:00:00,T,1,0\n", "line 2: num_inference_steps must be at least 1"),
        (ALIBABA + "2024-05-01 10:00:00,T,1.5,8\n", "line 2: num_images_per_prompt must be a whole number"),
        (ALIBABA + "2024-05-01 10:00:00,T,1e300,8\n", "line 2: num_images_per_prompt must be .* at most 1000"),
        (ALIBABA + "NULL,T,1,8\n", "line 2: gmt_create must be a date and time"),
        (f"{BIN}600,1,1,Pareto,1,1\n", "line 2: the distribution must be Gamma, Weibull, Exponential or empty"),
        (f"{BIN}300,1,1,Gamma,1,1\n", r"line 2: the bin begins at 300 s, before the one ahead of it ends \(600 s\)"),
        (f"{BIN}600,1,1,,1,1\n", "line 2: a rate of 1 without a distribution"),
        (f"{BIN}600,1,-1,Gamma,1,1\n", "line 2: cv must be finite and not negative"),
        (f"{BIN}600,1,0,Gamma,1,1\n", "line 2: cv must be from"),
        (f"{BIN}600,inf,1,Gamma,1,1\n", "line 2: rate must be finite"),
        (f"{BIN}600,1\n", "line 2: 2 cells where a bin has 6"),
        ("a,b\n1,2\n", r"line 1: none of Azure LLM 2023 .*ServeGen chunk .*: 'a,b'"),
        ("", "line 1: none of"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_external(write(tmp_path, text), MIX)


ROWS = st.lists(st.text(alphabet="0123456789.,-:eE GamWeibulNUL\n\"'é", max_size=60), max_size=4)


@given(st.sampled_from([(azure, AZURE), (alibaba, ALIBABA), (servegen, BIN)]), ROWS)
def test_every_content_of_a_file_is_read_or_reported_with_its_line(known: tuple[Any, str], rows: list[str]) -> None:
    module, head = known
    times_s: list[float] = []
    said = ""
    try:
        times_s = [arrival.time_s for arrival in module.read(head + "\n".join(rows), "f.csv", 0)]
    except TraceError as error:
        said = str(error)
    assert not said or said.startswith("f.csv, line ")
    assert times_s == sorted(times_s)


def test_our_reader_points_to_the_converter(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"scripts/make_trace\.py --from"):
        read_trace(SAMPLES / "azure-like.csv")


@pytest.mark.parametrize("name", ["trace.txt", "trace.csv"])
def test_a_comment_goes_ahead_and_is_skipped(tmp_path: Path, name: str) -> None:
    requests = read_external(SAMPLES / "azure-like.csv", MIX).requests
    write_trace(requests, tmp_path / name, comment='the "first", of two\nlines')
    assert (tmp_path / name).read_text().startswith("# the 'first', of two\n# lines\n")
    assert read_trace(tmp_path / name) == requests
