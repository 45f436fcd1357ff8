"""Profile tables: what is written is read back, and what is wrong is named with file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from profiler import read_shipped_table, read_table, write_table
from profiler.tables.links import LinkSpeeds
from profiler.tables.rows import (
    COLUMNS,
    LINKS_COLUMNS,
    WEIGHTS_COLUMNS,
    LinksRow,
    derive_links_path,
    derive_weights_path,
)
from tests.profiler.synthetic import table
from tridentserve.errors import ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage

GOOD = "m,cpu,diffuse,64,64,1,1,1,0.5,1000,measured"


def write(
    folder: Path, *lines: str, header: str = ",".join(COLUMNS), weights: str = "m,diffuse,10,4,0.5,measured"
) -> Path:
    path = folder / "t.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    derive_weights_path(path).write_text(",".join(WEIGHTS_COLUMNS) + "\n" + weights + "\n")
    return path


def test_written_tables_read_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "new" / "synthetic.csv"
    write_table(path, table())
    again = read_table(path)
    assert again.weights == table().weights
    assert [row.key for row in again.rows] == [row.key for row in table().rows]
    assert [row.seconds for row in again.rows] == pytest.approx([row.seconds for row in table().rows], rel=1e-5)


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_table(path, table())
    before = path.read_bytes()
    broken = replace(table(), rows=(*table().rows, replace(table().rows[0], model="\ud800")))
    with pytest.raises(UnicodeEncodeError):
        write_table(path, broken)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.csv", "t.weights.csv"]


def test_links_are_written_read_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    links = (LinksRow("gpu", LinkSpeeds(1e9, 2.5e8, float("inf"), 3.0, 0.25, 0.5), "measured: a test"),)
    write_table(path, replace(table(), links=links))
    assert read_table(path).links == links
    write_table(path, table())
    assert read_table(path).links == links, "tools write none, so what a person wrote stays"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("gpu,1,1,0,1,0,0,measured", "t.links.csv:2: host_bytes_per_s is 0.0; it must be above 0"),
        ("gpu,1,nan,1,1,0,0,measured", "t.links.csv:2: inter_node_bytes_per_s is nan; it must be above 0"),
        ("gpu,1,1,1,fast,0,0,measured", "disk_bytes_per_s is 'fast'; give a number of bytes per second, or inf"),
        ("gpu,1,1,1,1,inf,0,measured", "transfer_latency_s is inf; it must be at least 0 and finite"),
        ("gpu,1,1,1,1,0,0,measured\ngpu,1,1,1,1,0,0,measured", "t.links.csv:3: gpu comes twice; keep one row"),
    ],
)
def test_bad_links_are_named(tmp_path: Path, cells: str, message: str) -> None:
    path = write(tmp_path, GOOD)
    derive_links_path(path).write_text(",".join(LINKS_COLUMNS) + "\n" + cells + "\n")
    with pytest.raises(ProfileError, match=message):
        read_table(path)


def test_a_stage_other_than_diffuse_may_take_no_time(tmp_path: Path) -> None:
    free = GOOD.replace("0.5", "0")
    assert read_table(write(tmp_path, free.replace("diffuse", "decode"))).rows[0].seconds == 0
    with pytest.raises(ProfileError, match=r"seconds is -1.0; it must be at least 0"):
        read_table(write(tmp_path, GOOD.replace("0.5", "-1").replace("diffuse", "encode")))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("m,diffuse,10,-4,0.5,measured", "output_bytes is -4; it must be at least 0"),
        ("m,diffuse,10,4,many,measured", "output_bytes_per_token is 'many'; give a number"),
        ("m,diffuse,10,4,-0.5,measured", "output_bytes_per_token is -0.5; it must be at least 0 and finite"),
    ],
)
def test_bad_outputs_are_named(tmp_path: Path, weights: str, message: str) -> None:
    with pytest.raises(ProfileError, match=f"t.weights.csv:2: {message}"):
        read_table(write(tmp_path, GOOD, weights=weights))


def test_reads_a_row_with_spaces_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path, "", GOOD.replace(",", " , "), "")
    path.write_text("\ufeff" + path.read_text())
    (row,) = read_table(path).rows
    assert (row.model, row.stage, row.shape, row.seconds) == ("m", Stage.DIFFUSE, Shape(64, 64), 0.5)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("seconds", "0", "seconds is 0.0; it must be above 0"),
        ("seconds", "nan", "seconds is nan; it must be above 0 and finite"),
        ("seconds", "fast", "seconds is 'fast'; give a number of seconds"),
        ("degree", "3", "degree 3 is not a power of two"),
        ("degree", "", "degree is empty"),
        ("height", "-64", "height is -64; it must be at least 1"),
        ("width", "6.4", "width is '6.4'; give a whole number"),
        ("peak_bytes", "-1", "peak_bytes is -1; it must be at least 0"),
        ("batch", "0", "batch is 0; it must be at least 1"),
        ("stage", "denoise", "stage is 'denoise'; it must be one of encode, diffuse, decode"),
        ("source", "guessed", "source is 'guessed'; start it with one of measured, published, modelled"),
        ("model", " ", "model is empty"),
    ],
)
def test_a_bad_cell_is_named_with_its_line(tmp_path: Path, column: str, value: str, message: str) -> None:
    cells = dict(zip(COLUMNS, GOOD.split(","), strict=True)) | {column: value}
    path = write(tmp_path, GOOD.replace("64,64", "32,32"), ",".join(cells.values()))
    with pytest.raises(ProfileError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"t.csv:3: {message}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, GOOD], "t.csv:3: m diffuse 64x64 at degree 1 comes twice"),
        ([GOOD + ",extra"], "t.csv:2: 12 cells where the header has 11"),
        ([GOOD, 'm,"cpu'], "t.csv:3: not CSV"),
        (["m\0" + GOOD[1:]], "t.csv:2: model is 'm\\x00'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read_table(write(tmp_path, *lines))
    assert str(caught.value).startswith(message)


def test_a_bad_header_names_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, header=",".join(COLUMNS).replace("seconds", "secs"))
    with pytest.raises(ProfileError, match=r"t.csv:1: .*missing: seconds; unknown: secs"):
        read_table(path)


def test_a_repeated_weight_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, weights="m,diffuse,10,4,0.5,measured\nm,diffuse,11,4,0.5,measured")
    with pytest.raises(ProfileError, match=r"t.weights.csv:3: m diffuse comes twice"):
        read_table(path)


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    derive_weights_path(path).unlink()
    with pytest.raises(ProfileError, match=r"t.weights.csv: no such file; write it with"):
        read_table(path)
    path.write_text("")
    with pytest.raises(ProfileError, match=r"t.csv:1: the file is empty"):
        read_table(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="cannot be read as UTF-8"):
        read_table(path)


def test_an_unknown_shipped_table_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ProfileError, match=r"no shipped profile table is named 'tiny-tpu'; there are: .*tiny-cpu"):
        read_shipped_table("tiny-tpu")
