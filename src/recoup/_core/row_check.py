"""The check that a function treats rows independently.

NOTE [ Rows that do not know each other ]

Rule 1. Some rows are looked at, in two parts, a and b. The function runs on ab, and beside it on
        ab' and a'b, where a' and b' are other rows of the same call. The rows of a must come out as
        they do beside b', and those of b as beside a'. Shapes and random states are equal in these
        runs, so this holds to the bit, also if it draws; where it groups rows (experts), to
        rounding.
Rule 2. What is summed over rows (a loss, the gradient of a parameter) is a sum over a and b only if
        ab - ab' - a'b + a'b' is zero.
Rule 3. A function that does not draw runs on a and on b alone, too, which shows whether it knows
        the places or the number of rows. Kernels round otherwise for fewer rows, so this is coarse.
Rule 4. Nobody sees these runs: no pair of hooks, no dispatch mode and no cache of autocast. Random
        states are as before, and so are buffers and tensors that the function holds, by value: some
        kernels leave versions alone. That a buffer has changed is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from recoup._core.captured import captured_by, parts_of
from recoup._core.devices import generator_states, generators_restored, same_states
from recoup._core.graph_ends import ends_of
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import grad_mode, versions_of, without_pairs
from recoup._core.sketch import tolerance_of
from recoup.errors import ChangedError

_COARSE = 16  # tolerances
Found = list[tuple[str, Tensor, bool]]  # names, values, and whether they are sums over rows


@dataclass
class RowCheck:
    """The check of a function, on the rows of one call.

    Args:
        fn: the function, whose buffers and tensors are put back.
        split: the tensors that have the rows.
        dim: the dimension of the rows.
        run: runs it on some rows, given their places and the tensors to take for those in `split`,
            by id. It returns the rows of outputs, or sums over rows.
        takes_gradients: whether the gradients of these are compared, too.

    Attributes:
        draws: whether the function was seen to draw.
    """

    fn: Callable[..., Any]
    split: Sequence[Tensor]
    dim: int
    run: Callable[[Sequence[int], dict[int, Tensor]], Found]
    takes_gradients: bool = False
    draws: bool = False
    _leaves: list[Tensor] = field(default_factory=list[Tensor])

    def mixes(self, rows: Sequence[int]) -> str | None:
        """Run the function on these rows, and compare what it makes.

        Returns:
            How it does not treat rows independently; nothing if it does. None if the rows could not
            show that.
        """
        with without_pairs(), _disable_current_modes():  # See Rule 4
            return self._compared(rows)

    def _compared(self, rows: Sequence[int]) -> str | None:
        half, dim = len(rows) // 2, self.dim
        a, b = list(rows[:half]), list(rows[half:])
        other_a, other_b = b[:half], [*a, *a][: len(b)]
        if not a:
            return None
        with self._unseen() as changed:
            whole, other = (self._at(each).values() for each in (a + b, other_a + other_b))
            if all(map(torch.equal, whole, other)):
                return None
            pairs = (a, b), (a, other_b), (other_a, b), (other_a, other_b)
            runs = [self._found(first + second) for first, second in pairs]
            alone = [] if self.draws else [self._found(a), self._found(b)]
        if changed:
            return (
                f"it changes its buffer `{changed[0]}`, which tiles change once each. Leave that "
                "out of `fn`, or call `.eval()` on it."
            )
        is_telling = True
        for place, (name, value, is_sum) in enumerate(runs[0]):
            _, beside_b, beside_a, neither = (run[place][1] for run in runs)
            parts, allowed = [run[place][1] for run in alone], self._allowed(value)
            if is_sum:  # See Rule 2
                if not value.isfinite().all():
                    return None
                is_telling &= bool(value.any())
                exact = _COARSE * (allowed if value.dim() else tolerance_of(value.dtype))
                checks = [(exact, [value, neither], [beside_b, beside_a])]
            else:  # See Rule 1
                own = beside_b.narrow(dim, 0, half), beside_a.narrow(dim, half, len(b))
                checks = [(allowed, [value], [torch.cat(own, dim)])]
                parts = [torch.cat(parts, dim)] if parts else []
            if parts and (value.is_floating_point() or value.is_complex()):  # See Rule 3
                checks.append((_COARSE * allowed, [value], parts))
            for most, plus, minus in checks:
                error = _difference(plus, minus)
                if not error <= most:
                    of_loss = " A mean must be one over targets in all its parts." if is_sum else ""
                    return (
                        f"{name} differs by {error:.2g} of its size with other rows beside, where "
                        f"rounding explains {most:.2g}. Do not tile it, give another `dim`, say in "
                        "`split` which arguments have the rows, or call `.eval()` if it has norms "
                        f"over rows.{of_loss}"
                    )
        return "" if is_telling else None

    def _at(self, rows: Sequence[int]) -> dict[int, Tensor]:
        """Return the tensors with only some rows, in a graph of their own, by id."""
        found: dict[int, Tensor] = {}
        for each in self.split:
            part = each.detach().index_select(self.dim, torch.tensor(rows, device=each.device))
            asks = self.takes_gradients and (part.is_floating_point() or part.is_complex())
            found[id(each)] = part.requires_grad_(asks or each.requires_grad)
        return found

    def _found(self, rows: Sequence[int]) -> Found:
        """Return what the function makes of some rows, with gradients if they are asked for."""
        own, has_grad = self._at(rows), self.takes_gradients or torch.is_grad_enabled()
        with generators_restored() as before, grad_mode(has_grad):
            given = {key: leaf.clone() for key, leaf in own.items()}  # no leaves to the function
            differentiated = [each for each in given.values() if each.requires_grad]
            versions = versions_of(differentiated)
            found = self.run(rows, given)
            if has_grad and versions_of(differentiated) != versions:
                raise ChangedError(
                    "`fn` writes to an argument that is split, and tiles are views of it. Let it "
                    "write to a copy (`x.clone()`), or leave out `inplace=True`."
                )
            if self.takes_gradients:
                found += self._gradients(own, [each for each in found if each[1].requires_grad])
            self.draws |= not same_states(before.states, generator_states())
        return [(name, value.detach(), is_sum) for name, value, is_sum in found]

    def _gradients(self, own: dict[int, Tensor], found: Found) -> Found:
        """Return the gradients of some rows, and of leaves."""
        ends = [end for _, end, _ in found]
        asked = {id(each): each for each in own.values() if each.requires_grad}
        self._leaves = self._leaves or [t for t in ends_of(ends).leaves if id(t) not in asked]
        # The gradient that rows are given differs from row to row.
        given = [torch.ones_like(e) if is_sum else e.detach().sin() + 1.5 for _, e, is_sum in found]
        inputs, num = [*asked.values(), *self._leaves], len(asked)
        options = {"allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(ends, inputs, given, **options) if ends else ()
        names = [f"argument {place}" for place in range(num)]
        names += [f"a parameter of shape {tuple(leaf.shape)}" for leaf in self._leaves]
        several = enumerate(zip(names, gradients, strict=False))
        return [(f"the gradient of {name}", each, place >= num) for place, (name, each) in several]

    @contextmanager
    def _unseen(self) -> Generator[list[str]]:
        """Return a context for runs (See Rule 4), and the names of buffers that they changed."""
        held: dict[int, tuple[str, Tensor]]
        held = {id(t): ("", t) for t in tensors_in(captured_by(self.fn))}
        held |= {id(pair[1]): pair for m in parts_of(self.fn)[1] for pair in m.named_buffers()}
        before = [
            (name, tensor, tensor.detach().clone())
            for name, tensor in held.values()
            if type(tensor) is Tensor and tensor.layout is torch.strided
            if not (tensor.requires_grad or tensor.is_quantized or tensor.is_meta)
        ]
        changed, has_cache = list[str](), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield changed
        finally:
            torch.set_autocast_cache_enabled(has_cache)
            for name, tensor, values in before:
                if bool(((tensor != values) & (values == values)).any()):
                    tensor.detach().copy_(values)
                    changed += [name] if name else []

    def _allowed(self, value: Tensor) -> float:
        """Return what rounding explains, in the least exact type that `value` may be made in."""
        kind, modules = value.device.type, parts_of(self.fn)[1]
        dtypes = {value.dtype, *(p.dtype for module in modules for p in module.parameters())}
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        if kind != "cpu":  # a product of float32 may be of TF32
            dtypes.add(torch.float16)
        return max(map(tolerance_of, dtypes))


def few_of(rows: Sequence[int], size: int, num: int | None = None) -> list[int]:
    """Return a few rows, or `num`, spread: no more than a tile of `size` has, but for two."""
    few = 5 if size > 4 else 3 if size > 2 else 2  # odd: a shift by a power of two is seen
    num = min(few if num is None else num, len(rows))
    return [rows[i * (len(rows) - 1) // (num - 1)] for i in range(num) if num > 1]


def _difference(plus: Sequence[Tensor], minus: Sequence[Tensor]) -> float:
    """Return the length of the difference of two sums, over that of the longest summand."""
    is_pair = len(plus) == len(minus) == 1
    if not plus[0].numel() or (is_pair and torch.equal(plus[0], minus[0])):
        return 0.0
    terms = torch.stack([*map(_finite, plus), *(-_finite(each) for each in minus)])
    terms = terms / terms.abs().max().clamp_min(torch.finfo(terms.dtype).tiny)  # squares must fit
    longest, left = (each.square().sum(-1).max().sqrt() for each in (terms, terms.sum(0)))
    return float(left / longest) if longest else 0.0


def _finite(value: Tensor) -> Tensor:
    """Return the values in one dimension, in at least 32 bits, with numbers for nan and inf."""
    real = torch.view_as_real(value) if value.is_complex() else value
    wide = real.to(torch.promote_types(real.dtype, torch.float32))
    return wide.nan_to_num(nan=3.0, posinf=2.0, neginf=-2.0).flatten()
