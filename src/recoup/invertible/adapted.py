"""A layer of another library as an invertible module, whichever library it is of.

NOTE [ Layers of other libraries ]

Rule 1. Only layers whose inverse is known to be cheap and exact are inverted; others are recomputed
        from their kept inputs. That is known of classes, and of no subclass of them: it may do
        anything.
Rule 2. A coupling evaluates its networks on the same inputs in both directions, so that these are
        shared (NOTE [ One evaluation ]).
Rule 3. Layers may start from their first batch, and note that in a buffer, which a second run would
        find as it was before. So a chain lets all of them start before its first run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from recoup._core.shared_evaluation import lending
from recoup.invertible.contract import InvertibleModule

__all__ = ["Adapted", "Backwards"]


class Adapted(InvertibleModule):
    """The base of adapters: a layer of another library, which stays the object that it is.

    Args:
        transform: the layer; a child of the adapter, if it is a module.
        networks: the networks that both directions evaluate on the same inputs (See Rule 2).
        why_not: why backward does not invert the layer; empty if it does (See Rule 1).
    """

    takes_context = True

    def __init__(
        self, transform: Any, networks: Iterable[nn.Module] = (), why_not: str = ""
    ) -> None:
        super().__init__()
        self.transform = transform
        self.why_not = why_not
        self._started: set[bool] = set()  # the modes in which it has started (See Rule 3)
        self._networks = () if why_not else tuple(dict.fromkeys(networks))

    @property
    def inverts_in_backward(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether backward inverts the layer; if not, `repr` says why."""
        return not self.why_not

    @property
    def is_light(self) -> bool:
        """Whether backward inverts the layer, and it has no networks."""
        return not self.why_not and not self._networks

    @property
    def has_started(self) -> bool:
        """Whether the layer has seen a batch in the mode that it is in (See Rule 3)."""
        return getattr(self.transform, "training", True) in self._started

    def has_seen_a_batch(self) -> None:
        """Note that the layer has seen a batch."""
        self._started.add(getattr(self.transform, "training", True))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map data to latent: ``x`` of shape ``(N, ...)`` to ``(y, log_det)``."""
        with lending(self._networks):
            return _pair(*self._forward(x, context), x)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map latent to data: ``y`` of shape ``(N, ...)`` to ``(x, log_det)``."""
        with lending(self._networks):
            return _pair(*self._inverse(y, context), y)

    def input_of(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the value of `inverse` alone: backward has no use for the log-determinant."""
        with lending(self._networks):
            return self._input_of(y, context)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def _input_of(self, y: Tensor, context: Tensor | None) -> Tensor:
        return self._inverse(y, context)[0]

    def extra_repr(self) -> str:
        """Show what backward does with the layer."""
        return f"recomputed: {self.why_not}" if self.why_not else "inverted"


class Backwards(InvertibleModule):
    """An adapted layer from latent to data, for flows that are trained on their samples.

    Args:
        layer: the layer, which is no child of this one: it has its place in another chain.
    """

    def __init__(self, layer: InvertibleModule) -> None:
        super().__init__()
        self.layer = layer

    @property
    def takes_context(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the layer takes a context."""
        return self.layer.takes_context

    @property
    def inverts_in_backward(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether backward inverts the layer."""
        return self.layer.inverts_in_backward

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map latent to data, ``(N, ...)`` to ``(y, log_det)``."""
        return self.layer.inverse(x, *_if_any(context))

    @property
    def is_light(self) -> bool:
        """Whether backward inverts the layer, and it has no networks."""
        return getattr(self.layer, "is_light", False)

    @property
    def has_started(self) -> bool:
        """Whether the layer has seen a batch in the mode that it is in."""
        return getattr(self.layer, "has_started", True)

    def input_of(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the value of `inverse` alone."""
        return self.layer.forward(y, *_if_any(context))[0]

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map data to latent, ``(N, ...)`` to ``(x, log_det)``."""
        return self.layer.forward(y, *_if_any(context))


def _if_any(context: Tensor | None) -> tuple[Tensor, ...]:
    """Return the arguments of a layer beside its value: not all layers take a context."""
    return () if context is None else (context,)


def _pair(value: Tensor, log_det: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a value and its log-determinant, ``(N,)``: libraries return other shapes, too."""
    num = len(like)
    if not isinstance(log_det, Tensor):
        return value, value.new_full((num,), log_det)
    if log_det.dim() > 1:
        log_det = log_det.flatten(1).sum(1)
    return value, log_det if log_det.shape == (num,) else log_det.expand(num)
