"""C of a batch on a worker and on several: one request after the other; all workers agree on which are left and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.members import Member, Pool
from tests.pipelines.models import load_stage, make_inputs, model_folder
from tridentserve.engine.live.transport.parcel import Parcel
from tridentserve.engine.live.worker.decoding import Decoding
from tridentserve.errors import HandoffError
from tridentserve.pipelines import load_adapter
from tridentserve.plans import DispatchPlan, PlanMember
from tridentserve.requests import GenerationInputs
from tridentserve.stages import Stage

BATCH = {"first": make_inputs(80, 48, num_outputs=2), "second": make_inputs(80, 48, prompt="mist", seed=1)}
LARGE = {"large": make_inputs(32, 560)}
PLAN = DispatchPlan(0, "m", (Stage.DECODE,), ("w0", "w1"), tuple(map(PlanMember, BATCH)), "g", decode_degree=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder("sd3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def latents_of(inputs: GenerationInputs) -> torch.Tensor:
    generator = torch.Generator().manual_seed(inputs.seed)
    shape = (inputs.num_outputs, 16, inputs.shape.height // 8, inputs.shape.width // 8)
    return torch.randn(shape, generator=generator)


def decode(
    member: Member,
    folder: Path,
    of_rank: list[dict[str, GenerationInputs]],
    latents: dict[str, np.ndarray[Any, Any]],
    tight: int | None,
    stopped: int | None,
) -> Any:
    """`of_rank`: the members that each rank has not heard to have left. `tight`: the rank that is short of memory;
    `stopped`: the one that is asked to stop."""
    if folder not in member.decoders:
        member.decoders[folder] = load_adapter(folder, frozenset({Stage.DECODE}))
    decoding = Decoding(PLAN, member.decoders[folder], member.group("decoding"))
    given = {name: Parcel({"latents": torch.from_numpy(array)}) for name, array in latents.items()}
    is_first = member.rank == 0
    decoded = decoding.decode_members(
        of_rank[member.rank], given if is_first else {}, stopped == member.rank, in_tiles=tight == member.rank
    )
    images = None if decoded is None else {name: each.pixels for name, each in decoded.items()}
    return images, decoding.tiled


Run = Callable[..., list[Any]]


@pytest.fixture
def together(pool: Pool, folder: Path) -> Run:
    def run(
        requests: dict[str, GenerationInputs],
        left: tuple[str, ...] = (),
        tight: int | None = None,
        stopped: int | None = None,
    ) -> list[Any]:
        """`left`: the first worker knows that these have left, the other not yet."""
        staying = {name: inputs for name, inputs in requests.items() if name not in left}
        latents = {name: latents_of(inputs).numpy() for name, inputs in staying.items()}
        return pool.run(decode, 2, folder, [staying, requests], latents, tight, stopped)

    return run


def alone(folder: Path, inputs: GenerationInputs, tile: int | None = None) -> Any:
    return load_stage(folder, Stage.DECODE).decode({"latents": latents_of(inputs)}, inputs, tile)


def difference(one: Any, other: Any) -> int:
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def test_a_batch_is_decoded_request_by_request(together: Run, folder: Path) -> None:
    (images, tiled), (others, _) = together(BATCH)
    assert (list(images), tiled, others) == (list(BATCH), False, {})
    for name, inputs in BATCH.items():
        assert difference(images[name], alone(folder, inputs)) <= 1


def test_never_more_than_one_request_is_in_the_decoder(folder: Path) -> None:
    adapter = load_adapter(folder, frozenset({Stage.DECODE}))
    rows: list[int] = []
    adapter.pipe.vae.decoder.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))  # type: ignore[attr-defined]
    given = {name: Parcel({"latents": latents_of(inputs)}) for name, inputs in BATCH.items()}
    images = Decoding(PLAN, adapter, None).decode_members(BATCH, given, stopped=False, in_tiles=False)
    assert rows == [2, 1]
    assert images is not None
    for name, inputs in BATCH.items():
        assert np.array_equal(images[name].pixels, alone(folder, inputs))


def test_the_first_worker_says_which_requests_remain(together: Run, folder: Path) -> None:
    (images, _), (others, _) = together(BATCH, left=("first",))
    assert (list(images), others) == (["second"], {})
    assert difference(images["second"], alone(folder, BATCH["second"])) <= 1
    assert together(BATCH, left=tuple(BATCH)) == [({}, False), ({}, False)]


def test_all_use_tiles_where_one_is_short_of_memory(together: Run, folder: Path) -> None:
    (images, tiled), (_, other_tiled) = together(LARGE, tight=1)
    assert tiled
    assert other_tiled
    (inputs,) = LARGE.values()
    assert difference(images["large"], alone(folder, inputs, tile=512)) <= 1
    assert difference(images["large"], alone(folder, inputs)) > 1


def test_all_stop_when_the_first_is_asked_to_and_only_then(together: Run) -> None:
    assert [images for images, _ in together(BATCH, stopped=0)] == [None, None]
    (images, _), (others, _) = together(BATCH, stopped=1)
    assert (len(images), others) == (2, {})


def test_a_request_without_latents_is_named(folder: Path) -> None:
    with pytest.raises(HandoffError, match="request first has no inputs for decode"):
        Decoding(PLAN, load_stage(folder, Stage.DECODE), None).decode_members(BATCH, {}, stopped=False, in_tiles=False)
