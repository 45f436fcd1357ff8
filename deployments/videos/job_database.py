"""The SQLite file of video jobs: its tables, how it is opened, and its transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tridentserve.errors import ConfigError

_VERSION = 5
"""Version of the schema. Earlier versions were never released, so they are refused and not migrated."""
_BUSY_TIMEOUT_S = 10.0
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
    image_sha256 TEXT
) STRICT;
CREATE INDEX by_turn ON jobs (priority DESC, number) WHERE state IN ('queued', 'leased');
CREATE INDEX by_end ON jobs (ended_s) WHERE ended_s IS NOT NULL;
-- The input images of unfinished jobs. Afterwards the digest is enough to recognize the same request.
CREATE TABLE images (number INTEGER PRIMARY KEY, png BLOB NOT NULL) STRICT;
CREATE TRIGGER drop_image AFTER UPDATE OF state ON jobs WHEN NEW.state IN ('completed', 'failed')
BEGIN DELETE FROM images WHERE number = NEW.number; END;
-- The files that were begun and belong to no completed job yet. Nothing else in the directory of files is ever swept,
-- because it may hold files of others.
CREATE TABLE unkept (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, count INTEGER NOT NULL, begun_s REAL NOT NULL
) STRICT;
CREATE TRIGGER keep_files AFTER UPDATE OF state ON jobs WHEN NEW.state = 'completed'
BEGIN DELETE FROM unkept WHERE number = NEW.number; END;
"""


def open_database(path: Path) -> sqlite3.Connection:
    """The file, with its tables. Raises `ConfigError` for a file of another program or of another version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # With autocommit, `begin_write` opens transactions, which lock the file for writing from their start.
    database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    database.row_factory = sqlite3.Row
    try:
        database.execute("PRAGMA auto_vacuum = FULL")  # a new file shrinks when images are deleted
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # a job that was answered outlives a power cut
        with begin_write(database):
            _prepare(database, path)
    except sqlite3.DatabaseError as error:
        database.close()
        raise ConfigError(f"videos.data_dir: {path} is no database of video jobs ({error})") from None
    return database


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version == _VERSION:
        return
    if version != 0:
        raise ConfigError(
            f"videos.data_dir: {path} is of version {version}, this service writes {_VERSION}; use an empty "
            "directory, or the release that wrote it"
        )
    for statement in _SCHEMA.split(";\n"):
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {_VERSION}")


@contextmanager
def begin_write(database: sqlite3.Connection) -> Iterator[None]:
    """A transaction that writes: kept at the end, rolled back if anything is raised within."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # SQLite rolls back by itself when the disk is full
            database.execute("ROLLBACK")
        raise
