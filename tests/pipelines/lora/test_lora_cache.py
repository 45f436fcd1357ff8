"""A worker keeps LoRAs within a bound of bytes: the longest unused go first, never those of the running plan."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from tridentserve.models.lora_files import LoraFile, compute_digest
from tridentserve.pipelines.lora.lora_cache import LoraCache
from tridentserve.pipelines.lora.reading import LayerChange

LAYER = torch.nn.Linear(1, 1)


class Reader:
    """Makes LoRAs of the sizes that it is given, in bytes, and counts its calls."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.calls: list[str] = []

    def __call__(self, file: LoraFile) -> tuple[LayerChange, ...]:
        self.calls.append(file.name)
        up = torch.zeros(0, dtype=torch.uint8)
        return (LayerChange(LAYER, torch.zeros(self.sizes[file.name], dtype=torch.uint8), up, 1.0),)


def file_of(name: str, model: str = "one") -> LoraFile:
    return LoraFile(model, name, Path(name), "digest")


def test_it_is_the_plain_rule_for_any_plans() -> None:
    """The rule, written out: what was used last stays, as long as all of it fits."""
    drawn = random.Random(0)
    for _ in range(200):
        names = "abcdefg"
        sizes = {name: drawn.randrange(1, 9) for name in names}
        capacity, cache, reader = drawn.randrange(20), LoraCache(0), Reader(sizes)
        cache = LoraCache(capacity)
        order: list[str] = []
        for _ in range(12):
            plan = drawn.sample(names, drawn.randrange(1, 4))
            expected_calls = [name for name in plan if name not in order]
            reader.calls.clear()
            cache.hold([file_of(name) for name in plan], reader)
            assert reader.calls == expected_calls
            assert set(plan) <= {file.name for file in cache.files}
            assert all(len(cache.get(file_of(name))) == 1 for name in plan)
            others = sum(sizes[file.name] for file in cache.files if file.name not in plan)
            assert others == 0 or others + sum(sizes[name] for name in plan) <= capacity
            cache.trim()
            order = keep(capacity, sizes, order, plan)
            assert [file.name for file in cache.files] == order
            assert cache.num_bytes == sum(sizes[name] for name in order) <= capacity


def keep(capacity: int, sizes: dict[str, int], before: Sequence[str], plan: Sequence[str]) -> list[str]:
    """What is left of `before` when a plan has been done: room is made once for each of its LoRAs that is read."""
    held = [name for name in before if name not in plan] + [name for name in plan if name in before]
    for name in (name for name in plan if name not in before):
        held.append(name)
        while sum(sizes[one] for one in held) > capacity and (others := [one for one in held if one not in plan]):
            held.remove(others[0])
    while sum(sizes[one] for one in held) > capacity:
        held.pop(0)
    return held


def test_weights_and_activations_come_before_loras_that_no_plan_needs() -> None:
    cache = LoraCache(100)
    cache.hold([file_of(name) for name in "abc"], Reader(dict.fromkeys("abc", 10)))
    assert cache.make_room(-25, [file_of("c")]) == 20  # there is room for them
    assert cache.make_room(-15, [file_of("c")]) == 10
    assert [file.name for file in cache.files] == ["b", "c"]
    assert cache.make_room(50, [file_of("c")]) == 0
    assert (cache.files, cache.num_bytes) == ((file_of("c"),), 10)


def test_what_changes_is_told_once() -> None:
    cache, reader = LoraCache(), Reader({"a": 1, "b": 1})
    assert cache.take_news() is None
    cache.hold([file_of("a"), file_of("b", model="other")], reader)
    assert cache.take_news() == ("one:a@digest", "other:b@digest")
    cache.hold([file_of("a")], reader)
    assert cache.take_news() is None
    cache.drop_model("other")
    assert cache.take_news() == ("one:a@digest",)


def test_a_file_of_a_model_folder_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path, reader, cache = tmp_path / "a", Reader({"a": 1}), LoraCache()
    path.write_text("first")
    file = LoraFile("one", "a", path)
    cache.hold([file], reader)
    cache.hold([file], reader)
    assert reader.calls == ["a"]
    path.write_text("other")
    os.utime(path, ns=(1, 1))
    cache.hold([file], reader)
    assert reader.calls == ["a", "a"]
    assert compute_digest(path) != compute_digest(Path(__file__))
