"""What a plan says of every tensor, and that saying it changes nothing."""

import copy
import math

import pytest
import torch
from torch import nn

import musigma as ms


def _gen(seed=0):
    return torch.Generator().manual_seed(seed)


def _net():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 5))


def test_every_tensor_has_a_law_or_a_reason():
    plan = ms.init.plan(_net(), torch.randn(32, 16, generator=_gen()))
    names = {name for name, _ in _net().named_parameters()}
    assert {entry.tensor for entry in plan} | set(plan.skipped) == names
    assert all(entry.reason for entry in plan)


def test_the_law_follows_what_really_follows():
    x = 3 * torch.randn(4096, 16, generator=_gen())
    plan = ms.init.plan(_net(), x)
    second = float(x.double().square().mean())
    # Var = 1/(fan_in · E[x²]) before a relu, whatever scale the example has.
    assert plan["0.weight"].std == pytest.approx(1 / math.sqrt(16 * second), rel=1e-6)
    assert plan["0.weight"].activation == "relu"
    # relu hands on half of the second moment.
    assert plan["2.weight"].std == pytest.approx(math.sqrt(2 / 64), rel=1e-3)
    assert plan["2.weight"].norm == "3"
    assert (plan["3.weight"].scheme, plan["3.bias"].scheme, plan["4.bias"].scheme) == (
        "ones",
        "zeros",
        "zeros",
    )


def test_planning_changes_nothing():
    net, x = _net(), torch.randn(8, 16, generator=_gen())
    before, rng = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    ms.init.plan(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


def test_a_meta_model_gets_the_plan_of_a_real_one():
    x = torch.randn(64, 16, generator=_gen())
    real = ms.init.plan(_net(), x)
    with torch.device("meta"):
        hollow = _net()
    assert {e.tensor: e.std for e in ms.init.plan(hollow, x)} == {e.tensor: e.std for e in real}


def test_what_is_written_keeps_the_laws():
    net = _net()
    plan = ms.init.initialize(net, torch.randn(64, 16, generator=_gen()))
    for name, tensor in net.named_parameters():
        entry = plan[name]
        # The sampling error of a normal's standard deviation is std/√(2n); four of them.
        assert float(ms.moments(tensor.detach(), None).std()) == pytest.approx(
            entry.std, abs=4 * entry.std / math.sqrt(2 * tensor.numel())
        )
