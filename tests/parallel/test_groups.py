"""Groups without a global world: collectives, failures, and groups made again."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.parallel.members import CPU, TIMEOUT_S, Member, Pool
from tridentserve.errors import GroupError
from tridentserve.parallel import GroupCache, abandon, connect_store, group_cache, make_group

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def exchange(member: Member) -> list[list[float]]:
    """Each rank sends r + 1 numbers to rank r, and gathers shards of its own length."""
    group = member.group("collectives")
    rank, size = group.rank, group.size
    blocks = [torch.full((other + 1,), 10.0 * rank + other) for other in range(size)]
    received = group.all_to_all(blocks, [(rank + 1,)] * size)
    gathered = group.all_gather(torch.full((rank, 2), float(rank)), [(other, 2) for other in range(size)])
    return [torch.cat(received).tolist(), torch.cat(gathered).flatten().tolist()]


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_of_any_size_reach_their_rank(pool: Pool, size: int) -> None:
    for rank, (received, gathered) in enumerate(pool.run(exchange, size)):
        assert received == [10.0 * sender + rank for sender in range(size) for _ in range(rank + 1)]
        assert gathered == [float(sender) for sender in range(size) for _ in range(2 * sender)]


def leader_tensors() -> dict[str, torch.Tensor]:
    tensors = {f"of {dtype}": torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "strided": torch.eye(3)[:, 1:]}


def broadcast(member: Member) -> list[Any]:
    group = member.group("collectives")
    tensors = group.broadcast_tensors(leader_tensors() if group.rank == 0 else None)
    value = group.broadcast_json({"steps": [1, None], "name": "é"} if group.rank == 0 else None)
    expected = leader_tensors()
    same = [
        torch.equal(tensors[name], expected[name]) and tensors[name].dtype == expected[name].dtype for name in expected
    ]
    return [
        list(tensors) == list(expected) and all(same),
        value,
        [group.agree(command + group.rank) for command in (5, 0)],
    ]


@pytest.mark.parametrize("size", [1, 4])
def test_all_ranks_get_what_rank_0_has(pool: Pool, size: int) -> None:
    assert pool.run(broadcast, size) == [[True, {"steps": [1, None], "name": "é"}, [5, 0]]] * size


def wait_in_group(member: Member, name: str, dead: int) -> bool:
    """Wait for a member that will not come to the collective."""
    group = member.group(name)
    member.store.set(f"{name}: rank {member.rank} waits", "")
    if member.rank == dead:
        time.sleep(TIMEOUT_S)
    with pytest.raises(GroupError, match=f"group {group.name!r} on rank {member.rank} of {member.size}"):
        group.all_to_all([torch.ones(1)] * group.size, [(1,)] * group.size)
    with pytest.raises(GroupError, match="has failed or was closed before"):
        group.agree()
    return True


def sum_of_ranks(member: Member, name: str) -> float:
    return float(sum(member.group(name).all_gather(torch.tensor([float(member.rank)]), [(1,)] * member.size)))


def test_a_killed_member_fails_its_group_at_once_and_can_be_replaced(pool: Pool) -> None:
    pool.run(sum_of_ranks, 2, "bystanders")
    pool.run(sum_of_ranks, 3, "with a dead one")
    pool.post(wait_in_group, 3, "with a dead one", 2)
    pool.store.wait([f"with a dead one: rank {rank} waits" for rank in range(3)])
    pool.kill(2)
    assert pool.results([0, 1]) == [True, True]
    assert pool.run(sum_of_ranks, 2, "bystanders") == [1.0, 1.0]
    pool.replace(2)
    assert pool.run(sum_of_ranks, 3, "a new name") == [3.0, 3.0, 3.0]


def leave(member: Member, leaver: int) -> str:
    group = member.group("one leaves")
    group.agree()
    if member.rank == leaver:
        group.close()
    with pytest.raises(GroupError) as caught:
        group.all_to_all([torch.ones(1)] * group.size, [(1,)] * group.size)
    return str(caught.value)


def test_closing_a_group_frees_the_members_that_wait_in_it(pool: Pool) -> None:
    answers = pool.run(leave, 2, 0)
    assert "was closed before" in answers[0]
    assert "all_to_all failed in group 'one leaves/2" in answers[1]
    assert "on rank 1 of 2" in answers[1]


def test_a_member_that_never_comes_is_an_error_at_the_timeout() -> None:
    store = connect_store(is_server=True)
    with pytest.raises(GroupError, match="cannot make group 'lonely' as rank 0 of 2"):
        make_group(store, "lonely", 0, 2, CPU, timeout_s=0.3)


def test_the_store_listens_on_its_host_only() -> None:
    store = connect_store("127.0.0.1", is_server=True)
    client = connect_store("127.0.0.1", store.port)
    client.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", store.port), timeout=1):
        pass


def test_addresses_that_do_not_work_are_named() -> None:
    taken = connect_store(is_server=True)
    with pytest.raises(GroupError, match=f"cannot start the store .* 127.0.0.1:{taken.port}"):
        connect_store(port=taken.port, is_server=True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(GroupError, match=f"cannot reach the store .* 127.0.0.1:{port}"):
            connect_store(port=port, timeout_s=0.2)


def use_cache(member: Member, plans: list[tuple[int, str]], loses: dict[int, str]) -> list[str]:
    """Run plans, each in a group by name, on a new cache of two groups. `loses`: the group that rank 1 forgets before a
    plan."""
    cache = GroupCache(member.store, CPU, capacity=2, timeout_s=TIMEOUT_S)
    used = []
    for plan_id, name in plans:
        if member.rank == 1 and plan_id in loses:
            cache.drop(loses[plan_id])
        group = cache.acquire(name, member.rank, member.size, use=plan_id)
        assert group.agree(plan_id) == plan_id
        used.append(group.name)
    return [*used, "|".join(cache.names)]


def test_groups_are_kept_by_name_and_the_least_recently_used_goes(pool: Pool) -> None:
    plans = [(1, "a"), (2, "b"), (3, "a"), (4, "c"), (5, "a"), (6, "b")]
    assert pool.run(use_cache, 2, plans, {}) == [["a@1", "b@2", "a@1", "c@4", "a@1", "b@6", "a|b"]] * 2


def test_a_group_that_one_member_lost_is_made_again_by_all(pool: Pool) -> None:
    plans = [(10, "d"), (11, "e"), (12, "d"), (13, "d")]
    assert pool.run(use_cache, 2, plans, {12: "d"}) == [["d@10", "e@11", "d@12", "d@12", "e|d"]] * 2


def give_up_or_wait(member: Member) -> str:
    """One member of two gives the use of a group up, before the other comes or while it waits."""
    cache = GroupCache(member.store, CPU, capacity=16, timeout_s=TIMEOUT_S)
    if member.rank == 1:
        time.sleep(0.2)
        cache.abandon("given up", 1, use=1)
    else:
        with pytest.raises(GroupError, match="group 'given up': rank 1 of 2 has given up"):
            cache.acquire("given up", 0, 2, use=1)
    group = cache.acquire("given up", member.rank, 2, use=2)
    group.agree()  # A member that returns closes the group: the other has joined by now.
    return group.name


def test_a_member_may_give_a_plan_up_and_come_to_the_next(pool: Pool) -> None:
    assert pool.run(give_up_or_wait, 2) == ["given up@2"] * 2


def test_others_may_speak_for_a_dead_member() -> None:
    store = connect_store(is_server=True)
    abandon(store, "pair", rank=1, use=7)
    with pytest.raises(GroupError, match="rank 1 of 2 has given up"):
        GroupCache(store, CPU, capacity=16, timeout_s=TIMEOUT_S).acquire("pair", 0, 2, use=7)


def test_a_member_that_does_not_come_to_a_plan_is_named() -> None:
    cache = GroupCache(connect_store(is_server=True), CPU, capacity=16, timeout_s=0.3)
    with pytest.raises(GroupError, match=r"group 'pair': ranks \[1\] of 2 did not come within 0.3 s"):
        cache.acquire("pair", 0, 2, use=1)


def keys_left(member: Member, plans: list[tuple[int, str]]) -> list[str]:
    """The keys in the store after these plans on a cache of one group, and after one more plan, at whose start no
    member can wait for the keys of the others."""
    cache = GroupCache(member.store, CPU, capacity=1, timeout_s=TIMEOUT_S)
    for plan_id, name in plans:
        cache.acquire(name, member.rank, member.size, use=plan_id).agree()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + TIMEOUT_S)
    with patch.object(group_cache, "time", later):
        group = cache.acquire(plans[-1][1], member.rank, member.size, use=plans[-1][0] + 1)
    group.all_gather(torch.ones(1), [(1,)] * member.size)  # All have deleted what was due.
    return [key for key in member.store.list_keys() if "tidy" in key]


def test_groups_that_were_dropped_leave_nothing_in_the_store(pool: Pool) -> None:
    plans = [(1, "tidy-a"), (2, "tidy-b"), (3, "tidy-a"), (4, "tidy-a"), (5, "tidy-c")]
    left = pool.run(keys_left, 2, plans)[0]
    assert {key for key in left if key.startswith("use/")} == {"use/tidy-c/6/0", "use/tidy-c/6/1"}
    assert {key.split("/")[1] for key in left if key.startswith("group/")} == {"tidy-c@5"}


def lose_one(member: Member) -> list[str]:
    """Groups are dropped that had a member whose process has ended, the others stay."""
    cache = GroupCache(member.store, CPU, capacity=16, timeout_s=TIMEOUT_S)
    for name, members in (("with", ("w0", "w1")), ("with too", ("w1", "w2")), ("without", ("w0", "w2"))):
        cache.acquire(name, member.rank, member.size, use=1, members=members).agree()
    cache.drop_groups_of("w1")
    return list(cache.names)


def test_groups_of_a_lost_member_are_dropped(pool: Pool) -> None:
    assert pool.run(lose_one, 2) == [["without"]] * 2
