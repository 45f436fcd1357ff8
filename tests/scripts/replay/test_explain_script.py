"""The script that explains requests of a log."""

from __future__ import annotations

import json
from pathlib import Path

import explain
import pytest
import yaml

from tests.deployments.explaining.bursts import CONFIGURATION, record_bursts
from tridentserve.scheduling.decision_log import encode_entry
from tridentserve.scheduling.explanation.chronicle import Chronicle


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{encode_entry(entry)}\n" for entry in record_bursts()))
    return path


@pytest.fixture
def late() -> list[str]:
    return [life.request_id for life in Chronicle(record_bursts()).list_late()]


def test_the_latest_late_requests(
    log: Path, late: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"args": CONFIGURATION}]}))
    assert explain.main([str(log), "--late", "1", "--config", str(config)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{late[-1]} (tiny-sd3, ")
    assert "the log was run again without each:" in text


def test_one_request_as_json_by_the_log_alone(log: Path, late: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([str(log), late[0], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["id"], told["baseline"]) == (late[0], None)
    assert "no --config" in told["not_run"]


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nobody"], "no request with this id"), (["--late", "0"], "--late")]
)
def test_what_cannot_be_explained(
    log: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = explain.main([str(log), *arguments])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_log_without_late_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text("")
    assert explain.main([str(tmp_path / "log.jsonl"), "--late", "3"]) == 2
    assert "no request was late" in capsys.readouterr().err
