"""State dicts under the names of other libraries, to the plain names of a model: a table.

A name that is not in the table stays as it is: a strict load reports it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from recoup._arguments import check_type

_LSTM = r"(?:weight|bias)_[ih]h_l\d+(?:_reverse)?"
# Regular expressions for whole names, and what they become.
_TORCH = (  # parametrizations and the weight norms of torch.nn.utils
    (r"((?:.*\.)?)parametrizations\.([^.]+)\.original0", r"\1\2_g"),
    (r"((?:.*\.)?)parametrizations\.([^.]+)\.original1?", r"\1\2"),
    (r"((?:.*\.)?weight\w*)_v", r"\1"),
)
_WRAPPERS = (  # of fastai, which has `weight_raw` in them, and of salesforce, in their `module`
    (rf"(.*?)(?:module\.)?({_LSTM})_raw", r"\1\2"),
    (rf"(.*?)module\.({_LSTM})", r"\1\2"),
    (r"(.*)_dp\.emb\.weight", r"\1.weight"),
)
_GLUON = (  # MXNet 2.0 before its beta, and what MXNet 1 saves
    (r"((?:.*\.)?)l(\d+)_(i2h|h2h|h2r)_(weight|bias)", r"\1\4_\3_l\2"),
    (r"((?:.*\.)?)r(\d+)_(i2h|h2h|h2r)_(weight|bias)", r"\1\4_\3_l\2_reverse"),
    (r"((?:.*\.)?)_unfused\.(\d+)\.(?:l_cell\.)?(i2h|h2h|h2r)_(weight|bias)", r"\1\4_\3_l\2"),
    (r"((?:.*\.)?)_unfused\.(\d+)\.r_cell\.(i2h|h2h|h2r)_(weight|bias)", r"\1\4_\3_l\2_reverse"),
    (r"((?:.*\.)?)(i2h|h2h|h2r)_(weight|bias)", r"\1\3_\2"),
    (r"(.*weight|.*bias)_(.)2(.)(.*)", r"\1_\2\3\4"),
)
_GLUON_ARRAYS = ((r"((?:.*\.)?)(gamma|alpha)", r"\1weight"), (r"((?:.*\.)?)beta", r"\1bias"))


def to_plain_names(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Give the tensors of an old file the names that they have in a model with recoup.

    These are those of the plain modules, and `weight_g` for the magnitude of a weight norm: a model
    without one gets the product if it is loaded with `recoup.weight_norm` and that is removed.
    Understood are the two weight norms of torch, `torch.nn.utils.parametrize`, the AWD-LSTM of
    fastai and of salesforce, and gluon. Everything else stays as it is, so it may be called for any
    file, and twice. Kept: nothing; the tensors share memory with those that were given.

    Args:
        state_dict: tensors by name, as from `torch.load`; or the arrays of a gluon model, as from
            `numpy.load` of an `.npz` file or `mxnet.nd.load` of a `.params` file.

    Returns:
        The tensors by their plain names, in the order in which they were given.

    Raises:
        ValueError: when two entries with different values would have one name, or an entry is
            neither a tensor nor an array.

    Example:
        >>> import recoup, torch
        >>> old = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))
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
    check_type(Mapping, "a mapping from names to tensors", state_dict=state_dict)
    given = cast("Mapping[Any, Any]", state_dict)
    has_wrappers = any(re.fullmatch(_WRAPPERS[0][0], str(name)) for name in given)
    found: dict[str, Tensor] = {}
    raw: set[str] = set()  # what is kept in a wrapper, beside the copy that it computes with
    for old, value in given.items():
        is_array = not isinstance(value, Tensor)
        array = value.asnumpy() if hasattr(value, "asnumpy") else value  # of mxnet
        if is_array and not hasattr(array, "__array__"):
            raise ValueError(
                f'`state_dict["{old}"]` is a {type(value).__name__}, but must be a tensor or an '
                "array. Leave it out, or give that part of the file alone."
            )
        tensor = torch.as_tensor(array)
        table = (*(_WRAPPERS if has_wrappers else ()), *_TORCH, *_GLUON)
        new = str(old)
        for pattern, becomes in (*table, *(_GLUON_ARRAYS if is_array else ())):
            new = re.sub(rf"\A(?:{pattern})\Z", becomes, new)
        if has_wrappers and new in raw:
            continue
        is_raw = has_wrappers and str(old).endswith("_raw")
        if new in found and not is_raw and not torch.equal(found[new], tensor):
            raise ValueError(
                f"`state_dict` has two entries with different values, `{old}` among them, which "
                f"would both be `{new}`. Leave one of them out."
            )
        raw.update([new] if is_raw else [])
        found[new] = tensor
    return found
