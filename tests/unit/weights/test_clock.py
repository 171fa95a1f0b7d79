"""Schedules whose step is told by a clock: an optimizer, a scheduler, a function."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.weights import applied, update

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, 0.01),
}


class Steps:
    """A schedule that writes down the steps at which it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, step):
        self.asked.append(step)
        return 0.1


def net(schedule, apply=recoup.weight_noise, **more):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    name = "std" if apply is recoup.weight_noise else "p"
    apply(model, nn.Linear, **{name: schedule}, **more)
    return model


def steps_of(model, optimizer, num, accumulates=1):
    for _ in range(num):

        def loss():
            optimizer.zero_grad()
            for _ in range(accumulates):
                total = model(torch.ones(2, 3)).square().sum()
                total.backward()
            return total

        loss()
        optimizer.step(loss if isinstance(optimizer, torch.optim.LBFGS) else None)


def asked(schedule, model):
    """The step that a forward gives to the schedule."""
    schedule.asked.clear()
    model(torch.ones(2, 3))
    assert len(set(schedule.asked)) == 1
    return schedule.asked[0]


@pytest.mark.parametrize("apply", [recoup.weight_noise, recoup.weight_dropout])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_of_an_optimizer_are_counted_and_not_forwards(kind, apply):
    schedule = Steps()
    model = net(schedule, apply)
    model(torch.ones(2, 3)), model(torch.ones(2, 3))
    assert applied(model)[0].step == 2
    optimizer = OPTIMIZERS[kind](model.parameters())
    assert update(model, clock=optimizer) is model
    assert asked(schedule, model) == asked(schedule, model) == 0
    steps_of(model, optimizer, 3, accumulates=4)
    assert asked(schedule, model) == asked(schedule, model.train()) == 3
    assert applied(model)[0].step == optimizer.param_groups[0]["num_steps"] == 3
    update(model, clock=optimizer)  # again, and not counted twice
    steps_of(model, optimizer, 1)
    assert asked(schedule, model) == 4


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", ["clock", "state"])
def test_a_schedule_is_resumed_with_the_optimizer(kind, first):
    def made():
        schedule = Steps()
        model = net(schedule)
        return schedule, model, OPTIMIZERS[kind](model.parameters())

    schedule, model, optimizer = made()
    update(model, clock=optimizer)
    steps_of(model, optimizer, 5)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    schedule, model, optimizer = made()
    model.load_state_dict(weights)
    if first == "clock":
        update(model, clock=optimizer)
        optimizer.load_state_dict(state)
    else:
        optimizer.load_state_dict(state)
        update(model, clock=optimizer)
    assert asked(schedule, model) == 5
    steps_of(model, optimizer, 2)
    assert asked(schedule, model) == 7


def test_a_state_that_was_saved_without_a_clock():
    schedule = Steps()
    model = net(schedule)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = optimizer.state_dict()
    update(model, clock=optimizer)
    steps_of(model, optimizer, 2)
    optimizer.load_state_dict(state)
    assert asked(schedule, model) == 0
    steps_of(model, optimizer, 1)
    assert asked(schedule, model) == 1


def test_several_groups_and_models_share_the_count():
    schedule, other = Steps(), Steps()
    models = net(schedule), net(other)
    groups = [{"params": models[0].parameters()}, {"params": models[1].parameters()}]
    optimizer = torch.optim.SGD(groups, 0.01)
    for model in models:
        update(model, clock=optimizer)
    steps_of(models[0], optimizer, 2)
    assert asked(schedule, models[0]) == asked(other, models[1]) == 2
    assert "num_steps" not in optimizer.param_groups[1]


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused):
    schedule = Steps()
    model = net(schedule)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    update(model, clock=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for scale in (1.0, float("inf"), 1.0, float("nan"), float("inf")):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * scale).backward()
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model[0].weight, before) == (scale != 1.0)
    assert asked(schedule, model) == 2


def test_a_learning_rate_scheduler():
    schedule = Steps()
    model = net(schedule)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    update(model, clock=scheduler)
    for epoch in range(3):
        assert asked(schedule, model) == epoch
        steps_of(model, optimizer, 4)
        scheduler.step()
    assert asked(schedule, model) == 3
    again = LambdaLR(torch.optim.SGD(model.parameters(), 0.01), lambda step: 1.0)
    update(model, clock=again)
    assert asked(schedule, model) == 0
    again.load_state_dict(scheduler.state_dict())
    assert asked(schedule, model) == 3
    assert "num_steps" not in optimizer.param_groups[0]
    plateau = ReduceLROnPlateau(optimizer)
    update(model, clock=plateau)
    plateau.step(1.0)
    assert asked(schedule, model) == 1


def test_a_function():
    schedule, now = Steps(), [7]
    model = net(schedule, clock=lambda: now[0])
    assert schedule.asked == [7, 7]  # looked at when it was applied, for each weight
    assert asked(schedule, model) == 7
    now[0] = 9
    assert asked(schedule, model) == asked(schedule, model.eval().train()) == 9
    np = pytest.importorskip("numpy")
    now[0] = np.int64(11)
    assert asked(schedule, model) == 11
    for wrong in (-1, 1.5, True, None, torch.tensor(3)):
        now[0] = wrong
        with pytest.raises(ValueError, match="must be an int from 0"):
            model(torch.ones(2, 3))


@pytest.mark.parametrize("wrong", [3, "optimizer", torch.optim.SGD, torch.tensor(1), lambda: 0.5])
def test_what_is_no_clock(wrong):
    layer = nn.Linear(2, 2)
    for apply in (recoup.weight_noise, recoup.weight_dropout):
        with pytest.raises(ValueError, match=r"`clock` is|must be an int"):
            apply(layer, clock=wrong)
    assert type(layer) is nn.Linear
    recoup.weight_noise(layer)
    with pytest.raises(ValueError, match=r"`clock` is|must be an int"):
        update(layer, std=0.5, clock=wrong)
    assert repr(applied(layer)) == "[weight: weight_noise(std=0.01)]"


def test_a_scheduler_of_schedulers_has_no_step():
    layer = recoup.weight_noise(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    chained = ChainedScheduler([LambdaLR(optimizer, lambda step: 1.0)], optimizer)
    with pytest.raises(ValueError, match="`last_epoch`"):
        update(layer, clock=chained)


def test_a_clock_of_what_has_no_schedule():
    layer = recoup.weight_norm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`clock` is given, and no parameter"):
        update(layer, clock=torch.optim.SGD(layer.parameters(), 0.1))


def test_the_step_is_set_where_the_clock_has_it():
    model = net(lambda step: 0.1)
    applied(model)[0].step = 3
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    update(model, clock=optimizer)
    with pytest.raises(ValueError, match=r'`param_groups\[0\]\["num_steps"\]` of the SGD') as error:
        applied(model)[0].step = 5
    assert "recoup.weights.update" in str(error.value)
    assert applied(model)[0].step == 0
    optimizer.param_groups[0]["num_steps"] = 5
    assert applied(model)[0].step == 5


def test_one_call_has_one_clock():
    first, second = Steps(), Steps()
    model = recoup.weight_dropout(net(first), nn.Linear, p=second)
    update(model, "0.weight", clock=lambda: 3)
    assert [each.step for each in applied(model)] == [3, 3, 3, 3]
    model = net(first)
    recoup.weight_dropout(model[0], p=second)
    update(model, "1.weight", clock=lambda: 4)
    steps = {repr(each).partition("(")[0]: each.step for each in applied(model)}
    want = {"0.weight: weight_dropout": 0, "0.weight: weight_noise": 4, "1.weight: weight_noise": 4}
    assert steps == want


def test_copies_have_the_same_clock():
    schedule = Steps()
    model = net(schedule)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    update(model, clock=optimizer)
    again = copy.deepcopy(model)
    steps_of(model, optimizer, 2)
    assert applied(again)[0].step == applied(model)[0].step == 2
    forwards = copy.deepcopy(net(schedule))  # without a clock, each counts its own
    alike = copy.deepcopy(forwards)
    alike(torch.ones(2, 3))
    assert (applied(forwards)[0].step, applied(alike)[0].step) == (0, 1)
    assert applied(alike)[0].step == applied(alike)[1].step


def at_step(step):
    return 0.1 * step


def test_a_pickle_keeps_the_count_and_drops_the_clock():
    model = net(at_step)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    update(model, clock=optimizer)
    steps_of(model, optimizer, 2)
    again = pickle.loads(pickle.dumps(model))
    steps_of(model, optimizer, 1)
    assert applied(again)[0].step == 2
    again(torch.ones(2, 3))
    assert applied(again)[0].step == applied(again)[1].step == 3
    applied(again)[0].step = 8
    assert applied(again)[1].step == 8


def test_a_clock_keeps_no_optimizer_alive():
    model = net(at_step)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    update(model, clock=optimizer)
    steps_of(model, optimizer, 2)
    assert applied(model)[0].step == 2
    gone = weakref.ref(optimizer)
    del optimizer, scheduler
    gc.collect()
    assert gone() is None
    model(torch.ones(2, 3))
    assert applied(model)[0].step == 2


def test_a_wrapped_optimizer_is_counted_where_it_is_saved():
    class Wrapper(torch.optim.Optimizer):
        """As trainers wrap an optimizer, without one of their own."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = net(at_step)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    update(model, clock=Wrapper(optimizer))
    steps_of(model, optimizer, 2)
    assert applied(model)[0].step == optimizer.state_dict()["param_groups"][0]["num_steps"] == 2


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.a(x))


def test_a_step_ends_where_the_clock_shows_another():
    """Parts that run before one tick share their draw; a backward need not come."""
    now = [3]
    model = recoup.weight_noise(Parts(), r".\.weight", at_step, clock=lambda: now[0])
    x = torch.ones(2, 3)
    first, same = model.a(x), model.a(x)
    assert torch.equal(first, same)
    now[0] = 4
    later = model.a(x)
    assert not torch.equal(first, later)
    assert torch.equal(later, model.a(x))


def test_code_that_runs_again_has_the_step_of_its_forward():
    schedule = Steps()
    model = net(schedule)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    update(model, clock=optimizer)
    for again in (recoup.checkpoint, functools.partial(checkpoint, use_reentrant=False)):
        output = again(model, torch.ones(2, 3, requires_grad=True)).sum()
        schedule.asked.clear()
        output.backward()
        assert schedule.asked == []


# -- Lightning -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_trainer_of_lightning_resumes_the_schedule(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.schedule = Steps()
            self.net = net(self.schedule)
            self.seen = []

        def training_step(self, batch, index):
            self.seen.append(asked(self.schedule, self.net))
            with recoup.weights.step(self.net):
                return self.net(batch).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 0.01)
            update(self.net, clock=optimizer)
            return optimizer

    def fitted(epochs, checkpoint):
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accumulate_grad_batches=4,
            enable_checkpointing=True,
            default_root_dir=tmp_path / str(epochs),
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=2)
        trainer.fit(module, data, ckpt_path=checkpoint)
        return module, trainer

    module, trainer = fitted(2, None)
    assert module.seen == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    path = trainer.checkpoint_callback.best_model_path
    module, _ = fitted(3, path)
    assert module.seen == [4, 4, 4, 4, 5, 5, 5, 5]
    assert applied(module)[0].step == 6
