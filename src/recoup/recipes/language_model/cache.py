"""The continuous cache: recent words that followed outputs like the present one."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from recoup.recipes.checks import check_at_least, check_not_negative, check_probabilities

__all__ = ["NeuralCache"]


class NeuralCache:
    """A mixture of a network's predictions with recent words that followed similar outputs.

    The probability of a word is ``(1 - weight) p + weight p_cache``, where ``p_cache`` gives each
    of the last words a share in proportion to the exponential of `theta` times the product of the
    output before it with the present output. Until a first word is known it is that of the network.

    Kept: the last `window` outputs and words.

    Args:
        window: number of words in the cache.
        theta: how sharply the cache distinguishes outputs.
        weight: weight of the cache in the probability, in ``[0, 1)``.

    Raises:
        ValueError: when an argument is out of its range.

    Source: Grave, Joulin and Usunier, https://arxiv.org/abs/1612.04426.
    """

    def __init__(self, window: int = 2000, theta: float = 0.662, weight: float = 0.1279) -> None:
        check_at_least(1, cache_window=window)
        check_not_negative(cache_theta=theta)
        check_probabilities(cache_weight=weight)
        self.window = window
        self.theta = theta
        self.weight = weight
        self._outputs: Tensor | None = None
        self._words: Tensor | None = None

    def forget(self) -> None:
        """Begin a new text."""
        self._outputs = self._words = None

    def nll(self, logits: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of the next words, and add the words to the cache.

        Args:
            logits: logits of the network ``(T, N, V)``.
            outputs: outputs of its last layer ``(T, N, C)``.
            targets: the words ``(T, N)``.

        Returns:
            Negative log-likelihoods ``(T, N)``, in nats.
        """
        network = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        network = network.view_as(targets)
        keys = outputs if self._outputs is None else torch.cat([self._outputs, outputs])
        words = targets if self._words is None else torch.cat([self._words, targets])
        num_before = len(keys) - len(outputs)
        now = torch.arange(num_before, len(keys), device=keys.device)[:, None]
        then = torch.arange(len(keys), device=keys.device)
        is_past = (then < now) & (then >= now - self.window)

        likeness = self.theta * torch.einsum("tnc,snc->nts", outputs, keys)
        attention = likeness.masked_fill(~is_past, -math.inf).softmax(dim=2)
        is_same = words.t()[:, None, :] == targets.t()[:, :, None]
        cached = torch.where(is_same & is_past, attention, 0.0).sum(dim=2).t().log()
        mixed = torch.logaddexp(
            network + math.log1p(-self.weight),
            cached + (math.log(self.weight) if self.weight else -math.inf),
        )
        # Copies: a view would keep the whole storage.
        self._outputs, self._words = keys[-self.window :].clone(), words[-self.window :].clone()
        has_past = is_past.any(dim=1, keepdim=True)
        return -torch.where(has_past, mixed, network)
