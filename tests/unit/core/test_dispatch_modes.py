"""Dispatch modes that are entered for a while, and the flags of torch, which all threads share."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from recoup._core.operators import InMode


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fails", [False, True])
def test_flags_stay_as_they_were_within_a_mode_and_where_threads_overlap(fails):
    """The thread that began first ends first: the other one found the flags set."""
    is_entered, is_left = threading.Event(), threading.Event()

    def run():
        with suppress(KeyError), InMode(Mode()):
            is_entered.set()
            is_left.wait(10)
            if fails:
                raise KeyError

    thread = threading.Thread(target=run)
    with InMode(Mode()):
        thread.start()
        assert is_entered.wait(10)
        assert is_in_torch_dispatch_mode()
    is_left.set()
    thread.join()
    assert not is_in_torch_dispatch_mode()
    with Mode():
        run()
        assert is_in_torch_dispatch_mode()
    assert not is_in_torch_dispatch_mode()
