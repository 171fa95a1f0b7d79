"""The use that code makes of a weight it has just read, as the source of the code shows.

NOTE [ A use that the source shows ]

Rule 1. The instruction that reads has a place in the source, and the expression around that place
        takes the weight: an operator, a call, an attribute, an assignment. Of a variable, the uses
        until it is assigned again count; of a value that is returned, the use of the caller.
Rule 2. A call counts by the function that its name stands for: torch's functions compute, except
        those that initialise, optimize, compare or describe.
Rule 3. Without the source (in some interactive sessions), the next instruction tells attributes,
        assignments to attributes and comparisons. Where nothing tells, the use is unknown. No value
        depends on a mere guess: see `outside_forward`.
"""

from __future__ import annotations

import ast
import builtins
import dis
import enum
import functools
import linecache
import math
import re
import sys
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

__all__ = ["Use", "has_source", "use_of", "variable_of"]


class Use(enum.Enum):
    """The use that code makes of a weight."""

    ASKS = enum.auto()  # describes, changes, ties, optimizes or penalises the parameter
    COMBINES = enum.auto()  # computes with it as a model does, or an average of models
    COMPUTES = enum.auto()  # computes with it as models alone do
    UNKNOWN = enum.auto()
    RETURNS = enum.auto()  # within this file: as its caller does


# Attributes that describe, change or save a parameter, sum it up, or penalise it.
_ASKING_ATTRIBUTE = re.compile(
    "shape|size|n?dim|n(umel|element)|stride|dtype|device|layout|names|itemsize|nbytes|element_size|"
    ".*storage.*|data|data_ptr|grad|grad_fn|requires_grad|retain.*|is_.*|_.*|register_.*|detach|"
    "cpu|cuda|numpy|tolist|item|.*_|new_.*|backward|square|pow|abs|norm|sum|mean|std|var|a?(min|max)|"
    "arg(min|max)|any|all|count_nonzero|isnan|isinf|isfinite|equal|allclose|dist|append|extend|insert"
)
_REDUCING = re.compile("norm|sum|mean|std|var|a?(min|max)")  # along an axis, as models do
_COLLECTING = re.compile("append|extend|insert|add|update|setdefault")
_PASSING_ATTRIBUTE = re.compile("clone|contiguous")  # whose result is used as the weight is
# Functions and methods that models alone call with a weight; others serve averages, too.
_OF_MODELS = re.compile("(b|add)?mm|add(bmm|mv)|baddbmm|mv|matmul|einsum|tensordot|.*conv.*|.*_fwd")
# Functions of torch that do not compute as a model does.
_ASKING = re.compile(
    "equal|allclose|isclose|is_.*|numel|save|.*_like|isfinite|isnan|((vector|matrix)_)?norm|assert_.*|"
    "has_torch_function.*"
)
# Methods of other tensors that compute with a weight given as an argument.
_TAKING = re.compile("dot|mul|add|sub|div|where|gather|lerp")
_ASKING_MODULES = (
    "copy",
    "pickle",
    "_pickle",
    "numpy",
    "torch.linalg",
    "torch._C._linalg",
    "torch.autograd",
    "torch.nn.init",
    "torch.nn.utils",
    "torch.optim",
    "torch.testing",
)
_MODULES_OF_MODELS = ("torch.nn.functional", "torch._C._nn", "torch.utils.checkpoint")
_ASKING_METHODS = re.compile(
    "add_param_group|update_parameters|register_.*|log|log_.*|add_histogram"
)
_PARTS = (ast.Starred, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.IfExp, ast.Subscript)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_NUM_HOLDERS = 3  # of a copy of variables: the frame, the name here and getrefcount's argument
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)
_STATEMENTS = (ast.Expr, ast.Assert, ast.Delete, ast.If, ast.While, ast.AugAssign)


def use_of(frame: types.FrameType) -> Use:
    """Return the use that the code of `frame` makes of the value of its last instruction."""
    uses: set[Use] = set()
    for each in _uses(frame.f_code, frame.f_lasti):
        uses.add(each if isinstance(each, Use) else _use_by(each, frame))
    if Use.RETURNS in uses:
        uses.add(Use.UNKNOWN if frame.f_back is None else use_of(frame.f_back))
    for use in (Use.COMPUTES, Use.COMBINES, Use.UNKNOWN):
        if use in uses:
            return use
    return Use.ASKS if uses else Use.UNKNOWN


def has_source(frame: types.FrameType) -> bool:
    """Whether the source of the code of `frame` can be read."""
    return len(linecache.getlines(frame.f_code.co_filename)) > 0


@functools.lru_cache(maxsize=512)
def _uses(code: types.CodeType, offset: int) -> tuple[Use | str, ...]:
    """Return the uses of what an instruction reads; a call by the name of its function."""
    linecache.checkcache(code.co_filename)
    source = _source("".join(linecache.getlines(code.co_filename)))
    if source is None:
        return (_use_by_next(code, offset),)
    place = next(islice(code.co_positions(), offset // 2, None), None)
    if place is None or None in place:
        return (_use_by_next(code, offset),)
    line, end_line, column, end_column = place
    node = source.expressions.get((line, column, end_line, end_column))
    return () if node is None else tuple(_uses_in(node, source))


def _use_by_next(code: types.CodeType, offset: int) -> Use:
    """Return the use that the next instructions make (See Rule 3)."""
    instructions = dis.get_instructions(code)
    for each in instructions:
        if each.offset == offset:
            break
    then, after = next(instructions, None), next(instructions, None)
    name = "" if then is None else then.opname
    if then is not None and name in ("LOAD_ATTR", "LOAD_METHOD"):
        return _use_by_attribute(str(then.argval))
    if name.startswith("LOAD_"):  # the other operand, or an argument before it
        name = "" if after is None else after.opname
    asked = ("COMPARE_OP", "IS_OP", "CONTAINS_OP", "STORE_ATTR", "POP_TOP", "SWAP", "COPY")
    return Use.ASKS if name in asked else Use.UNKNOWN


class _Source:
    """A file: its expressions by their places, and the node around each node."""

    def __init__(self, tree: ast.AST) -> None:
        self.expressions: dict[tuple[Any, ...], ast.expr] = {}
        self.around: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            for inner in ast.iter_child_nodes(node):
                self.around[inner] = node
            if isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
                place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
                self.expressions[place] = node


@functools.lru_cache(maxsize=8)
def _source(text: str) -> _Source | None:
    if not text:
        return None
    try:
        return _Source(ast.parse(text))
    except SyntaxError:  # a cell with commands of a notebook
        return None


def _uses_in(
    node: ast.expr, source: _Source, seen: frozenset[ast.expr] = frozenset()
) -> Iterator[Use | str]:
    """Yield what the expression around `node` does with its value (See Rule 1).

    Args:
        node: the expression.
        source: the file that it is in.
        seen: the variables that led here, so that none is followed twice.
    """
    around = source.around.get(node)
    match around:
        case ast.Attribute():
            call = source.around.get(around)
            if not isinstance(call, ast.Call):
                yield _use_by_attribute(around.attr)
            elif _PASSING_ATTRIBUTE.fullmatch(around.attr):
                yield from _uses_in(call, source, seen)
            else:
                yield _use_by_method(around.attr, call)
        case ast.BinOp(op=ast.MatMult()):
            yield Use.COMPUTES
        case ast.BinOp(op=ast.Pow()) if node is around.left:
            yield Use.ASKS
        case ast.BinOp() | ast.UnaryOp():
            of_result = set(_uses_in(around, source, seen))  # a difference may be measured
            yield (
                Use.ASKS
                if of_result == {Use.ASKS} and _is_measured(around, source)
                else (Use.COMBINES)
            )
        case ast.Compare() | ast.BoolOp() | ast.FormattedValue() | ast.Slice():
            yield Use.ASKS
        case ast.Call() if node is not around.func:
            yield from _uses_by_call(around, source, seen)
        case ast.keyword():
            call = source.around[around]
            if isinstance(call, ast.Call):
                yield from _uses_by_call(call, source, seen)
        case ast.Subscript() if _looks_up(node, around, source):
            yield Use.COMBINES
        case ast.Tuple() if isinstance(source.around.get(around), ast.Assign):
            yield from _uses_unpacked(node, around, source, seen)
        case ast.Return():
            yield Use.RETURNS
        case ast.IfExp() if node is around.test:
            yield Use.ASKS
        case ast.comprehension() if node is around.iter:
            yield from _uses_of_target(around.target, source, seen, source.around[around])
        case ast.For() if node is around.iter:
            yield from _uses_of_target(around.target, source, seen, around)
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            targets = around.targets if isinstance(around, ast.Assign) else [around.target]
            for target in targets:
                yield from _uses_of_target(target, source, seen)
            if isinstance(around, ast.NamedExpr):
                yield from _uses_in(around, source, seen)
        case ast.expr() if isinstance(around, (*_PARTS, *_COMPREHENSIONS)):
            yield from _uses_in(around, source, seen)
        case ast.AugAssign() if node is around.value:
            yield Use.COMBINES
        case ast.stmt() if isinstance(around, _STATEMENTS):
            yield Use.ASKS
        case _:
            yield Use.UNKNOWN


def _is_measured(node: ast.expr, source: _Source) -> bool:
    """Whether an expression is what a method, a power or a comparison is applied to."""
    return isinstance(source.around.get(node), (ast.Attribute, ast.BinOp, ast.Compare))


def _looks_up(node: ast.expr, index: ast.Subscript, source: _Source) -> bool:
    """Whether rows are looked up and reduced, as a bag of embeddings is."""
    around = source.around.get(index)
    is_reduced = isinstance(around, ast.Attribute) and _REDUCING.fullmatch(around.attr) is not None
    return is_reduced and node is index.value and not _is_constant(index.slice)


def _is_constant(index: ast.expr) -> bool:
    return all(isinstance(each, (ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.USub,
                                 ast.Load)) for each in ast.walk(index))  # fmt: skip


def _uses_unpacked(
    node: ast.expr, values: ast.Tuple, source: _Source, seen: frozenset[ast.expr]
) -> Iterator[Use | str]:
    """Yield the uses of a value that is assigned among others: ``a, b = ..., ...``."""
    assign = source.around[values]
    for target in assign.targets if isinstance(assign, ast.Assign) else ():
        if isinstance(target, ast.Tuple) and len(target.elts) == len(values.elts):
            yield from _uses_of_target(target.elts[values.elts.index(node)], source, seen)
        else:
            yield from _uses_of_target(target, source, seen)


def _uses_by_call(
    call: ast.Call, source: _Source, seen: frozenset[ast.expr]
) -> Iterator[Use | str]:
    names: list[str] = []
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        is_list = _COLLECTING.fullmatch(function.attr) and not call.keywords
        if is_list and isinstance(source.around.get(call), ast.Expr):
            yield from _uses_of_target(function.value, source, seen | {function.value})
            return
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        names.append(function.id)
        yield ".".join(reversed(names))
    elif names:
        yield f".{names[0]}"  # a method of what an expression gives
    else:
        yield Use.UNKNOWN


def _uses_of_target(
    target: ast.expr, source: _Source, seen: frozenset[ast.expr], scope: ast.AST | None = None
) -> Iterator[Use | str]:
    """Yield the uses of what is assigned: those of a variable in `scope`, by default a function."""
    if isinstance(target, (ast.Attribute, ast.Subscript)):
        yield Use.ASKS
        return
    around = source.around.get(target) if scope is None else scope
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
    while scope is None and around is not None and not isinstance(around, functions):
        around = source.around.get(around)
    if not isinstance(target, ast.Name) or around is None:
        yield Use.UNKNOWN
        return
    names = [each for each in _names_in(around, target.id) if each not in seen]
    again = [
        each.lineno
        for each in names
        if isinstance(each.ctx, ast.Store) and each.lineno > target.lineno
    ]
    until = min(again, default=math.inf) if scope is None else math.inf
    for each in names:
        if isinstance(each.ctx, ast.Load) and target.lineno <= each.lineno <= until:
            yield from _uses_in(each, source, seen | {each})


def _names_in(node: ast.AST, name: str) -> Iterator[ast.Name]:
    """Yield the nodes of a variable in a scope, and in functions within that do not bind it."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, _SCOPES) and _binds(inner, name):
            continue
        if isinstance(inner, ast.Name) and inner.id == name:
            yield inner
        yield from _names_in(inner, name)


def _binds(scope: ast.AST, name: str) -> bool:
    for each in ast.walk(scope):
        if isinstance(each, ast.arg) and each.arg == name:
            return True
        if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store):
            return True
    return False


def _use_by_method(name: str, call: ast.Call) -> Use:
    along = [each.arg for each in call.keywords]
    is_along = "dim" in along or (bool(call.args) and name != "norm")
    return Use.COMBINES if _REDUCING.fullmatch(name) and is_along else _use_by_attribute(name)


def _use_by_attribute(name: str) -> Use:
    if _ASKING_ATTRIBUTE.fullmatch(name):
        return Use.ASKS
    return Use.COMPUTES if _OF_MODELS.fullmatch(name) else Use.COMBINES


def _use_by(name: str, frame: types.FrameType) -> Use:
    """Return the use that a function, or a method, of this name makes of an argument (Rule 2)."""
    root, *path = name.split(".")
    last = path[-1] if path else root
    if last.endswith("_"):
        return Use.ASKS  # it changes a tensor
    found: Any = frame.f_globals.get(root, getattr(builtins, root, None))
    if found is None and root:
        found = variable_of(frame, root)
    if path and not isinstance(found, types.ModuleType):
        return _use_by_method_of_others(last)
    for each in path:
        found = getattr(found, each, None)
    if found is sum:
        return Use.COMBINES
    module = str(getattr(found, "__module__", ""))
    is_asking = isinstance(found, type) or module.startswith(_ASKING_MODULES)
    if is_asking or module == "builtins" or _ASKING.fullmatch(last):
        return Use.ASKS
    if module.partition(".")[0] != "torch":
        return Use.UNKNOWN
    if module.startswith(_MODULES_OF_MODELS) or _OF_MODELS.fullmatch(last):
        return Use.COMPUTES
    return _use_by_attribute(last)


def _use_by_method_of_others(name: str) -> Use:
    """Return the use that a method of another object makes of an argument."""
    if _OF_MODELS.fullmatch(name):
        return Use.COMPUTES
    if _ASKING_METHODS.fullmatch(name):
        return Use.ASKS
    return Use.COMBINES if _TAKING.fullmatch(name) else Use.UNKNOWN


def variable_of(frame: types.FrameType, name: str) -> object:
    """Return a variable of a function that runs, without keeping its variables alive."""
    variables: Any = frame.f_locals
    found = variables.get(name)
    # Before Python 3.13 a frame keeps this copy until it ends, and with it a loss that the function
    # has deleted. The copy is also what `locals()` returned to the function, if it was called.
    is_copy = isinstance(variables, dict) and variables is not frame.f_globals
    if is_copy and sys.getrefcount(variables) == _NUM_HOLDERS:
        cast("dict[str, Any]", variables).clear()
    return found
