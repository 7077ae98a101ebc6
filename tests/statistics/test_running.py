"""Running averages under both conventions, and the notes' formula that mixes them."""

import pytest
import torch

import musigma as ms

BATCHES = [
    torch.tensor([[1.0], [2.0], [3.0], [6.0]]),
    torch.tensor([[4.0], [8.0]]),
    torch.tensor([[0.0], [1.0]]),
]


def run(running: ms.Running) -> tuple[float, float]:
    for batch in BATCHES:
        running.update(ms.moments(batch, 0))
    return running.mean.item(), running.var.item()


def test_exponential_average_by_hand() -> None:
    # batch means 3, 6, .5; unbiased variances 14/3, 8, .5
    mean = ((0.1 * 3) * 0.9 + 0.1 * 6) * 0.9 + 0.1 * 0.5
    var = ((0.9 + 0.1 * 14 / 3) * 0.9 + 0.1 * 8) * 0.9 + 0.1 * 0.5
    assert run(ms.Running(momentum=0.1)) == pytest.approx((mean, var))


def test_the_other_convention_is_its_mirror() -> None:
    assert run(ms.Running.from_keep(0.9)) == pytest.approx(run(ms.Running(momentum=0.1)))
    # the notes' formula with the notes' number: nine tenths of the past are gone at each step
    mean = ((0.9 * 3) * 0.1 + 0.9 * 6) * 0.1 + 0.9 * 0.5
    assert run(ms.Running.from_keep(0.1))[0] == pytest.approx(mean)


def test_cumulative_average_by_hand() -> None:
    assert run(ms.Running(momentum=None)) == pytest.approx(((3 + 6 + 0.5) / 3, (14 / 3 + 8 + 0.5) / 3))


def test_it_is_torchs_buffer() -> None:
    layer = torch.nn.BatchNorm1d(1)
    for batch in BATCHES:
        layer(batch)
    assert run(ms.Running()) == pytest.approx((layer.running_mean.item(), layer.running_var.item()), rel=1e-6)


@pytest.mark.parametrize("momentum", [-0.1, 1.5, float("nan")])
def test_momentum_is_a_share(momentum: float) -> None:
    with pytest.raises(ValueError, match=r"lies in \[0, 1\]"):
        ms.Running(momentum)
    with pytest.raises(ValueError, match=r"lies in \[0, 1\]"):
        ms.Running.from_keep(momentum)


def test_reading_before_the_first_batch_and_a_changed_shape() -> None:
    running = ms.Running()
    with pytest.raises(RuntimeError, match="update"):
        _ = running.mean
    running.update(ms.moments(torch.randn(4, 3), 0))
    before = running.mean.clone()
    with pytest.raises(ValueError, match=r"\(3,\); got \(2,\)"):
        running.update(ms.moments(torch.randn(4, 2), 0))
    assert torch.equal(running.mean, before)
    assert repr(running) == "Running(momentum=0.1, num_batches_tracked=1)"


def test_no_gradient_is_kept() -> None:
    running = ms.Running()
    running.update(ms.moments(torch.randn(4, 3, requires_grad=True), 0))
    assert not running.mean.requires_grad
