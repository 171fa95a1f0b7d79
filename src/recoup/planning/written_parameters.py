"""The parameters that a forward writes to, such as a codebook that it averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.operators import DispatchMode, has_schema, traits_of
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import version_of
from recoup._core.storage_tracking import storages_of

__all__ = ["ParameterCopy", "WriteWatch"]


class ParameterCopy:
    """The value that a parameter had, to be put back.

    Args:
        parameter: the parameter.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.content = parameter.detach().clone()
        self.version = version_of(parameter)


class WriteWatch(DispatchMode):
    """A mode that copies the parameters of a model that operators write to, before they do.

    So a copy of all parameters, which may not fit, is not needed. Operators show every write, also
    one through `.data`, which leaves the version as it was.

    Args:
        model: the model.

    Attributes:
        copies: the copies, in the order of the first writes.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.copies: list[ParameterCopy] = []
        self._untouched: dict[torch.UntypedStorage, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            for storage in storages_of([parameter]):
                self._untouched.setdefault(storage, []).append(parameter)

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in storages_of(_written(func, args, kwargs)):
            self.copies += map(ParameterCopy, self._untouched.pop(storage, ()))
        return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operator that it writes to."""
    writes = traits_of(func).writes if has_schema(func) else ()
    return tensors_in(
        [value for key, value in (*enumerate(args), *kwargs.items()) if key in writes]
    )
