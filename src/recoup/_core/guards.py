"""The guard of a region: the state of its modules, which a second run must find unchanged.

NOTE [ Correct or an error ]

Rule 1. Parameters, buffers and the training mode of a region's modules are compared before it
        runs again: the same tensors, unchanged since the end of the first run. (A first run may
        change them itself: a data-dependent start does.)
Rule 2. Batch and instance norms update their statistics in the first run only: a second run updates
        copies. (Without momentum, it would be other code for a compiler, and might save other
        tensors.) Numbers that are attributes of modules (a counter, the probability of a dropout)
        have in a second run the values from before the first run, and are put back after it. A
        flag has the value that the first run left, since most flags record that something has been
        done once.
Rule 3. Any other buffer that a first run changes is in a second run as it was before the first one
        (NOTE [ Counted once ]); so is a tensor that is an attribute and that the first run
        replaced. A changed buffer of which there is no copy is an error in the first run.
Rule 4. Sharded modules (FSDP2) replace their parameters while they run, so those are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NoReturn, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from recoup._core.module_entries import Entries, TensorEntries
from recoup._core.random_sources import DETERMINISTIC
from recoup._core.replaced_values import Location, Replacement
from recoup._core.saved_tensors import version_of
from recoup.errors import ChangedError, ReplayError

__all__ = [
    "ModuleGuard",
    "is_in_place",
    "mark_of",
    "updates_statistics",
]

_NUMBERS = frozenset((bool, int, float, complex, str))
_NOTED = _NUMBERS | {Tensor}
_training: Callable[[nn.Module], bool] = attrgetter("training")


class ModuleGuard:
    """The parameters, buffers, modes and numbers of modules, as a first run leaves them.

    Args:
        roots: the modules.
        name: the name of the call in error messages.
        part_names: the name of each root in error messages, if they are those of several calls.

    Attributes:
        is_training: whether any of the modules is in training mode.
        has_norms: whether a norm updates its statistics, so that no second run may run meanwhile.
    """

    __slots__ = (
        "_buffers",
        "_children",
        "_counted",
        "_modes",
        "_modules",
        "_name",
        "_norms",
        "_numbers",
        "_part_names",
        "_roots",
        "_tensors",
        "has_norms",
        "is_training",
    )

    def __init__(
        self, roots: tuple[nn.Module, ...], name: str = "", part_names: Sequence[str] = ()
    ) -> None:
        self._roots = roots
        self._name = name
        self._part_names = part_names
        self._tensors = TensorEntries()  # parameters, and tensors that are attributes
        self._buffers: TensorEntries | None = None  # if there are any, as most modules have none
        self._children: Entries | None = None
        self._modules: list[nn.Module] = []
        self._norms: list[nn.Module] = []
        self._numbers: list[tuple[dict[str, Any], str, Any]] = []
        self._counted: list[tuple[Location, Tensor, int]] = []  # and the versions (See Rule 3)
        self._walk()
        self._modes = list(map(_training, self._modules))
        self.is_training = True in self._modes
        self.has_norms = bool(self._norms)
        if self._buffers is not None:
            self._buffers.marks = self._buffers.marks_now()

    def _walk(self) -> None:
        # nn.Module.modules() builds names and a set of those seen; this takes a tenth of its time.
        # A module that is met twice is compared twice.
        pending = list(self._roots)
        sharded: set[int] = set()  # ids of what is in a sharded module
        seen: set[int] = set()  # ids of those with children, which may contain themselves
        found = self._modules
        for module in pending:
            found.append(module)
            own: dict[str, Any] = module.__dict__
            kind = type(module)
            is_known = kind in DETERMINISTIC
            is_sharded = False
            if sharded or not is_known:
                is_sharded = id(module) in sharded or hasattr(kind, "unshard")
            if own["_parameters"] and not is_sharded:  # See Rule 4
                self._tensors.add(own["_parameters"])
            if own["_buffers"]:
                self._note_buffers(module)
            if not is_known:  # those do not change their attributes
                self._note_attributes(own)
            children = own["_modules"]
            if not children or id(module) in seen:
                continue
            seen.add(id(module))
            self._children = held = self._children or Entries()
            num_before = len(held.values)
            held.add(children)
            inner = held.values[num_before:]
            pending += inner
            if is_sharded:
                sharded.update(map(id, inner))

    def _note_buffers(self, module: nn.Module) -> None:
        if updates_statistics(module):
            self._norms.append(module)
            return
        self._buffers = self._buffers or TensorEntries()
        self._buffers.add(module._buffers)

    def _note_attributes(self, own: dict[str, Any]) -> None:
        for key in [key for key, value in own.items() if type(value) in _NOTED]:
            value = own[key]
            if type(value) is not Tensor:
                if key != "training":
                    self._numbers.append((own, key, value))
            elif value.grad_fn is None:
                self._tensors.owners.append(own)
                self._tensors.keys.append(key)
                self._tensors.values.append(value)

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers that are compared, as they were before the first run."""
        return [] if self._buffers is None else self._buffers.values

    def count_once(self, copies: dict[int, Tensor]) -> bool:
        """Give later runs the buffers that the first run has changed as they were (See Rule 3).

        Args:
            copies: copies of buffers from before the first write to them, by place.

        Returns:
            Whether it has changed any.
        """
        buffers = self._buffers
        if buffers is None:
            return False
        before, now = buffers.marks, buffers.marks_now()
        left: list[int] = []
        for place, value in enumerate(buffers.values):
            is_same = before[0][place] == now[0][place] and before[1][place] == now[1][place]
            found = value if is_same else copies.get(place)
            if found is None or (is_same and buffers.is_there(place)):
                left.append(place)
            else:
                location = Location(buffers.owners[place], buffers.keys[place])
                self._counted.append((location, found, version_of(found)))
        if len(left) < len(buffers.values):
            buffers.keep_only(left)
            buffers.marks = ([before[0][at] for at in left], [before[1][at] for at in left])
        return len(left) < len(before[0])

    def first_run_ended(self) -> None:
        """Record the versions that the first run left; raise if it changed a buffer."""
        # A flag that the first run has set says that something was done once (an initialization).
        for index, (own, key, value) in enumerate(self._numbers):
            if type(value) is bool:
                self._numbers[index] = (own, key, own.get(key))
        tensors, buffers = self._tensors, self._buffers
        if buffers is not None and not (
            buffers.are_there() and buffers.marks == buffers.marks_now()
        ):
            key, name = self._name_of(buffers)
            raise ReplayError(
                f"{name} changes its buffer `{key}` in forward, so running it again would not "
                "compute the same. If it did not do so in earlier steps, repeat this one: a copy "
                "will be kept from now on. Or keep its residuals: "
                'memory="linear", a schedule that tapes it in the sweep, or a plan whose '
                "`blocks` leave it out."
            )
        if not tensors.are_there():
            # A second run replaces it too, beginning with the one that was there (See Rule 3).
            for owner, key, value in tensors.drop_missing():
                if key in owner and not isinstance(value, nn.Parameter):
                    self._counted.append((Location(owner, key), value, version_of(value)))
        tensors.marks = tensors.marks_now()

    def check(self) -> None:
        """Raise if anything was changed or replaced since the first run ended."""
        for held in (self._tensors, self._buffers):
            if held is None:
                continue
            if not held.are_there():
                raise ChangedError(
                    "`{}` of {}".format(*self._name_of(held))
                    + " was replaced between forward and backward, so running it again would "
                    "compute something else. Run backward before it is replaced (with "
                    "`torch.func.functional_call`: within the call)."
                )
            if held.marks != held.marks_now():
                raise ChangedError(
                    "`{}` of {}".format(*self._name_of(held))
                    + " was changed in place between forward and backward, so running it again "
                    "would compute something else. Step the optimizer after backward has passed "
                    "every use of it."
                )
        if self._children is not None and not self._children.are_there():
            self._raise_replaced_module(self._children)
        if self._modes != list(map(_training, self._modules)):
            self._raise_other_mode()

    def _raise_replaced_module(self, children: Entries) -> NoReturn:
        place = children.where(lambda place: not children.is_there(place)) or 0
        own, key, child = children.owners[place], children.keys[place], children.values[place]
        name = self._name_around(lambda module: module._modules is own)
        raise ChangedError(
            f"`{key}`, a {type(child).__name__} in {name}, was replaced between forward "
            "and backward, so running it again would compute something else. Replace it "
            "after backward."
        )

    def _raise_other_mode(self) -> NoReturn:
        pairs = zip(self._modules, self._modes, strict=True)
        module, training = next(pair for pair in pairs if pair[0].training is not pair[1])
        name = self._name_around(lambda part: part is module)
        raise ChangedError(
            f"{name} was in {'training' if training else 'evaluation'} mode in "
            f"forward, but {type(module).__name__} within it no longer is, so running it "
            "again would compute something else. Call train() or eval() after backward."
        )

    def to_replace(self) -> list[Replacement]:
        """Return the values that a second run must have, where they are not there (See Rule 2)."""
        found: list[Replacement] = []
        for own, key, value in self._numbers:
            if own.get(key) != value:
                found.append((Location(own, key), value))
        for norm in self._norms:
            for key, buffer in norm._buffers.items():
                if buffer is not None:
                    found.append((Location(norm._buffers, key), buffer.clone()))
        for location, value, version in self._counted:
            if version_of(value) != version:
                raise ChangedError(
                    f"The tensor that was `{location.key}` of {self._name} before forward replaced "
                    "it was changed in place before backward, so running it again would compute "
                    "something else. Change a clone."
                )
            found.append((location, value.detach().clone()))
        return found

    def modules_with_attributes(self) -> list[nn.Module]:
        """Return the modules whose forward may set attributes."""
        return [module for module in self._modules if type(module) not in DETERMINISTIC]

    def _name_of(self, held: TensorEntries) -> tuple[str, str]:
        """Return the name of the first tensor that was replaced, or else changed, and its call."""
        place = held.changed() or 0
        own, key = held.owners[place], held.keys[place]

        def has_it(module: nn.Module) -> bool:
            return any(own is each for each in (module._parameters, module._buffers, vars(module)))

        for root in self._roots:
            for prefix, module in cast("Iterable[tuple[str, nn.Module]]", root.named_modules()):
                if has_it(module):
                    return f"{prefix}.{key}" if prefix else key, self._name_around(has_it)
        return key, self._name

    def _name_around(self, is_meant: Callable[[nn.Module], bool]) -> str:
        """Return the name of the first call that uses such a module."""
        for root, name in zip(self._roots, self._part_names, strict=False):
            if any(map(is_meant, root.modules())):
                return name
        return self._name


def updates_statistics(module: nn.Module) -> bool:
    """Whether `module` is a norm that updates its statistics in forward."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def is_in_place(module: nn.Module) -> bool:
    """Whether `module` says that the first thing it does changes its input in place."""
    while isinstance(module, nn.Sequential) and module._modules:
        module = next(iter(module._modules.values()))
    return bool(mark_of(module, "inplace"))


def mark_of(fn: Any, name: str) -> Any:
    """Return an attribute that marks a module, of its own or of its class; False without one."""
    kind: Any = fn.__class__
    if getattr(kind, "__getattr__", None) is nn.Module.__getattr__:  # it would look in vain, slowly
        return fn.__dict__.get(name, getattr(kind, name, False))
    return getattr(fn, name, False)
