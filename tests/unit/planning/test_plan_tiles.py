"""A plan with `tiles`: the output layer of a language model runs in tiles with its loss."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ChangedError, GradientError
from tests.planned_zoo import is_plain, transformers_or_skip

VOCABULARY = 4096


def gpt2(dropout: float = 0.1, layers: int = 3) -> nn.Module:
    transformers = transformers_or_skip()
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_layer=layers, vocab_size=VOCABULARY, n_positions=128,
        use_cache=False, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)  # the head is the embedding


def llama() -> nn.Module:
    transformers = transformers_or_skip()
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Plain(nn.Module):
    """A language model that returns its logits."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in "abc"
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(num: int = 4, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (num, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, : length // 4] = -100
    return tokens, labels


def step(model, tokens, labels, **more):
    """A step with the draws of seed 3: its loss and gradients, in the order of parameters."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    output = model(tokens, labels=labels, **more)
    output.loss.backward()
    return output.loss.detach(), [p.grad for p in model.parameters()]


def assert_close(got, want, tolerance):
    for a, b in zip(got[1], want[1], strict=True):
        assert float((a - b).norm() / b.norm().clamp_min(1e-30)) <= tolerance
    assert float((got[0] - want[0]).abs() / want[0].abs()) <= tolerance


def errors(found, exact):
    """How far each gradient is from that in float64, relative to its norm."""
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(found[1], exact[1], strict=True)])


def assert_as_exact(got, want, exact):
    """Check that tiles are as near to float64 as the model without them is."""
    eps = torch.finfo(torch.float32).eps
    assert float((got[0] - exact[0]).abs()) <= 2 * eps * float(exact[0])
    own, plain = errors(got, exact), errors(want, exact)
    assert own.norm() <= 1.1 * plain.norm()
    assert own.max() <= 1.1 * plain.max()


def shifted_loss(tokens):
    def loss(logits):
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].flatten())

    return loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [functools.partial(gpt2, 0.0), llama], ids=["gpt2", "llama"])
def test_a_language_model_in_fewer_bytes_than_its_logits(build):
    torch.manual_seed(0)
    model, (tokens, labels) = build(), batch()
    want = step(model, tokens, labels)
    exact = step(copy.deepcopy(model).double(), tokens, labels)
    whole = recoup.plan(model, tokens, labels=labels)
    tiled = recoup.plan(model, tokens, labels=labels, tiles=True)
    budget = 1.02 * tiled.points[0].peak_bytes
    assert budget < whole.points[0].peak_bytes / 3
    for bytes_ in (int(budget), whole.points[0].peak_bytes // 2):
        plan = tiled.plan(bytes_)
        with plan.applied():
            assert recoup.measure(lambda: step(model, tokens, labels)).peak_bytes <= bytes_
            assert_as_exact(step(model, tokens, labels), want, exact)


def has_like_rows(model, rows):
    """Whether products of this machine have the same rows, however many there are."""
    gradient = torch.randn(len(rows), VOCABULARY)
    weight = model.lm_head.weight.detach()
    pairs = [(rows @ weight.T, lambda x: x @ weight.T), (gradient @ weight, lambda x: x @ weight)]
    given = [rows, gradient]
    return all(
        torch.equal(whole, torch.cat([product(piece) for piece in value.split(64)]))
        for (whole, product), value in zip(pairs, given, strict=True)
    )


@pytest.mark.parametrize("build", [functools.partial(gpt2, 0.0, 6), llama], ids=["gpt2", "llama"])
def test_the_head_alone_rounds_otherwise(build):
    """Bits of all other gradients are those without tiles; the head's are nearer to float64."""
    torch.manual_seed(0)
    model, (tokens, labels) = build(), batch()
    if not has_like_rows(model, torch.randn(4 * 63, 64)):
        pytest.skip("products of fewer rows round otherwise here")
    want = step(model, tokens, labels)
    exact = step(copy.deepcopy(model).double(), tokens, labels)
    plan = recoup.plan(model, tokens, labels=labels, budget="8 MiB", tiles=True)
    assert plan.planned.tiled is not None
    with plan.applied():
        got = step(model, tokens, labels)
    head = model.lm_head.weight
    for place, parameter in enumerate(model.parameters()):
        if parameter is head:
            assert errors(got, exact)[place] <= errors(want, exact)[place]
        else:
            assert torch.equal(got[1][place], want[1][place])


def test_the_number_of_items_of_an_accumulated_batch():
    model, (tokens, labels) = gpt2(), batch()
    more = {"num_items_in_batch": torch.tensor(777)}
    want = step(model, tokens, labels, **more)
    plan = recoup.plan(model, tokens, labels=labels, budget="6 MiB", tiles=True, **more)
    with plan.applied():
        assert_close(step(model, tokens, labels, **more), want, 1e-6)
    assert "tile: `lm_head`" in str(plan)


@pytest.fixture(scope="module")
def planned():
    torch.manual_seed(0)
    model, (tokens, labels) = gpt2(), batch()
    return model, recoup.plan(model, tokens, labels=labels, budget="6 MiB", tiles=True)


def test_logits_are_those_of_the_model_when_they_are_read(planned):
    model, plan = planned
    tokens, labels = batch()
    model.eval()
    want = model(tokens, labels=labels)
    with plan.applied():
        got = model(tokens, labels=labels)
        assert got.logits.shape == want.logits.shape
        assert got.logits.requires_grad
        assert torch.equal(got.logits[..., :-1, :].argmax(-1), want.logits[..., :-1, :].argmax(-1))
        assert torch.equal(got.logits, want.logits)
        assert torch.equal(got.logits.transpose(1, 2), want.logits.transpose(1, 2))
        assert torch.equal(torch.cat([got.logits, got.logits]), want.logits.repeat(2, 1, 1))
    model.train()


@pytest.fixture(scope="module")
def doubles():
    torch.manual_seed(0)
    model, (tokens, _) = Plain().double(), batch()
    plan = recoup.plan(model, tokens, loss=shifted_loss(tokens), budget="9 MiB", tiles=4)
    assert plan.planned.tiled is not None
    return model, plan


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits: logits.float().logsumexp(-1).square().mean(),
        lambda logits: logits[:, :, 5].sum() + (logits[:, 1:] * 2).view(-1, VOCABULARY).std(),
        lambda logits: (30 * torch.tanh(logits / 30)).flatten(0, 1).softmax(-1).square().sum(),
        lambda logits: logits.mul_(2).sum(0)[0, 0] + logits.detach().sum(),
        lambda logits: F.cross_entropy(logits.transpose(1, 2), batch()[0]),
        lambda logits: F.cross_entropy(
            logits.flatten(0, 1), batch()[0].flatten(), weight=torch.arange(VOCABULARY).double()
        ),
        lambda logits: F.cross_entropy(
            (30 * torch.tanh(logits / 30)).flatten(0, 1), batch()[0].flatten(), label_smoothing=0.1
        ),
        lambda logits: F.cross_entropy(
            logits.to(torch.float64).view(-1, VOCABULARY), batch()[1].view(-1), reduction="sum"
        ),
        lambda logits: F.cross_entropy(logits[batch()[0] > 99], batch()[0][batch()[0] > 99]),
    ],
)  # fmt: skip
def test_whatever_is_made_of_logits_has_its_gradient(doubles, loss):
    (model, plan), (tokens, _) = doubles, batch()
    want = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    with plan.applied():
        found = loss(model(tokens))
        got = torch.autograd.grad(found, list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_a_model_whose_loss_is_given(dtype, tolerance):
    torch.manual_seed(0)
    model, (tokens, _) = Plain().to(dtype), batch()
    loss = shifted_loss(tokens)
    budget = 5 * 2**20 * dtype.itemsize // 4
    plan = recoup.plan(model, tokens, loss=loss, budget=budget, tiles=True)

    def run():
        found = loss(model(tokens))
        return found.detach(), torch.autograd.grad(found, list(model.parameters()))

    want = run()
    with plan.applied():
        assert_close(run(), want, tolerance)
    with pytest.raises(recoup.errors.BudgetError):
        recoup.plan(model, tokens, loss=loss, budget=budget)


def test_a_loss_of_no_target_is_that_of_torch(planned):
    model, plan = planned
    tokens, labels = batch()
    with plan.applied():
        assert model(tokens, labels=torch.full_like(labels, -100)).loss.isnan()


def test_evaluation_and_generation_are_untouched(planned):
    model, plan = planned
    tokens, labels = batch()
    with plan.applied(), torch.no_grad():
        assert type(model(tokens, labels=labels).logits) is torch.Tensor
        made = model.eval().generate(tokens[:1, :5], max_new_tokens=3, do_sample=False)
    model.train()
    assert made.shape == (1, 8)


def test_what_is_removed_copied_and_pickled_is_the_model(planned):
    model, plan = planned
    tokens, labels = batch()
    with plan.applied():
        assert recoup.applied_plans(model) == [plan]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other(tokens, labels=labels).logits) is torch.Tensor
        output = model(tokens, labels=labels)
        assert type(pickle.loads(pickle.dumps(output.logits.detach()))) is torch.Tensor
    assert is_plain(model)
    assert type(model(tokens, labels=labels).logits) is torch.Tensor


def test_accumulated_and_larger_batches(planned):
    model, plan = planned
    halves = [batch(2), batch(6)]  # planned for 4

    def run():
        torch.manual_seed(0)
        model.zero_grad()
        for tokens, labels in halves:
            (model(tokens, labels=labels).loss / 2).backward()
        return [p.grad for p in model.parameters()]

    want = run()
    with plan.applied(), pytest.warns(UserWarning, match="times as much as the plan"):
        got = run()
    assert_close((torch.ones(()), got), (torch.ones(()), want), 1e-6)


def test_logits_that_are_read_too_late(planned):
    model, plan = planned
    tokens, labels = batch()
    weights = [p.detach().clone() for p in model.parameters()]
    with plan.applied():
        output = model(tokens, labels=labels)
        output.loss.backward()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        with pytest.raises(ChangedError, match="lm_head"):
            output.logits.sum()
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), weights, strict=True):
            parameter.copy_(before)


@pytest.mark.parametrize("kind", ["mask", "places"])
def test_an_index_that_is_written_to(planned, kind):
    model, plan = planned
    tokens, _ = batch()
    index = torch.arange(4) % 2 if kind == "places" else torch.ones(4, 64).tril().bool()
    torch.manual_seed(3)
    with plan.applied():
        taken = model(tokens).logits[index]
        before = index.clone()
        index.zero_()
        value = taken.exp()
    torch.manual_seed(3)
    torch.testing.assert_close(value, model(tokens).logits[before].exp())


def test_a_further_plan_over_one_that_is_applied():
    torch.manual_seed(0)
    model = gpt2()
    tokens, labels = batch()
    budget = int(1.1 * recoup.plan(model, tokens, labels=labels, tiles=True).least_bytes)
    with recoup.plan(model, tokens, labels=labels, budget=budget, tiles=True).applied():
        again = recoup.plan(model, tokens[:, :50], labels=labels[:, :50], budget=budget, tiles=True)
    assert again.rehearsed_peak_bytes <= budget
    with recoup.plan(
        model, tokens, labels=labels, budget=budget, tiles=True, replan=True
    ).applied() as plan:
        step(model, tokens[:, :50], labels[:, :50])
    assert plan.is_applied is False


def test_what_was_derived_before_a_write(planned):
    model, plan = planned
    tokens, labels = batch()
    with plan.applied():
        logits = model(tokens, labels=labels).logits
        flat = logits.view(-1, VOCABULARY)
        logits[0] = 0
        with pytest.raises(ChangedError, match="changed in place"):
            flat.sum()
        assert logits[0].abs().sum() == 0


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(4, 64, VOCABULARY)


def test_a_function_of_another_library_is_an_error_and_left_alone_by_a_plan(planned):
    model, plan = planned
    tokens, labels = batch()
    with plan.applied():
        loss = _Own.apply(model(tokens, labels=labels).logits)
        with pytest.raises(GradientError, match="lm_head"):
            loss.backward()
    other = Plain()
    made = recoup.plan(other, tokens, loss=_Own.apply, budget="30 MiB", tiles=True)
    assert made.planned.tiled is None
    with made.applied():
        assert type(other(tokens)) is torch.Tensor


@pytest.mark.parametrize(
    "loss", [lambda y: y.square().mean(), lambda y: y.log_softmax(1)[..., 0].sum()]
)
def test_a_head_that_no_cross_entropy_reads_is_left_alone(loss):
    model, (tokens, _) = Plain(), batch()
    plan = recoup.plan(model, tokens, loss=loss, budget="30 MiB", tiles=True)
    assert plan.planned.tiled is None


def test_a_gradient_of_logits_is_asked_for_before_the_loss_or_an_error(doubles):
    (model, plan), (tokens, _) = doubles, batch()
    loss = shifted_loss(tokens)
    with plan.applied():
        logits = model(tokens)
        logits.retain_grad()
        loss(logits).backward()
        assert logits.grad.shape == logits.shape
        logits = model(tokens)
        flat = logits.flatten(0, 1)
        logits.retain_grad()
        F.cross_entropy(flat, tokens.flatten()).backward()
        assert logits.grad.shape == logits.shape
        logits = model(tokens)
        loss(logits)
        with pytest.raises(GradientError, match="no gradient of its own"):
            logits.retain_grad()


def test_a_second_derivative_is_an_error(planned):
    model, plan = planned
    tokens, labels = batch()
    with plan.applied():
        loss = model(tokens, labels=labels).loss
        with pytest.raises(GradientError, match="cannot be differentiated again"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_in_bfloat16_under_autocast():
    torch.manual_seed(0)
    model, (tokens, labels) = gpt2().eval(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        plan = recoup.plan(model, tokens, labels=labels, budget="8 MiB", tiles=True)
        want = step(model, tokens, labels)
        with plan.applied():
            assert_close(step(model, tokens, labels), want, 2e-2)
            logits = model(tokens, labels=labels).logits
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, logits.clone())


def test_small_gradients_in_float16():
    """A mean over many targets is divided at the end, where a gradient in 16 bits would vanish."""
    torch.manual_seed(0)
    model, num = Plain(8), 4096
    tokens = torch.randint(VOCABULARY, (1, num))
    scale = 2.0**16  # of a GradScaler

    def loss(logits):
        return scale * F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    exact = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    model.half()
    plan = recoup.plan(model, tokens, loss=loss, budget="64 MiB", tiles=True)
    assert plan.planned.tiled is not None
    with plan.applied():
        got = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    for a, b in zip(got, exact, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 2e-2


@pytest.mark.parametrize("tiles", [1, -2, "8", 2.0])
def test_the_number_of_tiles_is_checked(tiles):
    with pytest.raises(ValueError, match="`tiles`"):
        recoup.plan(Plain(), batch()[0], budget="9 MiB", tiles=tiles)


class Mixing(nn.Module):
    """What an MLP may do that tiles cannot: `how` says it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.how = how
        self.register_buffer("count", torch.zeros(()))
        self.shown = torch.zeros(())
        if how == "zeros":  # the branch of a residual begins at zero
            self.scale = nn.Parameter(torch.zeros(32))
            nn.init.zeros_(self.inner[-1].weight)
            nn.init.zeros_(self.inner[-1].bias)

    def forward(self, x):
        if self.how == "mean":
            return self.inner(x - x.mean(1, keepdim=True))
        if self.how == "places":
            return self.inner(x) + torch.arange(x.shape[1])[:, None] / 10
        if self.how == "zeros":  # which begin to mix rows when they are trained
            x = x + self.scale * x.norm(dim=1, keepdim=True)
        if self.how == "gradient":  # only backward mixes rows
            x = x + (x.mean(1, keepdim=True) - x.mean(1, keepdim=True).detach())
        if self.how == "draws":
            x = F.dropout(x, 0.1)
        if self.how == "counts":
            self.count += 1
        if self.how == "shows":
            self.shown = x.detach().mean()
        return self.inner(x)


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mlp = Mixing(how)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def mixing(how: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Around(how) for _ in range(3)))
    return model, torch.randn(2, 256, 32, generator=torch.Generator().manual_seed(1))


def gradients(model, x):
    torch.manual_seed(3)
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.ones(()), [p.grad for p in model.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "how", ["mean", "places", "gradient", "zeros", "draws", "counts", "shows", "rows"]
)
def test_an_mlp_runs_in_tiles_only_if_its_rows_are_independent(how):
    model, x = mixing(how)
    frontier = recoup.plan(model, x, loss=lambda y: y.square().mean(), tiles=True)
    whole = recoup.plan(model, x, loss=lambda y: y.square().mean())
    want = gradients(model, x)
    if how == "rows":
        assert frontier.points[0].peak_bytes < 0.75 * whole.points[0].peak_bytes
        plan = frontier.plan(frontier.points[0].peak_bytes)
        assert "tile: `0.mlp` ... `2.mlp`" in str(plan)
        assert plan.rehearsed_peak_bytes == plan.predicted_peak_bytes
    else:
        # The parts of the MLP may run in tiles, not the MLP.
        plan = frontier.plan(frontier.points[0].peak_bytes)
        modules = [] if plan.planned.tiled is None else plan.planned.tiled.modules
        assert not any(isinstance(module, Mixing) for module in modules)
    with plan.applied():
        assert_close(gradients(model, x), want, 1e-6)


def test_a_language_model_with_mlps_in_tiles_at_the_least_bytes():
    transformers = transformers_or_skip()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=512, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    tokens = torch.randint(512, (1, 512))
    frontier = recoup.plan(model, tokens, labels=tokens, tiles=True)
    bytes_ = frontier.points[0].peak_bytes
    plan = frontier.plan(bytes_)
    names = {type(module).__name__ for module in plan.planned.tiled.modules}
    assert names == {"Linear", "LlamaMLP"}
    want = step(model, tokens, tokens)
    with plan.applied():
        assert recoup.measure(lambda: step(model, tokens, tokens)).peak_bytes <= bytes_
        # Llama's loss is taken in float32, whatever the type of the model.
        assert_close(step(model, tokens, tokens), want, 1e-6)


def test_a_frozen_head_and_a_frozen_body():
    model, (tokens, _) = Plain(), batch()
    loss = shifted_loss(tokens)
    for frozen in (model.head, nn.ModuleList([model.embedding, model.blocks])):
        model.requires_grad_(True)
        frozen.requires_grad_(False)
        plan = recoup.plan(model, tokens, loss=loss, budget="12 MiB", tiles=True)
        wanted = [p for p in model.parameters() if p.requires_grad]
        want = torch.autograd.grad(loss(model(tokens)), wanted)
        with plan.applied():
            got = torch.autograd.grad(loss(model(tokens)), wanted)
        assert_close((torch.ones(()), got), (torch.ones(()), want), 1e-6)


def test_an_error_of_too_few_bytes_names_tiles():
    model, (tokens, _) = Plain(), batch()
    with pytest.raises(recoup.errors.BudgetError, match="tiles=True"):
        recoup.plan(model, tokens, loss=shifted_loss(tokens), budget="1 MiB")
    for loss in (shifted_loss(tokens), lambda logits: logits.square().mean()):  # or left alone
        with pytest.raises(recoup.errors.BudgetError) as caught:
            recoup.plan(model, tokens, loss=loss, budget="1 MiB", tiles=True)
        assert "tiles=True" not in str(caught.value)


def test_within_a_checkpoint_the_head_runs_as_it_is(doubles):
    (model, plan), (tokens, _) = doubles, batch()
    loss, parameters = shifted_loss(tokens), list(model.parameters())
    want = torch.autograd.grad(loss(model(tokens)), parameters)
    with plan.applied():
        for run in (recoup.checkpoint, torch.utils.checkpoint.checkpoint):
            more = {} if run is recoup.checkpoint else {"use_reentrant": False}
            found = run(model, tokens, **more)
            assert type(found) is torch.Tensor
            got = torch.autograd.grad(loss(found), parameters)
            assert all(map(torch.equal, got, want))


@pytest.mark.filterwarnings("ignore:A model that follows a plan was given to torch.compile")
def test_torch_compile_around_the_model(doubles):
    (model, plan), (tokens, _) = doubles, batch()
    loss, parameters = shifted_loss(tokens), list(model.parameters())
    want = torch.autograd.grad(loss(model(tokens)), parameters)
    with plan.applied():
        compiled = torch.compile(model, backend="aot_eager")
        got = torch.autograd.grad(loss(compiled(tokens)), parameters)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


def test_a_parametrized_head_is_left_alone():
    model, (tokens, _) = Plain(), batch()
    nn.utils.parametrizations.weight_norm(model.head)
    plan = recoup.plan(model, tokens, loss=shifted_loss(tokens), budget="30 MiB", tiles=True)
    assert plan.planned.tiled is None


@pytest.mark.slow
def test_the_largest_batch_is_larger():
    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2].numel()).long())

    def largest(**more):
        return recoup.largest(
            lambda size: torch.zeros(size, 64, dtype=torch.long), Plain(16), budget="6 MiB",
            most=8, loss=loss, **more,
        )  # fmt: skip

    assert largest(tiles=True).size == 8
    assert largest().size <= 2


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path):
    transformers = transformers_or_skip()
    from recoup.integrations.transformers import MemoryBudget

    data = [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (16, 64))]

    def trained(*callbacks):
        torch.manual_seed(0)
        model = gpt2()
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no", optim="sgd",
            eval_strategy="epoch", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, eval_dataset=data,
            callbacks=list(callbacks),
        )  # fmt: skip
        loss = trainer.train().training_loss
        return torch.tensor(loss), [p.detach() for p in model.parameters()]

    callback = MemoryBudget("5 MiB", tiles=True)
    shown = []
    callback.show = lambda plan: shown.append(str(plan))
    assert_close(trained(callback), trained(), 1e-6)
    assert "tile: `lm_head`" in shown[0]


# -- whose logits, and whose gradient --------------------------------------------------------------


def under(plan, step):
    """What a step gives with the plan, and without it."""
    with plan.applied():
        found = step()
    return found, step()


def test_weights_that_stand_in_for_those_of_the_head(doubles):
    model, plan = doubles
    tokens, _ = batch()

    def step():
        given = {
            name: (p.detach() * (1.5 if name.startswith("head") else 1)).requires_grad_()
            for name, p in model.named_parameters()
            if name.startswith("head")
        }
        model.zero_grad(set_to_none=True)
        loss = shifted_loss(tokens)(torch.func.functional_call(model, given, (tokens,)))
        loss.backward()
        assert model.head.weight.grad is None
        return [loss.detach(), *(p.grad for p in given.values())]

    for got, want in zip(*under(plan, step), strict=True):
        torch.testing.assert_close(got, want)


def test_what_is_derived_without_a_graph_has_none(doubles):
    model, plan = doubles
    tokens, _ = batch()

    def step():
        output = model(tokens)
        with torch.no_grad():
            softer, rows = output / 2.0, output[:, :-1].reshape(-1, VOCABULARY)
            loss = F.cross_entropy(rows, tokens[:, 1:].flatten())
        assert not loss.requires_grad
        assert not softer.softmax(-1).requires_grad
        assert not F.cross_entropy(rows, tokens[:, 1:].flatten()).requires_grad
        return [softer.softmax(-1), loss]

    for got, want in zip(*under(plan, step), strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_of_the_logits(doubles):
    model, plan = doubles
    tokens, _ = batch()

    def step():
        output, calls = model(tokens), []
        output.grad_fn.register_prehook(calls.append)  # so the whole is there
        loss = shifted_loss(tokens)(output)
        (found,) = torch.autograd.grad(loss, output)
        assert len(calls) == 0
        shifted_loss(tokens)(output).backward()
        assert len(calls) == 1
        return [found]

    for got, want in zip(*under(plan, step), strict=True):
        torch.testing.assert_close(got, want)
    with plan.applied():
        output = model(tokens)
        loss = shifted_loss(tokens)(output)
        for ask in (
            lambda: torch.autograd.grad(loss, output, allow_unused=True),
            lambda: torch.autograd.grad(loss, [output]),
            lambda: loss.backward(inputs=[output]),
            lambda: output.grad_fn,
        ):
            with pytest.raises(GradientError, match="no gradient of its own"):
                ask()
    model.zero_grad()


@pytest.mark.filterwarnings("ignore:The first step")  # which has the whole logits
@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_that_want_the_gradient_of_the_head(doubles, name):
    model, plan = doubles
    tokens, _ = batch()

    def step():
        seen = []
        handle = getattr(model.head, name)(lambda *args: seen.append(args[-1][0].clone()))
        model.zero_grad()
        shifted_loss(tokens)(model(tokens)).backward()
        handle.remove()
        return seen

    for got, want in zip(*under(plan, step), strict=True):
        torch.testing.assert_close(got, want)


def test_other_bits_of_the_logits(doubles):
    model, plan = doubles
    tokens, _ = batch()

    def step():
        bits = model(tokens).view(torch.int64)
        assert bits.dtype is torch.int64
        return [bits]

    for got, want in zip(*under(plan, step), strict=True):
        assert torch.equal(got, want)


class Reversible(nn.Module):
    """A language model over additive couplings, which a plan may invert."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 2 * width)
        nets = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)]
        self.blocks = nn.ModuleList(Coupling(net, place % 2) for place, net in enumerate(nets))
        self.head = nn.Linear(2 * width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Coupling(nn.Module):
    def __init__(self, net: nn.Module, first: int) -> None:
        super().__init__()
        self.net, self.first = net, first

    def _shifted(self, x, sign):
        parts = list(x.chunk(2, -1))
        parts[1 - self.first] = parts[1 - self.first] + sign * self.net(parts[self.first])
        return torch.cat(parts, -1)

    def forward(self, x):
        return self._shifted(x, 1)

    def inverse(self, y):
        return self._shifted(y, -1)


def test_blocks_may_be_inverted_beside_a_head_in_tiles():
    torch.manual_seed(0)
    model, (tokens, _) = Reversible().double(), batch()
    loss = shifted_loss(tokens)
    frontier = recoup.plan(model, tokens, loss=loss, tiles=4, exact=False)
    tiled = [kind for kind in frontier._kinds if kind.step.tiled is not None]
    assert tiled
    assert all(any(cost.is_invertible for cost in kind.costs) for kind in tiled)
    plan = frontier.plan(int(1.05 * frontier.points[0].peak_bytes))

    def step():
        model.zero_grad(set_to_none=True)
        found = loss(model(tokens))
        found.backward()
        return [found.detach(), *(p.grad for p in model.parameters())]

    for got, want in zip(*under(plan, step), strict=True):
        torch.testing.assert_close(got, want)


class Graphed(Plain):
    """A language model whose forward needs a graph."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.num_calls = way, 0

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.way == "grad":
            x = x.detach().requires_grad_()
        start = x
        for block in self.blocks:
            x = x + block(x)
        if self.way == "hook":
            x.register_hook(self.count)
        elif self.way == "retain_grad":
            x.retain_grad()
        elif self.way == "graph of its own":
            with torch.enable_grad():
                start = x.detach().requires_grad_()
                x = x + torch.autograd.grad(self.blocks[0](start).square().sum(), start)[0]
        elif self.way == "func":
            energy = torch.func.grad(lambda start: start.sin().square().sum())
            x = x + energy(x.detach())
        elif self.way == "grad":
            x = x + torch.autograd.grad(x.square().sum(), start, create_graph=True)[0]
        return self.head(x)

    def count(self, gradient):
        self.num_calls += 1
        return gradient * 2


@pytest.mark.parametrize("way", ["hook", "retain_grad", "graph of its own", "func", "grad"])
def test_a_forward_that_needs_a_graph(way):
    model, (tokens, _) = Graphed(way).double(), batch()
    loss = shifted_loss(tokens)
    loss(model(tokens)).backward()
    wanted, _ = [p.grad for p in model.parameters()], model.zero_grad()
    model.num_calls = 0
    plan = recoup.plan(model, tokens, loss=loss, tiles=True).plan("10 MiB")
    assert plan.planned.tiled is not None
    model.num_calls = 0
    with plan.applied():
        loss(model(tokens)).backward()
    assert model.num_calls == (way == "hook")
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=1e-10, atol=1e-14)


def test_tiles_have_fewer_rows_where_bytes_ask_for_it():
    """The head has no gradient, as beside an adapter, so logits are most of what a step takes."""
    torch.manual_seed(0)
    model, (tokens, _) = Plain(256), batch()
    for each in (model.embedding, model.head):
        each.requires_grad_(False)
    loss = shifted_loss(tokens)

    def gradients():
        model.zero_grad()
        loss(model(tokens)).backward()
        return [p.grad for p in model.blocks.parameters()]

    coarse = recoup.plan(model, tokens, loss=loss, tiles=4).least_bytes
    frontier, wanted = recoup.plan(model, tokens, loss=loss, tiles=True), gradients()
    least = frontier.least_bytes
    assert least < 0.8 * coarse
    plan = frontier.plan(least)
    assert plan.planned.tiled.head.tile_rows <= 32  # of 64, by the number of features
    with plan.applied():
        assert recoup.measure(gradients, device="cpu", repeats=0).peak_bytes <= least
        for got, want in zip(gradients(), wanted, strict=True):
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-7)
