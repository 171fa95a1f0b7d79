"""Random draws that a second run repeats: our own from seeds, foreign ones from the state.

NOTE [ A seed is the random state ]

Rule 1. A draw of ours takes one seed from the default generator and is made from that seed. A
        region writes the seed down (8 bytes) and a second run of the region gets it again.
Rule 2. A call that may draw, or may not, leaves the default generators as it found them if it
        did not, and one seed further if it did; so a stream does not depend on who asked.
Rule 3. A foreign draw moves a default generator outside Rule 1 and Rule 2. A region in which
        that happened keeps the state it began with; any other keeps none.
Rule 4. A region run for the second time asks the region around it that is also run again, not
        the generator; a first run inside a second one writes down what it is given.
Rule 5. After a second run the default generators are as they were before it.
Rule 6. What is decided outside of a region and may be decided otherwise later (which draw a weight
        has, which depends on the forward around it) is written down in the order of the seeds.
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
    # All devices, since a region may draw on another than the current one.
    if torch.cuda.is_initialized():
        return (torch.default_generator, *torch.cuda.default_generators)
    return (torch.default_generator,)


def generator_states() -> States:
    """Return where the default generators stand."""
    if not torch.cuda.is_initialized():
        return (torch.default_generator.get_state(),)
    return tuple(generator.get_state() for generator in _generators())


def set_generator_states(states: States) -> None:
    """Put the default generators there."""
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def same_states(a: States, b: States) -> bool:
    """Whether nothing was drawn between two states."""
    # A device that woke up in between counts as unchanged: nothing was known to replay there.
    return all(_bytes(x) == _bytes(y) for x, y in zip(a, b, strict=False))


def _bytes(state: Tensor) -> bytes:
    # torch.equal takes five times as long for the 5 KB of a state, and every region pays it.
    return ctypes.string_at(state.data_ptr(), state.numel())


class Draws:
    """What a region drew: its seeds in order, and the state it began with if it needs it."""

    __slots__ = ("_cursor", "_expected", "_foreign", "_replaying", "_seeds", "_start")

    def __init__(self) -> None:
        self._seeds: list[Any] = []  # draws, and what Rule 6 writes down
        self._start: States | None = None
        self._expected: States = ()
        self._foreign = False
        self._replaying = False
        self._cursor = 0

    @property
    def has_foreign(self) -> bool:
        """Whether a default generator moved other than by draws of ours (See Rule 3)."""
        return self._foreign

    def recording(self) -> _Recording:
        """Around the first run: write down the seeds, and whether anything else was drawn."""
        return _Recording(self)

    def replaying(self) -> _Replaying:
        """Around a later run: the same seeds and state, and the generators untouched after it."""
        return _Replaying(self)

    def _meet(self, states: States) -> None:
        if not self._foreign and not same_states(self._expected, states):
            self._foreign = True  # See Rule 3

    def _next(self) -> Any:
        seed = self._seeds[self._cursor] if self._cursor < len(self._seeds) else None
        self._cursor += 1
        return seed


class _Pushed(Restoring):
    """Around code whose draws belong to a region, too."""

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
    """Return the regions that write a draw down, and the one that already knows it."""
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
    """Draw a seed of 8 bytes from the default CPU generator; a replay returns the same one."""
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
    """What was decided, and how many seeds that took from the stream (See Rule 6)."""

    value: Any
    num_seeds: int


def counted(decide: Callable[[], Any]) -> Counted:
    """Return what `decide` decides, and how many seeds it drew."""
    before = _stack.num_seeds
    value = decide()
    return Counted(value, _stack.num_seeds - before)


def skip(num_seeds: int) -> None:
    """Move the stream on by as many seeds, so that a foreign draw finds it in its place."""
    for _ in range(num_seeds):
        _fresh_seed()


def num_repeated() -> int:
    """Return how many regions are around that will run again, or do."""
    return len(_stack.draws)


def is_repeated() -> bool:
    """Whether a region is around that will run again, or does."""
    return bool(_stack.draws)


def remembered(decide: Callable[[], T]) -> T:
    """Return what `decide` returns; a region that runs again gets what its first run was given."""
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
    """Return a context around what shall not be seen in the random stream."""
    return _LeftAs()


class _LeftAs(Restoring):
    """Around code that the default generators are left as they were, or at `states`."""

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
    """Around code that these regions alone are around."""

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
    """Return a number for the place at which the stream of the default CPU generator is."""
    return hash(_bytes(torch.default_generator.get_state()))


class SeededCall:
    """A call whose default-generator draws come from one seed, to be repeated in any order.

    What is drawn by seeds within belongs to the call, and not to the regions around it.
    """

    __slots__ = ("_draw", "_is_known", "_within")

    def __init__(self) -> None:
        self._draw: int | None = None
        self._is_known = False
        self._within = Draws()

    @property
    def draws(self) -> bool:
        """Whether it drew when it ran first."""
        return self._draw is not None

    @property
    def is_known(self) -> bool:
        """Whether it has run, or is known to draw nothing."""
        return self._is_known

    def draws_nothing(self) -> None:
        """Say that the call draws nothing, so that nobody has to watch it."""
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
    """Around a seeded call: what is drawn within is written down, or repeated, by it alone."""

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
    """Run `call` with the default generators at `seed`, and leave them as they were."""
    with _LeftAs():
        _seed_generators(seed)
        return call()


def _seed_generators(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(seed)
