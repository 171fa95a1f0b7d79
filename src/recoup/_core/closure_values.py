"""The plain values (numbers, strings, None), and modules, that code reads at the end of a path.

NOTE [ The reads of code ]

Rule 1. The instructions of a function, and of functions defined within it, show which globals and
        closure cells it reads, and which attributes and entries of them, as `config.scale` and
        `counter[0]`; for a bound method also those of its owner. Nothing else is compared, so a
        change of a value that is not read is no error.
Rule 2. Computed reads (an attribute of the result of a call, an entry at a varying index) are not
        followed.
Rule 3. Methods and properties of the owner are followed, some levels deep.
Rule 4. A module at the end of a path (`self.blocks[0]`) is found, too, but not put back.
"""

from __future__ import annotations

import dis
import types
import weakref
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from recoup._core.replaced_values import Location

__all__ = ["MAX_DEPTH", "MAX_ENTRIES", "PLAIN", "plain_values", "reads_of"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
MAX_DEPTH = 4  # of calls and containers that are followed
MAX_ENTRIES = 64  # of a container that are looked at
# Packages whose functions and objects are not searched.
_OTHERS = frozenset(("builtins", "torch", "numpy", "functools", "math"))
_MISSING = object()
_SKIPPED = frozenset(("COPY", "PUSH_NULL", "NOP", "RESUME", "PRECALL", "EXTENDED_ARG", "DUP_TOP",
                      "DUP_TOP_TWO"))  # fmt: skip


class Read(NamedTuple):
    """A value that code reads: its root, its name, and the path of attributes and entries."""

    root: str  # "global", "cell" or "self"
    name: str
    path: tuple[tuple[bool, Any], ...]  # whether it is an entry, and which


class Reads(NamedTuple):
    """The reads of a code object, outside its owner and of it, and the names it writes."""

    reads: tuple[Read, ...]
    of_owner: tuple[Read, ...]
    global_names: frozenset[str]
    written: frozenset[str]


# A dictionary of weak references that take themselves out runs no Python code at a look-up, as a
# WeakKeyDictionary would.
_known: dict[weakref.ref[types.CodeType], Reads] = {}


def reads_of(code: types.CodeType) -> Reads:
    """Return the reads of `code`."""
    found = _known.get(weakref.ref(code))
    if found is None:
        reads: dict[Read, None] = {}
        written: set[str] = set()
        own = code.co_varnames[0] if code.co_argcount else ""
        _scan(code, own, set(code.co_freevars), reads, written)
        names = frozenset(read.name for read in reads if read.root == "global")
        of_owner = tuple(read for read in reads if read.root == "self" and read.path)
        outside = tuple(read for read in reads if read.root != "self")
        found = _known[weakref.ref(code, _forget)] = Reads(
            outside, of_owner, names, frozenset(written)
        )
    return found


def _forget(code: weakref.ref[types.CodeType]) -> None:
    _known.pop(code, None)


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
        if isinstance(constant, types.CodeType):  # a function defined within
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


Found = tuple[str, Any, Location | None, bool]


def plain_values(
    fn: types.FunctionType, found: list[Found], owner: object, prefix: str, depth: int = 0
) -> None:
    """Find each value that `fn` reads: name, value, location, and whether `fn` itself writes it.

    Args:
        fn: a function.
        found: the list that the values are added to.
        owner: the object that `fn` is bound to, or None.
        prefix: a prefix for the names.
        depth: the number of calls followed before this one.
    """
    reads = reads_of(fn.__code__)
    if owner is not None:
        for read in reads.of_owner:
            _follow(owner, read, found, prefix, depth)
    for read in reads.reads:
        if read.root == "global":
            value = fn.__globals__.get(read.name, _MISSING)
        else:
            value = _in_cell(fn, read.name)
        if value is _MISSING:
            continue
        if read.path:
            if not _is_of_others(value):
                _follow(value, read, found, prefix, depth)
        elif isinstance(value, PLAIN):
            is_global = read.root == "global"
            location = (
                Location(fn.__globals__, read.name)
                if is_global
                else Location(_cell(fn, read.name), None)
            )
            found.append((f"{prefix}{read.name}", value, location, read.name in reads.written))


def _cell(fn: types.FunctionType, name: str) -> types.CellType:
    return (fn.__closure__ or ())[fn.__code__.co_freevars.index(name)]


def _in_cell(fn: types.FunctionType, name: str) -> Any:
    try:
        return _cell(fn, name).cell_contents
    except (IndexError, ValueError):  # of a function defined within, or not bound yet
        return _MISSING


def _follow(value: Any, read: Read, found: list[Found], prefix: str, depth: int) -> None:
    """Find the values at the end of the path of a read (See Rules 2 and 3)."""
    name = f"{prefix}{read.name}"
    location: Location | None = None
    for index, (is_entry, key) in enumerate(read.path):
        if isinstance(value, Tensor) or _is_of_others(value):
            return
        name += f"[{key!r}]" if is_entry else f".{key}"
        if is_entry:
            try:
                if not isinstance(value, (dict, list)):
                    return
                value, location = cast("Any", value)[key], Location(value, key)
            except (KeyError, IndexError):
                return
            continue
        before = value
        value, location = _attribute(before, key)
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, types.FunctionType) and location is None:
            is_last = index + 1 == len(read.path) or isinstance(value, property)
            if is_last and depth < MAX_DEPTH and not _is_of_others(before):
                plain_values(function, found, before, f"{name.rpartition('.')[0]}: ", depth + 1)
            return
    if location is None or isinstance(location.owner, nn.Module):
        return  # a module is compared as a whole
    if isinstance(value, PLAIN):
        found.append((name, value, location, False))
    elif isinstance(value, nn.Module):
        found.append((name, value, None, False))


def _attribute(value: Any, key: str) -> tuple[Any, Location | None]:
    """Return an attribute without running code, and its location if that can be written to."""
    own = getattr(value, "__dict__", {})
    if key in own and not isinstance(value, type):
        return own[key], Location(value if isinstance(value, nn.Module) else own, key)
    if isinstance(value, nn.Module) and key in value._modules:
        return value._modules[key], Location(value, key)
    for kind in (value if isinstance(value, type) else cast("Any", type(value))).__mro__:
        if key in vars(kind):
            found = vars(kind)[key]
            return found, Location(kind, key) if isinstance(found, (*PLAIN, nn.Module)) else None
    return None, None


def _is_of_others(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _OTHERS
    kind = value if isinstance(value, type) else cast("Any", type(value))
    if isinstance(value, (dict, list)):
        return False
    return kind.__module__.partition(".")[0] in _OTHERS
