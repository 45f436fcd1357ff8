from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.formats.sample_rows import HEADER, LINE, REQUEST, ROW, SAMPLES, write
from traces.formats.ours import read_trace, write_trace
from traces.requests import OPTIONAL, REQUIRED, TraceRequest, scale_pixels
from tridentserve.errors import ConfigError, TraceError


@pytest.mark.parametrize(
    "text", [LINE, f"# made by hand\n\n  {LINE}\r\n", f"{HEADER}\n{ROW}\n", f"{HEADER}\r\n{ROW}\r\n"]
)
def test_both_formats_are_distinguished_by_content(tmp_path: Path, text: str) -> None:
    assert read_trace(write(tmp_path, text)) == [REQUEST]


def test_optional_fields_and_columns_in_any_order(tmp_path: Path) -> None:
    full = replace(REQUEST, slo_ms=1500.0, seed=7, fps=16.0, model="tiny-sd3", guidance_scale=0.0)
    full = replace(full, quality="fast", on_late="degrade", priority=-2)
    line = LINE[:-1] + ", slo_ms=1500, seed=7.0, fps=16, model='tiny-sd3', guidance_scale=0, quality='fast', "
    line += "on_late='degrade', priority=-2)"
    assert read_trace(write(tmp_path, line)) == [full]
    columns = "model,seed,slo_ms,quality,on_late,priority,guidance_scale,fps"
    table = f"\ufeff# ours\n{columns},{HEADER.replace('timestamp', 'timestamp_s')}\n"
    rows = f"tiny-sd3,7.0,1.5e3,fast,degrade,-2,0,16,{ROW}\n,,,,,,,,{ROW.replace('0,', '1,', 1)}\n"
    assert read_trace(write(tmp_path, table + rows)) == [full, replace(REQUEST, request_id="1")]


def test_rows_are_sorted_by_time_stably_and_limited_to_the_earliest(tmp_path: Path) -> None:
    lines = [
        LINE.replace("request_id=0", f"request_id='{name}'").replace("0.5", str(timestamp))
        for name, timestamp in [("late", 9), ("b", 1), ("a", 1), ("first", 0)]
    ]
    path = write(tmp_path, "\n".join(lines))
    assert [request.request_id for request in read_trace(path)] == ["first", "b", "a", "late"]
    assert [request.request_id for request in read_trace(path, limit=2)] == ["first", "b"]


def test_a_trace_that_is_not_one_says_so(tmp_path: Path) -> None:
    cases = {
        "": "the file is empty",
        "a,b\n1,2": "line 1: neither",
        "\n\nrequests = 3": "line 3: neither",
        HEADER: "no requests",
        f"{HEADER},nsfw\n{ROW},1": "unknown field 'nsfw' .*optional: slo_ms, seed",
        f"{HEADER},seed,seed\n{ROW},1,1": "twice",
        HEADER.replace(",height", "") + f"\n{ROW}": "missing field height",
    }
    for text, message in cases.items():
        with pytest.raises(TraceError, match=message):
            read_trace(write(tmp_path, text))
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.txt")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(LINE.encode() + b"\n\xff\xfe")
    with pytest.raises(TraceError, match="line 2: not UTF-8"):
        read_trace(tmp_path / "binary")


def test_a_quoted_prompt_over_several_lines_does_not_shift_line_numbers(tmp_path: Path) -> None:
    text = f'{HEADER}\n0,0,64,64,1,"one\ntwo\r\nthree",,4\n1,0,64,64,1,x,,oops\n'
    with pytest.raises(TraceError, match="line 5: num_inference_steps must be a number, not 'oops'"):
        read_trace(write(tmp_path, text))


def test_an_id_is_used_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: request_id '0' was used on line 1"):
        read_trace(write(tmp_path, f"{LINE}\n{LINE}"))


WHOLE = ("height", "width", "num_frames", "num_inference_steps")
TEXTS = ("model", "quality", "on_late")
GOOD = {"request_id": 1, "timestamp": 1.0, "height": 64, "width": 64, "num_frames": 1} | {
    "prompt": "a fox",
    "negative_prompt": "",
    "num_inference_steps": 4,
}


def bad_values(rng: random.Random) -> tuple[str, str, str]:
    """A field, the source text of a value that is wrong for it, and what the error must speak of."""
    number = rng.choice(
        [name for name in (*REQUIRED, *OPTIONAL) if "prompt" not in name and name not in (*TEXTS, "priority")]
    )
    whole = rng.choice(WHOLE)
    huge = rng.choice(["9" * 30, "1e30", "9" * 5000])
    return rng.choice(
        [
            (rng.choice(["timestamp", "slo_ms", "fps", "guidance_scale"]), rng.choice(["1e999", "-1e999"]), "finite"),
            (number, f"-{rng.randint(1, 10**6)}", "must be "),
            (whole, "0", "must be at least 1"),
            (whole, f"{rng.randint(1, 99)}.5", "whole"),
            (whole, huge, ""),
            (rng.choice(["slo_ms", "fps"]), "0", "above 0"),
            ("quality", repr(rng.choice(["best", "", "Fast"])), "one of exact, high, fast"),
            ("on_late", repr(rng.choice(["later", "", "Refuse"])), "one of wait, refuse, degrade"),
            ("priority", f"{rng.choice('+-')}{rng.randint(1001, 10**6)}".lstrip("+"), "must be at least -1000"),
            ("timestamp", f"17{rng.randint(10**7, 10**8 - 1)}.5", "start of the trace"),
        ]
    )


def malformed_line(rng: random.Random) -> tuple[str, str]:
    """A `Request(...)` line that is broken in one way, and what the error must speak of."""
    source = {name: repr(value) for name, value in GOOD.items()}

    def call(fields: dict[str, str]) -> str:
        return f"Request({', '.join(f'{name}={value}' for name, value in fields.items())})"

    field, value, message = bad_values(rng)
    name = rng.choice(list(source))
    whole = call(source)
    attack = rng.choice(["__import__('os').abort()", "[].clear()", "1 + 1", "f'{1}'", "x", "float('nan')", "-'a'"])
    return rng.choice(
        [
            (call(source | {field: value}), message),
            (call(source | {name: attack}), f"{name} must be a plain"),
            (call(source | {name: rng.choice(["None", "True", "b'x'", "2j", "..."])}), f"{name} must be"),
            (call({key: source[key] for key in source if key != name}), f"missing field {name}"),
            (call(source | {f"x{rng.randint(0, 99)}": "1"}), "unknown field 'x"),
            (whole[: rng.randint(8, len(whole) - 1)], "not a"),
            (f"{whole}, {whole}", "not a Request"),
            (f"{call(source)[:-1]}, {name}=1)", f"{name} is given twice"),
            (f"Request(1, {whole[8:]}", "name=value"),
            (f"Request(**{{'a': {rng.randint(0, 99)}}})", "name=value"),
            (f"{attack}.Request(a=1)", "not a"),
            (rng.choice("([-~") * rng.randint(300, 20_000) + "1", "not a"),
            ("Request(" + "+".join("1" * 20_000), "not a"),
            ("Request(prompt='" + "x" * 2**20 + "')", "longer than"),
            (call(source | {"prompt": rng.choice(["''", "'  '"])}), "prompt is empty"),
            (call(source | {"prompt": "'\\ud800'"}), "surrogate"),
            (call(source | {"height": "'64'"}), "height must be a number"),
            (f"eval({whole!r})", "not a Request"),
        ]
    )


def malformed_row(rng: random.Random) -> tuple[str, str]:
    """A CSV row (optional columns included) that is broken in one way, and what the error must speak of."""
    source = {name: str(value) for name, value in GOOD.items()} | dict.fromkeys(OPTIONAL, "")
    field, value, message = bad_values(rng)
    numeric = rng.choice([name for name in source if "prompt" not in name and name not in ("request_id", "model")])
    good = ",".join(source.values())
    if field == "request_id":
        return ",".join((source | {"request_id": ""}).values()), "request_id is empty"
    return rng.choice(
        [
            (",".join((source | {field: value}).values()), message),
            (",".join((source | {numeric: rng.choice(["x", "1;2", "0x10", "1,5"])}).values()), ""),
            (",".join((source | {rng.choice(["height", "timestamp"]): " "}).values()), "is empty"),
            (",".join((source | {"timestamp": rng.choice(["nan", "inf", "-inf", "1e999"])}).values()), "finite"),
            (",".join((source | {"prompt": " "}).values()), "prompt is empty"),
            (good + "," * rng.randint(1, 9), "cells where the header has"),
            (good.rsplit(",", rng.randint(1, 12))[0], "cells where the header has"),
            (good.replace("a fox", '"a" fox'), "not well-formed CSV"),
            (good.replace("a fox", '"a fox'), "not well-formed CSV"),
        ]
    )


@pytest.mark.parametrize("kind", ["lines", "csv"])
def test_1000_malformed_rows_are_each_reported_with_their_line(tmp_path: Path, kind: str) -> None:
    rng = random.Random(20251002)
    good_lines = [LINE.replace("request_id=0", f"request_id={100 + row}") for row in range(5)]
    good_rows = [ROW.replace("0,", f"{100 + row},", 1) + "," * len(OPTIONAL) for row in range(5)]
    for _ in range(500):
        place = rng.randint(1, 5)  # never first: that decides the format
        broken, message = malformed_line(rng) if kind == "lines" else malformed_row(rng)
        rows = good_lines.copy() if kind == "lines" else [",".join((*REQUIRED, *OPTIONAL)), *good_rows]
        rows.insert(place, broken)
        path = write(tmp_path, "\n".join(rows))
        with pytest.raises(TraceError) as failure:
            read_trace(path)
        told = str(failure.value)
        assert f"line {place + 1}: " in told, (broken[:200], told)
        assert message in told, (broken[:200], told)
        assert len(told) < 500, "an error fits the screen"


@given(
    st.one_of(
        st.text(), st.text("Request(prompt='x',1=)\n").map("Request".__add__), st.text().map(f"{HEADER}\n".__add__)
    )
)
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(TraceError):  # and with nothing else
        assert read_trace(path)


def text(min_size: int = 0) -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), min_size=min_size, max_size=20)


TEXT = text(1).filter(lambda value: bool(value.strip()))


def number(low: float, high: float, above: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=above)


REQUESTS = st.builds(
    TraceRequest,
    request_id=TEXT | st.integers(0, 10**20).map(str),
    timestamp_s=number(0, 1e9),
    height=st.integers(1, 65536),
    width=st.integers(1, 65536),
    num_frames=st.integers(1, 65536),
    prompt=TEXT,
    negative_prompt=text(),
    num_inference_steps=st.integers(1, 10_000),
    slo_ms=st.none() | number(0, 1e12, above=True),
    seed=st.none() | st.integers(0, 2**63 - 1),
    fps=st.none() | number(0, 1e6, above=True),
    model=st.none() | TEXT,
    guidance_scale=st.none() | number(0, 1e6),
    quality=st.sampled_from([None, "exact", "high", "fast"]),
    on_late=st.sampled_from([None, "wait", "refuse", "degrade"]),
    priority=st.none() | st.integers(-1000, 1000),
)


@given(st.lists(REQUESTS, min_size=1, max_size=4, unique_by=lambda request: request.request_id))
@pytest.mark.parametrize("name", ["trace.txt", "trace.csv"])
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, requests: list[TraceRequest]
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    write_trace(requests, path)
    assert read_trace(path) == sorted(requests, key=lambda request: request.timestamp_s)


def test_a_request_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"request 1 .*finite"):
        write_trace([REQUEST, replace(REQUEST, timestamp_s=float("nan"))], tmp_path / "trace.txt")
    assert not list(tmp_path.iterdir())


@given(st.integers(1, 4096), st.integers(1, 4096), st.floats(0.01, 10), st.sampled_from([1, 8, 16, 32]))
def test_scaled_sizes_are_near_and_on_the_multiple(height: int, width: int, factor: float, multiple: int) -> None:
    scaled = scale_pixels(replace(REQUEST, height=height, width=width), factor, multiple)
    for before, after in ((height, scaled.height), (width, scaled.width)):
        assert after % multiple == 0
        assert after >= multiple
        assert abs(after - before * factor**0.5) <= multiple / 2 + 1e-6 or after == multiple


def test_pixels_are_scaled_not_sides() -> None:
    scaled = scale_pixels(replace(REQUEST, height=1024, width=2048), 1 / 16)
    assert (scaled.height, scaled.width) == (256, 512)
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="above 0"):
            scale_pixels(REQUEST, factor)


def quickstart_requests() -> list[TraceRequest]:
    """The requests of `traces/data/samples/quickstart.txt`: Poisson arrivals at 2 per second, random sizes, seed 0."""
    rng = random.Random(0)
    sizes = [(128, 128), (256, 256), (256, 384), (384, 256), (512, 512)]
    things = ["a red fox in the snow", "a lighthouse at dusk", "a bowl of lemons", "a paper boat on a lake"]
    styles = ["watercolour", "oil on canvas", "a photograph", "a woodcut"]
    requests, timestamp_s = [], 0.0
    for index in range(20):
        height, width = rng.choice(sizes)
        prompt = f"{rng.choice(things)}, {rng.choice(styles)}"
        requests.append(
            TraceRequest(str(index), round(timestamp_s, 3), height, width, 1, prompt, "blurry", 8, seed=index)
        )
        timestamp_s += rng.expovariate(2.0)
    return requests


def test_the_sample_trace_is_the_one_described() -> None:
    assert read_trace(SAMPLES / "quickstart.txt") == quickstart_requests()
