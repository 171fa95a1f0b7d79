"""`recoup.offloading`: the plain gradients, and residuals that are not in memory."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import recoup
from recoup._core import tiers
from recoup.errors import ChangedError, OffloadError, RecoupError

SIZE = 64 * 64 * 4


def net(num_layers=4):
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.BatchNorm1d(64))


def step(model, x, around):
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    torch.manual_seed(1)
    with around:
        loss = model(x).square().sum()
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    assert not list(tmp_path.iterdir()), "a file has a name"
    gc.collect()
    for _ in range(200):
        if not any(each.name.startswith("recoup-offload") for each in threading.enumerate()):
            return
        time.sleep(0.01)
    raise AssertionError("a thread is left")


@pytest.mark.parametrize("min_bytes", [1, SIZE, "1 MiB"])
def test_the_plain_gradients(folder, min_bytes):
    model, x = net(), torch.randn(64, 64)
    wanted = step(model, x, nullcontext())
    assert_equal(step(model, x, recoup.offloading(min_bytes, folder)), wanted)
    assert_equal(step(model, x, recoup.offloading(min_bytes)), wanted)


def test_what_is_held(folder):
    model, x = net(20), torch.randn(64, 64)

    def forward(around):
        with around:
            return model(x)

    def held(around):
        return recoup.measure(lambda: forward(around()), repeats=0).held_bytes

    plain = held(nullcontext)
    found = held(lambda: recoup.offloading(SIZE, folder))
    assert plain >= 40 * SIZE
    assert found <= 5 * SIZE  # the output, two in flight, and what one operator makes
    assert held(lambda: recoup.offloading(SIZE + 1, folder)) == plain
    assert held(lambda: recoup.offloading(SIZE, folder, in_flight_bytes=8 * SIZE)) <= 11 * SIZE
    assert held(recoup.offloading) == plain  # it is in host memory already


def test_the_peak_of_a_step(folder):
    model, x = net(20), torch.randn(64, 64)
    peaks = [
        recoup.measure(lambda: step(model, x, around()), repeats=0).peak_bytes  # noqa: B023
        for around in (nullcontext, lambda: recoup.offloading(SIZE, folder))
    ]
    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert peaks[1] - gradients <= 12 * SIZE <= peaks[0] - gradients


def test_the_census(folder):
    model, x = net(2), torch.randn(64, 64)

    def forward():
        with recoup.offloading(SIZE, folder):
            return model(x)

    found = recoup.residuals(forward)
    assert found.total_bytes("offload") >= 5 * SIZE
    assert found.total_bytes("keep") < SIZE


def test_parameters_stay(folder, monkeypatch):
    sent = []
    send = tiers.FolderTier.send
    monkeypatch.setattr(
        tiers.FolderTier,
        "send",
        lambda tier, tensor: sent.append(tensor.numel()) or send(tier, tensor),
    )
    layer = nn.Linear(64, 64)
    x = torch.randn(3, 64).requires_grad_()
    with recoup.offloading(1, folder):
        layer(x * 1).sum().backward()
    assert sent == [3 * 64 * 4]


@pytest.mark.parametrize("way", ["checkpoint", "torch", "sqrt", "recompute", "noise", "plan"])
def test_with_what_runs_again(folder, way):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    model, x = nn.Sequential(*blocks, nn.BatchNorm1d(64)), torch.randn(64, 64)

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model

        def forward(self, x):
            for block in self.blocks[:-1]:
                with recoup.offloading(SIZE, folder):
                    if way == "checkpoint":
                        x = recoup.checkpoint(block, x)
                    elif way == "torch":
                        x = checkpoint(block, x, use_reentrant=False)
                    else:
                        x = recoup.recompute(block)(x)
            return self.blocks[-1](x)  # whose statistics torch's checkpoint would count twice

    wanted = step(model, x, nullcontext())
    if way == "sqrt":
        model = recoup.Sequential(*model, memory="sqrt")
    elif way == "noise":
        recoup.weight_noise(model, ".*weight", 0.1)
        wanted = step(model, x, nullcontext())
    elif way == "plan":
        whole = recoup.plan(model, x, budget="1 GiB")
        recoup.plan(model, x, budget=whole.least_bytes).apply()
    else:
        model = Called()
    assert_equal(step(model, x, recoup.offloading(SIZE, folder)), wanted)


@pytest.mark.parametrize(
    "run", [recoup.checkpoint, lambda f, x: checkpoint(f, x, use_reentrant=False)]
)
def test_nothing_moves_within_what_runs_again(folder, run, monkeypatch):
    sent = []
    monkeypatch.setattr(tiers.FolderTier, "send", lambda *_: sent.append(1))
    model = net(2)

    def within(x):
        with recoup.offloading(1, folder):
            return model(x)

    run(within, torch.randn(64, 64, requires_grad=True)).sum().backward()
    assert not sent


def test_hooks_beneath_see_what_stays(folder):
    seen = []

    def look(tensor):
        seen.append(tensor.numel() * 4)
        return tensor

    model, x = net(), torch.randn(64, 64)
    wanted = step(model, x, nullcontext())
    with saved_tensors_hooks(look, lambda tensor: tensor):
        found = step(model, x, recoup.offloading(SIZE + 1, folder))
        num_all = len(seen)
        step(model, x, recoup.offloading(1, folder))
    assert_equal(found, wanted)
    assert num_all > 10
    assert len(seen) - num_all < num_all


def test_autocast_and_compiled_code(folder):
    model, x = net(), torch.randn(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = step(model, x, nullcontext())
        assert_equal(step(model, x, recoup.offloading(1, folder)), wanted)
    compiled = torch.compile(net(), backend="aot_eager")
    wanted = step(compiled, x, nullcontext())
    assert_equal(step(compiled, x, recoup.offloading(1, folder)), wanted)


def test_within_a_compiled_function(folder):
    model, x = net(), torch.randn(64, 64)
    wanted = step(model, x, nullcontext())

    class Within(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with recoup.offloading(1, folder):
                return self.model(x)

    found = step(torch.compile(Within(), backend="aot_eager"), x, nullcontext())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_context_that_is_used_again(folder):
    around = recoup.offloading(SIZE, folder)
    model, x = net(), torch.randn(64, 64)
    wanted = step(model, x, nullcontext())
    with around, around:
        pass
    for _ in range(2):
        assert_equal(step(model, x, around), wanted)


def test_backward_in_another_thread(folder):
    model, x = net(), torch.randn(64, 64)
    wanted = step(model, x, nullcontext())
    model.zero_grad()
    model[-1].reset_running_stats()
    torch.manual_seed(1)
    with recoup.offloading(SIZE, folder):
        loss = model(x).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_equal(
        [p.grad for p in model.parameters()], wanted[1 : 1 + len(list(model.parameters()))]
    )
    del loss, thread


def test_views_of_other_types(folder):
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def loss():
        y = torch.view_as_complex((x * 1).view(4, 3, 2)).exp()
        picked = (x * 2)[:, torch.tensor([0, 2, 2])]
        masked = (x * 3).masked_fill(x > 0, 0.0)
        return (
            (y * y.conj()).real.sum() + picked.expand(2, 4, 3).prod(-1).sum() + masked.exp().sum()
        )

    with recoup.offloading(1, folder):
        found = loss()
    assert_equal(torch.autograd.grad(found, x), torch.autograd.grad(loss(), x))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.GRUCell, nn.LSTMCell])
def test_kernels_that_write_into_parts_of_a_storage(folder, kind):
    torch.manual_seed(0)
    layer = kind(8, 16).double()
    x = torch.randn(32, 8, dtype=torch.float64)
    x = x if "Cell" in kind.__name__ else x.view(4, 8, 8)

    def grads(around):
        layer.zero_grad()
        with around:
            output = layer(x)
            loss = (output[0] if isinstance(output, tuple) else output).square().sum()
        loss.backward()
        return [parameter.grad for parameter in layer.parameters()]

    wanted = grads(nullcontext())
    for _ in range(5):
        assert_equal(grads(recoup.offloading(1, folder)), wanted)


def test_parts_with_versions_of_their_own(folder):
    x = torch.randn(64, 64, requires_grad=True)
    with recoup.offloading(1, folder):
        a, b = torch.unsafe_chunk(x * 1, 2, 1)
        a = a.sigmoid_()
        time.sleep(0.02)  # what is copied now has not been written to as a whole
        loss = (a * b.sigmoid_()).sum()
    (found,) = torch.autograd.grad(loss, x)
    a, b = x.chunk(2, 1)
    assert_equal([found], torch.autograd.grad((a.sigmoid() * b.sigmoid()).sum(), x))
    weight = torch.ones(64, 64, requires_grad=True)
    with recoup.offloading(1, folder):
        y = x * 1
        z = y.sin()
        data = y.data
        data.mul_(2)  # the version of `y` does not show it
        loss = (y.data * weight).sum()
    loss.backward()
    assert torch.equal(weight.grad, y.data)
    del z


def test_a_change_in_place_is_an_error_or_right(folder):
    x = torch.randn(64, 64, requires_grad=True)
    with recoup.offloading(1, folder):
        y = x * 1
        z = y.sin()
    y.mul_(2)
    wanted = torch.autograd.grad((x * 1).sin().sum(), x)
    try:
        found = torch.autograd.grad(z.sum(), x)
    except ChangedError:
        return
    assert_equal(found, wanted)


def test_a_full_disk(folder, monkeypatch):
    num_written = 0

    def full(file, place, source):
        nonlocal num_written
        num_written += 1
        if num_written > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, place, source)

    write = tiers._write
    monkeypatch.setattr(tiers, "_write", full)
    model, x = net(), torch.randn(64, 64)
    wanted = step(model, x, nullcontext())
    model.zero_grad()
    model[-1].reset_running_stats()
    torch.manual_seed(1)
    with (
        pytest.raises(
            OffloadError, match=f"written to {folder}: .*No space left on device.*`min_bytes`"
        ),
        recoup.offloading(1, folder),
    ):
        loss = model(x).square().sum()
    loss.backward()
    assert_equal(
        [p.grad for p in model.parameters()], wanted[1 : 1 + len(list(model.parameters()))]
    )


def test_an_exception_leaves_nothing(folder):
    model, x = net(), torch.randn(64, 64)
    with pytest.raises(RuntimeError, match="size"), recoup.offloading(1, folder):
        (model(x) @ torch.ones(3)).sum()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_no_grad_does_nothing(folder):
    with torch.no_grad(), recoup.offloading(1, folder):
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_functional_transforms(folder):
    def loss(x):
        with recoup.offloading(1, folder):
            return x.sin().sum()

    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(loss)(torch.ones(3))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"min_bytes": "many"}, "`min_bytes` is 'many', which is no number of bytes"),
    ({"min_bytes": 0}, "`min_bytes` is 0, but it must be at least 1 byte"),
    ({"to": None}, "`to` is None, which is no folder"),
    ({"to": "/nowhere"}, "`to` is '/nowhere', which is no folder. Make the folder first"),
    ({"in_flight_bytes": -1}, "`in_flight_bytes` is -1, which is no number of bytes"),
])  # fmt: skip
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        recoup.offloading(**arguments)


def test_a_folder_that_goes_away():
    with tempfile.TemporaryDirectory() as name:
        around = recoup.offloading(1, name)
    with pytest.raises(OffloadError, match="No file can be made in"), around:
        pass


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OffloadError, match="No file can be made"), recoup.offloading(1, tmp_path):
        pass
