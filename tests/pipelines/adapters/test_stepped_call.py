"""A call that runs piece by piece, and never beside its caller."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

import pytest
import torch

from tridentserve.device import find_device
from tridentserve.pipelines.adapters.stepped_call import SteppedCall

CPU = find_device(torch.device("cpu"))
SETTING = contextvars.ContextVar("setting", default="none")


def count_to_four(done: list[int]) -> Callable[[Callable[[float], None]], str]:
    def run(note: Callable[[float], None]) -> str:
        for number in range(1, 5):
            done.append(number)
            note(number / 4 - 1e-6)
        done.append(0)
        return "all"

    return run


def test_it_waits_until_more_is_wanted() -> None:
    done: list[int] = []
    call = SteppedCall(count_to_four(done), CPU)
    assert not done
    for share, expected in ((0.2, [1]), (0.25, [1, 2]), (0.7, [1, 2, 3]), (0.7, [1, 2, 3]), (1.0, [1, 2, 3, 4, 0])):
        call.run_until(share)
        assert done == expected
    assert call.result == "all"
    call.run_until(1.0)


def test_it_may_be_left_in_the_middle() -> None:
    done: list[int] = []
    before, call = threading.active_count(), SteppedCall(count_to_four(done), CPU)
    call.end()
    call.run_until(0.2)
    call.end()
    call.end()
    assert done == [1]
    assert threading.active_count() == before


def test_what_it_raises_is_raised_where_it_was_asked_for() -> None:
    def fail(note: Callable[[float], None]) -> None:
        note(0.5)
        raise ValueError("odd")

    call = SteppedCall(fail, CPU)
    call.run_until(0.5)
    with pytest.raises(ValueError, match="odd"):
        call.run_until(1.0)
    call.end()


def test_it_has_the_settings_of_its_caller() -> None:
    threads = torch.get_num_threads()
    call = SteppedCall(lambda note: (SETTING.get(), torch.get_num_threads(), torch.is_grad_enabled()), CPU)
    token = SETTING.set("mine")
    call.run_until(1.0)
    SETTING.reset(token)
    assert call.result == ("mine", threads, True)
