"""Runs that end by a signal, a full disk, or beside another run in their folder."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from recoup.recipes.cli import main
from recoup.recipes.flow.model import FlowTraining
from recoup.recipes.run_folder import LOCK_FILE, folder_locked
from tests.recipes.test_flow_fit import same

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")


@pytest.fixture
def signal_at(monkeypatch):
    """Send a signal to this process while a batch of an epoch is trained on."""

    def install(signum, epoch, batch):
        before = FlowTraining.on_train_batch_start

        sent = []

        def start(self, images, batch_idx):
            before(self, images, batch_idx)
            if (self.current_epoch, batch_idx) == (epoch, batch) and not sent:
                sent.append(signum)
                signal.raise_signal(signum)

        monkeypatch.setattr(FlowTraining, "on_train_batch_start", start)

    return install


@pytest.fixture
def handlers():
    """Signals are handled after the test as they were before."""
    before = [signal.getsignal(each) for each in CODES]
    yield
    assert [signal.getsignal(each) for each in CODES] == before


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    return run("--epochs", "3", "--out", str(out)).checkpoint()


def fit(tiny, *options):
    return main(["flow", "fit", *tiny, *options])


def resume_said(capsys, epochs):
    """The options of the command that a stopped run names."""
    said = capsys.readouterr().err.splitlines()[-1]
    found = re.fullmatch(
        rf"recoup: stopped after epoch {epochs}; go on with `recoup (.*)`", said.strip()
    )
    assert found, said
    return found[1].split()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("signum", CODES, ids=lambda signum: signum.name)
def test_n8_a_signal_ends_a_run_which_is_gone_on_with_to_the_bit(
    tiny, whole, signal_at, handlers, capsys, signum
):
    signal_at(signum, 1, 2)
    assert fit(tiny, "--epochs", "3", "--out", "cut") == CODES[signum]
    assert not list(Path("cut").rglob(LOCK_FILE))
    assert main(resume_said(capsys, 1)) == 0
    ours = torch.load("cut/checkpoints/last.ckpt", weights_only=True)
    for part in PARTS:
        assert same(ours[part], whole[part]), part


def test_n8_before_the_first_epoch_ended_nothing_is_left(tiny, signal_at, handlers, capsys):
    signal_at(signal.SIGTERM, 0, 1)
    assert fit(tiny, "--epochs", "3", "--out", "cut") == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "recoup: stopped before the first epoch ended: nothing is kept. Begin again."
    assert not Path("cut").exists()


def test_n8_a_resumed_run_names_the_checkpoint_it_came_from(tiny, signal_at, handlers, capsys):
    assert fit(tiny, "--epochs", "1", "--out", "cut") == 0
    signal_at(signal.SIGINT, 1, 1)
    again = ["flow", "fit", "--resume", "cut/checkpoints/last.ckpt", "--epochs", "3"]
    assert main(again) == 130
    assert resume_said(capsys, 1) == again[:4]
    assert Path("cut/config.yaml").is_file()


def test_n8_a_second_signal_while_saving_leaves_the_checkpoint_before(
    tiny, signal_at, handlers, capsys, monkeypatch
):
    """The first comes in a step, the second within the write of a checkpoint."""
    save, replace = torch.save, Path.replace

    def replaced(self, target):
        if Path(target).name == "last.ckpt" and Path(target).exists():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replaced)
    assert fit(tiny, "--epochs", "3", "--out", "cut") == 130
    assert resume_said(capsys, 1) == ["flow", "fit", "--resume", "cut/checkpoints/last.ckpt"]
    assert torch.load("cut/checkpoints/last.ckpt", weights_only=True)["epoch"] == 0
    assert not [path for path in Path("cut").rglob("*") if path.suffix == ".part"]
    assert torch.save is save


def test_n8_a_signal_in_the_last_step_is_said_too(tiny, signal_at, handlers, capsys):
    signal_at(signal.SIGINT, 0, 4)
    assert fit(tiny, "--epochs", "1", "--out", "cut") == 130
    assert "stopped before the first epoch ended" in capsys.readouterr().err


def test_n8_in_another_thread_signals_are_left_alone(tiny, handlers):
    codes = []
    thread = threading.Thread(
        target=lambda: codes.append(fit(tiny, "--epochs", "1", "--out", "mine"))
    )
    thread.start()
    thread.join()
    assert codes == [0]


# -- one run a folder ------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from recoup.recipes.run_folder import folder_locked
with folder_locked(Path(sys.argv[1]), "--out"):
    print("locked", flush=True)
    if len(sys.argv) > 2:
        import os
        if os.fork() == 0:  # a worker that outlives it
            time.sleep(60)
    time.sleep(60)
"""


@pytest.fixture
def holder():
    started = []

    def start(folder, *options):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, folder, *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_n14_two_runs_in_one_folder(tiny, run, holder, refusal):
    run("--epochs", "1", "--out", "mine")
    other = holder("mine")
    resume = ["flow", "fit", "--resume", "mine/checkpoints/last.ckpt", "--epochs", "2"]
    message = refusal(*resume)
    assert f"`--out` is mine, where process {other.pid} on " in message
    assert "is training" in message
    other.kill()  # -9: the file of the lock stays, and means nothing
    other.wait()
    assert Path("mine", LOCK_FILE).exists()
    assert main(resume) == 0
    assert not Path("mine", LOCK_FILE).exists()


@pytest.mark.slow
def test_n14_two_new_runs_in_one_folder_or_with_one_folder_of_checkpoints(tiny, holder, refusal):
    holder("mine")
    assert "is training" in refusal("flow", "fit", *tiny, "--out", "mine")
    dirpath = ("--checkpoint.dirpath", "mine")
    message = refusal("flow", "fit", *tiny, "--out", "other", *dirpath)
    assert "`--checkpoint.dirpath` is " in message


@pytest.mark.slow
def test_n14_a_worker_that_outlives_the_run_does_not_keep_the_lock(holder):
    other = holder("mine", "fork")
    other.kill()
    other.wait()
    with folder_locked(Path("mine"), "--out"):
        pass


def test_n14_a_run_that_ended_in_between_is_not_written_over(tiny, run, refusal, monkeypatch):
    """Both found an empty folder; the first was through before the second locked it."""
    prepared = run.prepare([*tiny, "--epochs", "1", "--out", "mine"])
    run("--epochs", "1", "--out", "mine")
    with pytest.raises(Exception, match="holds a run already"):
        prepared.fit()


# -- what goes wrong while it runs -----------------------------------------------------------------


def test_n13_a_full_disk_is_one_line_and_the_checkpoint_before_stays(tiny, capsys, monkeypatch):
    """A limit on the size of files stands in for the disk: the system refuses to write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    epoch_end = ModelCheckpoint.on_train_epoch_end

    def full(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        return epoch_end(self, trainer, pl_module)

    monkeypatch.setattr(ModelCheckpoint, "on_train_epoch_end", full)
    try:
        assert fit(tiny, "--epochs", "3", "--out", "cut") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("recoup: error: ")
    assert "File too large" in said
    assert "go on with `recoup flow fit --resume cut/checkpoints/last.ckpt`" in said
    assert torch.load("cut/checkpoints/last.ckpt", weights_only=True)["epoch"] == 0
    assert not [path for path in Path("cut").rglob("*") if path.suffix == ".part"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody writes to")
def test_n13_a_folder_that_cannot_be_written_to_is_one_line(tiny, capsys):
    assert fit(tiny, "--epochs", "1", "--out", f"/proc/{os.getpid()}/run") == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("recoup: error: /proc/")
    assert "Traceback" not in said


def test_a_checkpoint_without_its_optimizer_is_not_gone_on_with(whole, refusal):
    """Relatives of N13: a file of weights alone, and states that are of another kind."""
    torch.save({name: whole[name] for name in whole if name != "optimizer_states"}, "some.ckpt")
    assert "which has no `optimizer_states`" in refusal("flow", "fit", "--resume", "some.ckpt")


def test_states_that_do_not_fit_are_one_line(whole, capsys):
    torch.save({**whole, "optimizer_states": [{"state": {}}]}, "some.ckpt")
    options = ["--epochs", "9", "--out", "mine"]
    assert main(["flow", "fit", "--resume", "some.ckpt", *options]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "`--resume` is some.ckpt, from which a run cannot resume" in said
