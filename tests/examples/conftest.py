from __future__ import annotations

import csv
import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import flow  # noqa: E402
import language_model  # noqa: E402

# Small enough for a run of a second, with everything in it: two scales, dropout, a last batch that
# is smaller than the others.
FLOW = [
    *("--model.flow=Glow", "--model.flow.num_levels=2", "--model.flow.num_steps=1"),
    *("--model.flow.width=8", "--model.flow.dropout=0.2", "--model.num_warmup_steps=5"),
    *("--model.learning_rate=0.01", "--data.batch_size=300"),
]
# Some dropout of each kind, windows of several lengths.
LANGUAGE_MODEL = [
    *("--model.embed_size=8", "--model.hidden_size=16", "--model.num_layers=2"),
    *("--model.input_dropout=0.1", "--model.output_dropout=0.1", "--model.weight_dropout=0.3"),
    *("--model.activation_penalty=0.1", "--model.learning_rate=5", "--data.bptt=12"),
    *("--data.batch_size=3", "--data.eval_batch_size=2", "--data.tokens=words"),
]
LINES = [f"the {a} is {b} than the {c} ." for a in "abc" for b in "xyz" for c in "abcd"]
QUIET = ["--num_threads=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Each test runs in a folder of its own, and forgets the seed that Lightning notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():  # of Lightning about itself, as of a folder with checkpoints
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
        yield
    torch.set_num_threads(num_threads)


class Run:
    def __init__(self, main, tiny, name, folder):
        self.main, self.tiny, self.name, self._folder = main, tiny, name, folder

    @functools.cached_property
    def finished(self):
        """The folder of a run of one epoch, which tests share."""
        return self.fit(epochs=1, out=self._folder)

    def fit(self, *options, epochs=2, out="run"):
        place = [f"--trainer.logger.save_dir={out}", f"--trainer.max_epochs={epochs}"]
        self.cli = self.main(["fit", *self.tiny, *QUIET, *place, *options])
        return Path(self.cli.trainer.log_dir)

    def started(self, *options):
        command = [sys.executable, str(EXAMPLES / f"{self.name}.py"), "fit", *self.tiny, *QUIET]
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([*command, *options], env=os.environ | paths, **quiet)

    def go_on(self, folder, *options, checkpoint="last", epochs=2):
        path = f"--ckpt_path={folder}/checkpoints/{checkpoint}.ckpt"
        length = f"--trainer.max_epochs={epochs}"
        self.cli = self.main(["fit", "-c", f"{folder}/config.yaml", path, length, *options])
        return Path(self.cli.trainer.log_dir)

    def use(self, command, folder, *options, checkpoint=None):
        path = checkpoint or f"{folder}/checkpoints/best.ckpt"
        return self.main([command, "-c", f"{folder}/config.yaml", f"--ckpt_path={path}", *options])


@pytest.fixture(scope="session")
def flows(tmp_path_factory):
    return Run(flow.main, FLOW, "flow", tmp_path_factory.mktemp("flows"))


@pytest.fixture(scope="session")
def texts(text, tmp_path_factory):
    folder, tiny = tmp_path_factory.mktemp("texts"), [*LANGUAGE_MODEL, f"--data.path={text}"]
    return Run(language_model.main, tiny, "language_model", folder)


@pytest.fixture(params=["flows", "texts"])
def example(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(LINES * 3) + "\n")
    return str(path)


def weights(folder, checkpoint="last"):
    path = Path(folder, "checkpoints", f"{checkpoint}.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def logged_in(folder, name):
    with Path(folder, "metrics.csv").open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]
