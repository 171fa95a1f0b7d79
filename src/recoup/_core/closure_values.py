"""The plain values (numbers, strings, None) that code reads beside its arguments.

NOTE [ What code reads ]

Rule 1. The instructions of a function, and of those that it defines within, tell which globals and
        closure cells it reads, and which attributes and entries of them, as `config.scale` and
        `counter[0]`; of a bound method also those of its owner. Nothing else is compared, so what
        changes and is not read is no error.
Rule 2. What an instruction computes first (an attribute of what a call returns, an entry at a place
        that varies) is not followed.
Rule 3. Methods and properties of the owner are followed, some levels deep.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

__all__ = ["PLAIN", "Place", "plain_values", "reads_of"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 4
_OTHERS = frozenset(("builtins", "torch", "numpy", "functools", "math"))
_SKIPPED = frozenset(("COPY", "PUSH_NULL", "NOP", "RESUME", "PRECALL", "EXTENDED_ARG", "DUP_TOP",
                      "DUP_TOP_TWO"))  # fmt: skip


class Read(NamedTuple):
    """A value that code reads: where it begins, its name, and what is taken of it."""

    root: str  # "global", "cell" or "self"
    name: str
    path: tuple[tuple[bool, Any], ...]  # whether it is an entry, and which


class Reads(NamedTuple):
    """What a code object reads, beside its owner and of it, and what it writes."""

    reads: tuple[Read, ...]
    of_owner: tuple[Read, ...]
    global_names: frozenset[str]
    written: frozenset[str]


_known: weakref.WeakKeyDictionary[types.CodeType, Reads] = weakref.WeakKeyDictionary()


def reads_of(code: types.CodeType) -> Reads:
    """Return what `code` reads."""
    found = _known.get(code)
    if found is None:
        reads: dict[Read, None] = {}
        written: set[str] = set()
        own = code.co_varnames[0] if code.co_argcount else ""
        _scan(code, own, set(code.co_freevars), reads, written)
        names = frozenset(read.name for read in reads if read.root == "global")
        of_owner = tuple(read for read in reads if read.root == "self" and read.path)
        outside = tuple(read for read in reads if read.root != "self")
        found = _known[code] = Reads(outside, of_owner, names, frozenset(written))
    return found


def _scan(
    code: types.CodeType, own: str, cells: set[str], reads: dict[Read, None], written: set[str]
) -> None:
    read: Read | None = None
    entry: Any = None
    has_entry = False
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in _SKIPPED:
            continue
        if read is not None:
            if has_entry and (name == "BINARY_SUBSCR" or instruction.argrepr == "[]"):
                read, has_entry = read._replace(path=(*read.path, (True, entry))), False
                continue
            if name in ("LOAD_ATTR", "LOAD_METHOD") and not has_entry:
                read = read._replace(path=(*read.path, (False, value)))
                continue
            if name in ("LOAD_CONST", "LOAD_SMALL_INT") and not has_entry:
                entry, has_entry = value, isinstance(value, (int, str))
                if has_entry:
                    continue
            reads[read] = None
        read, has_entry = _begun(name, value, own, cells), False
        if name in ("STORE_GLOBAL", "STORE_DEREF"):
            written.add(value)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # what it defines within, with the same owner
            _scan(constant, "", cells, reads, written)


def _begun(name: str, value: Any, own: str, cells: set[str]) -> Read | None:
    if name == "LOAD_GLOBAL":
        return Read("global", value, ())
    if name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
        return Read("cell", value, ()) if value in cells else None
    if name.startswith("LOAD_FAST"):
        last: Any = cast("Any", value)[-1] if isinstance(value, tuple) else value
        return Read("self", own, ()) if own and last == own else None
    return None


class Place(NamedTuple):
    """Where a plain value lies, so that it can be put back."""

    owner: Any
    key: Any

    def get(self) -> Any:
        """Return what lies there."""
        if isinstance(self.owner, types.CellType):
            return self.owner.cell_contents
        if isinstance(self.owner, (dict, list)):
            return cast("Any", self.owner)[self.key]
        return getattr(self.owner, self.key)

    def put(self, value: Any) -> None:
        """Put a value there."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, (dict, list)):
            cast("Any", self.owner)[self.key] = value
        else:
            setattr(self.owner, self.key, value)


Found = tuple[str, Any, Place, bool]


def plain_values(
    fn: types.FunctionType, owner: object, prefix: str, depth: int = 0
) -> Iterator[Found]:
    """Yield what `fn` reads: a name, the value, its place, and whether `fn` itself writes it.

    Args:
        fn: a function.
        owner: what it is bound to; None if to nothing.
        prefix: what names begin with.
        depth: how many calls lie before this one.
    """
    found = reads_of(fn.__code__)
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False))
    if owner is not None:
        for read in found.of_owner:
            yield from _followed(owner, read, prefix, depth)
    for read in found.reads:
        if read.root == "global":
            if read.name not in fn.__globals__:
                continue
            value, place = fn.__globals__[read.name], Place(fn.__globals__, read.name)
        else:
            try:
                value = cells[read.name].cell_contents
            except (KeyError, ValueError):  # not bound yet
                continue
            place = Place(cells[read.name], None)
        if read.path:
            if not _is_of_others(value):
                yield from _followed(value, read, prefix, depth)
        elif isinstance(value, PLAIN):
            yield f"{prefix}{read.name}", value, place, read.name in found.written


def _followed(value: Any, read: Read, prefix: str, depth: int) -> Iterator[Found]:
    """Go from the root of a read to what it takes (See Rules 2 and 3)."""
    name = f"{prefix}{read.name}"
    place: Place | None = None
    for index, (is_entry, key) in enumerate(read.path):
        if isinstance(value, Tensor) or _is_of_others(value):
            return
        name += f"[{key!r}]" if is_entry else f".{key}"
        if is_entry:
            try:
                if not isinstance(value, (dict, list)):
                    return
                value, place = cast("Any", value)[key], Place(value, key)
            except (KeyError, IndexError):
                return
            continue
        before = value
        value, place = _attribute(before, key)
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, types.FunctionType) and place is None:
            is_last = index + 1 == len(read.path) or isinstance(value, property)
            if is_last and depth < _DEEPEST and not _is_of_others(before):
                yield from plain_values(function, before, f"{name.rpartition('.')[0]}: ", depth + 1)
            return
    if isinstance(value, PLAIN) and place is not None and not isinstance(place.owner, nn.Module):
        yield name, value, place, False


def _attribute(value: Any, key: str) -> tuple[Any, Place | None]:
    """Return an attribute without running code; its place if it is the object's own or a number."""
    own = getattr(value, "__dict__", {})
    if key in own and not isinstance(value, type):
        # Numbers of modules are put back by their guard.
        return own[key], Place(value if isinstance(value, nn.Module) else own, key)
    if isinstance(value, nn.Module) and key in value._modules:
        return value._modules[key], Place(value, key)
    for kind in (value if isinstance(value, type) else cast("Any", type(value))).__mro__:
        if key in vars(kind):
            found = vars(kind)[key]
            return found, Place(kind, key) if isinstance(found, PLAIN) else None
    return None, None


def _is_of_others(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _OTHERS
    kind = value if isinstance(value, type) else cast("Any", type(value))
    if isinstance(value, (dict, list)):
        return False
    return kind.__module__.partition(".")[0] in _OTHERS
