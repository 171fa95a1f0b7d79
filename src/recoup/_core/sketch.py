"""Sketches: a few sums over all entries of a tensor, by which two runs are compared.

NOTE [ A sketch ]

Rule 1. The entries, in the order of memory, are the rows of a matrix of 16 columns. A sketch is the
        16 sums of its columns, in which each row has a weight of its own. So each entry counts, and
        its place does. It costs about as much as the plain sum. A few entries are their own sketch.
        That of integers, which must be told apart exactly, is a hash of their bits: of many, the
        sum of their words of 32 bits modulo 2**64, each times the odd numbers of its row and column
        (of words of 64 bits, the highest bit times any odd number is that bit again).
Rule 2. Equal bits make equal sketches. Where two tensors differ, the difference of their sketches
        has about the length of the difference of the tensors, to a sixth: the weights are random,
        and those of large tensors are the weights of blocks times those within.
Rule 3. Kernels may round otherwise in a second run: threads add in another order. So two tensors
        count as equal if they differ, as vectors, by less than `tolerance` of their length. In half
        precision that is so much that two rows of like weights might change places unseen. So these
        have 17 columns: a row of a tensor that moves comes to stand in others.
Rule 4. What has no numbers of its own cannot be compared, and neither can what is not finite.
Rule 5. On a CUDA device, launching a kernel takes longer than reading a few megabytes. So one
        kernel makes the sketch of a large tensor there: the weighted sums of its rows, some
        thousands, twice as fast as sums of columns. (That of integers is a product of rows of their
        bytes with eight columns of random bytes.) Only if two runs do not make the same bits, these
        sums are folded into the few numbers of Rule 1.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core.operators import hidden_keys, unseen
from recoup._core.tensors import has_values, is_without_values, wraps_others

_COLUMNS = 16
_OF_HALVES = 17  # columns (See Rule 3)
_FEW = 64  # entries, which are a sketch themselves
_FEW_BYTES = 2**16  # of integers, whose sketch is a hash
_ROWS = 256
_MOST_ROWS = 2048  # of tensors that are not read in blocks
_MANY = _OF_HALVES * _MOST_ROWS  # entries
_PIECE = 8 * _OF_HALVES * _ROWS  # of tensors that are converted first, which stays in a cache
_DEVICE_PIECE = 128 * _PIECE  # launching a kernel takes longer than reading so little
_WORDS = 2**12  # in a row
_MOST_WORDS = 2**16  # whose products are in memory at once, in a cache
_DEVICE_WORDS = 2**23
_BYTES = 2**12  # in a row
_SUMS_OF_BYTES = 8  # of each row: kernels for bytes make no fewer
_DEVICE_ROWS = 2**13  # of a tensor at most
_DEVICE_WIDTH = 2**9  # entries of a row at least
_COLUMN, _ROW = range(2)  # tables of odd numbers
_NEXT = 0x5851F42D4C957F2D  # odd, and so invertible: what the words before a piece are times
# Times a weight, at least 2.5: more than the product of two weights, 2.25, so that no sum is zero.
_OF_THE_LAST = 5.0
_SEED = 16
_OWN = frozenset((torch.float32, torch.float64))
_EXACT = frozenset((torch.bool, torch.int8, torch.int16, torch.int32, torch.int64))
HALVES = frozenset((torch.float16, torch.bfloat16))
_NUMBERS = _OWN | HALVES
_PLAIN = frozenset((Tensor, nn.Parameter))

# On CPU the numbers are read at once; elsewhere a read would wait for the device.
Sketch = Tensor | list[float]


def sketch_of(tensor: Tensor) -> Sketch | None:
    """Return the sketch of a tensor, whatever modes; None if it cannot be compared (See Rule 4)."""
    if type(tensor) is Tensor:
        if tensor.is_cpu and tensor.is_contiguous() and not _num_modes():  # the common ways
            # FSDP2 frees the memory of a gathered parameter; a derivative of zero has none.
            num = tensor.numel() if tensor.data_ptr() else 0
            dtype = tensor.dtype
            if dtype in _OWN and num and not tensor.is_neg():
                with _alone():
                    if num <= _FEW:
                        return cast("Any", tensor.view(-1)).tolist()
                    if num <= _COLUMNS * _MOST_ROWS and not num % _COLUMNS:
                        row = _row(num // _COLUMNS, dtype, tensor.device)
                        return cast("Any", row.mm(tensor.view(-1, _COLUMNS))).tolist()[0]
                    return cast("Any", _sums(tensor.view(-1))).tolist()
            if dtype in _EXACT and num and tensor.nbytes <= _FEW_BYTES:
                return _hash_of_few(tensor)
        elif tensor.is_cuda and not _num_modes() and (tensor.is_contiguous() or _is_turned(tensor)):
            num = tensor.numel() if tensor.data_ptr() else 0
            dtype = tensor.dtype
            if num > _MANY and dtype in _NUMBERS and not tensor.is_neg():
                with _alone():
                    return _sums_of_rows(tensor)
            if num > _MANY and dtype in _EXACT and tensor.is_contiguous():
                with _alone():
                    return _hash_of(tensor)
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # a DTensor wraps the tensor that this rank holds
        parts: list[Any] = [getattr(tensor, name) for name in names]
        of_parts = [sketch_of(part) for part in parts if isinstance(part, Tensor)]
        numbers = [number for each in of_parts if each is not None for number in numbers_of(each)]
        return numbers or None
    elif wraps_others(type(tensor)):
        return None  # what such a class wraps is not known (a MaskedTensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or not has_values(tensor):
        return None
    hidden = unseen() if type(tensor) in _PLAIN else nullcontext()  # from modes
    with _no_functions(), hidden, _alone():
        if not tensor.numel() or not tensor.untyped_storage().nbytes() or tensor._is_zerotensor():
            return None
        if tensor.dtype in _OWN and tensor.is_cpu and tensor.numel() <= _FEW:
            return cast("Any", tensor.reshape(-1)).tolist()
        dtype = tensor.dtype
        if dtype in _EXACT and tensor.is_cpu and tensor.nbytes <= _FEW_BYTES:
            return _hash_of_few(_flat(tensor).contiguous())
        if dtype in _OWN and tensor.is_contiguous():
            found = _sums(tensor.resolve_neg().view(-1))
        else:
            found = _sums_of_any(tensor)
    return cast("list[float]", cast("Any", found).tolist()) if found.is_cpu else found


def _is_turned(tensor: Tensor) -> bool:
    """Whether a tensor is the transpose of a matrix that lies densely in memory."""
    return tensor.dim() == 2 and tensor.stride() == (1, tensor.shape[0])


def norms_of(tensors: list[Tensor]) -> Sketch:
    """Return the norms of dense tensors on one device, as one sketch."""
    with _no_functions(), unseen(), _alone():
        found = torch.stack(cast("Any", torch)._foreach_norm(tensors))
        return cast("list[float]", cast("Any", found).tolist()) if found.is_cpu else found


def _hash_of_few(integers: Tensor) -> list[float]:
    """Return a hash of the bits of a contiguous tensor, as two numbers."""
    bits = hash(ctypes.string_at(integers.data_ptr(), integers.nbytes))
    return [float(bits >> 32), float(bits & (2**32 - 1))]


def make_tables(device: torch.device) -> None:
    """Make the weights that nearly all sketches need, so that no step is measured with them."""
    if is_without_values():
        return
    _table(_MOST_ROWS, torch.float32, device)
    for table in (_COLUMN, _ROW):
        _odd(table, device)
    if device.type == "cuda":
        _random_bytes(device)


def numbers_of(sketch: Sketch) -> list[float]:
    """Return the numbers of a sketch, and wait for them if they are on a device."""
    return sketch if isinstance(sketch, list) else cast("Any", _folded(sketch).cpu()).tolist()


def are_equal(pairs: Iterable[tuple[Sketch, Sketch]]) -> bool:
    """Whether the two sketches of each pair are the same bits; waits for their devices."""
    kinds: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for first, second in pairs:
        if isinstance(first, list) or isinstance(second, list):
            if first is not second and first != second:
                return False
        else:
            alike = kinds.setdefault((first.device, first.dtype, first.shape[1:]), ([], []))
            alike[0].append(first)
            alike[1].append(second)
    return all(torch.equal(*(_bits(each) for each in both)) for both in kinds.values())


def _bits(sketches: list[Tensor]) -> Tensor:
    return torch.cat(sketches).view(torch.uint8)  # as numbers, NaN would not be itself


def difference(first: Sketch, second: Sketch, length: float = 0.0) -> float:
    """Return the length of the difference of two sketches over that of the first, where finite.

    Or over the length of a tensor, if it is known: that of its sketch may be far less where entries
    are alike.
    """
    before, after = numbers_of(first), numbers_of(second)
    pairs = [pair for pair in zip(before, after, strict=True) if math.isfinite(pair[0])]
    if before == after or not pairs:
        return 0.0
    finite, others = zip(*pairs, strict=True)
    length = max(math.hypot(*finite), length if math.isfinite(length) else 0.0)
    found = math.dist(finite, others)
    if not found:
        return 0.0
    return found / length if length and not math.isnan(found) else math.inf


def difference_of_norms(first: Sketch, second: Sketch) -> float:
    """Return the largest difference of two norms, over the first of them where that is finite.

    A norm that is far below others is compared by a hundredth of the longest: it may cancel.
    """
    before, after = (e if isinstance(e, list) else cast("Any", e).tolist() for e in (first, second))
    pairs = [pair for pair in zip(before, after, strict=True) if math.isfinite(pair[0])]
    floor = 0.01 * max((one for one, _ in pairs), default=0.0)
    largest = 0.0
    for one, other in pairs:
        if one != other:
            length = max(one, floor)
            found = abs(one - other) / length if length else math.inf
            largest = max(largest, found if math.isfinite(found) else math.inf)
    return largest


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding may make (See Rule 3)."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype in HALVES:  # a kernel rounds once, at its end
        return 2 * torch.finfo(dtype).eps
    return torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps ** 0.75


_hiding: Any = hidden_keys
for _name, _key in torch._C.DispatchKey.__members__.items():
    if _name.startswith("Autocast"):
        _hiding |= torch._C.DispatchKeySet(_key)
# Returns a context without autograd, interceptors and autocast.
_alone = functools.partial(cast("Any", torch._C)._ExcludeDispatchKeyGuard, _hiding)
_num_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack")  # noqa: B009
_no_functions: Any = torch._C.DisableTorchFunctionSubclass


def _sums_of_any(tensor: Tensor) -> Tensor:
    """Return the sums for a tensor of any type and layout in memory."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = _flat(tensor.resolve_neg())
    if flat.dtype in _OWN:
        return _sums(flat)
    if not flat.dtype.is_floating_point:
        return _hash_of(flat)
    columns = _OF_HALVES if flat.dtype in HALVES else _COLUMNS
    if flat.dtype in HALVES and flat.is_cuda:
        return _sums(flat, columns)
    # Kernels of the CPU are slow in half precision, and sums in it overflow.
    pieces = cast("Iterable[Tensor]", flat.split(_PIECE if flat.is_cpu else _DEVICE_PIECE))
    parts = [_folded(_sums(piece.float(), columns)) for piece in pieces]
    weights = _row(len(parts), torch.float32, flat.device)
    return parts[0] if len(parts) == 1 else weights.mm(torch.stack(parts))[0]


def _hash_of(integers: Tensor) -> Tensor:
    """Return a hash of the bits of integers (See Rule 1); of few, their bytes."""
    columns = None
    # The kernel asks for more than 16 rows, which are aligned.
    if integers.is_cuda and integers.nbytes // _BYTES > 16 and integers.data_ptr() % 16 == 0:
        columns = _random_bytes(integers.device)
    if columns is not None:  # See Rule 5
        raw = integers.view(torch.int8)
        num_rows, num_left = divmod(raw.numel(), _BYTES)
        rows = raw.as_strided((num_rows, _BYTES), (_BYTES, 1))
        sums = cast("Any", torch)._int_mm(rows, columns)
        if not num_left:
            return sums
        left = _weighed(raw.view(-1)[num_rows * _BYTES :], _COLUMN)
        return torch.cat((sums.view(-1), left.view(torch.int32)))
    integers = integers.view(-1)
    if integers.storage_offset() * integers.dtype.itemsize % 4:
        integers = integers.clone()  # words are aligned
    raw = integers.view(torch.uint8)
    if integers.numel() <= _FEW:
        return raw.clone()
    num_words, num_left = divmod(raw.numel(), 4)
    words = (raw[: 4 * num_words] if num_left else raw).view(torch.int32)
    found = _weighed(raw[4 * num_words :], _COLUMN) if num_left else None
    most = _MOST_WORDS if raw.is_cpu else _DEVICE_WORDS
    pieces: tuple[Tensor, ...] = cast("Any", words).split(most)
    for piece in pieces:
        num_rows, num_left = divmod(piece.numel(), _WORDS)
        parts = [_weighed(piece[piece.numel() - num_left :], _COLUMN)] if num_left else []
        if num_rows:
            rows = piece[: piece.numel() - num_left].view(num_rows, _WORDS)
            parts.append(_weighed((rows * _odd(_COLUMN, raw.device)).sum(1), _ROW))
        for part in parts:
            found = part if found is None else found * _NEXT + part
    return cast("Tensor", found)


@functools.cache
def _random_bytes(device: torch.device) -> Tensor | None:
    """Return columns of random bytes; None on a device without products of bytes."""
    generator = torch.Generator().manual_seed(_SEED)
    shape = (_SUMS_OF_BYTES, _BYTES)
    found = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8, device="cpu")
    columns = found.to(device).t()
    try:
        cast("Any", torch)._int_mm(found.new_zeros(32, _BYTES, device=device), columns)
    except RuntimeError:
        return None
    return columns


def _weighed(integers: Tensor, table: int) -> Tensor:
    """Return the sum of integers, each times an odd number of its own, modulo 2**64."""
    return (integers * _odd(table, integers.device)[: integers.numel()]).sum(0, keepdim=True)


def _flat(tensor: Tensor) -> Tensor:
    """Return the entries: in the order of memory, without a copy, where they lie densely."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order: Sequence[int] = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(*order)
    return dense.view(-1) if dense.is_contiguous() else tensor.reshape(-1)


def _sums(flat: Tensor, columns: int = _COLUMNS) -> Tensor:
    """Return the weighted sums of the columns (See Rules 1 and 2)."""
    num, kind = flat.numel(), (flat.dtype, flat.device)
    if num < columns:
        return torch.cat((flat, flat.new_zeros(columns - num)))
    if num > columns * _MOST_ROWS and flat.is_cuda:
        return _sums_of_rows(flat)
    width = columns * _ROWS if num > columns * _MOST_ROWS else columns
    num_rows, num_left = divmod(num, width)
    rows = (flat[: num_rows * width] if num_left else flat).view(num_rows, width)
    found = _product(_row(num_rows, *kind), rows)
    if num_left:  # some entries count twice, and none of them for nothing
        found = found.add_(flat[num - width :], alpha=_OF_THE_LAST)
    if width > columns:
        found = _row(_ROWS, found.dtype, flat.device).mm(found.view(_ROWS, columns))
    return found[0]


def _sums_of_rows(dense: Tensor) -> Tensor:
    """Return the weighted sums of rows of many entries (See Rule 5)."""
    num = dense.numel()
    weights = _column(num, dense.dtype, dense.device)
    width = len(weights)
    num_rows, num_left = divmod(num, width)
    found = _product(dense.as_strided((num_rows, width), (width, 1)), weights)
    if num_left:
        last = dense.as_strided((1, width), (width, 1), dense.storage_offset() + num - width)
        found = torch.cat((found, _product(last, weights)))
    return found


def _product(rows: Tensor, weights: Tensor) -> Tensor:
    """Return a product with a matrix of one column, of halves in single precision."""
    if rows.dtype in HALVES:
        return cast("Any", torch).mm(rows, weights, out_dtype=torch.float32)
    return rows.mm(weights)


@functools.lru_cache(2**12)
def _column(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights of the entries of a row, of a tensor of so many entries."""
    width = max(_DEVICE_WIDTH, 2 ** math.ceil(math.log2(num / _DEVICE_ROWS)))
    return _table(width, dtype, device)[:, None]


def _folded(sketch: Tensor) -> Tensor:
    """Return the few numbers of a sketch on a device (See Rule 5)."""
    sketch = sketch.view(-1)
    with _alone():
        while sketch.dtype is torch.int32 and sketch.numel() > _FEW:
            sketch = _hash_of(sketch).view(-1)
        return _sums(sketch) if sketch.is_floating_point() and sketch.numel() > _FEW else sketch


@functools.cache
def _odd(table: int, device: torch.device) -> Tensor:
    """Return a table of random odd numbers of 64 bits."""
    generator = torch.Generator().manual_seed(_SEED + table)
    limits = torch.iinfo(torch.int64)
    found = torch.randint(limits.min, limits.max, (_WORDS,), generator=generator, device="cpu")
    return found.bitwise_or_(1).to(device)


@functools.lru_cache(2**12)
def _row(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weights of so many rows as a matrix of one row: `mm` is faster than `mv`."""
    num_made = max(_MOST_ROWS, 2 ** math.ceil(math.log2(num)))
    return _table(num_made, dtype, device)[None, :num]


@functools.cache
def _table(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random weights of either sign between a half and one and a half."""
    generator = torch.Generator().manual_seed(_SEED + num)
    of_cpu: dict[str, Any] = {"generator": generator, "device": "cpu"}  # whatever the default is
    found = torch.rand(num, dtype=torch.float64, **of_cpu).add_(0.5)
    signs = torch.randint(2, (num,), **of_cpu).mul_(2).sub_(1)
    return found.mul_(signs).to(device, dtype)
