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
def test_threads_whose_modes_overlap_leave_the_flags_as_they_were(fails):
    """The thread that began first ends first: the other one found the flags set."""
    is_entered, is_left = threading.Event(), threading.Event()

    def other():
        with suppress(KeyError), InMode(Mode()):
            is_entered.set()
            is_left.wait(10)
            if fails:
                raise KeyError

    thread = threading.Thread(target=other)
    with InMode(Mode()):
        thread.start()
        assert is_entered.wait(10)
        assert is_in_torch_dispatch_mode()
    is_left.set()
    thread.join()
    assert not is_in_torch_dispatch_mode()


@pytest.mark.parametrize("fails", [False, True])
def test_within_a_mode_of_other_code_its_flags_stay(fails):
    with Mode():
        with suppress(KeyError), InMode(Mode()):
            if fails:
                raise KeyError
        assert is_in_torch_dispatch_mode()
    assert not is_in_torch_dispatch_mode()
