"""Training by the command line: it learns, goes on as if never stopped, and modes agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.cli import main
from recoup.recipes.flow.train import CONFIGS, prepare
from recoup.recipes.flow.trained import load_flow

MODES = ["linear", "sqrt", "log", "constant", "2"]


@pytest.fixture(scope="module")
def linear(run, tmp_path_factory):
    return run("--epochs", "4", "--out", str(tmp_path_factory.mktemp("linear") / "run"))


def same(a, b):
    """Whether two values out of checkpoints are equal in every bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_the_loss_falls_and_its_parts_add_up(linear):
    rows = linear.metrics()
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    for part in ("train", "val"):
        losses = [float(row[f"{part}_bits_per_dim"]) for row in rows]
        assert losses[-1] < losses[0] - 0.1
        for row, loss in zip(rows, losses, strict=True):
            parts = float(row[f"{part}_latent"]) + float(row[f"{part}_log_det"])
            assert parts == pytest.approx(loss, abs=1e-5)


def test_every_parameter_is_trained_once_a_step(linear):
    optimizer = linear.cli.trainer.optimizers[0]
    moved = dict(linear.cli.model.named_parameters())
    assert moved.keys() == linear.start.keys()
    for name, parameter in moved.items():
        assert not torch.equal(parameter, linear.start[name]), name
        assert optimizer.state[parameter]["step"] == len(linear.losses) == 20


def test_the_run_leaves_its_settings_and_two_checkpoints(linear):
    out = linear.cli.out
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "config.yaml",
        "metrics.csv",
    }
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert settings["model"]["num_steps"] == 1
    assert "resume" not in settings


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", MODES[1:])
def test_each_memory_mode_goes_the_same_way(run, linear, memory):
    other = run("--epochs", "4", "--memory", memory)
    ours, theirs = (torch.tensor(it.losses, dtype=torch.float64) for it in (other, linear))
    tolerance = 1e-4 if memory == "constant" else 0.0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0.0)
    assert other.cli.model.flow.memory == (2 if memory == "2" else memory)


@pytest.mark.slow
def test_constant_memory_goes_the_same_way_in_double_precision(run):
    double = ("--epochs", "4", "--trainer.precision", "64-true", "--memory")
    linear, constant = (
        run(*double, memory, "--out", memory).losses for memory in ("linear", "constant")
    )
    assert constant == pytest.approx(linear, rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["linear", "constant"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(run, memory):
    options = ("--memory", memory, "--model.num_decay_steps", "20")
    whole = run(*options, "--epochs", "4", "--out", "whole")
    run(*options, "--epochs", "2", "--out", "halves")
    moved = Path("elsewhere.ckpt")
    Path("halves/checkpoints/last.ckpt").replace(moved)
    # It brings its own settings with it, and draws what it would have drawn; what the caller drew
    # in between changes nothing.
    torch.rand(7)
    assert main(["flow", "fit", "--resume", str(moved), "--epochs", "4", "--out", "halves"]) == 0
    ours = torch.load("halves/checkpoints/last.ckpt", weights_only=True)
    theirs = whole.checkpoint()
    assert ours["global_step"] == theirs["global_step"] == 20
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(ours[part], theirs[part]), part
    rows = (Path("halves/metrics.csv").read_text(), Path("whole/metrics.csv").read_text())
    first, second = ([line.rpartition(",")[0] for line in text.splitlines()] for text in rows)
    assert first == second


def test_a_checkpoint_is_gone_on_with_in_its_own_folder(run):
    run("--epochs", "1", "--out", "mine")
    assert main(["flow", "fit", "--resume", "mine/checkpoints/last.ckpt", "--epochs", "2"]) == 0
    assert [path.name for path in Path().iterdir()] == ["mine"]
    assert len(Path("mine/metrics.csv").read_text().splitlines()) == 3


def test_another_seed_is_another_run(run, linear):
    other = run("--epochs", "1", "--seed", "1")
    assert other.losses[1:] != linear.losses[1:5]
    # The parts stay: runs are compared on the same pictures.
    for part, images in other.cli.datamodule.parts.items():
        assert torch.equal(images, linear.cli.datamodule.parts[part])


def test_it_stops_early(run):
    stopped = run("--epochs", "9", "--early_stopping.patience", "1", "--model.learning_rate", "0")
    assert len(stopped.metrics()) == 2


def test_runs_are_numbered(run):
    assert [str(run("--epochs", "1").cli.out) for _ in range(2)] == [
        "runs/flow/fit-1",
        "runs/flow/fit-2",
    ]


def test_the_command_reports(capsys, tiny):
    assert main(["flow", "fit", *tiny, "--epochs=1", "--out", "mine"]) == 0
    printed = capsys.readouterr()
    assert "the digits, 1 x 8 x 8, 17 levels; 1437 for train" in printed.out
    assert "best checkpoint: mine/checkpoints/best.ckpt" in printed.out
    assert "epoch   1: bits/dim" in printed.err
    assert "log-det" in printed.err


def test_the_results_are_written_where_others_find_them(capsys, tiny):
    assert main(["flow", "fit", *tiny, "--epochs", "2", "--out", "mine"]) == 0
    printed = capsys.readouterr().out
    results = json.loads(Path("mine/run.json").read_text())
    assert f"test: {results['test_bits_per_dim']:.3f} bits/dim; results: mine/run.json" in printed
    weights = torch.load("mine/checkpoints/best.ckpt", weights_only=True)["state_dict"]
    model = load_flow(Checkpoint("mine/checkpoints/best.ckpt"))
    assert results["num_parameters"] == sum(p.numel() for p in model.parameters()) > 1000
    assert len(weights) >= len(list(model.parameters()))
    assert (results["num_epochs"], results["num_steps"]) == (2, 10)
    assert results["step"]["peak_bytes"] > 2**20
    assert results["seconds"] > 0
    # The test is that of the best weights, and the same whenever it is made.
    assert main(["flow", "evaluate", "--checkpoint", "mine/checkpoints/best.ckpt"]) == 0
    evaluated = capsys.readouterr().out
    assert f"{results['test_latent']:.4f}" in evaluated


# Of settings; users' scripts have them.
SHORT_NAMES = ["--data", "--memory", "--epochs", "--batch-size", "--out", "--seed", "--threads"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_each_configuration_is_valid(config):
    paper = config.endswith("-paper") and config != "nice-paper"
    shape = (32, 32, 3) if paper or config == "glow-pictures" else (28, 28)
    np.savez("some.npz", images=np.zeros((20, *shape), np.uint8))
    has_data = config.endswith(("-digits", "-moons", "-rings", "-checkerboard"))
    options = [*(() if has_data else ("--data", "some.npz"))]
    options += ["--model.width", "8"] if paper else []  # its weights would take seconds
    cli = prepare(["--config", config, *options])
    assert config.startswith(cli.model.hparams["flow"])
    assert cli.model.hparams["num_warmup_steps"] > 0
    assert not Path("runs").exists()


def test_help_is_short_and_names_the_rest(capsys):
    assert main(["flow", "fit", "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 45
    assert all(name in text for name in [*SHORT_NAMES, "--resume", "--help-all", "glow-mnist"])
    with pytest.raises(SystemExit) as end:
        main(["flow", "fit", "--help-all"])
    assert end.value.code == 0
    assert "--trainer.accelerator" in capsys.readouterr().out
