"""On a GPU the parts of a ring's attention add up to attention at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tridentserve.parallel.ring import SoftmaxSum, attend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_masked", [False, True])
def test_parts_add_up_to_the_whole(gpu: torch.device, dtype: torch.dtype, is_masked: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, 3, n, 64, generator=generator).to(gpu, dtype) for n in (37, 101, 101))
    mask = None
    if is_masked:
        mask = torch.rand(2, 1, 1, 101, generator=generator).gt(0.3).to(gpu)
        mask[1, ..., :50] = False  # sees nothing of the first part
        mask[..., -1] = True
    total = SoftmaxSum()
    for part in (slice(0, 50), slice(50, 101)):
        part_mask = None if mask is None else mask[..., part]
        total.add(*attend(query, key[:, :, part], value[:, :, part], part_mask, None))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(total.finish(dtype), expected, rtol=tolerance, atol=tolerance)
