"""The command line: runs resume to the bit, also after kill -9; hostile files are refused."""

from __future__ import annotations

import pickle
import re
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tests.examples.conftest import logged_in, same, weights


def last(folder):
    return torch.load(Path(folder, "checkpoints", "last.ckpt"), weights_only=True)


def left_by(folder):
    """What the last checkpoint holds of a run but for its times and paths."""
    kept = "state_dict", "optimizer_states", "lr_schedulers", "global_step", "current_model_state"
    return {name: last(folder).get(name) for name in kept}


def assert_equal(one, other):
    (found, form), (wanted, of_other) = (tree_flatten(left_by(each)) for each in (one, other))
    assert form == of_other
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


OPTIONS = {
    "flows": ["--model.memory=constant", "--model.num_decay_steps=25"],
    "texts": ["--model.averaging=always", "--model.weight_noise=0.01", "--model.memory=sqrt"],
}


def test_a_resumed_run_is_the_uninterrupted_one(example, request):
    options = OPTIONS[request.node.callspec.params["example"]]
    whole = example.fit(*options, epochs=4, out="whole")
    first = example.fit(*options, epochs=2, out="first")
    resumed = example.go_on(first, epochs=4)
    assert resumed != first
    assert example.cli.trainer.current_epoch == 4
    assert_equal(resumed, whole)


MODES = {  # and how far weights are from those of linear memory
    "flows": {"2": 0.0, "constant": None},
    "texts": {"sqrt": 1e-3, "200 KiB": 1e-3},
}


def test_memory_modes_have_the_same_figures(example, request):
    name = request.node.callspec.params["example"]
    metric = {"flows": "val_bits_per_dim", "texts": "val_perplexity"}[name]
    options = ["--model.weight_noise=0.05"] if name == "texts" else []  # one draw in all segments
    linear = example.fit(*options)
    for mode, rtol in MODES[name].items():
        folder = example.fit(*options, f"--model.memory={mode}", out=mode)
        assert logged_in(folder, metric) == pytest.approx(logged_in(linear, metric), rel=1e-3)
        for key, value in weights(linear).items() if rtol is not None else ():
            found = weights(folder)[key]
            torch.testing.assert_close(found, value, rtol=rtol, atol=rtol / 100, msg=key)
        if name == "texts":
            assert (example.cli.model.segment_steps is None) == (mode == "sqrt")
    with pytest.raises(Exception, match=r"`memory` is (1 KiB|1024 bytes, too few for a window)"):
        example.fit("--model.memory=1 KiB", out="small")


@pytest.mark.slow
@pytest.mark.parametrize("averaging", ["triggered", "never"])
def test_a_run_resumes_before_and_after_its_trigger(texts, averaging):
    options = [f"--model.averaging={averaging}", "--model.num_patient=0"]
    options.append("--model.learning_rate=15")  # so large that validation gets worse
    whole = texts.fit(*options, epochs=6, out="whole")
    if averaging == "triggered":
        assert last(whole)["callbacks"]["Averaging"]["is_averaging"]
    for stop in (1, 3, 5):
        first = texts.fit(*options, epochs=stop, out=f"first{stop}")
        assert_equal(texts.go_on(first, epochs=6), whole)


@pytest.mark.slow
def test_a_run_resumes_after_kill_9(example, request):
    options = OPTIONS[request.node.callspec.params["example"]]
    endless = ["--trainer.max_epochs=10000", "--trainer.logger.save_dir=killed"]
    process = example.started(*options, *endless)
    folder = Path("killed", example.name, "version_0")
    written = folder / "checkpoints" / "last.ckpt"
    try:
        for _ in range(600):
            time.sleep(0.1)
            if written.exists() and last(folder)["epoch"] >= 2:
                break
    finally:
        process.kill()
        process.wait()
    epochs = last(folder)["epoch"] + 3
    resumed = example.go_on(folder, epochs=epochs)
    whole = example.fit(*options, epochs=epochs, out="whole")
    assert_equal(resumed, whole)


def test_a_checkpoint_replaces_the_one_before_when_it_is_whole(flows, monkeypatch):
    folder = flows.fit(epochs=1)
    before = weights(folder)
    save = torch.save

    def cut_short(contents, path, *args, **kwargs):
        if contents.get("epoch") and "last" in str(path):
            Path(path).write_bytes(b"half of it")
            raise OSError("No space left on device")
        save(contents, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", cut_short)
    with pytest.raises(OSError, match="No space left"):
        flows.fit(epochs=2, out="cut")
    assert same(weights("cut/flow/version_0"), before)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def changed(contents, **changes):
    torch.save(contents | changes, "some.ckpt")


def half_of(contents):
    changed(contents)
    Path("some.ckpt").write_bytes(Path("some.ckpt").read_bytes()[:5000])


def flipped(contents):
    changed(contents)
    data = bytearray(Path("some.ckpt").read_bytes())
    with zipfile.ZipFile("some.ckpt") as archive:
        largest = max(archive.infolist(), key=lambda each: each.file_size)
    data[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    Path("some.ckpt").write_bytes(data)


def mid_epoch(contents):
    contents["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
    changed(contents)


CANNOT = "`--ckpt_path` is some.ckpt, which cannot be read as a checkpoint of tensors and numbers"
CODE = "code beside"  # is refused in every command, whatever the user says of it
BROKEN = {
    CODE: (lambda contents: changed(contents, more=Evil()), CANNOT),
    "a module": (lambda contents: changed(contents, more=torch.nn.Linear(2, 2)), CANNOT),
    "a pickle": (lambda contents: Path("some.ckpt").write_bytes(pickle.dumps(Evil())), CANNOT),
    "half of it": (half_of, CANNOT),
    "a flipped bit": (flipped, "is damaged"),
    "nothing": (lambda contents: None, "No such file"),
    "weights alone": (lambda contents: torch.save(contents["state_dict"], "some.ckpt"), CANNOT),
    "within an epoch": (mid_epoch, "written within an epoch"),
}
CASES = [("flows", "fit", name) for name in BROKEN if name != CODE]
CASES += [(kind, do, CODE) for kind in ("flows", "texts") for do in ("fit", "test", "predict")]


@pytest.mark.parametrize(("example", "command", "name"), CASES, indirect=["example"])
def test_a_hostile_or_damaged_file_is_refused(example, command, name):
    folder, (make, message) = example.finished, BROKEN[name]
    make(last(folder))
    before = sorted(folder.parent.rglob("*"))
    options = ["-c", f"{folder}/config.yaml", "--ckpt_path=some.ckpt"]
    options += ["--weights_only=false"] if name == CODE else []
    with pytest.raises(ValueError, match=re.escape(message)):
        example.main([command, *options])
    assert not Path("executed").exists()
    assert sorted(folder.parent.rglob("*")) == before


def test_a_checkpoint_chooses_no_settings(example):
    """Lightning would take the settings, and the classes, of the model from it."""
    folder = example.finished
    evil = {"_class_path": "pathlib.Path", "_instantiator": "pathlib.Path.touch", "seed": 5}
    evil |= {"flow": {"class_path": "recoup.flows.NICE"}, "hidden_size": 10**9}
    changed(last(folder), hyper_parameters=evil, datamodule_hyper_parameters=evil)
    run = example.use("test", folder, checkpoint="some.ckpt")
    assert same(run.model.state_dict(), weights(folder))
    assert run.model.hparams.get("seed", 0) == 0
    example.main(["fit", "-c", f"{folder}/config.yaml", "--ckpt_path=some.ckpt",
                  "--trainer.max_epochs=2"])  # fmt: skip


def test_a_checkpoint_names_no_files_to_remove(flows):
    folder = flows.fit(epochs=1)
    contents = last(folder)
    Path("precious").write_text("mine")
    new = (folder.parent / "version_1" / "checkpoints").resolve()  # as an attacker may guess
    victim = str(new / "../../../../precious")
    for key, state in contents["callbacks"].items():
        if key.startswith("ModelCheckpoint"):
            state |= {"dirpath": str(new), "kth_best_model_path": victim}
            state |= {"best_model_path": victim, "last_model_path": victim}
            state |= {"best_k_models": {victim: torch.tensor(1e9)}, "kth_value": torch.tensor(1e9)}
    changed(contents)
    flows.main(["fit", "-c", f"{folder}/config.yaml", "--ckpt_path=some.ckpt",
                "--trainer.max_epochs=3"])  # fmt: skip
    assert Path("precious").read_text() == "mine"
    assert (new / "best.ckpt").exists()


OTHERS = "the z is y than the x .\n" * 30 + "a b c\n" * 30


ANOTHER = [
    ("flows", "--model.flow.num_steps=2", "state_dict"),
    ("texts", "--data.path=others.txt", "state_dict|other tokens"),
    ("texts", "--data.path=renamed.txt", r"trained on other tokens than those of renamed\.txt"),
]


@pytest.mark.parametrize(("example", "option", "words"), ANOTHER, indirect=["example"])
def test_a_checkpoint_of_another_model_is_refused(example, option, words, text):
    Path("others.txt").write_text(OTHERS.replace("z", "q"))
    Path("renamed.txt").write_text(Path(text).read_text().replace("than", "then"))
    with pytest.raises((RuntimeError, ValueError), match=words):
        example.use("predict" if "renamed" in option else "test", example.finished, option)


WRONG = [
    ("flows", "--model.flow.num_stepz=3", "num_stepz"),
    ("texts", "--model.averaging=sometimes", "model.averaging"),
    ("flows", "--data.path=moons", "shape"),
    ("texts", "--trainer.gradient_clip_val=1", "gradient"),
    ("texts", "--model.memory=much", "much"),
    ("texts", "--model.input_dropout=1", "less than 1"),
]


@pytest.mark.parametrize(("example", "option", "said"), WRONG, indirect=["example"])
def test_what_is_wrong_or_does_not_fit_together_is_refused(example, capsys, option, said):
    with pytest.raises((Exception, SystemExit)) as caught:
        example.fit(option)
    assert said in f"{caught.value} {capsys.readouterr().err}"
    assert caught.type is not SystemExit or not Path("run").exists()
