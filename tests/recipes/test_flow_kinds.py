"""Every flow of the recipe on pictures and points, with labels and without."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.cli import main
from recoup.recipes.flow.builders import build_flow
from recoup.recipes.flow.density import density_picture, log_density
from recoup.recipes.flow.trained import load_data, load_flow

FLOWS = {
    "nice": ["--model.num_couplings", "2", "--model.depth", "1"],
    "realnvp": ["--model.num_steps", "1", "--model.depth", "1"],
    "flowpp": ["--model.num_steps", "1", "--model.depth", "1", "--model.num_components", "2"],
    "iresnet": ["--model.num_steps", "1", "--model.coefficient", "0.7"],
}


def fit(flow, *args):
    tiny = ["--model.width", "8", "--model.num_warmup_steps", "5", "--threads", "1"]
    options = [*FLOWS[flow], *tiny, "--batch-size", "600", "--epochs", "1", "--out", "mine"]
    assert main(["flow", "fit", "--model.flow", flow, *options, *args]) == 0
    return "mine/checkpoints/best.ckpt"


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:Under memory=.constant.:UserWarning")
@pytest.mark.parametrize("flow", FLOWS)
def test_each_flow_learns_pictures(flow, capsys):
    extra = {"flowpp": ["--model.variational", "true"], "nice": ["--model.exact", "true"]}
    checkpoint = fit(flow, "--memory", "constant", *extra.get(flow, []))
    printed = capsys.readouterr().out
    assert f"flow: {flow}, " in printed
    model = load_flow(Checkpoint(checkpoint))
    assert model.flow.memory == "constant"
    found = float(re.search(r"test: ([\d.]+) bits/dim", printed)[1])
    assert 0 < found < 6
    assert main(["flow", "sample", "--checkpoint", checkpoint, "--num", "4"]) == 0
    with Image.open("samples.png") as image:
        assert image.size == (146, 146)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flow", FLOWS)
def test_each_flow_learns_points(flow, capsys):
    checkpoint = fit(flow, "--data", "moons")
    printed = capsys.readouterr()
    assert "data: moons, points in the plane; 16000 for train" in printed.out
    assert "nats/point" in printed.err
    assert main(["flow", "evaluate", "--checkpoint", checkpoint]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2000 points, the test part of moons\n")
    bits = float(re.search(r"bits/dim +(\S+)", text)[1])
    nats = float(re.search(r"nats/point +(\S+)", text)[1])
    assert nats == pytest.approx(bits * 2 * np.log(2), abs=2e-4)
    flow = load_flow(Checkpoint(checkpoint)).flow
    with torch.no_grad():
        expected = -flow.log_prob(load_data(Checkpoint(checkpoint)).parts["test"]).mean()
    assert nats == pytest.approx(float(expected), abs=1e-3)
    assert main(["flow", "sample", "--checkpoint", checkpoint]) == 0
    assert "density of moons" in capsys.readouterr().out
    with Image.open("samples.png") as image:
        assert image.width > 900


@pytest.mark.parametrize("name", ["glow", "realnvp", "flowpp", "iresnet"])
def test_the_margin_of_the_logit_is_a_setting(name):
    shape = {"shape": (1, 4, 4), "levels": 17, "num_classes": None, "memory": "linear"}
    built = [build_flow(name, **shape, settings=each) for each in ({}, {"alpha": 1e-6})]
    assert [flow.chain[0].alpha for flow in built] == [0.05, 1e-6]


def test_points_of_ones_own_whatever_their_scale(capsys):
    """Longitudes and latitudes, say: the density found is near that of the normal they are."""
    spread = np.array([[30.0], [0.1]])
    points = np.random.default_rng(0).normal(0.0, 1.0, (2, 1800)) * spread + [[100.0], [50.0]]
    np.savetxt("own.csv", points.T, delimiter=",", header="longitude,latitude", comments="")
    checkpoint = fit("realnvp", "--data", "own.csv", "--epochs", "8")
    assert "data: own.csv, points in the plane; 1440 for train" in capsys.readouterr().out
    others = np.random.default_rng(1).normal(0.0, 1.0, (2, 600)) * spread + [[100.0], [50.0]]
    np.savez("others.npz", points=others.T)
    assert main(["flow", "evaluate", "--checkpoint", checkpoint, "--data", "others.npz"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("600 points, all of others.npz\n")
    nats = float(re.search(r"nats/point +(\S+)", text)[1])
    assert nats == pytest.approx(1 + np.log(2 * np.pi * 30.0 * 0.1), abs=0.3)
    assert main(["flow", "sample", "--checkpoint", checkpoint]) == 0
    assert "density of own.csv" in capsys.readouterr().out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("flow", ["realnvp", "nice"])
def test_a_conditional_flow_is_given_labels(flow, capsys):
    checkpoint = fit(flow, "--model.conditional", "true")
    assert "17 levels, 10 classes" in capsys.readouterr().out
    model = load_flow(Checkpoint(checkpoint))
    assert model.flow.num_classes == 10
    assert main(["flow", "evaluate", "--checkpoint", checkpoint]) == 0
    sample = ["flow", "sample", "--checkpoint", checkpoint, "--num", "20", "--out"]
    assert main([*sample, "all.png"]) == 0
    assert main([*sample, "some.png", "--labels", "3"]) == 0
    assert main([*sample, "two.png", "--labels=0,1"]) == 0
    for name, size in {"all": (2, 10), "some": (20, 1), "two": (10, 2)}.items():
        with Image.open(f"{name}.png") as image:
            assert image.size == (size[0] * 70 + 6, size[1] * 70 + 6)
    assert "20 samples at temperature 0.7: two.png" in capsys.readouterr().out
    for labels in ("10", "-1", "a", "1,,2"):
        assert main([*sample, "x.png", f"--labels={labels}"]) == 2
        assert f"`--labels` is {labels}, but must be classes from 0 to 9" in capsys.readouterr().err


def test_other_data_must_have_the_classes_of_the_flow(capsys):
    checkpoint = fit("nice", "--model.conditional", "true")
    np.savez("some.npz", images=np.zeros((9, 8, 8), np.uint8), labels=np.arange(9) + 5, levels=17)
    capsys.readouterr()
    assert main(["flow", "evaluate", "--checkpoint", checkpoint, "--data", "some.npz"]) == 2
    assert "some.npz has 14 classes" in capsys.readouterr().err
    np.savez("some.npz", images=np.zeros((9, 8, 8), np.uint8), labels=np.arange(9), levels=17)
    assert main(["flow", "evaluate", "--checkpoint", checkpoint, "--data", "some.npz"]) == 0
    assert capsys.readouterr().out.startswith("9 pictures, all of some.npz")


@pytest.mark.slow
def test_a_conditional_run_is_gone_on_with(capsys):
    fit("nice", "--data", "rings", "--model.conditional", "true")
    assert main(["flow", "fit", "--resume", "mine/checkpoints/last.ckpt", "--epochs", "2"]) == 0
    assert len(Path("mine/metrics.csv").read_text().splitlines()) == 3
    sample = ["flow", "sample", "--checkpoint", "mine/checkpoints/last.ckpt"]
    assert main([*sample, "--labels", "1"]) == 0
    capsys.readouterr()
    for option in ("--num", "--temperature"):
        assert main([*sample, option, "2"]) == 2
        assert "whose density is drawn. Leave it out." in capsys.readouterr().err


class Halves(torch.nn.Module):
    """Two classes: the unit square on the left of the origin, and that on its right."""

    num_classes = 2

    def __init__(self):
        super().__init__()
        self.base = SimpleNamespace(like=torch.zeros(0))

    def log_prob(self, x, labels):
        left = x[:, 0].floor() == labels - 1
        return torch.where(left & (x[:, 1].floor() == 0), 0.0, -torch.inf)


def test_the_density_of_all_classes_is_their_mixture():
    points = torch.tensor([[-0.5, 0.5], [0.5, 0.5], [0.5, 1.5]])
    mixed = log_density(Halves(), points, torch.tensor([0.25, 0.75])).exp()
    torch.testing.assert_close(mixed, torch.tensor([0.25, 0.75, 0.0]))
    alone = log_density(Halves(), points, torch.tensor([0.0, 1.0])).exp()
    torch.testing.assert_close(alone, torch.tensor([0.0, 1.0, 0.0]))


def test_the_picture_shows_the_density_where_it_is():
    corners = torch.tensor([[-1.0, 0.0], [1.0, 1.0]])
    picture, mass = density_picture(Halves(), corners, "Halves", torch.tensor([0.0, 1.0]))
    assert mass == pytest.approx(1.0, abs=0.02)
    array = np.asarray(picture).astype(int).sum(2)
    right = array[120:-60, array.shape[1] // 2 + 60 : -60]
    middle = right.shape[1] // 2
    assert right[:, middle + 30 :].min() > 300 > 60 > right[:, : middle - 30].max()


def test_n11_no_epoch_is_a_mistake(capsys):
    assert main(["flow", "fit", "--epochs", "0", "--out", "none"]) == 2
    assert "--epochs" in capsys.readouterr().err
