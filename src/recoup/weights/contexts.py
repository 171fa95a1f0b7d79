"""Contexts around forwards: one draw for several, noise off, noise on."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral

from torch import nn

from recoup._core.rng import draw_seed
from recoup.weights.application import parametrized_weights
from recoup.weights.steps import Override, SameDraw, Step


@contextmanager
def step(module: nn.Module) -> Generator[None, None, None]:
    """Let the code within be one step: each weight of `module` has one draw, wherever it is read.

    A forward of the module that a reparametrization was applied to is a step by itself. Use this
    where a training step computes otherwise: `training_step` of a LightningModule, several forwards
    with one loss, `model.encode(x)`, a loss that reads `model.embedding.weight`. A schedule counts
    it once. In evaluation nothing is drawn, as in any forward.

    Kept: 8 bytes a weight, as in a forward. Call `backward` and the optimizer's step outside.

    Args:
        module: a module, or a tree of modules.

    Returns:
        A context manager, for this thread; also a decorator.

    Example:
        >>> import recoup, torch
        >>> layer, x = recoup.weight_dropout(torch.nn.Linear(64, 64)), torch.ones(1, 64)
        >>> with recoup.weights.step(layer):
        ...     torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        True
    """
    found = (each.applications for each in parametrized_weights(module))
    with Step(None, [*dict.fromkeys(itertools.chain(*found))]):
        yield


def same_draw(seed: int | None = None) -> AbstractContextManager[None]:
    """Give each weight one draw for all steps and reads within.

    Around several forwards (windows of one sequence, gradients that are accumulated) it makes them
    use the same noise; with a seed, that noise is a function of the seed and of the names of the
    parameters, so that a whole data set can be run through one sample, and every rank of a
    distributed run can have the same noise, as ``same_draw(seed=step)``, or its own, as
    ``same_draw(seed=step * world_size + rank)``. A schedule counts one step.

    Args:
        seed: an int from 0; drawn from the default generator if None.

    Returns:
        A context manager.

    Raises:
        ValueError: when `seed` is not an int from 0, or None.

    Example:
        >>> import recoup, torch
        >>> layer, x = recoup.weight_dropout(torch.nn.Linear(64, 64)), torch.ones(1, 64)
        >>> with recoup.weights.same_draw(seed=3):
        ...     torch.equal(layer(x), layer(x))
        True
        >>> torch.equal(layer(x), layer(x))
        False
    """
    given: object = seed
    is_whole = isinstance(given, Integral) and given is not True and given is not False
    if seed is not None and (not is_whole or seed < 0):
        raise ValueError(f"`seed` is {seed!r}, but must be an int from 0, or None to draw one.")
    # Drawn in any case: the position in the stream identifies code that torch runs again.
    drawn = draw_seed()
    return SameDraw(None, (), drawn if seed is None else int(seed))


def disabled(module: nn.Module) -> AbstractContextManager[None]:
    """Turn weight dropout and noise off in `module`, which may stay in training mode.

    Weight norm is not noise, and stays. Code that ran within is also run again without noise.

    Args:
        module: a module, or a tree of modules.

    Returns:
        A context manager, for this thread.

    Example:
        >>> import recoup, torch
        >>> layer, x = recoup.weight_dropout(torch.nn.Linear(64, 64)), torch.ones(1, 64)
        >>> with recoup.weights.disabled(layer):
        ...     torch.equal(layer(x), layer(x))
        True
    """
    return Override(parametrized_weights(module), is_on=False)


def enabled(module: nn.Module) -> AbstractContextManager[None]:
    """Turn weight dropout and noise on in `module`, which may be in evaluation mode.

    Monte-Carlo evaluation draws noise and leaves dropout of activations and batch norms in
    evaluation mode.

    Args:
        module: a module, or a tree of modules.

    Returns:
        A context manager, for this thread.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_dropout(torch.nn.Linear(64, 64)).eval()
        >>> x = torch.ones(1, 64)
        >>> with recoup.weights.enabled(layer):
        ...     torch.equal(layer(x), layer(x))
        False
    """
    return Override(parametrized_weights(module), is_on=True)
