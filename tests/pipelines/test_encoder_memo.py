"""What an encoder made of inputs that come again is given again, bit for bit, within a bound of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from tests.pipelines.models import ALL, QUICK, families, make_inputs
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.encoder_memo import EncoderMemo, install_memo
from tridentserve.stages import Stage

Model = Callable[[str], Path]


class Encoder(torch.nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, ids: torch.Tensor, scale: float = 1.0, cache: object = None) -> Any:
        self.calls += 1
        hidden = ids.float() * scale
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden, hidden + 1))


def make_encoder(max_bytes: int = 10_000) -> tuple[Encoder, EncoderMemo]:
    encoder, memo = Encoder(), EncoderMemo(max_bytes)
    memo.wrap(encoder, "text_encoder")
    return encoder, memo


def ids(value: int, length: int = 4) -> torch.Tensor:
    return torch.full((1, length), value)


@pytest.mark.parametrize("family", families(*ALL, quick=QUICK))
def test_a_condition_is_the_same_with_a_memo(model: Model, family: str) -> None:
    folder = model(family)
    stock, remembering = (load_adapter(folder, frozenset({Stage.ENCODE})) for _ in range(2))
    memo = install_memo(remembering)
    first = make_inputs(64, 64, variant=family)
    second = replace(first, prompt="another prompt, of other words", seed=first.seed + 1)
    for inputs in (first, second, first, second, replace(first, seed=9)):
        (expected,), (found,) = stock.encode_all([inputs]), remembering.encode_all([inputs])
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert memo.num_bytes > 0
    for one, other in zip(stock.encode_all([first, second]), remembering.encode_all([first, second]), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_adapter_without_encoders_has_nothing_to_remember(model: Model) -> None:
    assert install_memo(load_adapter(model("sd3"), frozenset({Stage.DECODE}))).num_bytes == 0


def test_only_what_comes_again_is_kept() -> None:
    encoder, memo = make_encoder()
    for value in range(5):
        encoder(ids(value))
    assert (encoder.calls, memo.num_bytes) == (5, 0)
    for _ in range(3):
        encoder(ids(3))
    assert encoder.calls == 6
    assert memo.num_bytes == 3 * 4 * 4


@pytest.mark.parametrize(
    "change",
    [
        lambda encoder: encoder(ids(2)),
        lambda encoder: encoder(ids(1, length=5)),
        lambda encoder: encoder(ids(1).reshape(2, 2)),
        lambda encoder: encoder(ids(1).int()),
        lambda encoder: encoder(ids(1), 2.0),
        lambda encoder: encoder(ids(1), scale=2.0),
    ],
)
def test_any_difference_of_the_inputs_is_seen(change: Callable[[Encoder], Any]) -> None:
    encoder, _ = make_encoder()
    for _ in range(3):
        encoder(ids(1))
    assert encoder.calls == 2
    change(encoder)
    assert encoder.calls == 3


def test_inputs_that_cannot_be_compared_are_encoded_each_time() -> None:
    encoder, memo = make_encoder()
    for _ in range(3):
        encoder(ids(1), cache=object())
    assert (encoder.calls, memo.num_bytes) == (3, 0)


def test_a_result_may_be_changed_by_whoever_gets_it() -> None:
    encoder, _ = make_encoder()
    for _ in range(4):
        found = encoder(ids(1))
        assert isinstance(found, BaseModelOutput)
        assert torch.equal(found.last_hidden_state, ids(1).float())
        found.last_hidden_state.zero_()
        found.hidden_states[1].zero_()
    assert encoder.calls == 2


def test_the_oldest_results_make_room() -> None:
    encoder, memo = make_encoder(max_bytes=2 * 48)
    for value in (1, 1, 2, 2):
        encoder(ids(value))
    encoder(ids(1))  # used later than that of 2
    encoder(ids(3))
    encoder(ids(3))
    assert (encoder.calls, memo.num_bytes) == (6, 96)
    encoder(ids(1))
    assert encoder.calls == 6
    encoder(ids(2))
    assert encoder.calls == 7
    for _ in range(3):
        encoder(ids(1, length=100))  # too large to be kept at all
    assert encoder.calls == 10
    memo.clear()
    assert memo.num_bytes == 0
    encoder(ids(1))
    assert encoder.calls == 11
