"""The search for the blocks of a model: the modules that a plan keeps or recomputes as a whole.

NOTE [ Groups of modules ]

Rule 1. A convolution keeps its input, and the ReLU before it keeps its output, which is the same
        tensor. As blocks of their own each would seem to keep one. So a module with a matrix or a
        kernel begins a group, and what follows it (norms, activations, pooling) belongs to it.
Rule 2. While a plan is followed, the sequence calls its groups in place of its modules, and each
        group calls its modules, with their hooks.
Rule 3. A group is made once for a sequence, so that all plans for it have the same blocks. A
        sequence whose modules were replaced since, or that got more, runs as it is.
Rule 4. A forward may take the modules of a sequence without calling it (features of an image, layer
        by layer). Then each module is a block of its own.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

from recoup._core.modules import has_inverse, is_gathered, mark_of

Block = tuple[str, nn.Module]
Named = str | Iterable[str | nn.Module] | None
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def name_blocks(model: nn.Module, blocks: Named) -> list[Block]:
    """Return the blocks that the user names, or find them.

    Raises:
        ValueError: a name matches nothing, a module is not in the model, or one block lies within
            another.
    """
    if blocks is None:
        return find_blocks(model)
    named = dict(named_modules(model))
    is_several = isinstance(blocks, Iterable)  # pyright: ignore[reportUnnecessaryIsInstance]
    if isinstance(blocks, nn.Module) or not is_several:
        raise ValueError(
            f"`blocks` is a {type(blocks).__name__}, but must be a sequence of modules or names, "
            "or a regular expression. For the children of a module, pass list(module.children())."
        )
    if isinstance(blocks, str):
        try:
            pattern = re.compile(blocks)
        except re.error as error:
            raise ValueError(
                f"`blocks` is {blocks!r}, but must be a valid regular expression ({error})."
            ) from None
        found = [(name, each) for name, each in named.items() if name and pattern.fullmatch(name)]
        if not found:
            raise ValueError(
                f"`blocks` is {blocks!r}, which matches the name of no module of "
                f"{type(model).__name__}. Names are such as {_some(named)}."
            )
    else:
        found = list(dict(_one(model, named, block) for block in blocks).items())
        if not found:
            raise ValueError("`blocks` is empty. Name at least one, or leave it out to find them.")
    _check_apart(found)
    return found


def _one(model: nn.Module, named: dict[str, nn.Module], block: str | nn.Module) -> Block:
    for name, each in named.items():
        if name and (each is block or (isinstance(block, str) and name == block)):
            return name, each
    shown = repr(block) if isinstance(block, str) else type(block).__name__
    raise ValueError(
        f"`blocks` has {shown}, which is no module of {type(model).__name__}. Names are such as "
        f"{_some(named)}."
    )


def _some(named: dict[str, nn.Module]) -> str:
    names = [name for name in named if name]
    return ", ".join(f"`{name}`" for name in names[:3]) or "none: the model has no modules within"


def _check_apart(blocks: Sequence[Block]) -> None:
    ids = {id(module): name for name, module in blocks}
    for name, module in blocks:
        for within in module.modules():
            if within is not module and id(within) in ids:
                raise ValueError(
                    f"`blocks` contains `{name}` and `{ids[id(within)]}`, which is part of it. "
                    "Name one of the two."
                )


def find_blocks(model: nn.Module) -> list[Block]:
    """Return the modules that repeat: alike ones in a list or sequence, or side by side.

    The search goes from the model down. Where a list or sequence holds several modules of one class
    that have submodules, every child of it with submodules is a block, be it a list itself. If
    there is no such list, or all are within sibling modules of one class and are shorter than the
    row of these (the branches of the modules of a GoogLeNet), sibling modules with submodules whose
    class appears more than once are blocks. If there are none of these either, the modules of a
    sequence of more than two are, in groups (NOTE [ Groups of modules ]).
    """
    listed, beside = _first(model, _listed, ""), list(_outermost(model, _is_beside_another, ""))
    if _are_branches(listed, beside):
        return beside
    return listed or beside or _first(model, _linked, "")


def has_list_of_blocks(module: nn.Module) -> bool:
    """Whether `module` contains a list of several modules of one class that have submodules."""
    return bool(_first(module, _listed, ""))


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called; a list or dict of modules cannot."""
    of_class = getattr(type(module), "forward", None)  # a scripted module has its own alone
    return of_class is not nn.Module.forward or "forward" in vars(module)


def has_weights(module: nn.Module) -> bool:
    """Whether `module` has parameters."""
    return next(module.parameters(), None) is not None


def with_links(model: nn.Module, blocks: Sequence[Block]) -> list[Block]:
    """Return `blocks` with the modules of invertible chains in place of those that they contain.

    A chain is a module whose children all have an inverse (or are densities without one). For a
    chain within a chain, its modules are taken in its place. Without a chain there are no blocks.
    """
    links = _links_of_chains(model, "")
    within = {id(part) for _, link in links for part in link.modules()}
    others = [
        (name, module) for name, module in blocks if within.isdisjoint(map(id, module.modules()))
    ]
    chosen = {id(module) for _, module in (*links, *others)} if links else set[int]()
    return [(name, module) for name, module in named_modules(model) if id(module) in chosen]


def _links_of_chains(module: nn.Module, path: str) -> list[Block]:
    children = _children(module, path)
    inner = [(child, _links_of_chains(child[1], child[0])) for child in children]
    is_chain = bool(children) and all(_is_link(child) for _, child in children)
    if is_chain and (_is_link(module) or len(children) > 1):
        return [link for child, links in inner for link in links or [child]]
    return [link for _, links in inner for link in links]


def _is_link(module: nn.Module) -> bool:
    return has_inverse(module) or bool(mark_of(module, "returns_log_det"))


def repeats(modules: Sequence[nn.Module]) -> bool:
    """Whether several of the modules that have submodules are of one class."""
    return _repeat([("", module) for module in modules if _has_parts(module)])


def repeated_calls(model: nn.Module, called: Sequence[nn.Module]) -> list[Block]:
    """Return the outermost modules with parameters that are in `called` more than once."""
    counts = Counter(map(id, called))
    return list(_outermost(model, lambda each, _: counts[id(each)] > 1 and has_weights(each), ""))


def outermost_called(model: nn.Module, called: Sequence[nn.Module]) -> list[Block]:
    """Return the outermost modules that one forward calls; for a single one, those within it."""
    found: list[Block] = [("", model)]
    while len(found) == 1 and (inner := outermost_of(called, found[0][1], found[0][0])):
        found = inner
    return found if found[0][0] else []


def outermost_of(called: Sequence[nn.Module], module: nn.Module, path: str = "") -> list[Block]:
    """Return the outermost of some modules that are within another one, which is at `path`."""
    ids = set(map(id, called))
    return list(_outermost(module, lambda each, _: id(each) in ids, path))


def named_modules(model: nn.Module) -> Iterator[Block]:
    """Yield the modules of a model with their names, the model first."""
    yield from cast("Iterator[Block]", model.named_modules())


# -- ways down from a module -----------------------------------------------------------------------


def _first(
    module: nn.Module, choose: Callable[[nn.Module, list[Block]], list[Block]], path: str
) -> list[Block]:
    """Return what is chosen of the children of a module; if nothing is, of those within each."""
    children = _children(module, path)
    return choose(module, children) or [
        block for name, child in children for block in _first(child, choose, name)
    ]


def _outermost(
    module: nn.Module, is_taken: Callable[[nn.Module, list[Block]], bool], path: str
) -> Iterator[Block]:
    """Yield the outermost modules that are taken; `is_taken` is given their siblings, too."""
    children = _children(module, path)
    for name, child in children:
        if is_taken(child, children):
            yield name, child
        else:
            yield from _outermost(child, is_taken, name)


def _children(module: nn.Module, path: str) -> list[Block]:
    return [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _repeat(blocks: Sequence[Block]) -> bool:
    return any(num > 1 for num in Counter(type(module) for _, module in blocks).values())


def _listed(module: nn.Module, children: list[Block]) -> list[Block]:
    """Choose what has parts in a list that repeats; of a list of blocks in it, those blocks."""
    parts = [child for child in children if _has_parts(child[1])]
    if not isinstance(module, _CONTAINERS) or not _repeat(parts):
        return []
    return [block for name, part in parts for block in _listed_within(part, name) or [(name, part)]]


def _listed_within(part: nn.Module, path: str) -> list[Block]:
    """Return the blocks of a list of blocks in `part`; what is in a block itself is no list."""
    if not has_forward(part):
        return _listed(part, _children(part, path))
    return _first(part, _listed, path) if isinstance(part, nn.Sequential) else []


def _is_beside_another(module: nn.Module, siblings: list[Block]) -> bool:
    """Whether it has parts and a sibling of its class; groups of a sequence are better blocks."""
    is_sequence = isinstance(module, nn.Sequential) and len(groups_of(module)) > 2
    several = sum(type(each) is type(module) for _, each in siblings) > 1
    return several and _has_parts(module) and not is_sequence


def _are_branches(listed: Sequence[Block], beside: Sequence[Block]) -> bool:
    """Whether the lists of blocks are within modules of one class, of which there are more."""
    ids = {id(block) for _, block in listed}
    rows = [
        (each, len(ids.intersection(map(id, each.modules())) - {id(each)})) for _, each in beside
    ]
    rows = [(each, num) for each, num in rows if num and not isinstance(each, _CONTAINERS)]
    if len({type(each) for each, _ in rows}) != 1:
        return False
    nums = [num for _, num in rows]
    return sum(nums) == len(ids) and max(nums) < len(nums)


def _linked(module: nn.Module, children: list[Block]) -> list[Block]:
    if not isinstance(module, nn.Sequential) or len(children) <= 2:
        return []
    groups, path = groups_of(module), children[0][0].rpartition(".")[0]
    named: list[Block] = [(f"{path}.{name}" if path else name, group) for name, group in groups]
    return named if len(groups) > 2 else children


# -- groups ----------------------------------------------------------------------------------------


class ModuleGroup(nn.Module):
    """Consecutive modules of a sequence."""

    def __init__(self, sequence: nn.Sequential, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self._sequence = weakref.ref(sequence)

    @property
    def sequence(self) -> nn.Sequential | None:
        """The sequence, if it is alive."""
        return self._sequence()

    def forward(self, input: Any) -> Any:
        """Call the modules one after another."""
        for module in self.parts:
            input = module(input)
        return input


_Groups = list[tuple[str, ModuleGroup]]
_groups: WeakKeyDictionary[nn.Sequential, tuple[list[nn.Module], _Groups]] = WeakKeyDictionary()


def groups_of(sequence: nn.Sequential) -> _Groups:
    """Return the groups of a sequence with the names of their modules; none if it has none."""
    if type(sequence).forward is not nn.Sequential.forward or _has_own_forward(sequence):
        return []
    found_modules: dict[str, nn.Module | None] = vars(sequence)["_modules"]  # may repeat one
    modules = [module for module in found_modules.values() if module is not None]
    if len(modules) != len(found_modules) or any(map(is_gathered, modules)):
        return []
    before, found = _groups.get(sequence, ([], []))
    if [*map(id, before)] != [*map(id, modules)]:
        found = list(_grouped(sequence, list(found_modules), modules))
        _groups[sequence] = modules, found
    return found


def _has_own_forward(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return forward is not None and not hasattr(forward, "group")  # else a plan follows it


def _grouped(
    sequence: nn.Sequential, names: Sequence[str], modules: Sequence[nn.Module]
) -> Iterator[tuple[str, ModuleGroup]]:
    starts = [0, *(place for place, each in enumerate(modules) if place and _begins(each))]
    for start, stop in zip(starts, [*starts[1:], len(modules)], strict=True):
        name = names[start] if stop - start == 1 else f"{names[start]}-{names[stop - 1]}"
        yield name, ModuleGroup(sequence, modules[start:stop])


def _begins(module: nn.Module) -> bool:
    """Whether a module begins a group: it has a matrix or a kernel (See Rule 1)."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def modules_of(block: nn.Module) -> list[nn.Module]:
    """Return the module of the model that a block is, or those of a group."""
    return list(block.parts) if isinstance(block, ModuleGroup) else [block]


def are_groups_of(groups: Sequence[ModuleGroup], sequence: nn.Module) -> bool:
    """Whether these are the groups of all modules that a sequence has now (See Rule 3)."""
    own: dict[str, nn.Module | None] = vars(sequence)["_modules"]
    return [*map(id, own.values())] == [id(part) for group in groups for part in group.parts]


def run_groups(groups: Sequence[ModuleGroup], input: Any) -> Any:
    """Call the groups of a sequence (See Rule 2)."""
    for group in groups:
        input = group.forward(input)  # no hook takes the group for a module of the model
    return input


def kind_of(module: nn.Module) -> str:
    """Return the class of a block, or those of the modules of a group."""
    return ", ".join(type(each).__name__ for each in modules_of(module))
