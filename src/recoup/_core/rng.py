"""Random draws that a second run repeats: recoup's from seeds, others from generator states.

NOTE [ A seed is the random state ]

Rule 1. A draw by recoup takes one seed from the default generator and is made from that seed. A
        region records the seed (8 bytes), and its second run gets the same seed.
Rule 2. A call that may draw leaves the default generators unchanged if it did not draw, and one
        seed further if it did; so the stream does not depend on how much the call drew.
Rule 3. A foreign draw moves a default generator outside Rule 1 and Rule 2. A region with a foreign
        draw keeps the generator states from its start; any other keeps none.
Rule 4. A first run inside a second run takes its seeds from the region that runs again, not from
        the generator, and records them.
Rule 5. After a second run the default generators are restored to their states before it.
Rule 6. A decision that is made outside of a region and may differ later (which draw a weight has
        depends on the forward around it) is recorded in order among the seeds.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from recoup._core.restoring import Restoring
from recoup.errors import RecoupError, ReplayError

__all__ = [
    "Counted",
    "Draws",
    "SeededCall",
    "States",
    "counted",
    "draw_seed",
    "fingerprint",
    "generator_states",
    "generators_restored",
    "is_repeated",
    "num_repeated",
    "remembered",
    "same_states",
    "set_generator_states",
    "skip",
    "with_seed",
]

T = TypeVar("T")
States = tuple[Tensor, ...]


class _Stack(threading.local):
    def __init__(self) -> None:
        self.draws: list[Draws] = []
        self.num_seeds = 0


_stack = _Stack()


def _generators() -> tuple[torch.Generator, ...]:
    # All devices, since a region may draw on one that is not the current device.
    if torch.cuda.is_initialized():
        return (torch.default_generator, *torch.cuda.default_generators)
    return (torch.default_generator,)


def generator_states() -> States:
    """Return the states of the default generators."""
    if not torch.cuda.is_initialized():
        return (torch.default_generator.get_state(),)
    return tuple(generator.get_state() for generator in _generators())


def set_generator_states(states: States) -> None:
    """Set the states of the default generators."""
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def same_states(a: States, b: States) -> bool:
    """Whether two states are equal, so that nothing was drawn in between."""
    # A device that was initialized in between counts as unchanged: it has no state to replay.
    return all(_bytes(x) == _bytes(y) for x, y in zip(a, b, strict=False))


def _bytes(state: Tensor) -> bytes:
    # torch.equal takes five times as long for the 5 KB of a state, in every region.
    return ctypes.string_at(state.data_ptr(), state.numel())


class Draws:
    """The draws of a region: its seeds in order, and its first generator states if needed."""

    __slots__ = ("_cursor", "_expected", "_foreign", "_replaying", "_seeds", "_start")

    def __init__(self) -> None:
        self._seeds: list[Any] = []  # seeds, seeded calls, and the decisions of Rule 6
        self._start: States | None = None
        self._expected: States = ()
        self._foreign = False
        self._replaying = False
        self._cursor = 0

    @property
    def has_foreign(self) -> bool:
        """Whether a default generator was moved by a foreign draw (See Rule 3)."""
        return self._foreign

    def recording(self) -> _Recording:
        """Return a context for the first run, which records seeds and notes foreign draws."""
        return _Recording(self)

    def replaying(self) -> _Replaying:
        """Return a context for a later run, which repeats the draws and restores generators."""
        return _Replaying(self)

    def _meet(self, states: States) -> None:
        if not self._foreign and not same_states(self._expected, states):
            self._foreign = True  # See Rule 3

    def _next(self) -> Any:
        seed = self._seeds[self._cursor] if self._cursor < len(self._seeds) else None
        self._cursor += 1
        return seed


class _Pushed(Restoring):
    """A context whose draws belong to a region."""

    __slots__ = ("_draws", "_num_around")

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws
        self._num_around = -1

    def push(self) -> None:
        self._num_around = len(_stack.draws)
        _stack.draws.append(self._draws)

    def restore(self) -> None:
        if self._num_around >= 0:
            del _stack.draws[self._num_around :]
            self._num_around = -1


class _Recording(_Pushed):
    __slots__ = ("_start",)

    def __init__(self, draws: Draws) -> None:
        super().__init__(draws)
        self._start: States = ()

    def __enter__(self) -> None:
        self._start = self._draws._expected = generator_states()
        self.push()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        self.restore()
        draws = self._draws
        draws._meet(generator_states())
        draws._start = self._start if draws._foreign else None
        draws._expected = ()


class _Replaying(_Pushed):
    __slots__ = ("_before", "_outer")

    def __init__(self, draws: Draws) -> None:
        super().__init__(draws)
        self._before: States | None = None
        self._outer: tuple[bool, int] | None = None

    def __enter__(self) -> None:
        draws = self._draws
        start = draws._start
        if start is not None or any(map(_moves, draws._seeds)):
            self._before = generator_states()
        self._outer = (draws._replaying, draws._cursor)
        draws._replaying, draws._cursor = True, 0
        self.push()
        if start is not None:
            set_generator_states(start)

    def restore(self) -> None:
        super().restore()
        if self._outer is not None:
            self._draws._replaying, self._draws._cursor = self._outer
            self._outer = None
        if self._before is not None:
            set_generator_states(self._before)  # See Rule 5
            self._before = None


def _moves(entry: Any) -> bool:
    """Whether repeating an entry of a region moves a default generator."""
    if isinstance(entry, SeededCall):
        return entry.draws
    return not isinstance(entry, Counted) or entry.num_seeds > 0


def _writers() -> tuple[list[Draws], Draws | None]:
    """Return the regions that must record a draw, and the one that repeats it, if any."""
    writers: list[Draws] = []
    for draws in reversed(_stack.draws):
        if draws._replaying:
            return writers, draws  # See Rule 4
        writers.append(draws)
    return writers, None


def _fresh_seed() -> int:
    _stack.num_seeds += 1
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    try:
        return int(seed.item())
    except RuntimeError as error:
        raise RecoupError(
            '`randomness` of vmap is "different", but one call has one draw, which is the same for '
            'all samples. Use randomness="same", or recoup.weights.same_draw around vmap.'
        ) from error


def draw_seed() -> int:
    """Draw a seed of 8 bytes from the default CPU generator; a replay returns the same seed."""
    writers, known = _writers()
    if writers:
        states = generator_states()
        for draws in writers:
            draws._meet(states)
    seed = _fresh_seed()
    if known is not None:
        recorded = known._next()
        seed = seed if not isinstance(recorded, int) else recorded
    if writers:
        states = generator_states()
        for draws in writers:
            draws._expected = states
            draws._seeds.append(seed)
    return seed


class Counted(NamedTuple):
    """A decision, and how many seeds it took from the stream (See Rule 6)."""

    value: Any
    num_seeds: int


def counted(decide: Callable[[], Any]) -> Counted:
    """Return the result of `decide`, and how many seeds it drew."""
    before = _stack.num_seeds
    value = decide()
    return Counted(value, _stack.num_seeds - before)


def skip(num_seeds: int) -> None:
    """Advance the stream by `num_seeds` seeds, so that later foreign draws are repeated."""
    for _ in range(num_seeds):
        _fresh_seed()


def num_repeated() -> int:
    """Return the number of regions around this code that may run again, or run again now."""
    return len(_stack.draws)


def is_repeated() -> bool:
    """Whether this runs inside a region that may run again, or runs again now."""
    return bool(_stack.draws)


def remembered(decide: Callable[[], T]) -> T:
    """Return the result of `decide`; a region that runs again gets that of its first run."""
    if not _stack.draws:
        return decide()
    writers, known = _writers()
    states = generator_states() if writers else ()
    for draws in writers:
        draws._meet(states)
    found = None if known is None else known._next()
    if found is None:
        with _Only([]):
            found = counted(decide)
    elif not isinstance(found, Counted):
        raise ReplayError(
            "A region that runs again draws in another order than its first run did: a weight is "
            "read where a seed was drawn. Look for outside state that it reads."
        )
    else:
        skip(found.num_seeds)
    states = generator_states() if writers else ()
    for draws in writers:
        draws._expected = states
        draws._seeds.append(found)
    return found.value


def generators_restored() -> AbstractContextManager[object]:
    """Return a context after which the default generators are restored."""
    return _LeftAs()


class _LeftAs(Restoring):
    """A context that restores the default generators at its end, or sets them to `states`."""

    __slots__ = ("states",)

    def __init__(self) -> None:
        super().__init__()
        self.states: States | None = None

    def __enter__(self) -> _LeftAs:
        self.states = generator_states()
        return self

    def restore(self) -> None:
        if self.states is not None:
            set_generator_states(self.states)
            self.states = None


class _Only(Restoring):
    """A context in which `draws` replaces the stack of regions."""

    __slots__ = ("_around", "_draws")

    def __init__(self, draws: list[Draws]) -> None:
        super().__init__()
        self._draws = draws
        self._around: list[Draws] | None = None

    def __enter__(self) -> None:
        self._around = _stack.draws
        _stack.draws = self._draws

    def restore(self) -> None:
        if self._around is not None:
            _stack.draws = self._around
            self._around = None


def fingerprint() -> int:
    """Return a hash of the state of the default CPU generator."""
    return hash(_bytes(torch.default_generator.get_state()))


class SeededCall:
    """A call whose default-generator draws come from one seed, so it can be repeated in any order.

    Seeds drawn within belong to the call, and not to the regions around it.
    """

    __slots__ = ("_draw", "_is_known", "_within")

    def __init__(self) -> None:
        self._draw: int | None = None
        self._is_known = False
        self._within = Draws()

    @property
    def draws(self) -> bool:
        """Whether the call drew in its first run."""
        return self._draw is not None

    @property
    def is_known(self) -> bool:
        """Whether the call has run, or is known to draw nothing."""
        return self._is_known

    def draws_nothing(self) -> None:
        """Declare that the call draws nothing, so that its first run need not be watched."""
        self._is_known = True

    def run(self, call: Callable[[], T]) -> T:
        """Run `call`, or repeat it (See Rules 1 and 2)."""
        if self._is_known:
            return self._again(call)
        writers, known = _writers()
        before = generator_states()
        for region in writers:
            region._meet(before)
        found = None if known is None else known._next()
        if isinstance(found, SeededCall):
            if found._draw is not None:
                skip(1)
            self._draw, self._within = found._draw, found._within
            result = self._again(call)
        else:
            result = self._first(call, before)
        self._is_known = True
        after = generator_states()
        for region in writers:
            region._seeds.append(self)
            region._expected = after
        return result

    def _first(self, call: Callable[[], T], before: States) -> T:
        seed = _fresh_seed()
        with _LeftAs() as left:
            _seed_generators(seed)
            probe = generator_states()
            with _Within(self._within, is_replaying=False):
                result = call()
            drew = not same_states(probe, generator_states())
            if not drew:
                left.states = before  # See Rule 2
        self._draw = seed if drew else None
        return result

    def _again(self, call: Callable[[], T]) -> T:
        with _Within(self._within, is_replaying=True):
            return call() if self._draw is None else with_seed(call, self._draw)


class _Within(_Only):
    """A context for a seeded call, which alone records, or repeats, the seeds drawn within."""

    __slots__ = ("_is_replaying", "_outer", "_own")

    def __init__(self, draws: Draws, *, is_replaying: bool) -> None:
        super().__init__([draws])
        self._own = draws
        self._is_replaying = is_replaying
        self._outer: tuple[bool, int] | None = None

    def __enter__(self) -> None:
        super().__enter__()
        draws = self._own
        self._outer = (draws._replaying, draws._cursor)
        draws._replaying, draws._cursor = self._is_replaying, 0

    def restore(self) -> None:
        super().restore()
        if self._outer is not None:
            self._own._replaying, self._own._cursor = self._outer
            self._outer = None


def with_seed(call: Callable[[], T], seed: int) -> T:
    """Run `call` with the default generators seeded with `seed`, and restore them after it."""
    with _LeftAs():
        _seed_generators(seed)
        return call()


def _seed_generators(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(seed)
