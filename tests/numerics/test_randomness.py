"""Random draws: the same in every mode, and the same stream after them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import recoup
from recoup._core.rng import Draws, SeededCall, draw_seed, hash_seed
from recoup.errors import ReplayError
from tests.zoo import leaf


@pytest.mark.parametrize("is_again", [False, True])
def test_another_thread_that_draws_meanwhile(is_again):
    """After all that the region draws itself, so that no residual shows it."""

    def fn(x):
        y = nn.functional.dropout(x, 0.5)
        if is_again == (torch._C._current_graph_task_id() != -1):
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
        return y.exp().sin()

    with pytest.raises(ReplayError, match=r"[Aa]nother thread draws from it"):
        recoup.checkpoint(fn, leaf(64, 64)).sum().backward()


def test_seeds_made_of_numbers_are_those_of_splitmix64():
    """Draws of weights are made of them, so another hash would give every model other noise."""
    assert hash_seed(0) == 0xE220A8397B1DCDAF
    assert hash_seed(7, 3) == 0xF53A29A2695577C0
    assert hash_seed(2**63 - 1, 0) == 0x69C9D98A86C5CD1E


def all_kinds_of_draws():
    values = [torch.rand(2), torch.tensor(float(draw_seed() % 1000))]
    values += [SeededCall().run(lambda: torch.rand(2) + draw_seed() % 1000), torch.rand(1)]
    return [*values, SeededCall().run(lambda: torch.zeros(2)), torch.rand(1)]


def test_a_replay_repeats_seeds_and_foreign_draws_in_any_mixture():
    """So does the replay of a first run that was within a second one."""
    outer, inners = Draws(), []

    def run():
        inners.append(Draws())
        with inners[-1].recording():
            return all_kinds_of_draws()

    torch.manual_seed(0)
    with outer.recording():
        found = [run()]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for _ in range(2):
        with outer.replaying():
            found.append(run())
    for inner in inners:
        with inner.replaying():
            found.append(all_kinds_of_draws())
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))
    assert torch.equal(torch.get_rng_state(), before)
