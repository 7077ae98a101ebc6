"""GRD505: steps longer than the weight where a normalization hides its length, and the treatment for it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from musigma.doctor import Report, examine, treat

SGD = torch.optim.SGD


def data(n: int = 64, width: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, width, generator=generator), torch.randint(3, (n,), generator=generator)


def net(std: float, norm: nn.Module | None = None, *, bias: bool = False) -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Linear(16, 32, bias=bias), norm or nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)
    )
    nn.init.normal_(model[0].weight, 0.0, std, generator=generator)
    nn.init.normal_(model[3].weight, 0.0, 0.1, generator=generator)
    if bias:
        nn.init.normal_(model[0].bias, 0.0, std, generator=generator)
    return model


def judged(model: nn.Module, *, lr: float = 1.0) -> Report:
    x, y = data()
    optimizer = SGD(model.parameters(), lr=lr)
    loss = nn.functional.cross_entropy
    return examine(model, x, y, loss=loss, optimizer=optimizer, intent="train", select=["GRD505"])


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(32), nn.LayerNorm(32), nn.GroupNorm(4, 32), nn.RMSNorm(32)])
def test_short_weights_before_any_norm_are_seen(norm: nn.Module) -> None:
    (finding,) = judged(net(0.01, norm))
    assert finding.where == ("0.weight",)
    assert finding.evidence["weights"]["0.weight"]["ratio"] > 10


def test_the_ratio_is_the_measured_one() -> None:
    model = net(0.01)
    (finding,) = judged(model)
    x, y = data()
    before = model[0].weight.detach().clone()
    nn.functional.cross_entropy(model(x), y).backward()
    step = 1.0 * model[0].weight.grad.norm()
    assert finding.evidence["weights"]["0.weight"]["ratio"] == pytest.approx(
        float(step / before.norm()), rel=1e-5
    )


def test_a_step_of_a_few_lengths_corrects_itself() -> None:
    # the same weights at an ordinary rate: treating them there was measured to slow training down
    assert not judged(net(0.01), lr=0.1).findings


def test_weights_of_ordinary_length_are_left_alone() -> None:
    assert not judged(net(0.35)).findings


def test_a_norm_that_runs_on_stored_statistics_hides_nothing() -> None:
    model = net(0.01)
    model[1].eval()
    x, y = data()
    optimizer = SGD(model.parameters(), lr=10.0)
    report = examine(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer, select=["GRD505"])
    assert not report.findings


def test_a_head_that_starts_near_zero_is_left_alone() -> None:
    model = net(0.35)
    nn.init.normal_(model[3].weight, 0.0, 1e-4)
    assert not judged(model).findings


def test_weights_of_exactly_zero_divide_nothing() -> None:
    model = net(0.35)
    nn.init.zeros_(model[0].weight)
    assert not judged(model).findings


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_the_treatment_keeps_what_the_model_computes(bias: bool, training: bool) -> None:
    # In float64 and with a small eps nothing but rounding is left of the difference.
    model = net(0.01, nn.BatchNorm1d(32, eps=1e-12), bias=bias).double()
    x, y = data()
    x = x.double()
    for _ in range(3):
        model(x + 1)
    loss = nn.functional.cross_entropy
    report = examine(
        model, x, y, loss=loss, optimizer=SGD(model.parameters(), lr=1.0), intent="train", select=["GRD505"]
    )
    treated, record = treat(model, report, select=["GRD505"])
    assert [g.kept for g in record.given] == [True]
    assert record.mended == ("GRD505",)
    a, b = (copy.deepcopy(m).train(training)(x) for m in (model, treated))
    # eps 1e-12 beside a variance of 1e-3 is 1e-9
    torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    # He's variance, 2 / fan_in
    assert float(treated[0].weight.detach().square().mean()) == pytest.approx(2 / 16, rel=1e-9)


def test_where_the_rate_is_at_fault_the_weights_stay() -> None:
    model = net(0.35)
    report = judged(model, lr=1e3)
    treated, record = treat(model, report, select=["GRD505"])
    assert [g.kept for g in record.given] == [False]
    assert "lower the learning rate" in record.given[0].reason
    assert torch.equal(treated[0].weight, model[0].weight)


def test_a_norm_that_two_layers_share_keeps_its_statistics() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = net(0.01)
            self.one, self.norm, self.head = parts[0], parts[1], parts[3]
            self.two = nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.two(self.norm(self.one(x)).relu())).relu())

    model = Shared()
    treated, record = treat(model, judged(model), select=["GRD505"])
    assert [g.kept for g in record.given] == [False]
    assert torch.equal(treated.one.weight, model.one.weight)
