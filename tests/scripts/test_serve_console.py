"""The console of `make serve`, by lines that Ray, Ray Serve and this package print."""

from __future__ import annotations

import pytest
from lib.serve_console import ServeConsole

OF_CONTROLLER = "\x1b[36m(ServeController pid=22842)\x1b[0m "
QUIET = [
    f"{OF_CONTROLLER}INFO 2026-11-28 04:47:02,439 controller 22842 -- Adding 1 replica to Deployment(name='Api').",
    "2026-11-28 04:46:34,120\tINFO scripts.py:489 -- Running config file: 'quick.yaml'.",
    "2026-11-28 04:47:57,383\tSUCC scripts.py:546 -- \x1b[32mSubmitted deploy config successfully.\x1b[39m",
    "\x1b[33m(raylet)\x1b[0m Task ServeController.graceful_shutdown failed. There are infinite retries remaining.",
    "(ProxyActor pid=1) INFO 2026-11-28 04:47:09,111 proxy -- Client for request ebf disconnected, cancelling request.",
    "(ServeReplica:tridentserve:Scheduler pid=1) INFO 2026-11-28 04:47:09,111 tridentserve_Scheduler x y -- "
    "CALL get_catalogue OK 2001.5ms",
    "2026-11-28 05:00:36,021\tWARNING authentication_token_setup.py:85 -- Token authentication is enabled for this Ray "
    "cluster. Set RAY_AUTH_MODE=disabled to opt out.",
    "(StageWorker pid=1) 2026-11-28 05:00:36 NIXL INFO    _api.py:361 Backend UCX was instantiated",
    "",
]
SHOWN = [
    "(ServeReplica:tridentserve:Scheduler pid=1) INFO worker n0w1 has started and holds its weights (1 of 4)",
    "(ServeReplica:tridentserve:Api pid=1) ERROR 2026-11-28 05:03:12,302 tridentserve_Api y63 fc -- Request failed.",
    "(ServeReplica:tridentserve:Api pid=1) INFO 2026-11-28 05:03:12,302 tridentserve_Api y63 -- GET /health 200 2.1ms",
    "forked_start: no fork server",
]


@pytest.mark.parametrize("line", QUIET)
def test_what_says_nothing_to_a_user_is_quiet(line: str) -> None:
    assert ServeConsole().translate(line + "\n") is None


@pytest.mark.parametrize("line", SHOWN)
def test_what_a_user_can_use_is_shown_without_colours(line: str) -> None:
    assert ServeConsole().translate(f"\x1b[36m{line}\x1b[0m\n") == line


def test_a_continued_line_has_the_fate_of_the_one_before_of_its_process() -> None:
    console = ServeConsole()
    console.translate(
        f"{OF_CONTROLLER}WARNING 2026-11-28 04:47:32,538 controller 1 -- replicas that have taken more than"
    )
    assert console.translate("(ServeReplica:a:Api pid=3) ERROR 2026-11-28 05:03:12,302 a_Api y fc -- Request failed.")
    assert console.translate(f"{OF_CONTROLLER}This may be caused by a slow __init__ or reconfigure method.") is None
    assert console.translate("(ServeReplica:a:Api pid=3) Traceback (most recent call last):")


def test_a_failure_of_the_start_itself_is_shown_and_none_of_the_end() -> None:
    console = ServeConsole()
    console.translate("2026-11-28 04:46:34,120\tINFO scripts.py:489 -- Running config file: 'quick.yaml'.")
    failure = ["Traceback (most recent call last):", "Exception: The current node timed out during startup."]
    assert [console.translate(line) for line in failure] == failure
    console.translate("2026-11-28 04:47:34,120\tINFO scripts.py:600 -- Got KeyboardInterrupt, shutting down...")
    assert [console.translate(line) for line in failure] == [None, None]


def test_the_steps_of_the_start_are_told_in_words() -> None:
    told = ServeConsole().translate("2026-11-28 04:46:46,049\tINFO worker.py:2029 -- Started a local Ray instance.\n")
    assert told is not None
    assert told.startswith("Ray has started")
