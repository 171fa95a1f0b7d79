"""What every builder of flows promises, whatever it builds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.flows import NICE, FlowPlusPlus, Glow, IResNet, RealNVP
from recoup.flows.latents import as_tuple
from recoup.invertible import check_invertible
from tests.unit.flows.models import (
    assert_same_in_every_mode,
    classes,
    digits,
    filled,
    loss_and_gradients,
    stirred,
)

BUILDERS = {
    "nice": (NICE, {"width": 8}),
    "realnvp": (RealNVP, {"width": 6, "num_steps": 2}),
    "glow": (Glow, {"width": 6, "num_steps": 2}),
    "flow++": (FlowPlusPlus, {"width": 6, "num_steps": 2, "num_components": 3}),
    "iresnet": (IResNet, {"width": 8, "num_steps": 2}),
}
SMALL, VECTOR = (1, 4, 4), (5,)

recomputes = pytest.mark.filterwarnings("ignore:Under memory=.constant.:UserWarning")


def built(name, shape=(1, 8, 8), **options):
    torch.manual_seed(0)
    build, own = BUILDERS[name]
    return build(shape, **{"levels": 17} | own | options)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("nice", SMALL, {}),
        ("nice", (7,), {"levels": None, "num_couplings": 3, "depth": 1}),
        ("realnvp", SMALL, {}),
        ("realnvp", (2, 2, 4), {"num_levels": 1, "depth": 1}),
        ("realnvp", (2,), {"levels": None, "num_steps": 6}),
        ("realnvp", (3,), {"levels": 256}),
        ("glow", SMALL, {}),
        ("glow", SMALL, {"coupling": "additive", "conv1x1": "lu"}),
        ("glow", SMALL, {"alpha": None, "num_levels": 1}),
        ("glow", (1, 8, 8), {"num_levels": 3, "dropout": 0.3}),
        ("flow++", SMALL, {}),
        ("flow++", (2, 2, 2), {"num_levels": 1, "depth": 1}),
        ("flow++", VECTOR, {"levels": None, "num_steps": 3}),
        ("iresnet", VECTOR, {"levels": None, "depth": 1}),
        ("iresnet", SMALL, {"num_levels": 2, "log_det": "exact", "depth": 1}),
    ],
    ids=str,
)
def test_the_chain_is_invertible_with_parameters_of_both_signs(name, shape, options):
    """Inverse, log-determinant and gradients, in double precision to 1e-8."""
    x = 0.05 + 0.9 * torch.rand(2, *shape, dtype=torch.float64)
    report = check_invertible(filled(built(name, shape, **options)).chain, x)
    assert report, str(report)


@recomputes
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("nice", (1, 8, 8), {"exact": True, "dropout": 0.4}),
        ("nice", (1, 8, 8), {"exact": False, "dropout": 0.4, "num_classes": 3}),
        ("realnvp", (1, 8, 8), {"dropout": 0.4}),
        ("realnvp", VECTOR, {"dropout": 0.4, "num_classes": 3}),
        ("glow", (1, 8, 8), {"dropout": 0.5}),
        ("glow", SMALL, {"dropout": 0.3, "coupling": "additive", "num_classes": 3}),
        ("flow++", SMALL, {"dropout": 0.4}),
        ("flow++", SMALL, {"dropout": 0.4, "num_classes": 3, "variational": True}),
        ("flow++", VECTOR, {"dropout": 0.4, "num_classes": 3}),
        ("iresnet", SMALL, {"log_det": "exact", "num_terms": 3}),
        ("iresnet", SMALL, {"log_det": "series", "num_terms": 3}),
        ("iresnet", SMALL, {"log_det": "unbiased", "num_terms": 3}),
    ],
    ids=str,
)
def test_gradients_are_those_of_linear_memory_with_dropout_too(name, shape, options):
    flow = stirred(built(name, shape, **options))
    assert any(isinstance(m, nn.Dropout) for m in flow.modules()) is ("dropout" in options)
    labels = classes(6, 3) if "num_classes" in options else None
    assert_same_in_every_mode(flow, digits(shape=shape), labels)


@recomputes
@pytest.mark.parametrize("name", BUILDERS)
def test_the_first_step_is_the_same_in_every_mode(name):
    # It holds the data-dependent start, which must happen once and be that of the batch.
    results = {
        memory: loss_and_gradients(built(name, SMALL, memory=memory).double(), digits(shape=SMALL))
        for memory in ("linear", "sqrt", "constant")
    }
    for memory in ("sqrt", "constant"):
        assert results[memory][0] == pytest.approx(results["linear"][0], rel=1e-12)
        for name, gradient in results["linear"][1].items():
            torch.testing.assert_close(
                results[memory][1][name], gradient, rtol=1e-10, atol=1e-10, msg=name
            )


@pytest.mark.parametrize(
    ("name", "options", "latents"),
    [
        ("nice", {}, [(64,)]),
        ("nice", {"exact": True, "num_classes": 4}, [(64,)]),
        ("realnvp", {}, [(2, 4, 4), (2, 4, 4)]),
        ("glow", {}, [(2, 4, 4), (8, 2, 2)]),
        ("flow++", {"variational": False}, [(4, 4, 4)]),
        ("flow++", {"variational": True}, [(4, 4, 4)]),
        ("iresnet", {"num_levels": 2}, [(16, 2, 2)]),
    ],
    ids=str,
)
def test_digits_of_17_levels(name, options, latents):
    flow, x = stirred(built(name, **options)).eval(), digits(5)
    labels = classes(5, 4) if "num_classes" in options else None
    assert flow.levels == 17
    assert flow.bits_per_dim(x, labels).isfinite().all()
    assert [z.shape[1:] for z in as_tuple(flow(x, labels)[0])] == latents
    assert torch.equal(flow.reconstruct(x, labels), x)
    samples = flow.sample(5, labels=labels, temperature=0.7)
    assert samples.shape == (5, 1, 8, 8)
    assert set(samples.flatten().tolist()) <= set(range(17))


@pytest.mark.parametrize(
    ("name", "memory"), [("glow", "linear"), ("glow", "constant"), ("iresnet", "sqrt")]
)
def test_every_parameter_moves(name, memory):
    flow = built(name, memory=memory)
    optimizer = torch.optim.SGD(flow.parameters(), lr=0.1)
    for _ in range(2):  # behind a zero convolution a gradient comes with the second step
        optimizer.zero_grad()
        before = {name: p.detach().clone() for name, p in flow.named_parameters()}
        flow.bits_per_dim(digits().float()).mean().backward()
        optimizer.step()
    same = [name for name, p in flow.named_parameters() if torch.equal(p, before[name])]
    assert same == []


@pytest.mark.parametrize("name", BUILDERS)
def test_same_seed_builds_the_same_flow(name):
    first, second = built(name).state_dict(), built(name).state_dict()
    assert all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("nice", (1,), {}, r"`shape` is \(1,\)"),
        ("nice", (), {}, r"`shape` is \(\)"),
        ("nice", SMALL, {"num_couplings": 0}, "`num_couplings` is 0"),
        ("nice", SMALL, {"depth": 0}, "`depth` is 0"),
        ("nice", SMALL, {"levels": 0}, "`levels` is 0"),
        ("nice", SMALL, {"levels": 131072, "exact": True}, "`levels` is 131072, but with `exact`"),
        ("realnvp", (1,), {}, "at least 2 values"),
        ("realnvp", (8, 8), {}, r"`shape` is \(8, 8\)"),
        ("realnvp", (1, 6, 8), {}, "multiples of 4"),
        ("realnvp", SMALL, {"num_steps": 0}, "`num_steps` is 0"),
        ("realnvp", SMALL, {"num_levels": 0}, "`num_levels` is 0"),
        ("realnvp", SMALL, {"alpha": 0.5}, "`alpha` is 0.5"),
        ("realnvp", SMALL, {"memory": "big"}, "`memory` is 'big'"),
        ("glow", (8, 8), {}, r"`shape` is \(8, 8\)"),
        ("glow", (5,), {}, r"`shape` is \(5,\)"),
        ("glow", (1, 8, 8), {"num_levels": 4}, "multiples of 16"),
        ("glow", SMALL, {"num_levels": 0}, "`num_levels` is 0"),
        ("glow", SMALL, {"num_steps": 0}, "`num_steps` is 0"),
        ("glow", SMALL, {"coupling": "linear"}, "`coupling` is 'linear'"),
        ("glow", SMALL, {"conv1x1": "qr"}, "`conv1x1` is 'qr'"),
        ("glow", SMALL, {"levels": 0}, "`levels` is 0"),
        ("glow", SMALL, {"memory": "big"}, "`memory` is 'big'"),
        ("flow++", (1,), {}, "at least 2 values"),
        ("flow++", (1, 6, 8), {}, "multiples of 4"),
        ("flow++", SMALL, {"num_components": 0}, "`num_components` is 0"),
        ("flow++", SMALL, {"num_steps": 0}, "`num_steps` is 0"),
        ("flow++", SMALL, {"variational": True, "levels": None}, "`variational` is for images"),
        ("flow++", VECTOR, {"variational": True}, "`variational` is for images"),
        ("iresnet", (1, 6, 6), {"num_levels": 2}, "multiples of 4"),
        ("iresnet", (2,), {"num_levels": 2}, "`num_levels` 1"),
        ("iresnet", (2, 2), {}, r"`shape` is \(2, 2\)"),
        ("iresnet", SMALL, {"num_steps": 0}, "`num_steps` is 0"),
        ("iresnet", SMALL, {"depth": 0}, "`depth` is 0"),
        ("iresnet", SMALL, {"coefficient": 1.0}, "`coefficient` is 1.0"),
        ("iresnet", SMALL, {"log_det": "none"}, "`log_det` is 'none'"),
        ("iresnet", SMALL, {"memory": "big"}, "`memory` is 'big'"),
    ],
    ids=str,
)
def test_unsuitable_arguments_are_refused(name, shape, options, words):
    with pytest.raises(ValueError, match=words):
        built(name, shape, **options)
