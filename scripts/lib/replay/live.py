"""Replays a trace against a running service."""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
from contextlib import closing
from typing import NoReturn

from tqdm import tqdm

from traces.client.replay import replay
from traces.requests import TraceRequest
from traces.results import ReplayResult


def run(arguments: argparse.Namespace, requests: list[TraceRequest]) -> tuple[list[ReplayResult], bool]:
    """The results of the requests that ended, and whether it was interrupted before all of them had."""
    # Each request in flight is an open socket, and an open loop may have thousands of them.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    if arguments.save_images is not None:
        arguments.save_images.mkdir(parents=True, exist_ok=True)
    with closing(_Progress(len(requests))) as progress:
        replaying = replay(
            requests,
            arguments.url,
            speed=arguments.speed,
            model=arguments.model,
            timeout_s=arguments.timeout_s,
            save_dir=arguments.save_images,
            on_sent=progress.on_sent,
            on_done=progress.on_done,
        )
        try:
            return asyncio.run(replaying), False
        except KeyboardInterrupt:
            return sorted(progress.ended, key=lambda result: result.sent_s), True


class _Progress:
    """The bar on stderr. It appears with the first request sent: no bar stands above a message of bad usage."""

    def __init__(self, total: int) -> None:
        self.total, self.sent, self.failed = total, 0, 0
        self.ended: list[ReplayResult] = []
        self.bar: tqdm[NoReturn] | None = None

    def on_sent(self, request: TraceRequest) -> None:
        # miniters=0 lets update(0) redraw: how many were sent shows even while nothing has come back.
        if self.bar is None:
            self.bar = tqdm(total=self.total, unit="req", miniters=0, mininterval=0.2, file=sys.stderr)
        self.sent += 1
        self._show(0)

    def on_done(self, result: ReplayResult) -> None:
        self.ended.append(result)
        self.failed += result.error is not None
        self._show(1)

    def _show(self, done: int) -> None:
        if self.bar is not None:
            self.bar.set_postfix(sent=self.sent, failed=self.failed, refresh=False)
            self.bar.update(done)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
