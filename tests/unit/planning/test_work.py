"""The counted work of operators; some counters of torch refuse heads that share keys."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter

from recoup.planning import work
from recoup.planning.work import WorkCounter

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
LENGTH = 256


def counted(num_shared):
    """The work of a forward and of a backward of eight heads that share keys."""
    found = []
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, heads, LENGTH, 64, device="cuda", dtype=torch.bfloat16)
            for heads in (8, num_shared, num_shared)
        )
        out, scale, *rest = FORWARD(q, k, v)
        numbers = (*rest[:4], 0.0, False, *rest[4:6])
        for call in (lambda: FORWARD(q, k, v), lambda: BACKWARD(q, q, k, v, out, scale, *numbers)):
            counter = WorkCounter()
            with counter.counting():
                call()
            found.append(counter.work)
    return found


@pytest.mark.parametrize("refuses", [False, True])
def test_heads_that_share_keys_work_as_those_that_do_not(refuses, monkeypatch):
    if refuses:

        def counts(q, k, v, *args, out_shape, **kwargs):
            assert q[1] == k[1] == v[1]
            return flop_counter.sdpa_flop_count(q, k, v)

        def counts_backward(gradient, *args, **kwargs):
            return 2.5 * counts(*args, **kwargs)

        registry = dict(flop_counter.flop_registry)
        registry[FORWARD] = flop_counter.shape_wrapper(counts)
        registry[BACKWARD] = flop_counter.shape_wrapper(counts_backward)
        monkeypatch.setattr(work, "_flop_registry", lambda: registry)
    few, all_ = counted(2), counted(8)
    of_keys = 2 * (2 * 6 * LENGTH * 64) * 2  # the bytes of keys and values that are not there
    assert all_[0] - few[0] == pytest.approx(of_keys)
    assert all_[1] - few[1] == pytest.approx(2 * of_keys)  # and of their gradients


def test_a_question_about_a_tensor_is_no_work():
    """Without values, autograd asks tensors for their device by an operator."""
    counter = WorkCounter()
    with FakeTensorMode(), counter.counting():
        x = torch.empty(256, 256, requires_grad=True)
        before = counter.work
        x = x.relu()
    assert counter.work - before == 2 * x.nbytes
