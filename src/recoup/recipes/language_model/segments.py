"""Backpropagation through time, one segment's activations at a time.

A window of text is a chain of segments: each passes the state of the layers and three sums to the
next. The sums of all segments make up the loss of the window, so that loss and gradients are those
of the whole window, whatever its segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import recoup
from recoup.recipes.language_model.network import LanguageModel, Masks, State

__all__ = ["Penalties", "Trained", "Window", "sum_of_nll", "window_backward"]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Weights of the penalties on the outputs of the last layer.

    Args:
        activation: weight of the mean square of the outputs after dropout (AR).
        temporal: weight of the mean square of the difference of successive outputs, before
            dropout (TAR).

    Source: Merity, McCann and Socher, https://arxiv.org/abs/1708.01009.
    """

    activation: float = 0.0
    temporal: float = 0.0


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of text, as wide as the batch, and the state before it.

    Args:
        ids: numbers of tokens ``(T + 1, N)``: all but the last are inputs, all but the first
            targets.
        state: the state before the first.
    """

    ids: Tensor
    state: State

    @property
    def num_steps(self) -> int:
        """Number of time steps T."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training step on a window.

    Attributes:
        loss: the loss with its penalties, a scalar.
        nll: the sum of the negative log-likelihoods of its tokens, in nats.
        state: the state after it. No tensor here has a graph.
    """

    loss: Tensor
    nll: Tensor
    state: State


_Carried = tuple[State, Tensor]  # the state, and the sums: likelihood, squares, differences


def window_backward(
    network: LanguageModel,
    window: Window,
    store: recoup.GradStore,
    *,
    penalties: Penalties = Penalties(),
    segment_steps: int | None = None,
    masks: Masks | None = None,
) -> Trained:
    """Add the gradients of the loss of a window to a store.

    Kept: the states between segments, and the residuals of one segment while backward runs in it.
    Backward pays one more forward of each segment but the last. All segments share one draw of
    weight dropout and noise, and masks that do not depend on the segments.

    Args:
        network: the model to train.
        window: the text.
        store: the store to which the gradients are added.
        penalties: weights of the penalties.
        segment_steps: number of time steps of a segment; None for the whole window.
        masks: masks of the dropout of activations.

    Returns:
        Loss, likelihood and the next state.
    """
    steps = window.num_steps if segment_steps is None else segment_steps
    starts = range(0, window.num_steps, steps)
    segments = [_segment(network, window, start, start + steps, masks) for start in starts]
    ended: list[_Carried] = []

    def loss_of(carried: _Carried) -> Tensor:
        ended.append(carried)
        return _loss(carried[1], window, penalties)

    sums = torch.zeros(3, device=window.ids.device, dtype=_wide(network.decoder.weight.dtype))
    with recoup.weights.same_draw():
        loss = recoup.segments_backward(
            segments,
            (window.state, sums),
            loss_of,
            store,
            memory="linear" if len(segments) == 1 else "inputs",
        )
    state, sums = ended[0]
    detached = tuple((hidden.detach(), cell.detach()) for hidden, cell in state)
    return Trained(loss, sums[0].detach(), detached)


def sum_of_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the negative log-likelihoods of targets, in nats.

    Args:
        logits: ``(T, N, vocab_size)``. Logits of 16 bits are cast to 32 first, as autocast does:
            the sum over a window does not fit into 16.
        targets: numbers of tokens ``(T, N)``.
    """
    logits = logits.to(_wide(logits.dtype))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _segment(
    network: LanguageModel, window: Window, start: int, stop: int, masks: Masks | None
) -> Callable[[_Carried], _Carried]:
    ids, targets = window.ids[start:stop], window.ids[start + 1 : stop + 1]
    ids = ids[: len(targets)]

    def segment(carried: _Carried) -> _Carried:
        state, sums = carried
        encoded = network.encode(ids, state, None if masks is None else masks.between(start, stop))
        logits = network.decoder(encoded.dropped)
        differences = encoded.raw.diff(dim=0).square().sum(dtype=sums.dtype)
        if start:  # The output before is the last layer's hidden state.
            before = (encoded.raw[:1] - state[-1][0]).square().sum(dtype=sums.dtype)
            differences = differences + before
        squares = encoded.dropped.square().sum(dtype=sums.dtype)
        nll = sum_of_nll(logits, targets)
        return encoded.state, sums + torch.stack([nll, squares, differences])

    return segment


def _loss(sums: Tensor, window: Window, penalties: Penalties) -> Tensor:
    hidden = window.state[-1][0]
    num_tokens = window.num_steps * hidden.shape[1]
    num_outputs = window.num_steps * hidden.numel()
    num_differences = max(1, window.num_steps - 1) * hidden.numel()
    nll, squares, differences = sums
    loss = nll / num_tokens
    if penalties.activation:
        loss = loss + penalties.activation * squares / num_outputs
    if penalties.temporal:
        loss = loss + penalties.temporal * differences / num_differences
    return loss
