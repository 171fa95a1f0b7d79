"""What a user can mend is said in one line, with exit code 2, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recoup.recipes.cli import main
from recoup.recipes.flow.train import prepare


def write_pictures(folder, *shapes):
    Path(folder).mkdir()
    for number, shape in enumerate(shapes):
        Image.fromarray(np.full(shape, number, np.uint8)).save(Path(folder, f"{number}.png"))


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "cubic"], "`memory` is 'cubic', but must be \"linear\""),
        (["--memroy", "sqrt"], "no option `--memroy`. Did you mean `--memory`?"),
        (["--epochs", "many"], "argument --epochs: many is not a whole number"),
        (["--model.num_steps", "0"], "`num_steps` is 0"),
        (["--threads", "0"], "argument --threads: 0 is not a whole number"),
        (["--data", "nowhere"], "`--data` is nowhere, which does not exist"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (
            ["--config", "realnvp-minst"],
            "is realnvp-minst, which is neither a file nor one of flow",
        ),
        (["--config=glow"], "glow-digits, glow-mnist"),
        (
            ["--model.flow", "nice", "--model.coupling", "affine"],
            "`--model.coupling` is affine, but",
        ),
        (
            ["--model.flow", "nice", "--model.num_steps", "2"],
            "nice has no such setting. It has num",
        ),
        (["--model.exact", "true"], "`--model.exact` is True, but glow has no such setting"),
        (
            ["--data", "moons"],
            "`--model.flow` is glow, which is for pictures, but the data are points",
        ),
        (["--data", "moons", "--data.size", "8"], "`size` is 8, but moons are points"),
        (["--data", "rings", "--data.levels", "8"], "`levels` is 8, but rings are points"),
        (
            ["--data", "moons", "--model.flow", "realnvp", "--model.num_levels", "1"],
            "`--model.num_levels` is 1, but realnvp on points has no such setting",
        ),
        (
            ["--model.flow", "iresnet", "--model.conditional", "true"],
            "`--model.conditional` is true, but iresnet takes no labels. Use one of glow",
        ),
        (
            ["--data", "checkerboard", "--model.flow", "nice", "--model.conditional", "true"],
            "`--model.conditional` is true, but checkerboard has no label for each",
        ),
        (["--resume", "nowhere.ckpt"], "`--resume` is nowhere.ckpt, but there is no such file"),
        (["--trainer.devices", "0"], "Change the settings of the Trainer"),
    ],
)
def test_options_of_fit(refusal, options, message):
    assert message in refusal("flow", "fit", *options)


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("model.coupling", "odd", "'affine', 'additive'"),
        ("data.size", "1.5", "int"),
        ("trainer.max_epochs", "many", "int"),
    ],
)
def test_a_setting_of_another_type(refusal, setting, value, allowed):
    message = refusal("flow", "fit", f"--{setting}", value)
    assert f'"{setting}"' in message
    assert f"value: {value}" in message
    assert allowed in message
    assert message.endswith("See `--help-all`.\n")


@pytest.mark.parametrize("settings", ["--data.batch_sise=3", "--trainer.max_epoch 3"])
def test_a_setting_that_there_is_not(refusal, settings):
    assert f"unrecognized arguments: {settings}" in refusal("flow", "fit", *settings.split())


def test_a_corrupt_picture(refusal):
    write_pictures("some", (8, 8), (8, 8))
    whole = Path("some/0.png").read_bytes()
    Path("some/1.png").write_bytes(whole[: len(whole) // 2])
    assert "some/1.png cannot be read as a picture" in refusal("flow", "fit", "--data", "some")


def test_a_picture_of_another_size(refusal):
    write_pictures("some", (8, 8), (8, 8), (8, 10), (9, 9))
    message = refusal("flow", "fit", "--data", "some")
    assert "some/2.png is 10 x 8 pixels, but some/0.png is 8 x 8." in message
    assert "`--data.size 8`" in message


def test_a_picture_of_16_bits(refusal):
    Path("some").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save("some/0.png")
    assert "some/0.png has more than 8 bits" in refusal("flow", "fit", "--data", "some")


def test_pictures_that_cannot_be_squeezed(refusal):
    np.savez("some.npz", images=np.zeros((9, 28, 28), np.uint8))
    fit = ("flow", "fit", "--data", "some.npz", "--model.num_levels")
    message = refusal(*fit, 3)
    assert "28 x 28 pixels, but 3 scales need sides that are multiples of 8" in message
    assert "`--data.size 32`, or use `--model.num_levels 2`" in message
    assert prepare([*fit[2:], "2"]).model.flow.shape == (1, 28, 28)
    assert prepare([*fit[2:], "3", "--data.size", "32"]).model.flow.shape == (1, 32, 32)


def test_a_folder_without_pictures(refusal):
    Path("none").mkdir()
    assert "a folder without pictures" in refusal("flow", "fit", "--data", "none")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((4, 8, 8))}, "is of type float64, but must be uint8"),
        ({"images": np.zeros((4, 8), np.uint8)}, "has shape (4, 8)"),
        ({"a": np.zeros(1, np.uint8), "b": np.zeros(1, np.uint8)}, "Name the array of pictures"),
        ({"images": np.full((4, 8, 8), 9, np.uint8), "levels": np.asarray(9)}, "holds 9"),
        (
            {"images": np.zeros((4, 8, 8), np.uint8), "x_test": np.zeros((4, 8, 4), np.uint8)},
            "`x_test` of some.npz has pictures of shape (1, 8, 4)",
        ),
    ],
)
def test_an_archive_of_something_else(refusal, arrays, message):
    np.savez("some.npz", **arrays)
    assert message in refusal("flow", "fit", "--data", "some.npz")


def test_a_corrupt_archive(refusal):
    Path("some.npz").write_text("not an archive")
    assert "some.npz cannot be read as an .npz file" in refusal("flow", "fit", "--data", "some.npz")


def test_a_checkpoint_that_is_none(refusal):
    Path("text.ckpt").write_text("not a checkpoint")
    torch.save({"weights": 1}, "other.ckpt")
    torch.save({"state_dict": {}, "hyper_parameters": {"vocabulary": 7}}, "language.ckpt")
    for option in (("fit", "--resume"), ("evaluate", "--checkpoint"), ("sample", "--checkpoint")):
        assert "cannot be read as a checkpoint" in refusal("flow", *option, "text.ckpt")
        assert "is not a checkpoint" in refusal("flow", *option, "other.ckpt")
    assert "is not a checkpoint of a flow" in refusal(
        "flow", "sample", "--checkpoint", "language.ckpt"
    )


def test_a_checkpoint_of_another_architecture(refusal, checkpoint):
    resume = ("flow", "fit", "--resume", checkpoint, "--epochs", 9, "--model.width")
    assert "of another architecture: it has width 8 instead of 6" in refusal(*resume, 6)


def test_a_checkpoint_whose_weights_do_not_fit_its_settings(refusal, checkpoint):
    content = torch.load(checkpoint, weights_only=True)
    content["state_dict"].popitem()
    torch.save(content, "half.ckpt")
    message = refusal("flow", "sample", "--checkpoint", "half.ckpt")
    assert "half.ckpt is a checkpoint of another architecture." in message


def test_a_run_that_is_over(refusal, checkpoint):
    message = refusal("flow", "fit", "--resume", checkpoint)
    assert "has 2 epochs behind it, and `--epochs` is 2" in message


def test_a_folder_that_holds_a_run(refusal, checkpoint):
    message = refusal("flow", "fit", "--out", checkpoint.parents[1])
    assert "holds a run already. Go on with it by `--resume" in message
    Path("file").touch()
    assert "which is a file" in refusal("flow", "fit", "--out", "file")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num", "0"], "`--num` is 0"),
        (["--temperature", "-1"], "`--temperature` is -1.0"),
        (["--out", "samples.xyz"], "Try samples.png"),
        (["--out", "file/samples.png"], "file is a file"),
        (["--device", "abacus"], "`--device` is abacus"),
        (["--labels", "3"], "`--labels` is 3, but this flow is not conditional"),
    ],
)
def test_options_of_sample(refusal, checkpoint, options, message):
    Path("file").touch()
    assert message in refusal("flow", "sample", "--checkpoint", checkpoint, *options)


def test_options_of_evaluate(refusal, checkpoint):
    np.savez("some.npz", images=np.zeros((9, 8, 8), np.uint8))
    evaluate = ("flow", "evaluate", "--checkpoint", checkpoint)
    message = refusal(*evaluate, "--data", "some.npz")
    assert "1 x 8 x 8 with 256 grey levels" in message
    assert "for 1 x 8 x 8 with 17" in message
    assert "are points in the plane" in refusal(*evaluate, "--data", "moons")
    assert "arguments are required: --checkpoint" in refusal("flow", "evaluate")


def test_commands(refusal, capsys):
    assert "argument COMMAND: invalid choice: 'fly'" in refusal("flow", "fly")
    assert "there is no option `--foo`" in refusal("flow", "demo", "--foo")
    Path("full").mkdir()
    Path("full", "file").touch()
    assert "is not empty" in refusal("flow", "demo", "--out", "full")
    for args in ([], ["--help"], ["flow"], ["flow", "--help"]):
        assert main(args) == 0
        assert "normalizing flows: fit" in capsys.readouterr().out.lower()
