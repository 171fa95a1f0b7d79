"""AWD-LSTM: tokens per second and peak bytes beside other ways, and a learning curve."""

import math
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from couplings import peak_and_held
from lightning.pytorch.callbacks import Callback
from timing import in_turn, seconds_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import recoup

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "examples")]

from examples.language_model import (  # noqa: E402
    LanguageModel,
    Penalties,
    Texts,
    longest_segment,
    main,
    window_backward,
)

WIKITEXT = Path(__file__).parents[2] / "shared" / "data" / "wikitext-2"

# The preset awd-lstm-600. The text is WikiText-2 if it exists.
SIZES = {"embed_size": 200, "hidden_size": 600, "num_layers": 3}
DROPOUT = {
    "input_dropout": 0.3,
    "hidden_dropout": 0.1,
    "output_dropout": 0.2,
    "embedding_dropout": 0.05,
    "weight_dropout": 0.2,
}
NO_DROPOUT = dict.fromkeys(DROPOUT, 0.0)
BATCH_SIZE, BPTT = 80, 70
PENALTIES = Penalties(activation=2.0, temporal=1.0)


# -- contestants: functions that run forward and backward of one window ----------------------------


class Dropped(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, weight):
        return F.dropout(weight, self.p, self.training)


class RowsDropped(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, weight):
        if not self.training:
            return weight
        mask = weight.new_empty(len(weight), 1).bernoulli_(1 - self.p) / (1 - self.p)
        return weight * mask


def by_hand(network, ids, state):
    """An ordinary loop: forward, loss with its penalties, `.backward()`."""
    _loss(network, ids, state).backward()
    network.zero_grad()


def _loss(network, ids, state):
    raw, dropped, _ = network.encode(ids[:-1], state, network.new_masks(*ids[1:].shape))
    logits = network.decoder(dropped).flatten(0, 1)
    loss = F.cross_entropy(logits, ids[1:].flatten())
    loss = loss + PENALTIES.activation * dropped.square().mean()
    return loss + PENALTIES.temporal * raw.diff(dim=0).square().mean()


def plain(vocab_size, window):
    """`nn.LSTM` of the same size, without any dropout."""
    network = LanguageModel(vocab_size, **SIZES, **NO_DROPOUT)
    return lambda: by_hand(network, *window)


def parametrized(vocab_size, window):
    """The same regularisation with torch.nn.utils.parametrize, which keeps what it computes."""
    network = LanguageModel(
        vocab_size, **SIZES, **DROPOUT | {"embedding_dropout": 0.0, "weight_dropout": 0.0}
    )
    rows = RowsDropped(DROPOUT["embedding_dropout"])
    raw = network.embedding.weight
    parametrize.register_parametrization(network.embedding, "weight", rows)
    network.decoder.weight = raw
    for layer in network.layers:
        recurrent = Dropped(DROPOUT["weight_dropout"])
        parametrize.register_parametrization(layer, "weight_hh_l0", recurrent)

    return lambda: by_hand(network, *window)


def ours(vocab_size, window, segment_steps=None):
    """The example."""
    network = LanguageModel(vocab_size, **SIZES, **DROPOUT)

    def step():
        store = recoup.GradStore(network.parameters())
        window_backward(network, *window, store, PENALTIES, segment_steps)

    return step


CONTESTANTS = {
    "plain": plain,
    "parametrize": parametrized,
    "recoup": ours,
    "recoup sqrt": lambda *args: ours(*args, segment_steps=9),
}


def window_of(num_steps, batch_size, device):
    """Return a window, with the state before it, and the size of its vocabulary.

    The tokens are random without the text.
    """
    if WIKITEXT.exists():
        texts = Texts(
            str(WIKITEXT), min_count=1, batch_size=batch_size, bptt=num_steps, jitter=False
        )
        ids, vocab_size = next(iter(texts.train_dataloader())), texts.vocab_size
    else:
        vocab_size = 33278
        ids = torch.randint(vocab_size, (num_steps + 1, batch_size))
    state = LanguageModel(2, **SIZES, **NO_DROPOUT).zero_state(batch_size)
    moved = tuple((hidden.to(device), cell.to(device)) for hidden, cell in state)
    return vocab_size, (ids.to(device), moved)


def curve(device, epochs=2):
    """Train on a prefix of WikiText-2 and return the learning curve; a larger preset on a GPU."""
    preset = "awd-lstm-wt2" if device == "cuda" else "awd-lstm-600"
    config = ROOT / "examples" / "configs" / "language_model" / f"{preset}.yaml"
    args = ["-c", str(config), "--data.path", str(WIKITEXT), "--trainer.max_epochs", str(epochs)]
    args += ["--trainer.accelerator", "gpu" if device == "cuda" else device]
    args += ["--trainer.enable_progress_bar", "false"]
    record = CurveRecord()
    with tempfile.TemporaryDirectory() as folder:
        run = main([*args, f"--trainer.logger.init_args.save_dir={folder}"], run=False)
        run.trainer.callbacks.append(record)
        run.trainer.fit(run.model, run.datamodule)
    return record.rows


class CurveRecord(Callback):
    """Record the perplexity of each tenth of an epoch of training, and of each validation."""

    def __init__(self):
        self.rows = []
        self._tokens = 0
        self._before = (0.0, 0.0)

    def on_train_epoch_start(self, trainer, pl_module):
        self._before = (0.0, 0.0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._tokens += batch[1:].numel()
        tenth = max(1, trainer.num_training_batches // 10)
        if (batch_idx + 1) % tenth == 0:
            metric = pl_module.perplexities["train_"]
            now = (float(metric.mean_value), float(metric.weight))
            nll, num = (a - b for a, b in zip(now, self._before, strict=True))
            self._before = now
            self._add("training", math.exp(nll / num))

    def on_validation_end(self, trainer, pl_module):
        self._add("validation", float(trainer.callback_metrics["val_perplexity"]))

    def _add(self, part, perplexity):
        self.rows.append({"tokens": self._tokens, "part": part, "perplexity": perplexity})
        print(self.rows[-1], flush=True)


def speeds(device, rounds=8):
    """Measure tokens a second of forward and backward, the ways in turn, and their peaks."""
    vocab_size, window = window_of(BPTT, BATCH_SIZE, device)
    steps = {}
    for name, build in CONTESTANTS.items():
        torch.manual_seed(0)
        with torch.device(device):
            steps[name] = build(vocab_size, window)
    peaks = {}
    for name, step in steps.items():
        step()
        peaks[name] = peak_and_held(step, device)[0]
    times = in_turn(steps, rounds, device)
    # The fastest round of each: what disturbs one, mostly memory that is fetched anew, only delays.
    best = {name: min(found) for name, found in times.items()}
    return [
        {
            "name": name,
            "vocab_size": vocab_size,
            "tokens_per_second": BPTT * BATCH_SIZE / seconds,
            "speed_over_plain": best["plain"] / seconds,
            "median_over_plain": statistics.median(times["plain"]) / statistics.median(times[name]),
            "peak_bytes": peaks[name],
        }
        for name, seconds in best.items()
    ]


def long_windows(device, batch_size=10, long=2000):
    """Measure peak and speed of a long window, in the bytes that a short one takes."""
    vocab_size, short_window = window_of(BPTT, batch_size, device)
    _, long_window = window_of(long, batch_size, device)
    with torch.device(device):
        network = LanguageModel(vocab_size, **SIZES, **DROPOUT)
    rows = []

    def step_of(window, segment_steps):
        def step():
            store = recoup.GradStore(network.parameters())
            window_backward(network, *window, store, PENALTIES, segment_steps)

        return step

    def add(memory, window, segment_steps):
        step, num_steps = step_of(window, segment_steps), len(window[0]) - 1
        peak_bytes = peak_and_held(step, device)[0]
        seconds = min(seconds_of(step, device) for _ in range(2))
        rows.append(
            {
                "memory": memory,
                "bptt": num_steps,
                "segment_steps": segment_steps,
                "peak_bytes": peak_bytes,
                "tokens_per_second": num_steps * batch_size / seconds,
            }
        )
        return peak_bytes

    def peak(segment_steps):
        step = step_of(long_window, segment_steps)
        return recoup.measure(step, device=device, repeats=0).peak_bytes

    bound = add("linear", short_window, None)
    add("linear", long_window, None)
    add("sqrt", long_window, math.ceil(math.sqrt(long)))
    add(f"{bound} bytes", long_window, longest_segment(peak, long, bound))
    return rows


def suite(device):
    """Yield the tables."""
    yield "speeds", speeds(device)
    yield "long_windows", long_windows(device)
