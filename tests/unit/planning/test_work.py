"""The counted work of operators that torch's own counter refuses."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recoup.planning.work import WorkCounter

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention


def work(num_shared, length=256):
    counter = WorkCounter()
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, heads, length, 64, device="cuda", dtype=torch.bfloat16)
            for heads in (8, num_shared, num_shared)
        )
        with counter.counting():
            ATTENTION(q, k, v)
    return counter.work


def test_heads_that_share_keys_work_as_those_that_do_not():
    fewer_bytes = 2 * (2 * 6 * 256 * 64) * 2  # of keys and values
    assert work(8) - work(2) == pytest.approx(fewer_bytes)
