"""Video jobs in SQLite: what was asked for, who works on it, how it ended.

A job is queued, then leased by one process, which renews its lease while it works; then completed or failed. A lease
that runs out, as its process died, is taken over by the next process that asks. Whoever has lost a lease cannot end the
job any more. So each job ends, and ends once, whatever processes come and go.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from tridentserve.errors import ConfigError, InvalidRequestError, OverloadedError, VideoStorageError
from tridentserve.requests import GenerationInputs, RequestSpec

JobState = Literal["queued", "leased", "completed", "failed"]

_VERSION = 3
_BUSY_TIMEOUT_S = 10.0
_SPEC, _INPUTS = TypeAdapter(RequestSpec), TypeAdapter(GenerationInputs)
_SCHEMA = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order in which they were submitted
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('queued', 'leased', 'completed', 'failed')),
    priority INTEGER NOT NULL,
    spec TEXT NOT NULL,
    inputs TEXT NOT NULL,
    created_s REAL NOT NULL,
    not_before_s REAL NOT NULL DEFAULT 0,
    owner TEXT,
    lease_until_s REAL,
    attempts INTEGER NOT NULL DEFAULT 0,
    steps_done INTEGER NOT NULL DEFAULT 0,
    ended_s REAL,
    result TEXT,
    result_bytes INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    picture_sha256 TEXT
) STRICT;
CREATE INDEX by_turn ON jobs (priority DESC, number) WHERE state IN ('queued', 'leased');
CREATE INDEX by_end ON jobs (ended_s) WHERE ended_s IS NOT NULL;
"""
# What unfinished jobs start from. Afterwards the digest is enough, to know the same request again.
_PICTURES = """
CREATE TABLE pictures (number INTEGER PRIMARY KEY, png BLOB NOT NULL) STRICT;
CREATE TRIGGER drop_picture AFTER UPDATE OF state ON jobs WHEN NEW.state IN ('completed', 'failed')
BEGIN DELETE FROM pictures WHERE number = NEW.number; END;
"""
# The files that were begun and are no completed job's yet. Nothing else in the folder of files is ever swept: it may
# hold files of others.
_UNKEPT = """
CREATE TABLE unkept (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, count INTEGER NOT NULL, begun_s REAL NOT NULL
) STRICT;
CREATE TRIGGER keep_files AFTER UPDATE OF state ON jobs WHEN NEW.state = 'completed'
BEGIN DELETE FROM unkept WHERE number = NEW.number; END;
"""
_FROM_VERSION_1 = "ALTER TABLE jobs ADD COLUMN picture_sha256 TEXT;" + _PICTURES
_MAY_BE_CLAIMED = "(state = 'queued' AND not_before_s <= :now_s OR state = 'leased' AND lease_until_s <= :now_s)"


@dataclass(frozen=True, slots=True)
class VideoJob:
    """A job as it is stored. Times are of the Unix clock. `result`: what is told of a completed one; `error`: of a
    failed one, in OpenAI's form. `picture_sha256`: of the picture that it starts from, which `inputs` lacks here."""

    number: int
    job_id: str
    state: JobState
    priority: int
    spec: RequestSpec
    inputs: GenerationInputs
    created_s: float
    attempts: int
    steps_done: int
    ended_s: float | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    picture_sha256: str | None

    @property
    def file_name(self) -> str:
        """Of its videos, without index and suffix."""
        return file_name(self.job_id, self.number)


@dataclass(frozen=True, slots=True)
class UnkeptFiles:
    """Files, of which some may be there, that no completed job has: `count` of them under `name`."""

    number: int
    name: str
    count: int


class VideoStore:
    """The jobs in one file. Calls block, for as long as the disk takes; one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` when the file is not ours, or of a newer version."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Autocommit: transactions are opened by hand, for writing from their first statement on.
        self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA auto_vacuum = FULL")  # of a new file: it shrinks when pictures go
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # a job that was answered outlives a power cut
            with self._writing():
                self._prepare(path)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ConfigError(f"videos.data_dir: {path} is no database of video jobs ({error})") from None

    def _prepare(self, path: Path) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        missing = {
            0: _SCHEMA + _PICTURES + _UNKEPT,
            1: _FROM_VERSION_1 + _UNKEPT,
            2: _UNKEPT,
            _VERSION: "",
        }.get(version)
        if missing is None:
            raise ConfigError(f"videos.data_dir: {path} is of version {version}, this service writes {_VERSION}")
        for statement in missing.split(";\n"):
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite may have rolled back by itself, when the disk is full
                self._db.execute("ROLLBACK")
            raise

    # What clients ask for.

    def submit(
        self,
        spec: RequestSpec,
        inputs: GenerationInputs,
        priority: int,
        now_s: float,
        max_unfinished: int,
        max_picture_bytes: int,
    ) -> VideoJob:
        """A new job; or the one with the same id and the same request; or a new attempt of one that failed. The
        pictures that unfinished jobs start from have at most `max_picture_bytes` together.

        Raises `InvalidRequestError` for an id that was used for another request and for a picture that never has room,
        and `OverloadedError`."""
        picture, inputs = inputs.image, replace(inputs, image=None)
        digest = None if picture is None else hashlib.sha256(picture).hexdigest()
        with self._writing():
            known = self.find(spec.request_id)
            if known is not None and known.state != "failed":
                if _is_same(known, spec, inputs, digest):
                    return known
                message = "request_id has been used for another request: choose a new one"
                raise InvalidRequestError(message, "request_id")
            if self._count("SELECT COUNT(*) FROM jobs WHERE state IN ('queued', 'leased')") >= max_unfinished:
                raise OverloadedError(f"{max_unfinished} video jobs have not ended yet, try again later")
            self._db.execute("DELETE FROM jobs WHERE id = ?", (spec.request_id,))
            written = (spec.request_id, priority, _SPEC.dump_json(spec).decode(), _INPUTS.dump_json(inputs).decode())
            number = self._db.execute(
                "INSERT INTO jobs (id, state, priority, spec, inputs, created_s, picture_sha256) "
                "VALUES (?, 'queued', ?, ?, ?, ?, ?)",
                (*written, now_s, digest),
            ).lastrowid
            if picture is not None:
                if len(picture) > max_picture_bytes:
                    raise InvalidRequestError(
                        f"input_reference: takes {len(picture)} bytes as a PNG file, more than the {max_picture_bytes} "
                        "that this service keeps for all jobs; send a smaller picture",
                        "input_reference",
                    )
                self._db.execute("INSERT INTO pictures (number, png) VALUES (?, ?)", (number, picture))
                if self._count("SELECT SUM(LENGTH(png)) FROM pictures") > max_picture_bytes:
                    raise OverloadedError("the pictures of unfinished video jobs take all their room, try again later")
            job = self.find(spec.request_id)
        if job is None:
            raise RuntimeError("the job that was just written is not there")
        return job

    def picture(self, number: int) -> bytes | None:
        """What an unfinished job starts from, a PNG file."""
        row = self._db.execute("SELECT png FROM pictures WHERE number = ?", (number,)).fetchone()
        return None if row is None else bytes(row["png"])

    def _count(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0] or 0)

    def find(self, job_id: str) -> VideoJob | None:
        row = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else _job(row)

    def page(self, after: str | None, limit: int, newest_first: bool) -> list[VideoJob]:
        """Up to `limit` jobs, from the one behind `after` on. Raises `InvalidRequestError` when no job has that id."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        where = ""
        if after is not None:
            if (start := self.find(after)) is None:
                raise InvalidRequestError("after: there is no video with this id, begin again without it", "after")
            where = f"WHERE number {sign} {start.number}"
        rows = self._db.execute(f"SELECT * FROM jobs {where} ORDER BY number {order} LIMIT ?", (limit,))
        return [_job(row) for row in rows]

    def delete(self, number: int) -> None:
        """Forget a job that has ended; others stay."""
        self._db.execute("DELETE FROM jobs WHERE number = ? AND ended_s IS NOT NULL", (number,))

    # What processes do that work on jobs.

    def claim(
        self, owner: str, count: int, now_s: float, lease_s: float, max_picture_bytes: int | None = None
    ) -> list[VideoJob]:
        """Lease up to `count` jobs that nobody works on: higher priority first, then in order of arrival.

        The pictures of all jobs that are then the owner's take at most `max_picture_bytes`, unless there is only one.
        From the first one on that has no room, jobs with pictures wait; others go past them."""
        if count <= 0:
            return []
        with self._writing():
            numbers = self._next(owner, count, now_s, max_picture_bytes)
            rows = self._db.execute(
                "UPDATE jobs SET state = 'leased', owner = ?, lease_until_s = ?, attempts = attempts + 1, "
                f"steps_done = 0 WHERE number IN ({', '.join('?' * len(numbers))}) RETURNING *",
                (owner, now_s + lease_s, *numbers),
            ).fetchall()
        return sorted((_job(row) for row in rows), key=lambda job: (-job.priority, job.number))

    def _next(self, owner: str, count: int, now_s: float, max_picture_bytes: int | None) -> list[int]:
        lengths = "SELECT jobs.number, LENGTH(png) AS num_bytes FROM jobs LEFT JOIN pictures USING (number)"
        mine = self._db.execute(f"{lengths} WHERE state = 'leased' AND owner = ? AND lease_until_s > ?", (owner, now_s))
        held = sum(row["num_bytes"] or 0 for row in mine)
        may_be = self._db.execute(
            f"{lengths} WHERE {_MAY_BE_CLAIMED} ORDER BY priority DESC, jobs.number", {"now_s": now_s}
        )
        numbers, is_full = list[int](), False
        for row in may_be:
            num_bytes = row["num_bytes"] or 0
            is_full |= max_picture_bytes is not None and held > 0 and held + num_bytes > max_picture_bytes
            if num_bytes and is_full:
                continue
            held += num_bytes
            numbers.append(row["number"])
            if len(numbers) == count:
                break
        return numbers

    def renew(self, owner: str, steps_done: Mapping[int, int], now_s: float, lease_s: float) -> set[int]:
        """Keep the leases of jobs, with how far they are, by number. Returns those that are still the owner's."""
        with self._writing():
            return {
                number
                for number, steps in steps_done.items()
                if self._update(owner, number, "lease_until_s = ?, steps_done = ?", (now_s + lease_s, steps))
            }

    def release(self, owner: str, number: int, not_before_s: float, counted: bool) -> None:
        """Give a job back unfinished. Unless `counted`, it was no attempt."""
        change = "state = 'queued', owner = NULL, not_before_s = ?, attempts = attempts - ?, steps_done = 0"
        self._update(owner, number, change, (not_before_s, 0 if counted else 1))

    def complete(self, owner: str, number: int, result: Mapping[str, Any], result_bytes: int, now_s: float) -> bool:
        """False when the job is not the owner's any more."""
        change = "state = 'completed', owner = NULL, result = ?, result_bytes = ?, ended_s = ?"
        return self._update(owner, number, change, (json.dumps(result), result_bytes, now_s))

    def fail(self, owner: str | None, number: int, error: Mapping[str, Any], now_s: float) -> bool:
        """False when the job is not the owner's any more, or has ended; with None whoever works on it, if anybody."""
        change = "state = 'failed', owner = NULL, error = ?, ended_s = ?"
        return self._update(owner, number, change, (json.dumps(error), now_s))

    def _update(self, owner: str | None, number: int, change: str, values: tuple[Any, ...]) -> bool:
        mine = "state IN ('queued', 'leased')" if owner is None else "state = 'leased' AND owner = ?"
        keys = (number,) if owner is None else (number, owner)
        done = self._db.execute(f"UPDATE jobs SET {change} WHERE number = ? AND {mine}", (*values, *keys))
        return done.rowcount == 1

    # What is cleared away.

    def ended_before(self, time_s: float) -> list[VideoJob]:
        rows = self._db.execute("SELECT * FROM jobs WHERE ended_s < ?", (time_s,))
        return [_job(row) for row in rows]

    def surplus(self, max_bytes: int) -> list[VideoJob]:
        """The oldest completed jobs beyond the newest ones whose files have `max_bytes` together."""
        rows = self._db.execute(
            "SELECT * FROM (SELECT *, SUM(result_bytes) OVER (ORDER BY ended_s DESC, number DESC) AS total FROM jobs "
            "WHERE state = 'completed') WHERE total > ?",
            (max_bytes,),
        )
        return [_job(row) for row in rows]

    def begin_files(self, job: VideoJob, now_s: float) -> None:
        """Note that the files of a job are about to be written; `complete` strikes the note out."""
        self._db.execute(
            "INSERT OR REPLACE INTO unkept VALUES (?, ?, ?, ?)",
            (job.number, job.file_name, job.spec.num_outputs, now_s),
        )

    def unkept_files(self, before_s: float) -> list[UnkeptFiles]:
        """Begun before this time, for jobs that have failed or are gone."""
        rows = self._db.execute(
            "SELECT * FROM unkept WHERE begun_s < ? AND NOT EXISTS "
            "(SELECT 1 FROM jobs WHERE jobs.number = unkept.number AND state != 'failed')",
            (before_s,),
        )
        return [UnkeptFiles(row["number"], row["name"], row["count"]) for row in rows]

    def forget_files(self, number: int) -> None:
        """What `begin_files` noted has been removed."""
        self._db.execute("DELETE FROM unkept WHERE number = ?", (number,))


@contextmanager
def client_error() -> Iterator[None]:
    """What SQLite raises of its disk, as an error for clients."""
    try:
        yield
    except sqlite3.OperationalError as error:
        kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the rest are details
        if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise OverloadedError("the store of video jobs is busy, try again later") from error
        if kind not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            raise
        raise VideoStorageError(
            f"the store of video jobs cannot be used ({error}): see to the disk of videos.data_dir"
        ) from error


def file_name(job_id: str, number: int) -> str:
    """Unique, also where an id is used again."""
    return f"{job_id}-{number}"


def _job(row: sqlite3.Row) -> VideoJob:
    return VideoJob(
        number=row["number"],
        job_id=row["id"],
        state=row["state"],
        priority=row["priority"],
        spec=_SPEC.validate_json(row["spec"]),
        inputs=_INPUTS.validate_json(row["inputs"]),
        created_s=row["created_s"],
        attempts=row["attempts"],
        steps_done=row["steps_done"],
        ended_s=row["ended_s"],
        result=None if row["result"] is None else json.loads(row["result"]),
        error=None if row["error"] is None else json.loads(row["error"]),
        picture_sha256=row["picture_sha256"],
    )


def _is_same(job: VideoJob, spec: RequestSpec, inputs: GenerationInputs, picture_sha256: str | None) -> bool:
    """A client that asks again may have left the seed to the service: then that of the job will do."""
    same_inputs = job.inputs == (replace(inputs, seed=job.inputs.seed) if inputs.seed_drawn else inputs)
    return job.spec == spec and same_inputs and job.picture_sha256 == picture_sha256
