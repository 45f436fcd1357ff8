"""Video jobs in SQLite: each ends, and ends once, whichever processes come and go."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.videos.store import VideoStore
from deployments.videos.store_thread import translate_disk_errors
from deployments.videos.video_job import VideoJob
from tridentserve.errors import ConfigError, InvalidRequestError, OverloadedError, VideoStorageError
from tridentserve.requests import GenerationInputs, RequestSpec, Shape

SHAPE = Shape(64, 64, 9)
LEASE_S = 10.0
MIB = 2**20


def request(
    job_id: str, prompt: str = "a fox", seed: int = 7, image: bytes | None = None, seed_drawn: bool = False
) -> tuple[RequestSpec, GenerationInputs]:
    spec = RequestSpec(job_id, "tiny-wan", SHAPE, 4, slo_s=2.5)
    inputs = GenerationInputs(prompt, SHAPE, 4, 5.0, seed, fps=8.0, output_format="mp4", image=image)
    return spec, replace(inputs, seed_drawn=seed_drawn)


def submit(
    store: VideoStore,
    job_id: str,
    priority: int = 0,
    now_s: float = 0.0,
    most: int = 100,
    image: bytes | None = None,
    most_bytes: int = MIB,
) -> VideoJob:
    return store.submit(*request(job_id, image=image), priority, now_s, most, most_bytes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VideoStore]:
    store = VideoStore(tmp_path / "jobs.sqlite3")
    yield store
    store.close()


def test_a_job_is_what_was_submitted_also_for_the_next_process(store: VideoStore, tmp_path: Path) -> None:
    job = submit(store, "a", priority=3, now_s=5.0)
    other = VideoStore(tmp_path / "jobs.sqlite3")
    assert other.find("a") == job
    assert (job.spec, job.inputs) == request("a")
    assert (job.state, job.priority, job.created_s, job.attempts) == ("queued", 3, 5.0, 0)
    other.close()


def test_jobs_are_claimed_by_priority_and_then_in_order(store: VideoStore) -> None:
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)):
        submit(store, name, priority)
    assert store.claim("p", 0, 0.0, LEASE_S) == []
    assert [job.job_id for job in store.claim("p", 3, 0.0, LEASE_S)] == ["b", "d", "a"]
    assert [job.job_id for job in store.claim("q", 9, 0.0, LEASE_S)] == ["c", "e"]
    assert store.claim("q", 9, 0.0, LEASE_S) == []


def test_a_lease_that_runs_out_is_taken_over_and_its_first_owner_cannot_end_the_job(store: VideoStore) -> None:
    submit(store, "a")
    (job,) = store.claim("p", 1, 0.0, LEASE_S)
    assert store.renew("p", {job.number: 2}, 8.0, LEASE_S) == {job.number}
    assert store.claim("q", 1, 17.0, LEASE_S) == []
    (again,) = store.claim("q", 1, 18.0, LEASE_S)
    assert (again.number, again.attempts, again.steps_done) == (job.number, 2, 0)
    assert store.renew("p", {job.number: 3}, 18.0, LEASE_S) == set()
    assert not store.complete("p", job.number, {"seed": 1}, 10, 19.0)
    assert not store.fail("p", job.number, {"code": "x"}, 19.0)
    assert store.complete("q", job.number, {"seed": 7}, 20, 20.0)
    assert not store.complete("q", job.number, {"seed": 8}, 20, 21.0)
    done = store.find("a")
    assert done is not None
    assert (done.state, done.result, done.ended_s) == ("completed", {"seed": 7}, 20.0)


def test_a_job_that_was_given_back_waits_and_counts_as_an_attempt_or_not(store: VideoStore) -> None:
    submit(store, "a")
    (job,) = store.claim("p", 1, 0.0, LEASE_S)
    store.release("p", job.number, 5.0, counted=False)
    assert store.claim("q", 1, 4.0, LEASE_S) == []
    (again,) = store.claim("q", 1, 5.0, LEASE_S)
    assert again.attempts == 1
    store.release("q", job.number, 0.0, counted=True)
    assert store.claim("p", 1, 5.0, LEASE_S)[0].attempts == 2


def test_the_same_id_joins_and_another_request_may_not_use_it(store: VideoStore) -> None:
    job = submit(store, "a")
    spec, inputs = request("a", seed=99, seed_drawn=True)  # a client that left the seed to the service
    assert store.submit(spec, inputs, 0, 1.0, 100, MIB) == job
    for other in (
        request("a", prompt="a dog"),
        (replace(spec, num_inference_steps=5), inputs),
        request("a", seed=99),
    ):
        with pytest.raises(InvalidRequestError, match="another request"):
            store.submit(*other, 0, 1.0, 100, MIB)
    assert store.fail(None, job.number, {"code": "cancelled"}, 2.0)
    again = store.submit(*request("a", prompt="a dog"), 0, 3.0, 100, MIB)
    assert again.number != job.number
    assert again.file_name != job.file_name
    assert again.error is None


def test_jobs_that_have_not_ended_are_bounded(store: VideoStore) -> None:
    submit(store, "a", most=2)
    (job,) = store.claim("p", 1, 0.0, LEASE_S)
    submit(store, "b", most=2)
    with pytest.raises(OverloadedError, match="2 video jobs"):
        submit(store, "c", most=2)
    submit(store, "b", most=2)  # it is there already
    store.complete("p", job.number, {}, 0, 1.0)
    submit(store, "c", most=2)


def test_the_image_of_a_job_is_kept_until_the_job_ends(store: VideoStore, tmp_path: Path) -> None:
    job, other = submit(store, "a", image=b"fox"), submit(store, "b")
    assert (job.inputs.image, other.image_sha256) == (None, None)
    again = VideoStore(tmp_path / "jobs.sqlite3")
    assert (again.find_image(job.number), again.find_image(other.number)) == (b"fox", None)
    again.close()
    (leased, _) = store.claim("p", 2, 0.0, LEASE_S)
    store.release("p", leased.number, 0.0, counted=False)
    assert store.find_image(job.number) == b"fox"
    store.claim("p", 2, 0.0, LEASE_S)
    assert submit(store, "a", image=b"fox").number == job.number
    for another in (b"dog", None):
        with pytest.raises(InvalidRequestError, match="another request"):
            submit(store, "a", image=another)
    store.complete("p", job.number, {}, 1, 1.0)
    assert store.find_image(job.number) is None
    assert submit(store, "a", image=b"fox").state == "completed"
    failed = submit(store, "c", image=b"dog")
    store.fail(None, failed.number, {"code": "x"}, 2.0)
    assert store.find_image(failed.number) is None
    retried = submit(store, "c", image=b"cat")
    assert store.find_image(retried.number) == b"cat"


def test_the_images_of_jobs_that_wait_are_bounded(store: VideoStore) -> None:
    job = submit(store, "a", image=bytes(600), most_bytes=1000)
    with pytest.raises(OverloadedError, match="images"):
        submit(store, "b", image=bytes(401), most_bytes=1000)
    assert store.find("b") is None
    submit(store, "b", image=bytes(400), most_bytes=1000)
    submit(store, "c", most_bytes=1000)
    store.fail(None, job.number, {"code": "x"}, 1.0)
    submit(store, "d", image=bytes(600), most_bytes=1000)


def test_a_image_that_never_has_room_is_refused_for_good(store: VideoStore) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"input_reference: takes 1001 bytes .* send a smaller image"
    ) as raised:
        submit(store, "a", image=bytes(1001), most_bytes=1000)
    assert raised.value.param == "input_reference"
    assert store.find("a") is None
    submit(store, "a", image=bytes(1000), most_bytes=1000)


def test_jobs_are_claimed_as_far_as_their_images_have_room(store: VideoStore) -> None:
    def claim(now_s: float = 0.0) -> list[str]:
        return [job.job_id for job in store.claim("p", 9, now_s, LEASE_S, max_image_bytes=100)]

    for name, size in (("huge", 500), ("b", 60), ("c", 50), ("d", 10)):
        submit(store, name, image=bytes(size))
    submit(store, "without")
    assert claim() == ["huge", "without"]  # the first one goes in any case
    assert claim() == []
    assert [job.job_id for job in store.claim("q", 1, 0.0, LEASE_S, max_image_bytes=100)] == ["b"]
    huge = store.find("huge")
    assert huge is not None
    store.complete("p", huge.number, {}, 0, 1.0)
    assert claim() == ["c", "d"]
    submit(store, "e", image=bytes(40))
    assert claim(LEASE_S) == ["b", "without"]  # all leases have run out


def test_the_file_shrinks_when_a_image_goes(store: VideoStore, tmp_path: Path) -> None:
    def size_bytes() -> int:
        with sqlite3.connect(tmp_path / "jobs.sqlite3") as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        other.close()
        return (tmp_path / "jobs.sqlite3").stat().st_size

    job = submit(store, "a", image=bytes(MIB // 2))
    assert size_bytes() > MIB // 2
    store.fail(None, job.number, {"code": "x"}, 1.0)
    assert size_bytes() < MIB // 8


def test_a_file_is_opened_again(tmp_path: Path) -> None:
    store = VideoStore(tmp_path / "jobs.sqlite3")
    submit(store, "a")
    store.close()
    for _ in range(2):
        store = VideoStore(tmp_path / "jobs.sqlite3")
        assert store.find("a") == submit(store, "a")
        store.close()
    store = VideoStore(tmp_path / "jobs.sqlite3")
    assert store.find_image(submit(store, "b", image=b"fox").number) == b"fox"
    assert store.list_unkept_files(9.0) == []
    store.close()


def test_pages(store: VideoStore) -> None:
    for name in "abcde":
        submit(store, name)
    assert [job.job_id for job in store.list_page(None, 2, newest_first=True)] == ["e", "d"]
    assert [job.job_id for job in store.list_page("d", 2, newest_first=True)] == ["c", "b"]
    assert [job.job_id for job in store.list_page("b", 9, newest_first=False)] == ["c", "d", "e"]
    with pytest.raises(InvalidRequestError, match="after: there is no video with this id"):
        store.list_page("gone", 1, newest_first=False)


def test_what_is_cleared_away(store: VideoStore) -> None:
    for at, name in enumerate("abc"):
        submit(store, name)
        (job,) = store.claim("p", 1, 0.0, LEASE_S)
        store.complete("p", job.number, {}, 100, float(at))
    submit(store, "d")
    assert [job.job_id for job in store.list_ended_before(1.5)] == ["a", "b"]
    assert [job.job_id for job in store.list_surplus(250)] == ["a"]
    assert [job.job_id for job in store.list_surplus(99)] == ["c", "b", "a"]
    assert store.list_surplus(300) == []
    for job in (*store.list_ended_before(9.0), *store.list_page("c", 1, newest_first=False)):
        store.delete(job.number)
    assert [job.job_id for job in store.list_page(None, 9, newest_first=True)] == ["d"]


def test_files_are_kept_in_mind_until_their_job_is_completed(store: VideoStore) -> None:
    kept, failed, gone, running = (submit(store, name) for name in "abcd")
    store.claim("p", 4, 0.0, LEASE_S)
    for job in (kept, failed, gone, running):
        store.begin_files(job, 5.0)
    store.complete("p", kept.number, {}, 1, 6.0)
    for job in (failed, gone):
        store.fail("p", job.number, {"code": "x"}, 6.0)
    store.delete(gone.number)
    assert store.list_unkept_files(5.0) == []
    assert [files.name for files in store.list_unkept_files(5.1)] == ["b-2", "c-3"]
    store.forget_files(failed.number)
    assert [(files.number, files.name, files.count) for files in store.list_unkept_files(9.0)] == [(3, "c-3", 1)]


def test_a_full_disk_is_reported_and_loses_nothing(store: VideoStore) -> None:
    job = submit(store, "a")
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(VideoStorageError, match=r"disk is full.*videos\.data_dir") as caught, translate_disk_errors():
        submit(store, "b", image=bytes(MIB))
    assert caught.value.http_status == 507
    assert (store.find("a"), store.find("b")) == (job, None)
    store._db.execute(f"PRAGMA max_page_count = {pages + 10_000}")
    submit(store, "b", image=bytes(MIB // 2))


def test_a_store_that_another_process_holds_is_busy(store: VideoStore, tmp_path: Path) -> None:
    store._db.execute("PRAGMA busy_timeout = 0")
    other = sqlite3.connect(tmp_path / "jobs.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OverloadedError, match="busy"), translate_disk_errors():
        submit(store, "a")
    other.close()
    submit(store, "a")


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(ConfigError, match="no database of video jobs"):
        VideoStore(tmp_path / "text")
    for version in (1, 2, 3, 4, 99):
        other = sqlite3.connect(tmp_path / f"{version}.sqlite3")
        other.execute(f"PRAGMA user_version = {version}")
        other.close()
        with pytest.raises(ConfigError, match=f"of version {version}, this service writes 5"):
            VideoStore(tmp_path / f"{version}.sqlite3")


class Processes(RuleBasedStateMachine):
    """Three processes over one file, of which any may stop renewing at any time."""

    NAMES = st.sampled_from(["a", "b", "c", "d"])
    OWNERS = st.sampled_from(["p", "q", "r"])

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.store = VideoStore(Path(self.directory.name) / "jobs.sqlite3")
        self.now_s = 0.0
        self.leases: dict[int, tuple[str, float]] = {}  # the holder of each job, and until when
        self.ended: dict[int, int] = {}

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()

    @rule(name=NAMES, priority=st.integers(-1, 1))
    def submit(self, name: str, priority: int) -> None:
        submit(self.store, name, priority, self.now_s, image=name.encode())

    @rule(seconds=st.floats(0.5, 8.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(owner=OWNERS, count=st.integers(1, 3))
    def claim(self, owner: str, count: int) -> None:
        for job in self.store.claim(owner, count, self.now_s, LEASE_S):
            assert self.leases.get(job.number, ("", 0.0))[1] <= self.now_s, "it was someone else's"
            assert job.number not in self.ended
            self.leases[job.number] = owner, self.now_s + LEASE_S

    @rule(owner=OWNERS)
    def renew(self, owner: str) -> None:
        mine = {number for number, (holder, _) in self.leases.items() if holder == owner}
        assert self.store.renew(owner, dict.fromkeys(self.leases, 1), self.now_s, LEASE_S) == mine
        self.leases |= dict.fromkeys(mine, (owner, self.now_s + LEASE_S))

    @rule(owner=OWNERS, data=st.data(), good=st.booleans())
    def end(self, owner: str, data: st.DataObject, good: bool) -> None:
        if not (known := [*self.leases, *self.ended]):
            return
        number = data.draw(st.sampled_from(known))
        done = (
            self.store.complete(owner, number, {}, 1, self.now_s)
            if good
            else self.store.fail(owner, number, {"code": "x"}, self.now_s)
        )
        assert done == (self.leases.get(number, ("",))[0] == owner)
        if done:
            del self.leases[number]
            self.ended[number] = self.ended.get(number, 0) + 1

    @invariant()
    def each_ends_once(self) -> None:
        assert set(self.ended.values()) <= {1}

    @invariant()
    def unfinished_jobs_have_their_images(self) -> None:
        for job in self.store.list_page(None, 9, newest_first=True):
            image = None if job.number in self.ended else job.job_id.encode()
            assert self.store.find_image(job.number) == image


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=40, stateful_step_count=30)
