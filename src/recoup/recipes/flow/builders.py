"""Building a flow from the settings of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from recoup.flows import NICE, Flow, FlowPlusPlus, Glow, IResNet, RealNVP

__all__ = ["FLOW_SETTINGS", "FlowName", "build_flow"]

FlowName = Literal["glow", "nice", "realnvp", "flowpp", "iresnet"]


@dataclass(frozen=True)
class _Kind:
    """A kind of flow: its settings, those for pictures alone, and the defaults of the recipe."""

    build: Callable[..., Flow]
    settings: tuple[str, ...]
    for_pictures: tuple[str, ...] = ("num_levels", "alpha")
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    takes_points: bool = True
    takes_labels: bool = True


_SIZES = ("num_levels", "num_steps", "width", "depth")
_KINDS: dict[str, _Kind] = {
    "glow": _Kind(
        Glow,
        ("num_levels", "num_steps", "width", "coupling", "dropout", "alpha"),
        defaults={"num_levels": 2, "num_steps": 8},
        takes_points=False,
    ),
    "nice": _Kind(NICE, ("num_couplings", "width", "depth", "dropout", "exact")),
    "realnvp": _Kind(RealNVP, (*_SIZES, "dropout", "alpha"), defaults={"num_levels": 2}),
    "flowpp": _Kind(
        FlowPlusPlus,
        (*_SIZES, "num_components", "dropout", "alpha", "variational"),
        for_pictures=("num_levels", "alpha", "variational"),
        defaults={"num_levels": 2},
    ),
    "iresnet": _Kind(
        IResNet,
        (*_SIZES, "coefficient", "log_det", "alpha"),
        defaults={"num_levels": 1},
        takes_labels=False,
    ),
}

FLOW_SETTINGS = tuple(dict.fromkeys(name for kind in _KINDS.values() for name in kind.settings))


def build_flow(
    name: FlowName,
    shape: Sequence[int],
    *,
    levels: int | None,
    num_classes: int | None,
    memory: int | str,
    settings: dict[str, Any],
) -> Flow:
    """Build the flow of this name.

    Args:
        name: Name of the flow.
        shape: Shape ``(C, H, W)`` of a picture, or ``(2,)`` of points.
        levels: Number of grey levels; None for points.
        num_classes: Number of classes, for a conditional flow.
        memory: Memory mode of the flow.
        settings: Settings from the command line; a value of None counts as not given.

    Raises:
        ValueError: When the flow is not for such data, or does not have one of the settings.
    """
    kind = _KINDS[name]
    is_points = len(shape) == 1
    if is_points and not kind.takes_points:
        others = ", ".join(other for other, kind in _KINDS.items() if kind.takes_points)
        raise ValueError(
            f"`--model.flow` is {name}, which is for pictures, but the data are points. Use one "
            f"of {others}."
        )
    if num_classes is not None and not kind.takes_labels:
        others = ", ".join(other for other, kind in _KINDS.items() if kind.takes_labels)
        raise ValueError(
            f"`--model.conditional` is true, but {name} takes no labels. Use one of {others}."
        )
    has = [s for s in kind.settings if not (is_points and s in kind.for_pictures)]
    given = {setting: value for setting, value in settings.items() if value is not None}
    for setting in given:
        if setting not in has:
            of = f"{name} on points" if is_points and setting in kind.settings else name
            raise ValueError(
                f"`--model.{setting}` is {given[setting]}, but {of} has no such setting. It has "
                f"{', '.join(has)}."
            )
    given = {s: value for s, value in kind.defaults.items() if s in has} | given
    if not is_points and "num_levels" in has:
        _check_sides(shape, given["num_levels"])
    if num_classes is not None:
        given["num_classes"] = num_classes
    return kind.build(shape, levels=levels, memory=memory, **given)


def _check_sides(shape: Sequence[int], num_levels: int) -> None:
    factor = 2**num_levels if num_levels > 0 else 1
    height, width = shape[1:]
    if height % factor or width % factor:
        most = next(n for n in range(num_levels, -1, -1) if not (height % 2**n or width % 2**n))
        fewer = f", or use `--model.num_levels {most}`" if most else ""
        raise ValueError(
            f"The pictures are {width} x {height} pixels, but {num_levels} scales need sides that "
            f"are multiples of {factor}. Resize them with "
            f"`--data.size {max(factor, round(min(height, width) / factor) * factor)}`{fewer}."
        )
