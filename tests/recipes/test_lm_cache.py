"""The neural cache against a loop over all that was seen and the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recoup.recipes.language_model.cache import NeuralCache

VOCAB_SIZE, CHANNELS = 5, 3


def history(num_steps, batch_size, seed=0, dtype=torch.float64):
    """Logits, outputs and words of a text; few words, so that they come again and again."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_steps, batch_size)
    return (
        torch.randn(*shape, VOCAB_SIZE, generator=generator, dtype=dtype),
        torch.randn(*shape, CHANNELS, generator=generator, dtype=dtype),
        torch.randint(VOCAB_SIZE, shape, generator=generator),
    )


def probabilities(logits, outputs, words, window, theta, weight):
    """Grave et al., equations 2 to 4, word by word: ``(T, N, V)``."""
    found = torch.zeros_like(logits, dtype=torch.float64)
    for n in range(logits.shape[1]):
        for t in range(len(logits)):
            exponentials = [math.exp(float(logit)) for logit in logits[t, n]]
            network = [each / math.fsum(exponentials) for each in exponentials]
            seen = range(max(0, t - window), t)
            likeness = {
                i: math.exp(theta * sum(float(a * b) for a, b in zip(*pair, strict=True)))
                for i in seen
                for pair in [(outputs[t, n], outputs[i, n])]
            }
            for v in range(VOCAB_SIZE):
                cached = math.fsum(likeness[i] for i in seen if int(words[i, n]) == v)
                found[t, n, v] = (
                    (1 - weight) * network[v] + weight * cached / math.fsum(likeness.values())
                    if seen
                    else network[v]
                )
    return found


def in_pieces(cache, lengths, *tensors):
    pieces = zip(*(each.split(lengths) for each in tensors), strict=True)
    return torch.cat([cache.nll(*piece) for piece in pieces])


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    batch_size=st.integers(1, 3),
    window=st.integers(1, 12),
    theta=st.floats(0, 2),
    weight=st.floats(0, 0.99),
    seed=st.integers(0, 99),
)
def test_it_is_the_published_mixture_however_the_text_is_cut(
    lengths, batch_size, window, theta, weight, seed
):
    text = history(sum(lengths), batch_size, seed)
    expected = probabilities(*text, window, theta, weight)
    torch.testing.assert_close(expected.sum(dim=2), torch.ones_like(expected[:, :, 0]))
    found = in_pieces(NeuralCache(window, theta, weight), lengths, *text)
    wanted = -expected.gather(2, text[2][:, :, None]).squeeze(2).log()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num_before", [0, 1, 4, 9])
def test_probabilities_of_all_words_sum_to_one(num_before):
    logits, outputs, words = history(num_before + 1, 2)
    total = torch.zeros(2, dtype=torch.float64)
    for word in range(VOCAB_SIZE):
        cache = NeuralCache(window=4, theta=0.7, weight=0.3)
        if num_before:
            cache.nll(logits[:-1], outputs[:-1], words[:-1])
        total += (-cache.nll(logits[-1:], outputs[-1:], torch.full((1, 2), word))).exp()[0]
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-12, atol=0)


@pytest.mark.parametrize("lengths", [[8], [1] * 8, [3, 5]])
@pytest.mark.parametrize("window", [1, 3, 6, 7, 100])
def test_the_window_has_exactly_so_many_words(window, lengths):
    """Word 4 was the first of eight and no other: it counts at the last if seven are kept."""
    words = torch.tensor([4, 0, 1, 2, 3, 0, 1, 4])[:, None]
    logits = torch.zeros(8, 1, VOCAB_SIZE, dtype=torch.float64)
    outputs = torch.zeros(8, 1, CHANNELS, dtype=torch.float64)  # all alike
    nll = in_pieces(NeuralCache(window, 1.0, 0.5), lengths, logits, outputs, words)
    cached = 1 / 7 if window >= 7 else 0
    assert float(nll[-1]) == pytest.approx(-math.log(0.5 / VOCAB_SIZE + 0.5 * cached))


@pytest.mark.parametrize("lengths", [[9], [4, 5]])
def test_columns_are_texts_of_their_own(lengths):
    text = history(9, 3)
    together = in_pieces(NeuralCache(5, 0.7, 0.3), lengths, *text)
    for n in range(3):
        alone = NeuralCache(5, 0.7, 0.3).nll(*(each[:, n : n + 1] for each in text))
        torch.testing.assert_close(together[:, n : n + 1], alone)
    others = [each.clone() for each in text]
    others[1][:, 2], others[2][:, 2] = 7.0, 0
    beside = in_pieces(NeuralCache(5, 0.7, 0.3), lengths, *others)
    assert torch.equal(beside[:, :2], together[:, :2])
    assert not torch.equal(beside[1:, 2], together[1:, 2])


def network_nll(logits, words):
    return -logits.log_softmax(dim=2).gather(2, words[:, :, None]).squeeze(2)


def test_before_the_first_word_it_is_the_network():
    logits, outputs, words = history(6, 2)
    cache = NeuralCache(weight=0.9)
    for _ in range(2):
        nll = cache.nll(logits, outputs, words)
        torch.testing.assert_close(nll[0], network_nll(logits, words)[0])
        assert not torch.isclose(nll[1:], network_nll(logits, words)[1:]).any()
        cache.forget()


def test_without_forgetting_the_text_goes_on():
    text = history(6, 2)
    cache = NeuralCache(weight=0.5)
    first = cache.nll(*text)
    assert not torch.isclose(cache.nll(*text)[0], first[0]).any()
    cache.forget()
    torch.testing.assert_close(cache.nll(*text), first)


def test_with_weight_zero_it_is_the_network():
    logits, outputs, words = history(9, 2)
    cache = NeuralCache(window=3, weight=0)
    nll = in_pieces(cache, [4, 5], logits, outputs, words)
    torch.testing.assert_close(nll, network_nll(logits, words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("theta", [0.0, 1e4])
def test_extremes_stay_finite(theta, dtype):
    logits, outputs, words = history(40, 2, dtype=dtype)
    logits = 1e3 * logits  # which underflow as probabilities
    nll = in_pieces(NeuralCache(10, theta, 0.2), [15, 25], logits, outputs, words)
    assert nll.isfinite().all()
    assert (nll >= 0).all()


def test_a_word_that_the_network_rules_out_can_come_from_the_cache():
    logits, outputs, words = history(2, 1)
    words[:] = 3
    logits[1, 0, 3] = -math.inf
    nll = NeuralCache(weight=0.25).nll(logits, outputs, words)
    assert float(nll[1]) == pytest.approx(-math.log(0.25))


def test_it_keeps_the_words_of_its_window_and_no_more_bytes():
    cache = NeuralCache(window=10)
    for num_steps in (300, 1, 30):
        cache.nll(*history(num_steps, 2))
        kept = [each for each in vars(cache).values() if isinstance(each, torch.Tensor)]
        sizes = sorted(each.untyped_storage().nbytes() for each in kept)
        assert sizes == [10 * 2 * 8, 10 * 2 * 8 * CHANNELS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "`cache_window` is 0, but must be at least 1"),
        ({"theta": -0.1}, "`cache_theta` is -0.1, but must be at least 0, and finite"),
        ({"theta": math.inf}, "`cache_theta` is inf"),
        ({"theta": math.nan}, "`cache_theta` is nan"),
        ({"weight": 1.0}, "`cache_weight` is 1.0, but must be at least 0 and less than 1"),
        ({"weight": -0.1}, "`cache_weight` is -0.1"),
        ({"weight": math.nan}, "`cache_weight` is nan"),
    ],
)
def test_settings_out_of_their_range(options, message):
    with pytest.raises(ValueError, match=message):
        NeuralCache(**options)
