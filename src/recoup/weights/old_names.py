"""The names of tensors in other libraries, and the names of the same tensors here.

NOTE [ Names that merely look alike ]

Nothing but names and shapes tells where a file is from, and a name that is not understood stays as
it is: a strict load reports it, whereas a wrong name may load.

Rule 1. A magnitude is a number, or has the length of the direction along one axis and 1 along the
        others. `a_g` and `a_v` of other shapes, or beside an `a`, are no weight norm of torch; nor
        are two vectors of one shape, whose weight norm would be but signs.
Rule 2. A wrapper that drops weights has a single child, called `module`, which has no children. So
        the prefix `module.` of DataParallel stays, and so does a parameter `a_raw` elsewhere.
Rule 3. `gamma`, `beta` and `alpha` are also names in models of torch. They are those of gluon in a
        file of arrays, and remain in one of tensors.

Each function below returns new names by old ones. None: the entry is a copy, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

__all__ = [
    "RenamedTo",
    "axis_of_norm",
    "check_gluon_names",
    "from_gluon",
    "from_hook",
    "from_parametrizations",
    "from_wrapper",
    "to_gluon",
    "to_hook",
    "to_parametrizations",
    "to_wrapper",
]

RenamedTo = dict[str, str | None]
Tensors = Mapping[str, Tensor]
Functions = Sequence[str | None]


def axis_of_norm(magnitude: Tensor, direction: Tensor) -> int | None:
    """The axis of a norm of these shapes: -1 for a single magnitude, None if it is no norm."""
    if magnitude.dim() == 0:
        return -1
    if magnitude.dim() != direction.dim():
        return None
    for axis, n in enumerate(direction.shape):
        if magnitude.numel() == n == magnitude.shape[axis]:
            return axis
    return None


def _split(name: str) -> tuple[str, str]:
    """The name of a module with its dot, and that of its parameter."""
    prefix, dot, key = name.rpartition(".")
    return prefix + dot, key


# -- torch.nn.utils.weight_norm: a hook ------------------------------------------------------------


def from_hook(tensors: Tensors) -> RenamedTo:
    """Rename a direction `weight_v`; its magnitude `weight_g` is called so here as well."""
    names: RenamedTo = {}
    for name, direction in tensors.items():
        base = name[:-2]
        magnitude = tensors.get(f"{base}_g")
        if not name.endswith("_v") or magnitude is None or base in tensors:
            continue
        is_vector = direction.dim() == 1 and magnitude.dim() == 1  # See Rule 1
        if not is_vector and axis_of_norm(magnitude, direction) is not None:
            names[name] = base
    _check_partners(tensors)
    return names


def _check_partners(tensors: Tensors) -> None:
    beside: dict[str, list[str]] = {}
    for name in tensors:
        prefix, key = _split(name)
        if key.startswith("weight"):
            beside.setdefault(prefix, []).append(key)
    for prefix, keys in beside.items():
        if keys in (["weight_g"], ["weight_v"]):
            other = "weight_v" if keys == ["weight_g"] else "weight_g"
            raise ValueError(
                f"`state_dict` has `{prefix}{keys[0]}` without `{prefix}{other}`, the other half "
                "of a weight norm. Give the whole of the file, or leave this entry out."
            )


def to_hook(tensors: Tensors, is_chosen: Callable[[str], bool]) -> RenamedTo:
    """Rename each direction that is chosen and has a magnitude."""
    return {name: f"{name}_v" for name in tensors if is_chosen(name) and _is_normed(tensors, name)}


def _is_normed(tensors: Tensors, name: str) -> bool:
    magnitude = tensors.get(f"{name}_g")
    return magnitude is not None and axis_of_norm(magnitude, tensors[name]) is not None


# -- torch.nn.utils.parametrize --------------------------------------------------------------------

_PARAMETRIZED = re.compile(
    r"(?P<prefix>(?:.*\.)?)parametrizations\.(?P<key>[^.]+)\."
    r"(?:original(?P<number>\d*)|(?P<index>\d+)\.(?P<rest>.+))"
)


def from_parametrizations(tensors: Tensors, functions: Functions) -> RenamedTo:
    """Rename `original` and its like, and the tensors of the functions that are named."""
    names: RenamedTo = {}
    for name in tensors:
        found = _PARAMETRIZED.fullmatch(name)
        if found is None:
            continue
        base = found["prefix"] + found["key"]
        if found["rest"] is not None:
            function = _function(functions, int(found["index"]), name)
            names[name] = None if function is None else f"{base}_{function.lower()}.{found['rest']}"
        elif found["number"]:
            _check_originals(tensors, name[: -len(found["number"])], base)
            names[name] = f"{base}_g" if found["number"] == "0" else base
        else:
            names[name] = base
    return names


def _function(functions: Functions, index: int, name: str) -> str | None:
    if index < len(functions):
        return functions[index]
    raise ValueError(
        f"`state_dict` has `{name}`, a tensor of the parametrization with the index {index}, "
        f"whose class `functions` (of {len(functions)}) does not name. Name the classes in their "
        'order, as in functions=["LoRA"], or write None for one to leave out.'
    )


def _check_originals(tensors: Tensors, stem: str, base: str) -> None:
    magnitude, direction = tensors.get(f"{stem}0"), tensors.get(f"{stem}1")
    numbered = [f"{stem}{i}" for i in range(3) if f"{stem}{i}" in tensors]
    if magnitude is None or direction is None or len(numbered) != 2:
        raise ValueError(
            f"`state_dict` has {' and '.join(f'`{name}`' for name in numbered)}, but a weight norm "
            f"of `{base}` is `{stem}0` (the magnitude) and `{stem}1` (the direction). Give the "
            "whole of the file. What is no weight norm has no plain name: load it into the model "
            "that it is from, and remove the parametrization there."
        )
    if axis_of_norm(magnitude, direction) is None:
        raise ValueError(
            f"`{stem}0` has shape {tuple(magnitude.shape)}, which is no magnitude of `{stem}1` of "
            f"shape {tuple(direction.shape)}, so this is no weight norm and has no plain name. "
            "Load it into the model that it is from, and remove the parametrization there."
        )


def to_parametrizations(
    tensors: Tensors, is_chosen: Callable[[str], bool] | None, functions: Functions
) -> RenamedTo:
    """Rename weights that have a norm or one of the functions, or are chosen."""
    names: RenamedTo = {}
    below: dict[str, list[str]] = {}
    for name in tensors:
        for dot in re.finditer(r"\.", name):
            below.setdefault(name[: dot.end()], []).append(name)
    for name in tensors:
        prefix, key = _split(name)
        stem = f"{prefix}parametrizations.{key}."
        theirs: RenamedTo = {
            inner: f"{stem}{index}.{inner.removeprefix(own)}"
            for index, own in enumerate(f"{name}_{str(each).lower()}." for each in functions)
            if functions[index] is not None
            for inner in below.get(own, ())
        }
        is_normed = _is_normed(tensors, name)
        if is_chosen(name) if is_chosen is not None else is_normed or bool(theirs):
            names |= {name: f"{stem}original1" if is_normed else f"{stem}original", **theirs}
            if is_normed:
                names[f"{name}_g"] = f"{stem}original0"
    return names


# -- wrappers that drop weights: fastai's and salesforce's -----------------------------------------


def from_wrapper(tensors: Tensors) -> RenamedTo:
    """Rename what is in a wrapper, leave out the copies it computes with, and the second embedding.

    fastai has `weight_raw` in the wrapper, salesforce in its `module`.
    """
    names: RenamedTo = {}
    for name in tensors:
        owner, key = _split(name)
        base = key.removesuffix("_raw")
        if base == key or name in names:
            continue
        outer = owner.removesuffix("module.")
        for prefix in (owner, outer) if outer in ("", owner) or outer.endswith(".") else (owner,):
            inside = [other for other in tensors if other.startswith(prefix)]
            child = f"{prefix}module."
            is_weight = base.startswith(("weight", "bias")) or child + base in tensors
            if is_weight and _is_wrapper(inside, prefix):
                raw = {_split(other)[1] for other in inside}
                for other in inside:
                    last = _split(other)[1]
                    is_copy = f"{last}_raw" in raw
                    names[other] = None if is_copy else prefix + last.removesuffix("_raw")
                break
    for name in tensors:
        found = re.fullmatch(r"(.*)_dp\.emb\.weight", name)
        if found is not None and f"{found[1]}.weight" in tensors:
            names[name] = f"{found[1]}.weight"
    return names


def _is_wrapper(inside: list[str], prefix: str) -> bool:
    form = re.compile(rf"{re.escape(prefix)}(module\.[^.]+|[^.]+_raw)")
    return all(form.fullmatch(name) for name in inside) and any(
        name.startswith(f"{prefix}module.") for name in inside
    )


def to_wrapper(tensors: Tensors, is_chosen: Callable[[str], bool], raw: str) -> RenamedTo:
    """Rename all that the owner of a chosen weight has; `raw` is where the wrapper keeps it."""
    owners = sorted({_split(name)[0] for name in tensors if is_chosen(name)}, key=len)
    names: RenamedTo = {}
    for name in tensors:
        prefix = next((owner for owner in owners if name.startswith(owner)), None)
        if prefix is not None:
            key = name.removeprefix(prefix)
            names[name] = f"{prefix}{raw}{key}_raw" if is_chosen(name) else f"{prefix}module.{key}"
    return names


# -- gluon -----------------------------------------------------------------------------------------

_GLUON_RECURRENT = re.compile(
    r"(?P<prefix>(?:.*?\.)??)"
    r"(?:(?P<side>[lr])(?P<layer>\d+)_"  # MXNet 2.0 before its beta
    r"|_unfused\.(?P<old_layer>\d+)\.(?:(?P<old_side>[lr])_cell\.)?"  # what MXNet 1 saves
    r"|)(?P<part>i2h|h2h|h2r)_(?P<kind>weight|bias)"
)
_TORCH_RECURRENT = re.compile(
    r"(?P<prefix>(?:.*\.)?)(?P<kind>weight|bias)_(?P<part>ih|hh|hr)"
    r"(?:_l(?P<layer>\d+)(?P<reverse>_reverse)?)?"
)
_GLUON_PARTS = {"i2h": "ih", "h2h": "hh", "h2r": "hr"}
_TORCH_PARTS = {torch: gluon for gluon, torch in _GLUON_PARTS.items()}
_GLUON_KEYS = {"gamma": "weight", "beta": "bias", "alpha": "weight"}
# From `collect_params().save`, `export` and the Module API: of the scope, not of the place.
_SCOPED = re.compile(
    r"(arg|aux):.*|[^.]*\d_((i2h|h2h|h2r)_)?(weight|bias|gamma|beta|alpha|running_mean|running_var)"
)


def check_gluon_names(names: Sequence[str]) -> None:
    """Raise if a name in a file of arrays says nothing about the place in a model."""
    for name in names:
        if _SCOPED.fullmatch(name) and not _GLUON_RECURRENT.fullmatch(name):
            raise ValueError(
                f"`state_dict` has `{name}`, which names a scope of gluon and no place in a model. "
                "Save it in MXNet by `net.save_parameters`, which writes such as `0.weight`."
            )
        if _split(name)[1] == "rnn_param":
            raise ValueError(
                f"`state_dict` has `{name}`, in which MXNet 2 keeps all weights of a recurrent "
                "layer in one array whose shapes the file does not tell. Split it by the shapes of "
                "the layer: first all weights, then all biases; in each the layers, in each layer "
                "the directions, in each direction i2h before h2h."
            )


def from_gluon(names: Sequence[str], arrays: set[str]) -> RenamedTo:
    """Rename recurrent weights, and those of norms in files of arrays (Rule 3)."""
    renamed: RenamedTo = {}
    for name in names:
        prefix, key = _split(name)
        found = _GLUON_RECURRENT.fullmatch(name)
        if found is not None:
            layer = found["layer"] or found["old_layer"]
            reverse = "_reverse" if (found["side"] or found["old_side"]) == "r" else ""
            place = "" if layer is None else f"_l{layer}{reverse}"
            part = _GLUON_PARTS[found["part"]]
            renamed[name] = f"{found['prefix']}{found['kind']}_{part}{place}"
        elif name in arrays and key in _GLUON_KEYS:
            renamed[name] = prefix + _GLUON_KEYS[key]
    return renamed


def to_gluon(tensors: Tensors, is_chosen: Callable[[str], bool]) -> RenamedTo:
    """Rename as MXNet 1 has it; gluon has no `num_batches_tracked`."""
    is_two_sided = {
        found["prefix"]
        for found in map(_TORCH_RECURRENT.fullmatch, tensors)
        if found is not None and found["reverse"]
    }
    names: RenamedTo = {}
    for name in filter(is_chosen, tensors):
        prefix, key = _split(name)
        found = _TORCH_RECURRENT.fullmatch(name)
        if found is not None:
            side = "r" if found["reverse"] else "l"
            cell = f"{side}_cell." if prefix in is_two_sided else ""
            place = "" if found["layer"] is None else f"_unfused.{found['layer']}.{cell}"
            names[name] = f"{prefix}{place}{_TORCH_PARTS[found['part']]}_{found['kind']}"
        elif key in ("num_batches_tracked", "_extra_state"):
            names[name] = None
        elif key in ("weight", "bias") and _is_vector(tensors.get(f"{prefix}weight")):
            norm = {"weight": "gamma", "bias": "beta"}
            names[name] = prefix + (norm[key] if f"{prefix}bias" in tensors else "alpha")
    return names


def _is_vector(weight: Tensor | None) -> bool:
    return weight is not None and weight.dim() == 1
