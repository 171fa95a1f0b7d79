"""Train an AWD-LSTM on text, through windows as long as you like, in the memory you choose.

    python examples/language_model.py fit                      # on the documentation of Python
    python examples/language_model.py fit --data.path book.txt --data.tokens words
    python examples/language_model.py fit --data.bptt 2000 --model.memory "500 MiB"
    python examples/language_model.py fit -c examples/configs/language_model/awd-lstm-wt2.yaml \\
        --data.path wikitext-2/

A run goes to ``runs/language_model/version_0``, or the next number. Go on with it, test it, let it
write; finetune it, averaging from the start:

    run=runs/language_model/version_0
    best=$run/checkpoints/best.ckpt
    program="python examples/language_model.py"
    $program fit -c $run/config.yaml --ckpt_path $run/checkpoints/last.ckpt
    $program test -c $run/config.yaml --ckpt_path $best --data.eval_batch_size 1
    $program predict -c $run/config.yaml --ckpt_path $best --data.prompt "The statement"
    $program fit -c $run/config.yaml --model.init_from $best --model.averaging always

Every option: ``python examples/language_model.py fit --help``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from command_line import TrainingCLI, check_checkpoint, seed_at
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from text import END_OF_LINE, UNKNOWN, TokenKind, joined, read_parts, tokenized, vocabulary_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import recoup
from recoup.memory import parse_bytes

MONITOR = "val_perplexity"
State = tuple[tuple[Tensor, Tensor], ...]  # hidden and cell state of each layer, (1, N, H) both
Masks = Sequence[Tensor | None]  # which activations to keep, (1, N, C) or (T, N, C)

# --- model ---------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """An LSTM language model with the regularization of AWD-LSTM.

    Kept for it: a seed each for weight dropout, weight noise and dropout of the embedding, from
    which backward draws again, and the masks of the dropout of activations, a byte an entry. The
    parameters and their names are those of plain layers.

    Args:
        vocab_size: Number of tokens.
        embed_size: Size of an embedding.
        hidden_size: Size of the layers; the last has `embed_size` if weights are tied.
        num_layers: Number of LSTM layers.
        tie_weights: Whether the decoder shares the weight of the embedding.
        input_dropout: Dropout of the input of the first layer.
        hidden_dropout: Dropout between layers.
        output_dropout: Dropout of the input of the decoder.
        embedding_dropout: Dropout of whole rows of the embedding, so of a word wherever it occurs;
            a tied decoder uses the raw weight.
        weight_dropout: Dropout of hidden-to-hidden weights, one mask for a window.
        dropout_kind: "locked" for one mask of activations for a window (variational dropout), or
            "independent" for another at each step.
        weight_noise: Standard deviation of variational noise on weights; `set_noise` turns it on.

    Source: Merity, Keskar and Socher, https://arxiv.org/abs/1708.02182.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        embed_size: int = 128,
        hidden_size: int = 256,
        num_layers: int = 2,
        tie_weights: bool = True,
        input_dropout: float = 0.4,
        hidden_dropout: float = 0.2,
        output_dropout: float = 0.4,
        embedding_dropout: float = 0.1,
        weight_dropout: float = 0.5,
        dropout_kind: Literal["locked", "independent"] = "locked",
        weight_noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.sizes = [embed_size, *[hidden_size] * num_layers]  # of activations
        if tie_weights:
            self.sizes[-1] = embed_size
        self.rates = [input_dropout, *[hidden_dropout] * (num_layers - 1), output_dropout]
        if not all(0 <= rate < 1 for rate in self.rates):
            raise ValueError(f"Dropout is {self.rates}, but must be at least 0 and less than 1.")
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.layers = nn.ModuleList(map(nn.LSTM, self.sizes[:-1], self.sizes[1:]))
        self.decoder = nn.Linear(self.sizes[-1], vocab_size)
        self.dropout_kind = dropout_kind
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if tie_weights:
            self.decoder.weight = self.embedding.weight
        else:
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

        # Each use of a parameter has its own policy: the decoder's use of a tied weight has none.
        if embedding_dropout:
            recoup.weight_dropout(self.embedding, p=embedding_dropout, axes=(1,))
        if weight_dropout:
            for layer in self.layers:
                recoup.weight_dropout(layer, "weight_hh_l0", p=weight_dropout)
        self.weight_noise, self._noise_std = weight_noise, torch.zeros(())
        if weight_noise:
            for part in (self.embedding, *self.layers):
                recoup.weight_noise(part, ".*weight.*", std=self._noise_std)

    def set_noise(self, is_on: bool) -> None:
        """Turn the noise on weights on or off, from the next forward on."""
        self._noise_std.fill_(self.weight_noise if is_on else 0.0)

    def zero_state(self, batch_size: int) -> State:
        """Return the state before the first token."""
        shapes = [(1, batch_size, size) for size in self.sizes[1:]]
        weight = self.decoder.weight
        return tuple((weight.new_zeros(shape), weight.new_zeros(shape)) for shape in shapes)

    def new_masks(self, num_steps: int, batch_size: int) -> list[Tensor | None]:
        """Draw what to keep in a window of the first layer's input, and of each layer's output."""
        length = 1 if self.dropout_kind == "locked" else num_steps
        like = self.decoder.weight
        return [
            like.new_empty((length, batch_size, size), dtype=torch.bool).bernoulli_(1 - rate)
            if rate and self.training
            else None
            for size, rate in zip(self.sizes, self.rates, strict=True)
        ]

    def encode(self, ids: Tensor, state: State, masks: Masks) -> tuple[Tensor, Tensor, State]:
        """Run the layers over the numbers of tokens ``(T, N)``, from a state on.

        Returns the outputs of the last layer ``(T, N, C)``, those after dropout, and the state.
        """

        def dropped(x: Tensor, place: int) -> Tensor:
            mask, scale = masks[place], 1 / (1 - self.rates[place])
            if mask is None:
                return x
            if len(mask) == 1:  # It is small: as numbers it needs one pass over `x`, not two.
                return x * (mask.to(x.dtype) * scale)
            return x * mask * scale

        raw = self.embedding(ids)
        x, states = dropped(raw, 0), list[tuple[Tensor, Tensor]]()
        for number, (layer, before) in enumerate(zip(self.layers, state, strict=True), 1):
            raw, after = layer(x, before)
            states.append(after)
            x = dropped(raw, number)
        return raw, x, tuple(states)

    def forward(self, ids: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the logits of each next token ``(T, N, vocab_size)``, and the state after it."""
        state = self.zero_state(ids.shape[1]) if state is None else state
        _, dropped, state = self.encode(ids, state, self.new_masks(*ids.shape))
        return self.decoder(dropped), state


# --- data ----------------------------------------------------------------------------------------

# As in Merity et al.: half the length in one window of twenty, a standard deviation of five steps,
# and none shorter than five. None is longer by more than five deviations, as one in three million
# would be, so that a bound on memory holds for all.
_HALF_FRACTION, _DEVIATION, _SHORTEST, _MOST_LONGER = 0.05, 5.0, 5, 25


def window_lengths(num_steps: int, bptt: int, seed: int, epoch: int) -> list[int]:
    """Return the lengths of windows, about `bptt` each, that cover a text of `num_steps` steps.

    They begin elsewhere in each epoch, so that each token is near the end of one at times.
    """
    draw = torch.Generator().manual_seed(seed_at(seed, "lengths", epoch))
    lengths: list[int] = []
    while num_steps > 0:
        is_half = float(torch.rand((), generator=draw)) < _HALF_FRACTION
        mean = bptt / 2 if is_half else float(bptt)
        length = int(mean + _DEVIATION * float(torch.randn((), generator=draw)))
        lengths.append(min(max(_SHORTEST, length), bptt + _MOST_LONGER, num_steps))
        num_steps -= lengths[-1]
    return lengths


def windows(columns: Tensor, lengths: Sequence[int]) -> DataLoader[Tensor]:
    """Return windows ``(length + 1, N)`` of columns, one after the other, each with its targets."""
    ends = accumulate(lengths)
    slices: Any = [slice(end - length, end + 1) for length, end in zip(lengths, ends, strict=True)]
    dataset: Any = columns
    return DataLoader(dataset, batch_size=None, sampler=slices)


class Texts(LightningDataModule):
    """Text in training, validation and test parts, as windows ``(length + 1, N)`` of numbers.

    The vocabulary is that of the training part. The windows of an epoch follow from `seed` and its
    number alone, so that a resumed run goes on as if it had not been interrupted.

    Args:
        path: A text file, or a folder with train.txt, valid.txt and test.txt; the documentation
            that comes with CPython if None.
        tokens: What a token is: "whitespace" for what stands between white space, as in texts
            that were tokenized before; "words" for words and marks of punctuation; "characters".
            "words" for the built-in text and "whitespace" for others if None.
        min_count: How often a token must occur in training; all others are <unk>.
        max_vocab_size: The largest size of the vocabulary.
        batch_size: Number of columns that are read side by side in training.
        eval_batch_size: The same in validation and test; with 1 every token is read.
        bptt: Number of steps of a window.
        jitter: Whether the windows of training vary around `bptt`, anew in each epoch.
        validation_fraction: Part of the text that validates, if there is no validation file.
        test_fraction: Part of the text kept for the end, if there is no test file.
        prompt: How the text begins that ``predict`` writes.
        seed: Seed of the lengths of windows.
    """

    def __init__(
        self,
        path: str | None = None,
        tokens: TokenKind | None = None,
        min_count: int = 2,
        max_vocab_size: int | None = None,
        batch_size: int = 20,
        eval_batch_size: int = 10,
        bptt: int = 35,
        jitter: bool = True,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        prompt: str = "",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if bptt < 1:
            raise ValueError(f"`bptt` is {bptt}, but must be at least 1.")
        self.name = path or "the documentation of Python"
        self.kind: TokenKind = tokens or ("words" if path is None else "whitespace")
        texts = {part: tokenized(text, self.kind) for part, text in read_parts(path).items()}
        num_tokens = len(texts["train"])
        for part, fraction in (("test", test_fraction), ("validation", validation_fraction)):
            if not 0 < fraction < 1:
                raise ValueError(f"`{part}_fraction` is {fraction}, but must lie between 0 and 1.")
            if part not in texts:
                start = max(0, len(texts["train"]) - round(fraction * num_tokens))
                texts[part], texts["train"] = texts["train"][start:], texts["train"][:start]
        self.vocabulary = vocabulary_of(texts["train"], min_count, max_vocab_size)
        if len(self.vocabulary) < 2:
            raise ValueError(
                f"`min_count` is {min_count}, but no token of {self.name} occurs as often in "
                "training: all would be <unk>. Give a smaller one, or more text."
            )
        self.vocab_size = len(self.vocabulary)
        self._numbers = {token: number for number, token in enumerate(self.vocabulary)}
        self.parts = {part: self.encode(text) for part, text in texts.items()}
        self.prompt, self.bptt, self.jitter, self.seed = prompt, bptt, jitter, seed
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        num_steps = len(self.columns("train", batch_size)) - 1
        self.longest = min(bptt + _MOST_LONGER * jitter, num_steps)  # window of training
        self.columns("validation", eval_batch_size)

    def encode(self, tokens: Sequence[str]) -> Tensor:
        """Return the numbers of tokens ``(T,)``."""
        unknown = self._numbers[UNKNOWN]
        return torch.tensor([self._numbers.get(token, unknown) for token in tokens])

    def columns(self, part: str, batch_size: int) -> Tensor:
        """Lay a part ``(T,)`` out in columns ``(T // N, N)`` that are read side by side."""
        ids = self.parts[part]
        num_rows = len(ids) // batch_size
        if num_rows < 2:
            raise ValueError(
                f"The {part} part of {self.name} has {len(ids)} tokens, too few for {batch_size} "
                "columns of two. Give more text, or a smaller batch size."
            )
        return ids[: num_rows * batch_size].view(batch_size, num_rows).t().contiguous()

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return windows of the training part, with lengths set by `seed` and the epoch."""
        trainer = self.trainer
        ranks, rank, epoch = 1, 0, 0
        if trainer is not None:
            ranks, rank, epoch = trainer.world_size, trainer.global_rank, trainer.current_epoch
        columns = self.columns("train", self.batch_size * ranks)
        columns = columns[:, rank * self.batch_size :][:, : self.batch_size]
        if not self.jitter:
            return self._even(columns)
        return windows(columns, window_lengths(len(columns) - 1, self.bptt, self.seed, epoch))

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._even(self.columns("validation", self.eval_batch_size))

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._even(self.columns("test", self.eval_batch_size))

    def _even(self, columns: Tensor) -> DataLoader[Tensor]:
        whole, rest = divmod(len(columns) - 1, self.bptt)
        return windows(columns, [self.bptt] * whole + [rest] * (rest > 0))

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return the prompt as a window, with the end of a line before it."""
        tokens = tokenized(self.prompt, self.kind)
        if tokens[-1:] == [END_OF_LINE] and not self.prompt.endswith("\n"):
            tokens.pop()  # the line goes on
        start = "\n" if self.kind == "characters" else END_OF_LINE
        ids = self.encode([start, *tokens])[:, None]
        return windows(ids, [len(ids) - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the numbers of tokens mean what they meant when the model was trained."""
        if state_dict["vocabulary"] != self.vocabulary:
            raise ValueError(
                f"The checkpoint is of a model that was trained on other tokens than those of "
                f"{self.name}. Give the text that it was trained on as `--data.path`."
            )


# --- backpropagation through time, one segment's activations at a time ---------------------------


class Penalties(NamedTuple):
    """Weights of the mean square of the outputs (AR), and of their differences in time (TAR).

    Source: Merity, McCann and Socher, https://arxiv.org/abs/1708.01009.
    """

    activation: float = 0.0
    temporal: float = 0.0


class Trained(NamedTuple):
    """The loss of a window, the sum of its negative log-likelihoods, and the state after it."""

    loss: Tensor
    nll: Tensor
    state: State


def sum_of_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the negative log-likelihoods of targets, in nats and at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def window_backward(
    network: LanguageModel,
    ids: Tensor,
    state: State,
    store: recoup.GradStore,
    penalties: Penalties,
    segment_steps: int | None = None,
) -> Trained:
    """Add the gradients of the loss of a window to a store.

    A window is a chain of segments: each passes the state of the layers and three sums to the next.
    The sums make up the loss of the window, so that loss and gradients are those of the whole,
    whatever its segments; all share one draw of weight dropout and noise, and one of the masks.

    Kept: the states between segments, and the residuals of one segment while backward runs in it.
    Backward pays one more forward of each segment but the last.

    Args:
        network: The model to train.
        ids: Tokens ``(T + 1, N)``: all but the last are inputs, all but the first targets.
        state: The state before the first.
        store: The store to which the gradients are added.
        penalties: Weights of the penalties.
        segment_steps: Number of time steps of a segment; None for the whole window.
    """
    num_steps, batch_size = len(ids) - 1, ids.shape[1]
    masks = network.new_masks(num_steps, batch_size)
    length = segment_steps or num_steps
    carried: list[tuple[State, Tensor]] = []

    def segment(start: int) -> Callable[[tuple[State, Tensor]], tuple[State, Tensor]]:
        stop = min(start + length, num_steps)
        inputs, targets = ids[start:stop], ids[start + 1 : stop + 1]
        here = [m if m is None or len(m) == 1 else m[start:stop] for m in masks]

        def run(carry: tuple[State, Tensor]) -> tuple[State, Tensor]:
            before, sums = carry
            raw, dropped, after = network.encode(inputs, before, here)
            differences = raw.diff(dim=0).square().sum(dtype=sums.dtype)
            if start:  # The output before is the last layer's hidden state.
                jump = (raw[:1] - before[-1][0]).square().sum(dtype=sums.dtype)
                differences = differences + jump
            squares = dropped.square().sum(dtype=sums.dtype)
            nll = sum_of_nll(network.decoder(dropped), targets)
            return after, sums + torch.stack([nll, squares, differences])

        return run

    def loss_of(carry: tuple[State, Tensor]) -> Tensor:
        carried.append(carry)
        nll, squares, differences = carry[1]
        num_outputs = state[-1][0].numel()  # of one time step
        loss = nll / (num_steps * batch_size)
        loss = loss + penalties.activation * squares / (num_steps * num_outputs)
        return loss + penalties.temporal * differences / (max(1, num_steps - 1) * num_outputs)

    weight = network.decoder.weight
    sums = weight.new_zeros(3, dtype=torch.promote_types(weight.dtype, torch.float32))
    segments = [segment(start) for start in range(0, num_steps, length)]
    memory = "linear" if len(segments) == 1 else "inputs"
    with recoup.weights.same_draw():
        loss = recoup.segments_backward(segments, (state, sums), loss_of, store, memory=memory)
    after, sums = carried[0]
    detached = tuple((hidden.detach(), cell.detach()) for hidden, cell in after)
    return Trained(loss, sums[0].detach(), detached)


def longest_segment(peak: Callable[[int], int], longest: int, budget: int) -> int:
    """Return how many steps a segment may have for a window of `longest` steps to fit in bytes.

    Args:
        peak: Measures the peak of a step in bytes, with segments of so many steps.
        longest: Number of steps of the longest window.
        budget: The bytes.
    """
    steps = math.isqrt(longest)
    while peak(steps) > budget:
        if steps == 1:
            raise ValueError(
                f"`memory` is {budget} bytes, too few for a window of {longest} steps in segments "
                "of one. Give more, shorter windows, or a smaller batch."
            )
        steps = math.ceil(steps / 2)
    # Upwards, so that no measurement takes much more than the bytes that there are.
    while steps < longest and peak(min(longer := math.ceil(1.25 * steps), longest)) <= budget:
        steps = min(longer, longest)
    return steps


# --- training ------------------------------------------------------------------------------------


class Perplexity(MeanMetric):
    """Exponential of the mean negative log-likelihood, from sums over all tokens."""

    def compute(self) -> Tensor:
        """Return the perplexity of all tokens."""
        return super().compute().exp()


class Averaging(WeightAveraging):
    """Average the parameters once validation no longer improves (NT-ASGD), or from the start.

    Validation and the weights of a checkpoint are then the average; training goes on from the last
    parameters, which the checkpoint holds too. Weight dropout and noise are applied in forward, and
    no parameter ever holds them. The optimizer is plain SGD, since ``torch.optim.ASGD`` uses the
    learning rate of the step before, which here is that of another window.

    Args:
        num_patient: How many of the last validations the trigger does not count.
        from_start: Whether to average from the first step; the trigger then ends training.

    Source: Merity, Keskar and Socher, https://arxiv.org/abs/1708.02182, algorithm 1.
    """

    def __init__(self, num_patient: int, from_start: bool = False) -> None:
        super().__init__(use_buffers=False, avg_fn=_mean)
        self.num_patient, self.is_averaging = num_patient, from_start
        self.from_start, self.losses = from_start, list[float]()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the average where the module will be, and of its type, before it is there."""
        self._device = trainer.strategy.root_device
        trainer.precision_plugin.convert_module(pl_module)
        super().setup(trainer, pl_module, stage)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Take the parameters into the average, or, before the trigger, in its place."""
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if self._average_model is not None and not self.is_averaging:
            self._average_model.n_averaged.zero_()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to average, or end training, if this loss is above an earlier one that counts."""
        self.losses.append(float(trainer.callback_metrics[MONITOR]))
        counted = self.losses[: max(0, len(self.losses) - 1 - self.num_patient)]
        if counted and self.losses[-1] > min(counted):
            trainer.should_stop = trainer.should_stop or self.from_start
            self.is_averaging = True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "losses": self.losses, "is_averaging": self.is_averaging}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a run."""
        super().load_state_dict(state_dict)
        self.losses, self.is_averaging = list(state_dict["losses"]), state_dict["is_averaging"]


def _mean(mean: Tensor, new: Tensor, num: Tensor | int) -> Tensor:
    return mean + (new - mean) / (num + 1)


class LanguageModelTraining(LightningModule):
    """Train a language model on windows of text.

    Logged for each epoch, for training (``train_``) and validation (``val_``), and for ``test_``:
    `perplexity`, from sums over tokens and without the penalties.

    The draws of a step (masks, weight dropout, noise) follow from `seed`, the epoch and the number
    of the window: they are the same in every memory mode and in a resumed run.

    Args:
        vocab_size: Number of tokens, that of the data.
        bptt: Length of a window at which the learning rate is as given; it is scaled by the length.
        memory: What backward remembers of a window: "linear" for all of it, "sqrt" for as many
            states as a segment has steps, or the most bytes that a step may take, as "500 MiB".
        weight_noise_start: Number of the step from which there is noise.
        activation_penalty: Weight of the mean square of the outputs (AR).
        temporal_penalty: Weight of the mean square of their differences in time (TAR).
        optimizer: The optimizer.
        learning_rate: The learning rate.
        weight_decay: The weight decay.
        clip: Largest norm of the gradient; 0 for no bound.
        averaging: Whether the parameters are averaged: "triggered" when validation no longer
            improves, "always" from the first step until it no longer improves, or "never".
        num_patient: How many of the last validations the trigger does not count.
        init_from: A checkpoint whose weights a new run begins with.
        num_tokens: Number of tokens that ``predict`` writes.
        temperature: 1 for the probabilities of the model; less writes likelier tokens.
        seed: Seed of the draws of all steps.
        network: Arguments of `LanguageModel`.
    """

    def __init__(
        self,
        vocab_size: int,
        bptt: int = 35,
        memory: str = "linear",
        weight_noise_start: int = 0,
        activation_penalty: float = 2.0,
        temporal_penalty: float = 1.0,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 20.0,
        weight_decay: float = 1.2e-6,
        clip: float = 0.25,
        averaging: Literal["triggered", "always", "never"] = "triggered",
        num_patient: int = 5,
        init_from: str | None = None,
        num_tokens: int = 100,
        temperature: float = 1.0,
        seed: int = 0,
        **network: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.network = LanguageModel(vocab_size, **network)
        if init_from is not None:
            check_checkpoint(init_from)
            contents = torch.load(init_from, map_location="cpu", weights_only=True)
            self.load_state_dict(contents["state_dict"])
        self.budget = None if memory in ("linear", "sqrt") else parse_bytes(memory)
        self.segment_steps: int | None = None  # within the budget
        self.penalties = Penalties(activation_penalty, temporal_penalty)
        # Names end in an underscore, since modules have a method `train`.
        stages = ("train", "val", "test")
        self.perplexities = nn.ModuleDict({f"{stage}_": Perplexity() for stage in stages})
        self.states: dict[str, State] = {}

    def on_fit_start(self) -> None:
        """Find segments that keep to the bytes, if there is a bound on them."""
        trainer: Any = self.trainer
        if trainer.precision in ("16-mixed", "16-true"):
            raise ValueError("Means over a window are too small for float16. Give bf16-mixed.")
        if self.budget is None:
            return
        data: Texts = trainer.datamodule
        shape = (data.longest + 1, data.batch_size)
        ids = torch.zeros(shape, dtype=torch.int64, device=self.device)

        def peak(steps: int) -> int:
            step = partial(self.gradients, ids, steps)
            return recoup.measure(step, device=self.device, repeats=0).peak_bytes

        self.network.set_noise(True)
        with trainer.precision_plugin.forward_context():
            self.segment_steps = longest_segment(peak, data.longest, self.budget)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Take a step on a window ``(T + 1, N)``, carry the state over, and return the loss."""
        settings: Any = self.hparams
        torch.manual_seed(seed_at(settings.seed, self.global_rank, self.current_epoch, batch_idx))
        self.network.set_noise(self.global_step >= settings.weight_noise_start)
        num_steps = len(batch) - 1
        steps = math.ceil(math.sqrt(num_steps)) if settings.memory == "sqrt" else self.segment_steps
        state = self.states["train"] if batch_idx else None
        store, trained = self.gradients(batch, steps, state)
        self.states["train"] = trained.state
        self.count("train", trained.nll, batch[1:].numel())

        if self.trainer.world_size > 1:
            store.all_reduce_()
        if settings.clip:
            store.clip_norm_(settings.clip)
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * num_steps / settings.bptt
        store.step(optimizer)
        return trained.loss

    def gradients(
        self, ids: Tensor, segment_steps: int | None, state: State | None = None
    ) -> tuple[recoup.GradStore, Trained]:
        """Return the gradients of the loss of a window, and the loss and the state after it."""
        store = recoup.GradStore(self.network.parameters(), ddp=False)  # see `all_reduce_`
        state = self.network.zero_state(ids.shape[1]) if state is None else state
        options = (self.penalties, segment_steps)
        return store, window_backward(self.network, ids, state, store, *options)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        settings: Any = self.hparams
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[settings.optimizer]
        options = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        return kind(self.network.parameters(), **options)

    def configure_callbacks(self) -> list[Callback]:
        settings: Any = self.hparams
        averaging = Averaging(settings.num_patient, settings.averaging == "always")
        return [] if settings.averaging == "never" else [averaging]

    def count(self, stage: str, nll: Tensor, num_tokens: int) -> None:
        """Add the sum of the negative log-likelihoods of tokens to the perplexity."""
        metric: Any = self.perplexities[f"{stage}_"]
        metric.set_dtype(torch.float64)
        # The mean skips NaN, but a training that diverged must show.
        nll = nll.detach().double().nan_to_num(nan=math.inf, posinf=math.inf)
        metric.update(nll / num_tokens, weight=num_tokens)
        options: Any = {"on_step": False, "on_epoch": True, "prog_bar": stage == "val"}
        self.log(f"{stage}_perplexity", metric, **options)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("test", batch, batch_idx)

    def _evaluate(self, stage: str, batch: Tensor, batch_idx: int) -> None:
        state = self.states[stage] if batch_idx else None
        logits, self.states[stage] = self.network(batch[:-1], state)
        nll = sum_of_nll(logits, batch[1:])
        self.count(stage, nll, batch[1:].numel())

    def predict_step(self, batch: Tensor, batch_idx: int) -> str:
        """Print and return a text that begins with the prompt; <unk> is never written."""
        settings: Any = self.hparams
        trainer: Any = self.trainer
        data: Texts = trainer.datamodule
        draw = torch.Generator().manual_seed(settings.seed)
        ids, state, written = batch, None, batch[1:, 0].tolist()
        for _ in range(settings.num_tokens):
            logits, state = self.network(ids, state)
            last = logits[-1, 0].double().cpu()
            last[data.vocabulary.index(UNKNOWN)] = -math.inf
            shares = ((last - last.max()) / max(settings.temperature, 1e-9)).softmax(dim=0)
            written.append(int(torch.multinomial(shares, 1, generator=draw)))
            ids = batch.new_tensor([[written[-1]]])
        text = joined([data.vocabulary[number] for number in written], data.kind)
        print(text)
        return text


def main(args: Sequence[str] | None = None, *, run: bool = True) -> TrainingCLI:
    """Run the command line with these arguments, those of the process if None."""
    return TrainingCLI(
        LanguageModelTraining,
        Texts,
        name="language_model",
        monitor=MONITOR,
        of_data={"vocab_size": "vocab_size", "bptt": "bptt"},
        args=args,
        run=run,
        # Each epoch has other windows, and each rank its own columns of them.
        trainer_defaults={"reload_dataloaders_every_n_epochs": 1, "use_distributed_sampler": False},
    )


if __name__ == "__main__":
    main()
