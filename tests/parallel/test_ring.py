"""Attention in a ring equals attention at once, whatever the heads, the members and the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests.parallel.members import Member, Pool
from tridentserve.errors import ConfigError
from tridentserve.parallel.groups import SequenceGroup
from tridentserve.parallel.ring import SoftmaxSum, attend
from tridentserve.parallel.token_sharding import TokenSharding

CHANNELS, BATCH = 8, 2


def attend_together(
    member: Member, whole: Any, text: int, text_first: bool, mask: Any, options: Any
) -> tuple[Any, Any]:
    """The attention of all image tokens, as all members have it, and that of the text as this one has it."""
    sharding = TokenSharding(member.group("ring"))
    query, *_ = tensors = torch.from_numpy(whole).unbind(0)
    image = query.shape[2] - text
    sharding.shard(torch.zeros(1, image, 1))
    start = sum(sharding.sizes[: member.rank])
    mine = torch.arange(start, start + sharding.sizes[member.rank])
    of_text = torch.arange(text)
    kept = torch.cat([of_text, text + mine] if text_first else [mine, image + of_text])
    if mask is not None:
        mask = torch.from_numpy(mask)[..., kept]
        options = {**options, "attn_mask": mask if mask.shape[-2] == 1 else mask[..., kept, :]}
    output = sharding.compute_attention(
        scaled_dot_product_attention, *(tensor[:, :, kept] for tensor in tensors), text_first=text_first, **options
    )
    split = [text, len(mine)] if text_first else [len(mine), text]
    parts = torch.split(output, split, dim=2)
    shard, of_text = (parts[1], parts[0]) if text_first else parts
    batch, heads, _, channels = shard.shape
    gathered = sharding.gather(shard.transpose(1, 2).reshape(batch, -1, heads * channels))
    return gathered.numpy(), of_text.numpy()


@pytest.mark.parametrize("masks", ["none", "keys", "queries and keys", "added"])
@pytest.mark.parametrize(
    ("heads", "size", "text", "text_first"),
    [(2, 4, 5, True), (3, 4, 5, False), (6, 4, 0, False), (1, 2, 1, True), (4, 3, 7, False), (2, 3, 2, True)],
)
def test_all_members_together_attend_to_all(
    pool: Pool, heads: int, size: int, text: int, text_first: bool, masks: str
) -> None:
    generator = torch.Generator().manual_seed(heads * size + text)
    length = text + 3 * size + 2
    whole = torch.randn(3, BATCH, heads, length, CHANNELS, generator=generator)
    mask = make_mask(masks, text, text_first, length)
    options: Any = {"scale": 0.5} if text else {}
    query, key, value = whole.unbind(0)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    results = pool.run(
        attend_together, size, whole.numpy(), text, text_first, None if mask is None else mask.numpy(), options
    )
    places = range(text, length) if text_first else range(length - text)
    image = expected[:, :, places].transpose(1, 2).flatten(2)
    of_text = expected[:, :, [place for place in range(length) if place not in places]]
    for result in results:
        assert not isinstance(result, Exception), result
        torch.testing.assert_close(torch.from_numpy(result[0]), image, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(result[1]), of_text, rtol=1e-5, atol=1e-6)


def make_mask(kind: str, text: int, text_first: bool, length: int) -> torch.Tensor | None:
    """A mask that hides every other token of the text."""
    if kind == "none":
        return None
    seen = torch.ones(BATCH, 1, 1, length, dtype=torch.bool)
    hidden = torch.arange(1, max(1, text), 2) + (0 if text_first else length - text)
    seen[1, ..., hidden] = False
    if kind == "added":
        return torch.zeros(seen.shape).masked_fill(~seen, -1e4)
    return seen if kind == "keys" else seen.expand(-1, -1, length, -1)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    hidden=st.sets(st.integers(0, 24)),
    scale=st.sampled_from([0.1, 1.0, 60.0]),
    seed=st.integers(0, 99),
)
def test_parts_add_up_to_the_whole(sizes: list[int], hidden: set[int], scale: float, seed: int) -> None:
    """Also where a query sees nothing of a part, and where exponentials are too large for float32."""
    generator = torch.Generator().manual_seed(seed)
    keys = sum(sizes)
    query, key, value = (torch.randn(1, 2, n, CHANNELS, generator=generator) for n in (3, keys, keys))
    mask = torch.ones(1, 1, 3, keys, dtype=torch.bool)
    mask[..., [place for place in hidden if place < keys]] = False
    mask[..., keys - 1] = True
    total, start = SoftmaxSum(), 0
    for size in sizes:
        part = slice(start, start + size)
        total.add(*attend(query, key[:, :, part], value[:, :, part], mask[..., part], scale))
        start += size
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    torch.testing.assert_close(total.finish(torch.float32), expected, rtol=1e-4, atol=1e-5)


class _Alone(SequenceGroup):
    """A group whose other members never answer."""

    def __init__(self) -> None:
        self.name, self.rank, self.size = "alone", 0, 2

    def start_all_to_all_into(self, received: Any, *rest: Any) -> Any:
        return lambda: received.zero_()


def test_what_a_ring_cannot_compute_is_refused() -> None:
    sharding = TokenSharding(_Alone())
    sharding.shard(torch.zeros(1, 4, 1))
    tensors = torch.zeros(3, 1, 3, 2, CHANNELS)
    with pytest.raises(ConfigError, match="is_causal, and its heads cannot be shared by 2 workers; use a degree that"):
        sharding.compute_attention(
            scaled_dot_product_attention, *tensors.unbind(0), text_first=False, is_causal=True, dropout_p=0.0
        )
