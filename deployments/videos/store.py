"""Video jobs in SQLite: the request of each job, the process that works on it, and its end.

A job is queued, then leased by one process, which renews its lease while it works; then completed or failed. The lease
of a process that died runs out, and the next process that asks takes the job over. A process that has lost a lease
cannot end the job any more. So each job ends, and ends once, whatever processes come and go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployments.videos.job_database import begin_write, open_database
from deployments.videos.video_job import VideoJob, is_same, read_job, write_request
from tridentserve.errors import InvalidRequestError, OverloadedError
from tridentserve.requests import GenerationInputs, RequestSpec

_MAY_BE_CLAIMED = "(state = 'queued' AND not_before_s <= :now_s OR state = 'leased' AND lease_until_s <= :now_s)"


@dataclass(frozen=True, slots=True)
class UnkeptFiles:
    """Files that were begun and belong to no completed job. Some of them may not exist."""

    number: int
    """The number of their job."""
    name: str
    count: int


class VideoStore:
    """The jobs in one file. Calls block for as long as the disk takes, and come from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` for a file of another program or of another version."""
        self._db = open_database(path)

    def close(self) -> None:
        self._db.close()

    # Calls on behalf of clients.

    def submit(
        self,
        spec: RequestSpec,
        inputs: GenerationInputs,
        priority: int,
        now_s: float,
        max_unfinished: int,
        max_image_bytes: int,
    ) -> VideoJob:
        """Create a job, or join the job with the same id and the same request; a job that failed is created anew. The
        input images of unfinished jobs have at most `max_image_bytes` together.

        Raises `InvalidRequestError` for an id that was used for another request and for an image that never has room,
        and `OverloadedError`."""
        image, inputs = inputs.image, replace(inputs, image=None)
        digest = None if image is None else hashlib.sha256(image).hexdigest()
        with begin_write(self._db):
            known = self.find(spec.request_id)
            if known is not None and known.state != "failed":
                if is_same(known, spec, inputs, digest):
                    return known
                message = "request_id has been used for another request: choose a new one"
                raise InvalidRequestError(message, "request_id")
            if self._count("SELECT COUNT(*) FROM jobs WHERE state IN ('queued', 'leased')") >= max_unfinished:
                raise OverloadedError(f"{max_unfinished} video jobs have not ended yet, try again later")
            self._db.execute("DELETE FROM jobs WHERE id = ?", (spec.request_id,))
            written = (spec.request_id, priority, *write_request(spec, inputs))
            number = self._db.execute(
                "INSERT INTO jobs (id, state, priority, spec, inputs, created_s, image_sha256) "
                "VALUES (?, 'queued', ?, ?, ?, ?, ?)",
                (*written, now_s, digest),
            ).lastrowid
            if image is not None:
                if len(image) > max_image_bytes:
                    raise InvalidRequestError(
                        f"input_reference: takes {len(image)} bytes as a PNG file, more than the {max_image_bytes} "
                        "that this service keeps for all jobs; send a smaller image",
                        "input_reference",
                    )
                self._db.execute("INSERT INTO images (number, png) VALUES (?, ?)", (number, image))
                if self._count("SELECT SUM(LENGTH(png)) FROM images") > max_image_bytes:
                    raise OverloadedError("the images of unfinished video jobs take all their room, try again later")
            job = self.find(spec.request_id)
        if job is None:
            raise RuntimeError("the job that was just written is not there")
        return job

    def find_image(self, number: int) -> bytes | None:
        """The input image of an unfinished job, a PNG file."""
        row = self._db.execute("SELECT png FROM images WHERE number = ?", (number,)).fetchone()
        return None if row is None else bytes(row["png"])

    def _count(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0] or 0)

    def find(self, job_id: str) -> VideoJob | None:
        row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else read_job(row)

    def list_page(self, after: str | None, limit: int, newest_first: bool) -> list[VideoJob]:
        """Up to `limit` jobs that follow the job `after`. Raises `InvalidRequestError` when no job has that id."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        where = ""
        if after is not None:
            if (start := self.find(after)) is None:
                raise InvalidRequestError("after: there is no video with this id, begin again without it", "after")
            where = f"WHERE number {sign} {start.number}"
        rows = self._db.execute(f"SELECT * FROM jobs {where} ORDER BY number {order} LIMIT ?", (limit,))
        return [read_job(row) for row in rows]

    def delete(self, number: int) -> None:
        """Forget a job, if it has ended."""
        self._db.execute("DELETE FROM jobs WHERE number = ? AND ended_s IS NOT NULL", (number,))

    # Calls of processes that work on jobs.

    def claim(
        self, owner: str, count: int, now_s: float, lease_s: float, max_image_bytes: int | None = None
    ) -> list[VideoJob]:
        """Lease up to `count` jobs that no process works on: higher priority first, then in order of arrival.

        The images of all jobs that `owner` has then take at most `max_image_bytes`, unless there is only one image.
        Behind the first job whose image has no room, all jobs with images wait; jobs without one overtake them."""
        if count <= 0:
            return []
        with begin_write(self._db):
            numbers = self._choose_next(owner, count, now_s, max_image_bytes)
            rows = self._db.execute(
                "UPDATE jobs SET state = 'leased', owner = ?, lease_until_s = ?, attempts = attempts + 1, "
                f"steps_done = 0 WHERE number IN ({', '.join('?' * len(numbers))}) RETURNING *",
                (owner, now_s + lease_s, *numbers),
            ).fetchall()
        return sorted((read_job(row) for row in rows), key=lambda job: (-job.priority, job.number))

    def _choose_next(self, owner: str, count: int, now_s: float, max_image_bytes: int | None) -> list[int]:
        lengths = "SELECT jobs.number, LENGTH(png) AS num_bytes FROM jobs LEFT JOIN images USING (number)"
        own = self._db.execute(f"{lengths} WHERE state = 'leased' AND owner = ? AND lease_until_s > ?", (owner, now_s))
        held = sum(row["num_bytes"] or 0 for row in own)
        may_be = self._db.execute(
            f"{lengths} WHERE {_MAY_BE_CLAIMED} ORDER BY priority DESC, jobs.number", {"now_s": now_s}
        )
        numbers, is_full = list[int](), False
        for row in may_be:
            num_bytes = row["num_bytes"] or 0
            is_full |= max_image_bytes is not None and held > 0 and held + num_bytes > max_image_bytes
            if num_bytes and is_full:
                continue
            held += num_bytes
            numbers.append(row["number"])
            if len(numbers) == count:
                break
        return numbers

    def renew(self, owner: str, steps_done: Mapping[int, int], now_s: float, lease_s: float) -> set[int]:
        """Renew leases and store the completed steps of jobs, by number. Returns the jobs that `owner` still has."""
        with begin_write(self._db):
            return {
                number
                for number, steps in steps_done.items()
                if self._update(owner, number, "lease_until_s = ?, steps_done = ?", (now_s + lease_s, steps))
            }

    def release(self, owner: str, number: int, not_before_s: float, counted: bool) -> None:
        """Give an unfinished job back. Unless `counted`, the lease does not count as an attempt."""
        change = "state = 'queued', owner = NULL, not_before_s = ?, attempts = attempts - ?, steps_done = 0"
        self._update(owner, number, change, (not_before_s, 0 if counted else 1))

    def complete(self, owner: str, number: int, result: Mapping[str, Any], result_bytes: int, now_s: float) -> bool:
        """Complete a job. The result is False, and nothing changes, when `owner` does not have the job any more."""
        change = "state = 'completed', owner = NULL, result = ?, result_bytes = ?, ended_s = ?"
        return self._update(owner, number, change, (json.dumps(result), result_bytes, now_s))

    def fail(self, owner: str | None, number: int, error: Mapping[str, Any], now_s: float) -> bool:
        """Fail a job. The result is False, and nothing changes, when `owner` does not have the job any more, or it has
        ended. An owner of None fails the job of any process."""
        change = "state = 'failed', owner = NULL, error = ?, ended_s = ?"
        return self._update(owner, number, change, (json.dumps(error), now_s))

    def _update(self, owner: str | None, number: int, change: str, values: tuple[Any, ...]) -> bool:
        mine = "state IN ('queued', 'leased')" if owner is None else "state = 'leased' AND owner = ?"
        keys = (number,) if owner is None else (number, owner)
        done = self._db.execute(f"UPDATE jobs SET {change} WHERE number = ? AND {mine}", (*values, *keys))
        return done.rowcount == 1

    # Old jobs and their files.

    def list_ended_before(self, time_s: float) -> list[VideoJob]:
        """Jobs that ended before this time."""
        rows = self._db.execute("SELECT * FROM jobs WHERE ended_s < ?", (time_s,))
        return [read_job(row) for row in rows]

    def list_surplus(self, max_bytes: int) -> list[VideoJob]:
        """The oldest completed jobs, without which the files of all others have at most `max_bytes`."""
        rows = self._db.execute(
            "SELECT * FROM (SELECT *, SUM(result_bytes) OVER (ORDER BY ended_s DESC, number DESC) AS total FROM jobs "
            "WHERE state = 'completed') WHERE total > ?",
            (max_bytes,),
        )
        return [read_job(row) for row in rows]

    def begin_files(self, job: VideoJob, now_s: float) -> None:
        """Note that the files of a job are about to be written; `complete` removes the note."""
        self._db.execute(
            "INSERT OR REPLACE INTO unkept VALUES (?, ?, ?, ?)",
            (job.number, job.file_name, job.spec.num_outputs, now_s),
        )

    def list_unkept_files(self, before_s: float) -> list[UnkeptFiles]:
        """Files that were begun before this time for jobs that have failed or were deleted."""
        rows = self._db.execute(
            "SELECT * FROM unkept WHERE begun_s < ? AND NOT EXISTS "
            "(SELECT 1 FROM jobs WHERE jobs.number = unkept.number AND state != 'failed')",
            (before_s,),
        )
        return [UnkeptFiles(row["number"], row["name"], row["count"]) for row in rows]

    def forget_files(self, number: int) -> None:
        """Remove the note of `begin_files`, because the files have been removed."""
        self._db.execute("DELETE FROM unkept WHERE number = ?", (number,))
