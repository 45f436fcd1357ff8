"""The console of `make serve`, out of all that `serve run` and Ray print: the start in a few lines, those of this
package, and every warning and error that a reader can use. Ray keeps the whole in the logs of its session."""

from __future__ import annotations

import re

SESSION_LOGS = "/tmp/ray/session_latest/logs"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The prefix of a process of the cluster, and Ray's own sign that it has left out lines that were alike.
_PROCESS = re.compile(r"^\(([^)]*)\) ")
_REPEATED = re.compile(r" *\[repeated \d+x across cluster\].*$")
# How Ray, Ray Serve and the programs of both begin a line. Others are of this package, or continue the one before.
_HEADS = (
    re.compile(r"^(?P<level>INFO|WARNING|ERROR|CRITICAL|DEBUG) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ "),
    re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s(?P<level>[A-Z]+) \S+\.py:\d+ -- "),
    re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +NIXL +(?P<level>[A-Z]+) "),
    re.compile(r"^\[?[IWE]?\d{4}[-/ ]?\d\d[-/ ]?\d\d .*\] "),
)
_OUR_HEAD = re.compile(r"^(?:INFO|WARNING|ERROR|CRITICAL) (?!\d{4}-)")
_QUIET_LEVELS = ("INFO", "SUCC", "DEBUG")
# The access log, where the configuration asks for one.
_ACCESS = re.compile(r" -- (?:GET|POST|DELETE|PUT|PATCH|HEAD|OPTIONS|CALL generate\w*) \S* ?\S+ [\d.]+ms")
# Warnings of what is as it should be: the service is on this machine, its start takes its time, and its end is asked
# for.
_EXPECTED = (
    "won't accept connections from HAProxy on other nodes",
    "Proxy actor readiness check for proxy",
    "Proxy actor reported not ready",
    "replicas that have taken more than",
    "Token authentication is enabled for this Ray cluster",
    "Token authentication is disabled for this Ray cluster",
    "Failed to start RequestProtocol.HTTP server on port",  # taken by another service; the next port is tried
    "There are infinite retries remaining",
)
_TRACEBACK = "Traceback (most recent call last)"
_OWN_RAY = "Started a local Ray instance"
_STEPS = {
    _OWN_RAY: "Ray has started; starting Ray Serve ...",
    "Connected to Ray cluster": "Joined the Ray cluster that runs already; starting Ray Serve ...",
    "Deploying new app": "Ray Serve has started; reading the application ...",
    "Imported and built app": "Starting the scheduler and the API ...",
    "Got KeyboardInterrupt": None,
}


class ServeConsole:
    """Takes the lines one after another. A line that continues another one has that one's fate."""

    def __init__(self) -> None:
        self._shows_more: dict[str, bool] = {}
        """True for each process whose last line was shown."""
        self._is_ending = False
        self.has_own_ray = False
        """Ray was started for this service: no other node joins it."""

    def translate(self, line: str) -> str | None:
        """The line to show, None for none."""
        plain = _COLOUR.sub("", line.rstrip("\n"))
        process = found.group(1) if (found := _PROCESS.match(plain)) else ""
        text = plain[found.end() :] if found else plain
        for mark, step in _STEPS.items():
            if mark in text:
                self._shows_more[process] = False
                self._is_ending |= step is None
                self.has_own_ray |= mark == _OWN_RAY
                return step
        if any(mark in text for mark in _EXPECTED):
            shown = False
        elif head := next(filter(None, (pattern.match(text) for pattern in _HEADS)), None):
            level = head.groupdict().get("level") or "INFO"
            shown = level not in _QUIET_LEVELS or _ACCESS.search(text) is not None
        elif _OUR_HEAD.match(text):
            shown = True
        elif text.startswith(_TRACEBACK) and not process and not self._is_ending:
            shown = True  # `serve run` itself has failed, whatever its line before said
        else:
            shown = self._shows_more.get(process, True) and bool(text.strip())
        self._shows_more[process] = shown
        return _REPEATED.sub("", plain) if shown else None
