"""`twin`: a model for evaluation over the parameters of a model that is trained.

NOTE [ Two models over the same dictionaries ]

Rule 1. A twin is a deep copy in which the dictionaries of parameters and buffers are the model's
        own, and so are all tensors. Whatever replaces a parameter (`to_empty`, `setattr`, a state
        that is assigned) writes to the dictionary of its module, which is that of both. A copy or
        a pickle of the pair has shared dictionaries, too.
Rule 2. Code may hold a module or a tensor that is not registered, in a list or in a hook. The deep
        copy has a record of what it copied, by which the next copy shares what was missed.
Rule 3. A reparametrization that stays is the same object in both: its rate, its schedule and its
        draw within `same_draw` are those of the model. A function of the user's own is copied,
        since it may be a module within the tree.
Rule 4. A recurrent layer compares its list of weights with its parameters before it runs, so each
        of the two may keep a list of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from recoup._core.modules import is_gathered
from recoup.weights.application import keep_only
from recoup.weights.choosing import check_is_module, note_sharing
from recoup.weights.module import weights_of

M = TypeVar("M", bound=nn.Module)


def twin(module: M) -> M:
    """Return a model for evaluation over the parameters of `module`, without noise on weights.

    It computes what ``module.eval()`` would, whatever the mode of `module`: it is in evaluation
    mode itself, and `module.train()` and `module.eval()` do not change it. Reparametrizations with
    mode "training" are not in it, those with "always" and weight norms are.

    Kept: nothing but modules. Parameters and buffers are the same objects under the same names, and
    remain so when they are stepped, loaded, moved, replaced, or copied and pickled together, as in
    ``copy.deepcopy((module, twin))``. Everything else is copied as it is now: a layer that is
    replaced in `module` later, or a parametrization that is applied to it later, is not in the
    twin. Make it once, when the model is complete, and before it is wrapped or sharded.

    Args:
        module: the model, a tree of modules.

    Returns:
        A module of the same type, in evaluation mode.

    Raises:
        ValueError: when `module` contains a DistributedDataParallel, a DataParallel, a module that
            FSDP2 has sharded, or a ScriptModule.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_dropout(torch.nn.Linear(64, 64))
        >>> twin, x = recoup.weights.twin(layer), torch.ones(1, 64)
        >>> twin.weight is layer.get_parameter("weight"), layer.training, twin.training
        (True, True, False)
        >>> torch.equal(twin(x), layer.eval()(x))
        True

    Source: https://github.com/dmlc/gluon-nlp/issues/1060.
    """
    check_is_module(module)
    for name, part in cast("Any", module).named_modules():
        _check(part, f"`module.{name}`" if name else "`module`")
    made = _copied(module)
    keep_only(made, lambda step: step.mode == "always")
    for part, other in zip(module.modules(), made.modules(), strict=True):
        note_sharing(part, other)
    return made.eval()


def _check(part: Any, name: str) -> None:
    kind = type(cast("object", part)).__name__
    kinds: tuple[type, ...] = (DistributedDataParallel, DataParallel, torch.jit.ScriptModule)
    if isinstance(part, kinds) or is_gathered(part):
        raise ValueError(
            f"{name} is a {kind}, which is not to be there twice. Make the twin of "
            "the module within it, before it is wrapped, sharded or scripted; a sharded model is "
            "evaluated between `model.eval()` and `model.train()`."
        )


def _copied(module: M) -> M:
    """Return a copy of `module` in which what is shared stands for itself (See Rules 1 to 3)."""
    shared = {id(each): each for each in _shared_by(module.modules())}
    while True:
        memo: dict[int, Any] = dict(shared)
        made = copy.deepcopy(module, memo)
        copied: list[object] = memo.get(id(memo), [])  # where `copy` keeps what it has copied
        missed = {id(each): each for each in _shared_by(copied) if id(each) not in shared}
        if not missed:
            return made
        shared |= missed


def _shared_by(found: Iterable[object]) -> Iterator[Any]:
    """Yield what a twin shares of modules and tensors; other objects are copied."""
    for each in found:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, nn.Module):
            own = (each._parameters, each._buffers)
            yield from (*own, each._non_persistent_buffers_set)
            values = [*vars(each).values(), *(value for every in own for value in every.values())]
            yield from (value for value in values if isinstance(value, Tensor))
            for weight in weights_of(each).values():
                yield from weight.applications
                yield from (step for step in weight.steps if step.function is None)
