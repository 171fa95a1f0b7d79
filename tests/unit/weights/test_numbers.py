"""From a seed to the numbers of a weight, and from the weight to those of a step."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.weights import Draw, same_draw
from tests.chance import are_gaussian, has_share
from tests.weight_zoo import LAYERS, MORE, OURS, Kind, Reads, Runs, Way, built, compare, given, used

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]

CHUNK = 2**17  # entries that are drawn at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read(module, seed):
    """The weight of a module in a step of a seed. No state moves."""
    with same_draw(seed), torch.no_grad():
        before, stream = random.getstate(), torch.get_rng_state()
        found = module()
    assert torch.equal(torch.get_rng_state(), stream)
    assert random.getstate() == before
    return found


def weight(value, *shape, dtype=torch.float32):
    return Reads(torch.full(shape, value, dtype=dtype))


def mask(seed, p, *shape, **of_type):
    return read(recoup.weight_dropout(weight(1.0, *shape, **of_type), p=p), seed)


def noise(seed, *shape, **of_type):
    return read(recoup.weight_noise(weight(0.0, *shape, **of_type), std=1.0), seed)


# The entries that a mask keeps, as a hash; the changelog says so when a seed draws other numbers.
KEPT = {
    (0, 0.3, (CHUNK + 3,)): "7db98dfc",
    (1, 1 / 65536, (2 * CHUNK,)): "08b5c66f",
    (2**63 - 1, 0.5, (2 * CHUNK + 5,)): "52e5ea9c",
    (7, 255 / 256, (4096,)): "0ad77cdd",
}


@pytest.mark.parametrize(("seed", "p", "shape"), KEPT)
def test_a_seed_says_which_entries_are_kept_in_any_type(seed, p, shape):
    for dtype in DTYPES:
        found = mask(seed, p, *shape, dtype=dtype)
        is_kept = found != 0
        # So large that the mean stays.
        scale = torch.tensor(1 / (1 - round(p * 65536) / 65536)).to(dtype)
        want = torch.where(is_kept, scale, torch.zeros_like(scale))
        torch.testing.assert_close(found, want, rtol=1e-6, atol=0)
        packed = np.packbits(is_kept.numpy()).tobytes()
        assert hashlib.blake2b(packed, digest_size=4).hexdigest() == KEPT[seed, p, shape]
    assert has_share(is_kept, 1 - round(p * 65536) / 65536)


def test_noise_is_gaussian_in_every_chunk():
    found = noise(7, CHUNK + 70_000, dtype=torch.float64)
    assert are_gaussian(found)
    first, second = found.split(CHUNK)
    assert are_gaussian((first[: len(second)] - second) / 2**0.5)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(noise(7, 300, dtype=dtype), noise(7, 300).to(dtype))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (64, 64), (190, 211), (701, 803)], ids=str)
@pytest.mark.parametrize("p", [1e-9, 0.3, 0.5, 65535 / 65536, 1.0])
def test_a_draw_scales_or_is_added_to_any_weight_alike(shape, dtype, p):
    raw = torch.randn(shape, dtype=torch.float64).to(dtype)
    for apply, start, combine in (
        (lambda m: recoup.weight_dropout(m, p=p), 1.0, torch.mul),
        (lambda m: recoup.weight_noise(m, std=p), 0.0, torch.add),
    ):
        module = apply(weight(start, *shape, dtype=dtype))
        drawn = read(module, 11)
        module.get_parameter("weight").data.copy_(raw)
        found = read(module, 11)
        assert torch.equal(found, combine(raw, drawn))
        assert found.dtype is dtype
        assert found.is_contiguous()
        assert drawn.isfinite().all()
        assert torch.equal(module.get_parameter("weight"), raw)


def test_threads_and_settings_of_torch_make_no_difference():
    def draws(shape=(701, 803)):
        uniform = Draw(torch.zeros(shape, dtype=torch.float32), 6).uniform()
        return [mask(6, 0.3, *shape), *(noise(6, *shape, dtype=d) for d in DTYPES[::3]), uniform]

    want, before = draws(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        for num_threads, setting in ((2, torch.inference_mode()), (3, torch.autocast("cpu"))):
            torch.set_num_threads(num_threads)
            with setting:
                assert all(map(torch.equal, draws(), want)), setting
    finally:
        torch.set_num_threads(before)
        torch.set_default_dtype(torch.float32)


def decoded(embedding, ids):
    hidden = embedding(ids)
    return hidden, F.linear(hidden, embedding.weight)


def of_type(dtype):
    def make_input():
        return (torch.randn(4, 6, dtype=dtype, requires_grad=True),)

    return Kind(lambda: nn.Linear(6, 5, dtype=dtype), make_input)


def bags():
    return torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4])


WORDS = torch.tensor([[[1, 2], [2, 10]], [[1, 1], [9, 2]]], dtype=torch.int32)


def table(ids, **settings):
    return Kind(lambda: nn.Embedding(11, 6, **settings), lambda: (ids,))


KINDS = LAYERS | {
    "prelu": Kind(lambda: nn.PReLU(6), given((4, 6))),
    "embedding bag, sparse": Kind(lambda: nn.EmbeddingBag(11, 6, mode="sum", sparse=True), bags),
    "embedding, its weight read, too": Kind(
        lambda: Runs(nn.Embedding(9, 4), decoded), lambda: (torch.tensor([[1, 3], [8, 0]]),),
        ".*weight",
    ),
    "bfloat16": of_type(torch.bfloat16),
    "float16": of_type(torch.float16),
    "embedding, no words": table(torch.zeros(0, 4, dtype=torch.int64)),
    "embedding, padded, sparse": table(WORDS, padding_idx=2, sparse=True),
    "embedding, by frequency": table(WORDS, scale_grad_by_freq=True),
    "embedding, bfloat16": table(WORDS, dtype=torch.bfloat16),
}  # fmt: skip
WAYS = MORE | {
    "learned entries": Way(noise={"std": 0.3, "learned": "weight"}),
    "learned, one": Way(noise={"std": 0.3, "learned": "tensor"}),
    "rows": Way(dropout={"p": 0.5, "axes": (-1,)}),
    "rows and noise": Way(dropout={"p": 0.5, "axes": (-1,)}, noise={"std": 0.3}),
}
# But where gradients are added in another order:
EXACT = ["dropout", "noise", "norm", "thirds", "rows", "rows and noise"]
ADDED = {"embedding bag, sparse": 1e-6, "embedding, its weight read, too": 1e-5}
OF_TYPES = dict.fromkeys(("bfloat16", "float16", "embedding, bfloat16"), 0.05)
# A norm of torch takes no sparse gradient.
SPARSE = ["dropout", "noise", "thirds", "shared", "rows", "rows and noise"]
CASES = [("embedding bag, sparse", "function")]  # the first of them is in every sample
CASES += [(n, w) for n, w in itertools.product(KINDS, WAYS) if "sparse" not in n or w in SPARSE]


@pytest.mark.sampled(100)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_step_is_that_of_the_materialised_weights(name, way):
    plain, inputs = built(KINDS[name], dropout=False)
    is_long = WAYS[way].norm is not None or "attention" in name
    rtol = 1e-4 if is_long or WAYS[way].function is not None else 1e-5
    rtol = 0.0 if way in EXACT else OF_TYPES.get(name, rtol)
    compare(WAYS[way], plain, inputs, KINDS[name].pattern, rtol=max(rtol, ADDED.get(name, 0.0)))


def test_nothing_that_is_drawn_is_the_plain_module():
    way = Way(dropout={"p": 0.0}, noise={"std": 0.0})
    for module, x in ((nn.Linear(4, 3), torch.randn(2, 4)), (nn.Embedding(9, 3), torch.arange(3))):
        want, state = module(x), torch.get_rng_state()
        assert torch.equal(way(module)(x), want)
        assert torch.equal(state, torch.get_rng_state())


LAYOUTS = (
    torch.Tensor.contiguous,
    lambda w: w.to(memory_format=torch.channels_last),
    lambda w: w.repeat_interleave(2, 0).repeat_interleave(2, 2)[::2, :, ::2],
)
NORMS = [Way({"dim": 1}), Way({"dim": None}), Way({"dim": -1}, {"p": 0.5, "axes": (1,)})]


@pytest.mark.parametrize("way", [*OURS.values(), *NORMS])
def test_the_layout_of_a_weight_makes_no_difference(way):
    raw, results = torch.randn(4, 3, 3, 3, dtype=torch.float64), []
    for change in LAYOUTS:
        conv = nn.Conv2d(3, 4, 3, dtype=torch.float64, bias=False)
        conv.weight = nn.Parameter(change(raw))
        x = torch.linspace(-1, 1, 150, dtype=torch.float64).view(2, 3, 5, 5).requires_grad_()
        with same_draw(3):
            output = way(conv)(x)
        output.sin().sum().backward()
        results.append([output, x.grad, *(p.grad for p in conv.parameters())])
    for each in results[1:]:
        torch.testing.assert_close(each, results[0], rtol=1e-10, atol=1e-12)


AXES = [((12, 9), (0,)), ((12, 9), (1, -1)), ((12, 9), (0, 1)), ((20,), [0]), ((5, 6, 7), (2, 0)),
        ((5, 6, 7), (1,)), ((6, 5, 3, 3), (-1, -2, -3))]  # fmt: skip


@pytest.mark.parametrize(("size", "axes"), AXES)
def test_axes_share_the_mask(size, axes):
    module = nn.Embedding(*size).double() if len(size) == 2 else Reads(torch.randn(size).double())
    recoup.weight_dropout(module, p=0.5, axes=axes)
    together, seen = sorted({axis % len(size) for axis in axes}), []
    for _ in range(8):
        found = used(module)
        kept = (found != 0).double()
        shared = kept.amax(dim=together, keepdim=True)
        assert torch.equal(kept, shared.expand(size))
        assert torch.equal(found, module.get_parameter("weight") * kept * 2)
        seen.append(shared.flatten())
    assert 0 < torch.cat(seen).mean() < 1
    assert any(not torch.equal(seen[0], other) for other in seen[1:])
