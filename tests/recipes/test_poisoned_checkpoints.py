"""N1: a checkpoint may come from anywhere, and chooses neither code nor where files are written."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from recoup.recipes.cli import main
from recoup.recipes.flow.data import Images
from recoup.recipes.flow.model import FlowTraining
from recoup.recipes.settings import plain_settings

EVIL = """
from pathlib import Path
from lightning.pytorch.callbacks import Callback

Path("imported").touch()


class Evil(Callback):
    def __init__(self, *args, **kwargs):
        Path("made").touch()
"""
OBJECT = {"class_path": "evil.Evil", "init_args": {}}
ELSEWHERE = {
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"dirpath": "elsewhere"},
}

POISONS = {
    "trainer.callbacks": [OBJECT],
    "trainer.callbacks[0]": [ELSEWHERE],
    "trainer.logger": OBJECT,
    "trainer.logger.bool": True,
    "trainer.profiler": "evil.Evil",
    "trainer.plugins": [OBJECT],
    "trainer.plugins.name": ["evil.Evil"],
    "trainer.strategy": "evil.Evil",
    "trainer.strategy.object": OBJECT,
    "trainer.accelerator": "evil.Evil",
    "trainer.model_registry": "theirs",
    "trainer.max_steps": OBJECT,
    "trainer.devices": [[OBJECT]],
    "trainer.class_path": "evil.Evil",
    "model.class_path": "evil.Evil",
    "model.init_args": {},
    "model.width": OBJECT,
    "model.learning_rate": OBJECT,
    "data.class_path": "evil.Evil",
    "data.path": OBJECT,
    "checkpoint.filename": "../../elsewhere/best",
    "checkpoint.unknown": 1,
    "early_stopping.monitor": OBJECT,
    "early_stopping.class_path": "evil.Evil",
    "config": "evil.yaml",
    "optimizer": OBJECT,
    "lr_scheduler": OBJECT,
    "model": "evil.yaml",
    "trainer": "evil.yaml",
    "seed_everything": OBJECT,
    "print_config": "",
}


def poisoned(checkpoint, setting, value, part="recoup_settings"):
    content = copy.deepcopy(checkpoint)
    inside = content[part]
    section, _, name = setting.partition(".")
    name = name.partition(".")[0].partition("[")[0]
    if name:
        inside[section][name] = value
    else:
        inside[section] = value
    torch.save(content, "poisoned.ckpt")
    return ".".join(filter(None, (section, name)))


@pytest.fixture
def evil(monkeypatch, tmp_path):
    Path("evil.py").write_text(EVIL)
    Path("evil.yaml").write_text("class_path: evil.Evil\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(scope="module")
def trained_flow(checkpoint):
    return torch.load(checkpoint, weights_only=True)


@pytest.fixture(scope="module")
def trained_lm(lm_run, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("lm") / "run"
    lm_run("--data", text, "--epochs", "1", "--out", str(out))
    return torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.parametrize("poison", POISONS)
def test_n1_each_setting_that_is_not_plain_is_refused_by_name(trained_flow, poison):
    setting = poisoned(trained_flow, poison, POISONS[poison])
    noted = torch.load("poisoned.ckpt", weights_only=True)["recoup_settings"]
    owners = {"model": FlowTraining, "data": Images}
    with pytest.raises(ValueError, match=f"^it has a setting `{setting}` that is not taken"):
        plain_settings(noted, owners=owners, source="it", is_given=lambda setting: False)


def test_n1_the_settings_of_a_run_are_plain(trained_flow):
    noted = copy.deepcopy(trained_flow["recoup_settings"])
    owners = {"model": FlowTraining, "data": Images}
    plain = plain_settings(noted, owners=owners, source="it", is_given=lambda setting: False)
    for section in ("model", "data", "early_stopping", "seed_everything", "num_threads"):
        assert plain[section] == noted[section]
    assert noted["trainer"].keys() - plain["trainer"].keys() == {"default_root_dir"}
    assert noted["checkpoint"].keys() - plain["checkpoint"].keys() == {"dirpath"}


@pytest.mark.parametrize("option", ["--resume", "--finetune"])
@pytest.mark.parametrize(
    "poison",
    ["trainer.callbacks", "trainer.callbacks[0]", "trainer.strategy", "model.class_path", "model"],
)
def test_n1_settings_of_a_poisoned_flow(evil, trained_flow, refusal, poison, option):
    setting = poisoned(trained_flow, poison, POISONS[poison])
    message = refusal("flow", "fit", option, "poisoned.ckpt", "--epochs", "9")
    assert f"`{option}` is poisoned.ckpt, which has a setting `{setting}`" in message


@pytest.mark.parametrize("option", ["--resume", "--finetune"])
@pytest.mark.parametrize("poison", ["trainer.callbacks", "trainer.strategy", "model.class_path"])
def test_n1_settings_of_a_poisoned_language_model(evil, trained_lm, refusal, poison, option):
    setting = poisoned(trained_lm, poison, POISONS[poison])
    message = refusal("lm", "fit", option, "poisoned.ckpt", "--epochs", "9")
    assert f"`{option}` is poisoned.ckpt, which has a setting `{setting}`" in message


@pytest.mark.parametrize("part", ["hyper_parameters", "datamodule_hyper_parameters"])
@pytest.mark.parametrize("value", [OBJECT, [OBJECT], torch.ones(2)], ids=["dict", "list", "tensor"])
def test_n1_commands_that_load_a_model(evil, trained_flow, trained_lm, refusal, part, value):
    for recipe, content, commands in (
        ("flow", trained_flow, ("evaluate", "sample")),
        ("lm", trained_lm, ("evaluate", "generate")),
    ):
        poisoned(content, "path" if part.startswith("data") else "learning_rate", value, part)
        for command in commands:
            message = refusal(recipe, command, "--checkpoint", "poisoned.ckpt")
            assert f"whose `{part}` are not plain settings" in message


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("hyper_parameters", "class_path", "evil.Evil"),
        ("hyper_parameters", "learning_rate", "fast"),
        ("hyper_parameters", "num_levels", ["a"]),
        ("hyper_parameters", "hidden_size", "wide"),
        ("hyper_parameters", "flow", "evil.Evil"),
        ("hyper_parameters", "flow", ["glow"]),
        ("hyper_parameters", "shape", 3),
    ],
)
def test_n1_models_that_cannot_be_made(trained_flow, trained_lm, refusal, part, setting, value):
    """Settings of one recipe are unknown to the other."""
    for recipe, content, command in (
        ("flow", trained_flow, "sample"),
        ("lm", trained_lm, "generate"),
    ):
        poisoned(content, setting, value, part)
        assert "poisoned.ckpt" in refusal(recipe, command, "--checkpoint", "poisoned.ckpt")


@pytest.mark.parametrize(
    "vocabulary", [7, [1, 2], ["<unk>"], {"<unk>": 0}], ids=["number", "numbers", "few", "dict"]
)
def test_n1_a_vocabulary_that_is_none(trained_lm, refusal, vocabulary):
    poisoned(trained_lm, "vocabulary", vocabulary, "Texts")
    for command in ("evaluate", "generate"):
        assert "poisoned.ckpt" in refusal("lm", command, "--checkpoint", "poisoned.ckpt")


def test_n1_a_pickle_of_code_is_refused_by_every_command(refusal):
    class Code:
        def __reduce__(self):
            return (Path.touch, (Path("ran"),))

    torch.save({"state_dict": {}, "hyper_parameters": Code()}, "code.ckpt")
    for command in (
        ("flow", "fit", "--resume"),
        ("flow", "fit", "--finetune"),
        ("flow", "evaluate", "--checkpoint"),
        ("flow", "sample", "--checkpoint"),
        ("lm", "fit", "--resume"),
        ("lm", "fit", "--finetune"),
        ("lm", "evaluate", "--checkpoint"),
        ("lm", "generate", "--checkpoint"),
    ):
        assert "cannot be read as a checkpoint" in refusal(*command, "code.ckpt")


def test_n1_folders_come_from_where_the_file_lies(trained_flow):
    """The paths of a file are compared, never written to."""
    content = copy.deepcopy(trained_flow)
    content["recoup_settings"]["trainer"]["default_root_dir"] = "elsewhere"
    content["recoup_settings"]["checkpoint"]["dirpath"] = "elsewhere/checkpoints"
    Path("mine/checkpoints").mkdir(parents=True)
    torch.save(content, "mine/checkpoints/last.ckpt")
    assert main(["flow", "fit", "--resume", "mine/checkpoints/last.ckpt", "--epochs", "3"]) == 0
    assert Path("mine/metrics.csv").is_file()
    assert [path.name for path in Path().iterdir()] == ["mine"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "noted",
    ["{here}/../../mine", "{here}/../mine", "elsewhere/mine", "x/..", "memory://mine", ""],
)
def test_n1_no_file_is_removed_by_the_paths_of_a_checkpoint(trained_flow, noted):
    """Lightning removes the best checkpoint before, by the path that the file has."""
    content = copy.deepcopy(trained_flow)
    here = str(Path("run/checkpoints").resolve())
    noted = noted.format(here=here)
    for state in content["callbacks"].values():
        if "best_model_path" in state:
            state["dirpath"] = here
            state["best_model_path"] = state["kth_best_model_path"] = noted
            state["best_k_models"] = {noted: torch.tensor(99.0)}
            state["best_model_score"] = state["kth_value"] = torch.tensor(99.0)
    Path("run/checkpoints").mkdir(parents=True)
    torch.save(content, "run/checkpoints/last.ckpt")
    for kept in ("mine", "elsewhere/mine", "run/mine"):
        Path(kept).parent.mkdir(exist_ok=True)
        Path(kept).touch()
    assert main(["flow", "fit", "--resume", "run/checkpoints/last.ckpt", "--epochs", "3"]) == 0
    assert all(Path(kept).is_file() for kept in ("mine", "elsewhere/mine", "run/mine"))
    assert Path("run/checkpoints/last.ckpt").is_file()
    assert Path("run/checkpoints/best.ckpt").is_file()


def test_n1_what_the_command_line_gives_is_the_users_own(trained_flow):
    """The way out of a refusal: the option given again, instead of that of the file."""
    poisoned(trained_flow, "trainer.strategy", "evil.Evil")
    options = ["--trainer.strategy", "auto", "--epochs", "3", "--out", "run"]
    assert main(["flow", "fit", "--resume", "poisoned.ckpt", *options]) == 0
    assert not Path("imported").exists()
