"""The network: embedding, LSTM layers and decoder, and the dropout of AWD-LSTM for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

import recoup
from recoup.recipes.checks import check_at_least, check_probabilities

__all__ = ["DropoutKind", "Encoded", "LanguageModel", "Masks", "State"]

DropoutKind = Literal["locked", "independent"]

State = tuple[tuple[Tensor, Tensor], ...]
"""Hidden and cell state of each layer, ``(1, N, H)`` both."""

_RECURRENT = "weight_hh_l0"


class Masks:
    """The masks of the dropout of activations, drawn once for a window, whatever its segments.

    Kept: a byte for each entry of a mask. A locked mask has the size of one time step, an
    independent one that of the window.

    Args:
        probabilities: for each layer's name, the probability that an entry is dropped,
            in ``[0, 1)``.
        masks: for each layer's name, the entries to keep: ``(1, N, C)`` or ``(T, N, C)``.

    Source: Gal and Ghahramani, https://arxiv.org/abs/1512.05287, for locked masks.
    """

    def __init__(self, probabilities: Mapping[str, float], masks: Mapping[str, Tensor]) -> None:
        self._probabilities = probabilities
        self._masks = masks

    @classmethod
    def drawn(
        cls,
        kind: DropoutKind,
        probabilities: Mapping[str, float],
        sizes: Mapping[str, int],
        num_steps: int,
        batch_size: int,
        device: torch.device | str = "cpu",
    ) -> Masks:
        """Draw masks from the default generator.

        Args:
            kind: "locked" for one mask for all time steps (variational dropout), or "independent"
                for a mask of its own at each.
            probabilities: as above.
            sizes: number of channels for each name.
            num_steps: number of time steps of the window.
            batch_size: number of rows of the window.
            device: device of the activations.
        """
        length = 1 if kind == "locked" else num_steps
        masks = {
            name: torch.empty(
                (length, batch_size, sizes[name]), dtype=torch.bool, device=device
            ).bernoulli_(1 - p)
            for name, p in probabilities.items()
            if p
        }
        return cls(probabilities, masks)

    def between(self, start: int, stop: int) -> Masks:
        """Return the masks of the time steps from `start` to `stop`."""
        masks = {
            name: mask if len(mask) == 1 else mask[start:stop] for name, mask in self._masks.items()
        }
        return Masks(self._probabilities, masks)

    def drop(self, x: Tensor, name: str) -> Tensor:
        """Drop entries of activations ``(T, N, C)``, and scale up the others."""
        mask = self._masks.get(name)
        if mask is None:
            return x
        scale = 1 / (1 - self._probabilities[name])
        if len(mask) == 1:  # It is small: as numbers it needs one pass over `x`, not two.
            return x * (mask.to(x.dtype) * scale)
        return x * mask * scale


class Encoded(NamedTuple):
    """The output of the layers for tokens.

    Attributes:
        raw: outputs of the last layer ``(T, N, C)``.
        dropped: the same after dropout; the input of the decoder.
        state: the state after the last token.
    """

    raw: Tensor
    dropped: Tensor
    state: State


class LanguageModel(nn.Module):
    """An LSTM language model with the regularisation of AWD-LSTM.

    Kept: a seed each for weight dropout, weight noise and dropout of activations, from which
    backward draws again. The parameters and their names are those of plain layers. With
    ``dropout_kind="independent"`` and no dropout of weights or embedding rows it is the ordinary
    LSTM language model.

    Args:
        vocab_size: number of tokens.
        embed_size: size of an embedding.
        hidden_size: size of the layers; the last has `embed_size` if weights are tied.
        num_layers: number of LSTM layers.
        tie_weights: whether the decoder shares the weight of the embedding.
        input_dropout: dropout of the input of the first layer.
        hidden_dropout: dropout between layers.
        output_dropout: dropout of the input of the decoder.
        embedding_dropout: dropout of whole rows of the embedding, so of a word wherever it occurs.
            A tied decoder uses the raw weight.
        weight_dropout: dropout of the hidden-to-hidden weights, one mask for a window.
        weight_noise: standard deviation of the noise on the weights of embedding and layers. It is
            0 until `set_weight_noise` turns it on.
        dropout_kind: whether input, hidden and output dropout are "locked", one mask for a window,
            or "independent", one mask for each time step.

    Raises:
        ValueError: when a size is not positive, or a probability outside its range.

    Source: Merity, Keskar and Socher, https://arxiv.org/abs/1708.02182.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        embed_size: int = 400,
        hidden_size: int = 1150,
        num_layers: int = 3,
        tie_weights: bool = True,
        input_dropout: float = 0.65,
        hidden_dropout: float = 0.2,
        output_dropout: float = 0.4,
        embedding_dropout: float = 0.1,
        weight_dropout: float = 0.5,
        weight_noise: float = 0.0,
        dropout_kind: DropoutKind = "locked",
    ) -> None:
        super().__init__()
        check_at_least(1, vocab_size=vocab_size, embed_size=embed_size)
        check_at_least(1, hidden_size=hidden_size, num_layers=num_layers)
        check_probabilities(
            input_dropout=input_dropout,
            hidden_dropout=hidden_dropout,
            output_dropout=output_dropout,
        )
        if dropout_kind not in ("locked", "independent"):
            raise ValueError(
                f'`dropout_kind` is {dropout_kind!r}, but must be "locked" or "independent".'
            )
        if not weight_noise >= 0:
            raise ValueError(f"`weight_noise` is {weight_noise}, but must be at least 0.")
        self.dropout_kind: DropoutKind = dropout_kind
        self.weight_noise = weight_noise

        last_size = embed_size if tie_weights else hidden_size
        sizes = [embed_size, *[hidden_size] * (num_layers - 1), last_size]
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.layers = nn.ModuleList(map(nn.LSTM, sizes[:-1], sizes[1:]))
        self.decoder = nn.Linear(last_size, vocab_size)
        self._sizes = dict(
            zip(["input", *(f"output {n}" for n in range(1, num_layers + 1))], sizes, strict=True)
        )
        between = [hidden_dropout] * (num_layers - 1)
        rates = [input_dropout, *between, output_dropout]
        self._probabilities = dict(zip(self._sizes, rates, strict=True))
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
                recoup.weight_dropout(layer, _RECURRENT, p=weight_dropout)
        self._noise_std = torch.zeros(())
        if weight_noise:
            for part in (self.embedding, *self.layers):
                recoup.weight_noise(part, ".*weight.*", std=self._noise_std)

    def set_weight_noise(self, is_on: bool) -> None:
        """Turn the noise on weights on or off, from the next forward on."""
        self._noise_std.fill_(self.weight_noise if is_on else 0.0)

    def zero_state(self, batch_size: int) -> State:
        """Return the state before the first token."""
        weight = self.decoder.weight
        shapes = [(1, batch_size, size) for size in list(self._sizes.values())[1:]]
        return tuple((weight.new_zeros(shape), weight.new_zeros(shape)) for shape in shapes)

    def new_masks(self, num_steps: int, batch_size: int) -> Masks | None:
        """Draw the dropout masks of a window; None in evaluation."""
        if not self.training:
            return None
        return Masks.drawn(
            self.dropout_kind,
            self._probabilities,
            self._sizes,
            num_steps,
            batch_size,
            self.decoder.weight.device,
        )

    def encode(self, ids: Tensor, state: State, masks: Masks | None = None) -> Encoded:
        """Run the layers over tokens.

        Args:
            ids: numbers of tokens ``(T, N)``, int64.
            state: the state before them.
            masks: masks of the dropout of activations; None for none.
        """
        inputs = self.embedding(ids)
        raw: Tensor = inputs
        states: list[tuple[Tensor, Tensor]] = []
        dropped = inputs if masks is None else masks.drop(inputs, "input")
        for number, (layer, before) in enumerate(zip(self.layers, state, strict=True), 1):
            raw, after = layer(dropped, before)
            states.append(after)
            dropped = raw if masks is None else masks.drop(raw, f"output {number}")
        return Encoded(raw, dropped, tuple(states))

    def forward(self, ids: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the logits of each next token ``(T, N, vocab_size)``, and the state after it.

        Args:
            ids: numbers of tokens ``(T, N)``, int64.
            state: the state before them; zeros if None.
        """
        state = self.zero_state(ids.shape[1]) if state is None else state
        encoded = self.encode(ids, state, self.new_masks(*ids.shape))
        return self.decoder(encoded.dropped), encoded.state

    def evaluation_twin(self) -> Self:
        """Return a network that shares the parameters, without any dropout or noise.

        Kept: nothing; the twin has no parameters of its own, as `recoup.weights.twin` says.

        Source: https://github.com/dmlc/gluon-nlp/issues/1060.
        """
        twin = recoup.weights.twin(self)
        twin._probabilities = dict.fromkeys(self._probabilities, 0.0)
        twin._noise_std = torch.zeros(())  # that of the network would turn on its noise
        return twin
