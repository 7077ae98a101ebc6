"""Whatever goes wrong, the model keeps what it had, and the error says what to do."""

import copy

import pytest
import torch
from torch import nn

import musigma as ms


def _gen(seed=0):
    return torch.Generator().manual_seed(seed)


def _same(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class _FailsLater(nn.Module):
    """Runs as long as its weights are the ones it came with."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, x):
        if float(self.layer.weight.detach()[0, 0]) != 0.5:
            raise RuntimeError("another path")
        return self.norm(self.layer(x))


def test_an_example_that_does_not_fit_brings_the_models_own_error_and_what_to_pass():
    model = nn.Sequential(nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        ms.init.initialize(model, torch.ones(2, 3))
    assert "forward(" in caught.value.__notes__[0]
    assert _same(model, before)


def test_a_model_that_fails_with_its_new_weights_gets_the_old_ones_back():
    model, x = _FailsLater(), torch.randn(8, 4, generator=_gen())
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="another path"):
        ms.init.initialize(model, x)
    assert _same(model, before)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_verifying_leaves_gradients_buffers_and_switches_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    model[0].weight.grad = torch.full((8, 4), 7.0)
    model[3].bias.requires_grad_(False)
    ms.init.initialize(model, torch.randn(16, 4, generator=_gen()))
    assert bool((model[0].weight.grad == 7).all())
    assert all(p.grad is None for name, p in model.named_parameters() if name != "0.weight")
    assert not model[3].bias.requires_grad
    assert model[3].weight.requires_grad
    assert int(model[1].num_batches_tracked) == 0


def test_frozen_and_skipped_tensors_stay_and_are_listed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    plan = ms.init.initialize(model, torch.randn(8, 4, generator=_gen()), skip=["2.bias"])
    assert "frozen" in plan.skipped["0.weight"]
    assert plan.skipped["2.bias"] == "in skip"
    assert torch.equal(model[0].weight, before["0.weight"])
    assert torch.equal(model[2].bias, before["2.bias"])


def test_a_skip_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="matches no parameter"):
        ms.init.plan(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), skip=["0.wieght"])


def test_another_models_plan_changes_nothing():
    plan = ms.init.plan(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4))
    other = nn.Sequential(nn.Linear(4, 5))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="nothing was changed"):
        plan.apply(other)
    assert _same(other, before)


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.large(x) if bool(x.mean() > 100) else self.small(x)


def test_the_path_that_ran_is_named():
    plan = ms.init.plan(_Branches(), torch.randn(8, 4, generator=_gen()))
    assert any("small" in note and "not run: large" in note for note in plan.notes)
    assert "did not run" in plan["large.weight"].reason


class _Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).abs()


def test_an_op_nobody_knows_is_measured_and_said_to_be():
    model = nn.Sequential(nn.Linear(32, 64), _Fourier(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    plan = ms.init.initialize(model, torch.randn(64, 32, generator=_gen()))
    (layer,) = [x for x in plan.layers if x.module == "2"]
    assert "after" in layer.measured
    (check,) = [x for x in plan.verification.checks if x.module == "2"]
    assert check.low <= check.std <= check.high
