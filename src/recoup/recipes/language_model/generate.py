"""The command ``recoup lm generate``: text that a trained language model writes."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.checks import check_at_least, check_not_negative, move_to_device
from recoup.recipes.draws import generator_for
from recoup.recipes.language_model.reading import END_OF_LINE, text_of, tokens_of
from recoup.recipes.language_model.trained import load_model, load_token_kind, load_vocabulary
from recoup.recipes.mistakes import mistakes_reported

__all__ = ["generate"]


def generate(
    checkpoint: str,
    prompt: str = "",
    num_tokens: int = 100,
    temperature: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """Print a text that begins with a prompt and goes on as a trained model has it.

    Args:
        checkpoint: The .ckpt file of a trained model.
        prompt: How the text begins. Tokens that the model does not know are read as <unk>, which
            it never writes itself.
        num_tokens: Number of tokens to write.
        temperature: 1 for the probabilities of the model; less gives likelier tokens, 0 always the
            likeliest.
        seed: Seed of the draws.
        device: Where to run: cpu or cuda.

    Returns:
        The exit code.
    """
    with mistakes_reported():
        check_at_least(1, **{"--num-tokens": num_tokens})
        check_not_negative(**{"--temperature": temperature})
        generator = generator_for(seed)
        trained = Checkpoint(checkpoint)
        network = load_model(trained).network
        vocabulary, kind = load_vocabulary(trained), load_token_kind(trained)
        move_to_device(network, device)
    tokens = tokens_of(prompt, kind)
    if tokens[-1:] == [END_OF_LINE] and not prompt.endswith("\n"):
        tokens.pop()  # The line continues.
    unknown = [token for token in tokens if token not in vocabulary]
    if unknown:
        print(f"read as <unk>: {', '.join(dict.fromkeys(unknown))}", file=sys.stderr)
    start = "\n" if kind == "characters" else END_OF_LINE
    ids, state = vocabulary.encode([start, *tokens])[:, None].to(device), None
    written: list[int] = []
    with torch.no_grad():
        for _ in range(num_tokens):
            logits, state = network(ids, state)
            last = logits[-1, 0].cpu()
            last[vocabulary.unknown] = -torch.inf
            chosen = _chosen(last, temperature, generator)
            written.append(int(chosen))
            ids = chosen.view(1, 1).to(device)
    print(text_of([*tokens, *(vocabulary.tokens[number] for number in written)], kind))
    return 0


def _chosen(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    # The largest logit is shifted to 0 before the division, as a tiny temperature would make it
    # infinite.
    probabilities = ((logits - logits.max()).double() / temperature).softmax(dim=0)
    return torch.multinomial(probabilities, 1, generator=generator)
