"""Flows from the command line: the training is that by hand, and the same in every memory mode."""

from __future__ import annotations

import ast
import importlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import seed_at
from flow import Images
from PIL import Image
from sklearn.datasets import load_digits

from recoup.flows import Glow
from tests.examples.conftest import EXAMPLES, QUIET, Run, logged_in, same, weights

CONFIGS = sorted((EXAMPLES / "configs" / "flow").glob("*.yaml"))


def test_a_training_is_that_by_hand(flows):
    folder = flows.fit("--model.num_decay_steps=12", epochs=2)
    data = Images(batch_size=300)
    torch.manual_seed(0)
    glow = Glow((1, 8, 8), levels=17, num_levels=2, num_steps=1, width=8, dropout=0.2)
    optimizer = torch.optim.Adam(glow.parameters(), lr=0.01)
    step = 0
    for epoch in range(2):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(data.parts["train"]), generator=generator)
        for number, rows in enumerate(order.split(300)):
            torch.manual_seed(seed_at(0, 0, "train", epoch, number))
            rate = 0.01 * min(1, (step + 1) / 5) * (0.5 + 0.5 * math.cos(math.pi * step / 12))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            glow.bits_per_dim(data.parts["train"][rows]).mean().backward()
            torch.nn.utils.clip_grad_norm_(glow.parameters(), 10.0)
            optimizer.step()
            step += 1
    found = {name.removeprefix("flow."): value for name, value in weights(folder).items()}
    assert found.keys() == glow.state_dict().keys()
    for name, value in glow.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    glow.eval()
    total = torch.tensor(0.0)
    for number, rows in enumerate(data.parts["validation"].split(300)):
        torch.manual_seed(seed_at(0, 0, "val", number))
        with torch.no_grad():
            total += glow.bits_per_dim(rows).sum()
    logged = logged_in(folder, "val_bits_per_dim")
    assert logged[-1] == pytest.approx(float(total) / len(data.parts["validation"]), rel=1e-4)
    assert logged[-1] < logged[0]


def drawn(capsys):
    path = capsys.readouterr().out.splitlines()[-1].removeprefix("samples: ")
    with Image.open(path) as picture:
        return np.asarray(picture)


DRAWINGS = {"false": (9, (3, 3)), "true": (20, (10, 2))}  # with classes: of samples, in a grid


@pytest.mark.parametrize("conditional", DRAWINGS)
def test_a_trained_flow_is_tested_and_draws_a_row_for_each_class(flows, capsys, conditional):
    num_samples, (rows, columns) = DRAWINGS[conditional]
    folder = flows.fit(f"--data.conditional={conditional}", epochs=1)
    run = flows.use("test", folder)
    assert same(run.model.state_dict(), weights(folder, "best"))
    tested = run.trainer.callback_metrics
    assert tested["test_bits_per_dim"] == pytest.approx(
        float(tested["test_latent"] + tested["test_log_det"]), abs=1e-5
    )
    flows.use("predict", folder, f"--model.num_samples={num_samples}")
    assert drawn(capsys).shape == (rows * (64 + 6) + 6, columns * (64 + 6) + 6)


def test_points_and_their_classes(flows, capsys):
    points = ["--model.flow=RealNVP", "--model.flow.num_steps=2", "--model.flow.width=8"]
    points += ["--data.path=rings", "--data.batch_size=2000", "--data.conditional=true"]
    folder = Run(flows.main, points, "flow", None).fit(epochs=1)
    run = flows.use("test", folder)
    assert run.model.flow.num_classes == 3
    metrics = run.trainer.callback_metrics
    nats = float(metrics["test_bits_per_dim"]) * 2 * math.log(2)
    assert metrics["test_nats_per_point"] == pytest.approx(nats, rel=1e-5)
    flows.use("predict", folder)
    assert len(np.unique(drawn(capsys).reshape(-1, 3), axis=0)) > 100


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_presets_build_what_their_names_say(flows, path):
    names = {"glow": "Glow", "nice": "NICE", "realnvp": "RealNVP"}
    names |= {"flowpp": "FlowPlusPlus", "iresnet": "IResNet"}
    depth = "num_couplings" if "nice" in path.stem else "num_steps"
    args = ["-c", str(path), *QUIET, "--data.batch_size=10"]
    args += ["--model.flow.init_args.width=4", f"--model.flow.init_args.{depth}=2"]
    if path.stem.endswith(("mnist", "paper", "pictures")):
        shape = (20, 28, 28) if path.stem.endswith("mnist") else (20, 32, 32, 3)
        np.savez("some.npz", images=np.arange(np.prod(shape)).reshape(shape).astype(np.uint8))
        args.append("--data.path=some.npz")
    run = flows.main(args, run=False)
    assert type(run.model.flow).__name__ == names[path.stem.partition("-")[0]]
    batch = next(iter(run.datamodule.train_dataloader()))
    assert run.model.flow.bits_per_dim(*batch).isfinite().all()
    assert run.trainer.max_epochs >= 30


def test_examples_use_public_names_only():
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("recoup"):
                public = importlib.import_module(node.module).__all__
                assert {each.name for each in node.names} <= set(public), path
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names if each.name.startswith("recoup")]
                assert names in ([], ["recoup"]), path


def test_parts_share_no_picture_and_do_not_follow_the_seed():
    images = torch.from_numpy(load_digits().images).to(torch.uint8)[:, None]
    data, other = Images(seed=1), Images(seed=2)
    sizes = {part: len(each) for part, each in data.parts.items()}
    assert sizes == {"train": 1437, "test": 180, "validation": 180}
    assert same(data.parts, other.parts)
    everything = torch.cat(list(data.parts.values())).flatten(1)
    assert torch.equal(everything.sum(1).sort().values, images.flatten(1).sum(1).sort().values)
    firsts = [next(iter(each.train_dataloader()))[0] for each in (data, other, Images(seed=1))]
    assert not torch.equal(firsts[0], firsts[1])
    assert torch.equal(firsts[0], firsts[2])


def test_an_archive_names_its_parts_and_labels():
    pictures, labels = np.arange(4 * 10 * 9, dtype=np.uint8).reshape(10, 4, 9), np.arange(10) % 3
    parts = {"x_train": pictures, "x_test": pictures[:3], "y_train": labels, "y_test": labels[:3]}
    path = write("some.npz", parts)["path"]
    data = Images(path, conditional=True, validation_fraction=0.2, batch_size=4)
    assert (data.shape, data.levels, data.num_classes) == ((1, 4, 9), 256, 3)
    assert torch.equal(data.parts["test"][:, 0], torch.from_numpy(pictures[:3]))
    assert len(data.parts["train"]) == 8
    for x, label in data.train_dataloader():
        rows = [int((torch.from_numpy(pictures) == each).flatten(1).all(1).nonzero()) for each in x]
        assert label.tolist() == [row % 3 for row in rows]
    few = Images(path, levels=4).parts["test"]
    assert torch.equal(few[:, 0], torch.from_numpy(pictures[:3].astype(int) * 4 // 256).byte())
    number = np.arange(20)
    points = np.stack([0.5 * number, -number], axis=1)
    write("some.npz", {"points": points, "labels": number % 2})
    data = Images("some.npz", conditional=True)
    assert (data.shape, data.levels, data.num_classes) == ((2,), None, 2)
    assert torch.equal(data.labels["train"], (-data.parts["train"][:, 1] % 2).long())


def test_a_folder_of_pictures():
    Path("deep").mkdir()
    for number in range(9):
        Image.new("L", (12, 8), 10 * number).save(f"{number}.png")
    Image.new("RGB", (8, 8), (1, 2, 3)).save("deep/colour.png")
    with pytest.raises(ValueError, match=r"another size .* `--data\.size`"):
        Images(".")
    data = Images(".", size=8)
    assert data.shape == (3, 8, 8)
    assert sum(map(len, data.parts.values())) == 10


def write(name, content):
    if isinstance(content, dict):
        np.savez(name, **content)
    else:
        Path(name).write_text(content)
    return {"path": name}


REFUSALS = {
    "nowhere": (lambda: {"path": "nowhere"}, "`path` is nowhere, which is no folder"),
    "an empty folder": (lambda: {"path": "."}, "a folder without pictures"),
    "no archive": (lambda: write("a.npz", "text"), "cannot be read as an .npz"),
    "no known array": (lambda: write("a.npz", {"a": np.ones(2), "b": np.ones(2)}), "holds a, b"),
    "objects": (lambda: write("a.npz", {"images": np.array([{}])}), "cannot be read as an .npz"),
    "floats": (lambda: write("a.npz", {"images": np.ones((3, 4, 4))}), "pictures are uint8"),
    "no picture": (lambda: write("a.png", "text") and {"path": "."}, "a.png cannot be read"),
    "too many levels": (lambda: {"levels": 18}, "`levels` is 18, but the data have 17"),
    "levels of points": (lambda: {"path": "moons", "levels": 8}, "but the data have none"),
    "a fraction": (lambda: {"test_fraction": 1.0}, "`test_fraction` is 1.0"),
    "nothing left": (
        lambda: {"test_fraction": 0.6, "validation_fraction": 0.5}, "none are left to train on"
    ),
    "no labels": (lambda: {"path": "checkerboard", "conditional": True}, "has no label"),
    "three columns": (lambda: write("a.npz", {"points": np.ones((2, 3))}), "of shape (N, 2)"),
    "an infinity": (lambda: write("a.npz", {"points": np.full((2, 2), np.inf)}), "finite numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_data_that_do_not_fit_are_named(name):
    make, message = REFUSALS[name]
    settings = make()
    with pytest.raises(ValueError, match=re.escape(message)):
        Images(**settings)
