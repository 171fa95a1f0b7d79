"""What is done with a trained flow, and the demo."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import recoup
from recoup.memory import Curve, Point
from recoup.recipes import curve_command
from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.cli import main
from recoup.recipes.flow.demo import MEMORIES, build_step
from recoup.recipes.flow.pictures import grid
from recoup.recipes.flow.trained import load_data, load_flow


def numbers(text):
    return {
        name: float(value) for name, value in re.findall(r"^([a-z/-]+) +(-?[\d.]+)$", text, re.M)
    }


def test_evaluate_prints_the_test_part_in_parts(checkpoint, capsys):
    assert main(["flow", "evaluate", "--checkpoint", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("180 pictures, the test part of the digits\n")
    found = numbers(text)
    assert found["latent"] + found["log-det"] == pytest.approx(found["bits/dim"], abs=2e-4)
    flow = load_flow(Checkpoint(checkpoint)).flow
    with torch.no_grad():
        expected = float(flow.bits_per_dim(load_data(Checkpoint(checkpoint)).parts["test"]).mean())
    assert found["bits/dim"] == pytest.approx(expected, abs=0.02)  # other noise


def test_evaluate_takes_all_of_other_pictures(checkpoint, capsys):
    np.savez("some.npz", images=np.zeros((9, 8, 8), np.uint8), levels=17)
    command = ["flow", "evaluate", "--checkpoint", str(checkpoint), "--batch-size", "4"]
    assert main([*command, "--data", "some.npz"]) == 0
    assert capsys.readouterr().out.startswith("9 pictures, all of some.npz\n")
    np.savez(
        "two.npz",
        x_train=np.zeros((9, 8, 8), np.uint8),
        x_test=np.zeros((3, 8, 8), np.uint8),
        levels=17,
    )
    assert main([*command, "--data", "two.npz"]) == 0
    assert capsys.readouterr().out.startswith("3 pictures, the test part of two.npz\n")


def test_evaluate_keeps_to_the_test_part_of_what_was_trained_on(run, capsys):
    np.savez("some.npz", images=np.zeros((30, 8, 8), np.uint8), levels=17)
    run("--data", "some.npz", "--epochs", "1", "--out", "mine")
    path = Path("some.npz").resolve()
    checkpoint = "mine/checkpoints/last.ckpt"
    assert main(["flow", "evaluate", "--checkpoint", checkpoint, "--data", str(path)]) == 0
    assert capsys.readouterr().out.startswith("3 pictures, the test part of ")


def test_evaluate_knows_the_pictures_from_another_folder(run, capsys, monkeypatch):
    np.savez("some.npz", images=np.zeros((30, 8, 8), np.uint8), levels=17)
    run("--data", "some.npz", "--epochs", "1", "--out", "mine")
    path, checkpoint = Path("some.npz").resolve(), Path("mine/checkpoints/last.ckpt").resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for options in ([], ["--data", str(path)]):
        assert main(["flow", "evaluate", "--checkpoint", str(checkpoint), *options]) == 0
        assert capsys.readouterr().out.startswith(f"3 pictures, the test part of {path}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", str(2**70)], "must have at most 64 bits"),
        (["--device", "meta"], "`--device` is meta, which torch cannot use here"),
    ],
)
def test_sample_refuses(checkpoint, refusal, options, message):
    assert message in refusal("flow", "sample", "--checkpoint", checkpoint, *options)


def test_sample_draws_the_same_picture_again(checkpoint, capsys):
    command = ["flow", "sample", "--checkpoint", str(checkpoint), "--num", "5", "--out"]
    for name in ("new/a.png", "new/b.png"):
        assert main([*command, name]) == 0
    assert "5 samples at temperature 0.7: new/b.png" in capsys.readouterr().out
    assert Path("new/a.png").read_bytes() == Path("new/b.png").read_bytes()
    assert sorted(path.name for path in Path("new").iterdir()) == ["a.png", "b.png"]
    assert main([*command, "new/c.png", "--seed", "1"]) == 0
    assert Path("new/c.png").read_bytes() != Path("new/a.png").read_bytes()
    with Image.open("new/a.png") as image:
        assert image.size == (3 * 70 + 6, 2 * 70 + 6)
        assert image.mode == "L"


def test_a_grid_enlarges_without_smoothing():
    images = torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1, 1).expand(3, 3, 2, 2)
    array = np.asarray(grid(images, levels=3, num_columns=2))
    assert array.shape == (2 * 70 + 6, 2 * 70 + 6, 3)
    assert [array[40, 40, 0], array[40, 110, 0], array[110, 40, 0]] == [0, 128, 255]
    assert set(np.unique(array)) == {0, 128, 255}


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_step_of_the_curve(memory):
    module, x = build_step(depth=1, memory=memory)
    module(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert module.flow.memory == memory


@pytest.mark.slow
def test_the_demo_compares_and_draws(monkeypatch, capsys):
    points = [Point(n, memory, 2**20 * n, 0, 0.5) for n in (4, 8) for memory in MEMORIES]
    monkeypatch.setattr(recoup, "curve", lambda *args, **options: Curve("b", "cpu", tuple(points)))
    num_threads = torch.get_num_threads()
    assert main(["flow", "demo", "--epochs", "1", "--out", "mine"]) == 0
    assert torch.get_num_threads() == num_threads
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    peaks = [float(rows[memory][0]) for memory in MEMORIES]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < 0.3 * peaks[0]
    assert rows["sqrt"][4:] == ["0", "0"]
    assert all(float(value) < 1e-3 for value in rows["constant"][4:])
    assert "for 12 steps in float32" in text
    for name in ("samples.png", "reconstructions.png", "curve.png"):
        with Image.open(Path("mine", name)) as image:
            assert min(image.size) > 300
        assert f"mine/{name}" in text


def test_curve_is_a_command(monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(
        curve_command, "curve_command", lambda **options: asked.update(options) or 0
    )
    command = ["curve", "chain:build", "--depths", "4", "8", "--memories", "linear", "3"]
    assert main([*command, "--csv", "points.csv"]) == 0
    assert asked == {
        "build": "chain:build",
        "depths": [4, 8],
        "memories": ["linear", "3"],
        "csv": Path("points.csv"),
    }
