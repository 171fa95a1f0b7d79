"""State dicts under the names of other libraries, to the plain names of a model and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from recoup.weights import old_names
from recoup.weights.old_names import RenamedTo

__all__ = ["from_plain_names", "to_plain_names"]

_FORMATS = ("weight_norm", "parametrizations", "fastai", "salesforce", "gluon")


def to_plain_names(
    state_dict: Mapping[str, Any], *, fold: bool = False, functions: Sequence[str | None] = ()
) -> dict[str, Tensor]:
    """Give the tensors of an old file the names that they have in a model with recoup.

    These are those of the plain modules, and `weight_g` for the magnitude of a weight norm.
    Understood are the two weight norms of torch, `torch.nn.utils.parametrize`, the AWD-LSTM of
    fastai and of salesforce, and gluon. Everything else stays as it is, so it may be called for any
    file, and twice. The tensors share memory with those that were given.

    Args:
        state_dict: tensors by name, as from `torch.load`; or the arrays of a gluon model, as from
            `numpy.load` of an `.npz` file or `mxnet.nd.load` of a `.params` file.
        fold: whether to multiply magnitudes and directions, for a model without weight norm.
        functions: the classes of the parametrizations that have tensors of their own, in their
            order on a weight. Those of a `LoRA` get the names that `recoup.weights.apply` gives
            them (`weight_lora.a`); those of None are left out.

    Returns:
        The tensors by their plain names, in the order in which they were given.

    Raises:
        ValueError: when a half of a weight norm is missing, two entries with different values
            would have one name, or the file has no plain names.

    Example:
        >>> import recoup, torch
        >>> old = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))
        >>> list(old.state_dict())
        ['bias', 'parametrizations.weight.original0', 'parametrizations.weight.original1']
        >>> plain = recoup.weights.to_plain_names(old.state_dict())
        >>> list(plain)
        ['bias', 'weight_g', 'weight']
        >>> recoup.weight_norm(torch.nn.Linear(3, 2)).load_state_dict(plain)
        <All keys matched successfully>

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.parametrize.register_parametrization.html,
    `WeightDropout` of https://github.com/fastai/fastai, `WeightDrop` of
    https://github.com/salesforce/awd-lstm-lm, and `rnn_layer.py` of https://github.com/apache/mxnet
    (1.9.1), whose gates are in torch's order.
    """
    _check_functions(functions)
    tensors, arrays = _read(state_dict)
    old_names.check_gluon_names(arrays)
    tensors = _renamed(tensors, old_names.from_gluon([*tensors], {*arrays}))
    while True:  # a wrapper may be within a wrapper, and a parametrization have parametrizations
        before = [*tensors]
        tensors = _renamed(tensors, old_names.from_wrapper(tensors))
        tensors = _renamed(tensors, old_names.from_parametrizations(tensors, functions))
        tensors = _renamed(tensors, old_names.from_hook(tensors))
        if before == [*tensors]:
            return _folded(tensors) if fold else tensors


def from_plain_names(
    state_dict: Mapping[str, Any],
    to: str,
    where: str | None = None,
    *,
    functions: Sequence[str | None] = (),
) -> dict[str, Any]:
    """Give tensors the names that another library's model loads strictly.

    The inverse of `to_plain_names`: the tensors share memory with those that were given.

    Args:
        state_dict: tensors by their plain names, such as the `state_dict` of a model.
        to: "weight_norm" or "parametrizations" for those of `torch.nn.utils`; "fastai" (2) or
            "salesforce" for weights in their wrapper; "gluon" for what `load_parameters` of MXNet 1
            reads after `mxnet.nd.save`, in arrays of numpy.
        where: a regular expression for the whole names of the weights to rename. By default, these
            are the weights with a magnitude (and with one of `functions`); for fastai and
            salesforce, each `weight_hh_l0`; for gluon, everything. Weights without a magnitude that
            it matches become the `original` of "parametrizations".
        functions: as for `to_plain_names`; None holds the place of a function without tensors, or
            that of the weight norm if others come after it.

    Returns:
        The tensors by their new names, in the order in which they were given. Left out for gluon is
        `num_batches_tracked`, which it does not have; added for fastai, where `encoder.weight` is
        beside `rnns`, is `encoder_dp.emb.weight`, which is the same tensor.

    Raises:
        ValueError: when `where` matches nothing that can have a name there, or two entries would
            have one name.

    Example:
        >>> import recoup, torch
        >>> lstm = recoup.weight_dropout(torch.nn.LSTM(3, 2), "weight_hh_l0", p=0.5)
        >>> list(recoup.weights.from_plain_names(lstm.state_dict(), to="fastai"))
        ['module.weight_ih_l0', 'weight_hh_l0_raw', 'module.bias_ih_l0', 'module.bias_hh_l0']

    Source: see `to_plain_names`.
    """
    if to not in _FORMATS:
        raise ValueError(f"`to` is {to!r}, but must be one of {', '.join(map(repr, _FORMATS))}.")
    _check_functions(functions)
    tensors, _ = _read(state_dict)
    is_chosen = None if where is None else _matches(where)
    names = _names_for(to, tensors, is_chosen, functions)
    if is_chosen is not None and not any(is_chosen(name) for name in names):
        raise ValueError(
            f"`where` is {where!r}, which matches no tensor that can have a name of {to!r}. It "
            f"must match one of these in full: {_some(tensors)}."
        )
    renamed = _renamed(tensors, names)
    if to == "fastai":
        return _with_second_embedding(renamed)
    if to == "gluon":
        return {name: _array(name, tensor) for name, tensor in renamed.items()}
    return {**renamed}


def _names_for(
    to: str,
    tensors: dict[str, Tensor],
    is_chosen: Callable[[str], bool] | None,
    functions: Sequence[str | None],
) -> RenamedTo:
    if to == "parametrizations":
        return old_names.to_parametrizations(tensors, is_chosen, functions)
    if to in ("fastai", "salesforce"):
        is_dropped = is_chosen or _matches(r"(.*\.)?weight_hh_l0")
        return old_names.to_wrapper(tensors, is_dropped, "" if to == "fastai" else "module.")
    is_any = is_chosen or _matches(r".*")
    return (old_names.to_hook if to == "weight_norm" else old_names.to_gluon)(tensors, is_any)


def _matches(pattern: str) -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern)
        compiled.fullmatch("")  # a pattern of bytes compiles, too
    except (TypeError, re.error) as error:
        raise ValueError(
            f"`where` is {pattern!r}, but must be a regular expression for names ({error})."
        ) from error
    return lambda name: compiled.fullmatch(name) is not None


def _check_functions(functions: Sequence[str | None]) -> None:
    given: Any = functions
    if isinstance(given, str) or not all(f is None or isinstance(f, str) for f in given):
        raise ValueError(
            f"`functions` is {functions!r}, but must be a list of the names of classes, or None "
            'for one to leave out, such as ["LoRA"].'
        )


def _read(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """The values as tensors, and the names of those that were arrays."""
    given: Any = state_dict
    if not isinstance(given, Mapping):
        raise ValueError(
            f"`state_dict` is a {type(given).__name__}, but must be a mapping from names to "
            "tensors or arrays. Read a file by `torch.load(path, weights_only=True)`, one of MXNet "
            "2 by `numpy.load(path)`, and the binary `.params` of MXNet 1 by "
            "`mxnet.nd.load(path)`, for only MXNet can; `numpy.savez` then writes what can be read "
            "without it."
        )
    tensors: dict[str, Tensor] = {}
    arrays: list[str] = []
    for name, value in cast("Any", given).items():
        if not isinstance(name, str):
            raise ValueError(
                f"`state_dict` has the name {name!r}, but the names must be strings, as those of "
                "`Module.state_dict`."
            )
        if isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
            tensors[name] = value
        else:
            tensors[name] = _tensor(name, value)
            arrays.append(name)
    return tensors, arrays


def _tensor(name: str, value: Any) -> Tensor:
    array = value.asnumpy() if hasattr(value, "asnumpy") else value  # of mxnet
    if not hasattr(array, "__array__"):
        is_file = isinstance(value, Mapping)
        way_out = f'Give that part: state_dict["{name}"].' if is_file else "Leave it out."
        raise ValueError(
            f'`state_dict["{name}"]` is a {type(value).__name__}, but must be a tensor or an '
            f"array. {way_out}"
        )
    try:
        flags = getattr(array, "flags", None)  # torch warns of what is read only
        return torch.as_tensor(array if getattr(flags, "writeable", True) else array.copy())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'`state_dict["{name}"]` is an array that torch does not take ({error}). Give '
            'numpy.ascontiguousarray(array, "float32").'
        ) from error


def _array(name: str, tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.dtype is torch.bfloat16:
        raise ValueError(
            f"`{name}` is torch.bfloat16, which numpy does not have. Convert it by `.float()`."
        )
    return tensor.detach().cpu().numpy()


def _renamed(tensors: dict[str, Tensor], names: RenamedTo) -> dict[str, Tensor]:
    """Rename, or raise if two entries with different values would have one name."""
    renamed: dict[str, Tensor] = {}
    source: dict[str, str] = {}
    for old, tensor in tensors.items():
        new = names.get(old, old)
        if new is None:
            continue
        if new in renamed and not _is_same(renamed[new], tensor):
            raise ValueError(
                f"`state_dict` has `{source[new]}` and `{old}` with different values, which would "
                f"both be `{new}`. Leave one of them out."
            )
        if new not in renamed:
            renamed[new], source[new] = tensor, old
    return renamed


def _is_same(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_meta or b.is_meta:
        return True
    b = b.to(a.device)
    return torch.equal(a, b) or bool((a == b).logical_or(a.isnan() & b.isnan()).all())


def _folded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    folded = dict(tensors)
    for name, direction in tensors.items():
        magnitude = tensors.get(f"{name}_g")
        axis = None if magnitude is None else old_names.axis_of_norm(magnitude, direction)
        if magnitude is not None and axis is not None:
            folded[name] = _product(direction, magnitude, axis)
            del folded[f"{name}_g"]
    return folded


def _product(direction: Tensor, magnitude: Tensor, axis: int) -> Tensor:
    """The weight, by the operator with which torch computes it."""
    with torch.no_grad():
        if direction.dim() == 0:
            return direction * (magnitude / direction.abs())
        return torch.ops.aten._weight_norm(direction, magnitude, axis)


def _with_second_embedding(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Add what fastai's AWD_LSTM calls its embedding a second time."""
    added: dict[str, Any] = {}
    for name, tensor in tensors.items():
        added[name] = tensor
        prefix = name.removesuffix("encoder.weight")
        rnns = re.compile(rf"{re.escape(prefix)}rnns\.\d+\.weight_hh_l0_raw")
        if prefix != name and any(map(rnns.fullmatch, tensors)):
            added[f"{prefix}encoder_dp.emb.weight"] = tensor
    return added


def _some(names: Iterable[str]) -> str:
    shown = [*names]
    return ", ".join(f"`{name}`" for name in shown[:8]) + (", ..." if len(shown) > 8 else "")
