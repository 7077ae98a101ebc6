"""The only op that mutates: what it writes, and when it must not."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from musigma import ops


def state(c: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(c), torch.ones(c), torch.tensor(0)


def take_in(buffers: tuple[torch.Tensor, ...], x: torch.Tensor, momentum: float | None = 0.1) -> None:
    ops.running_update_(*buffers, *ops.moments(x, [0], None), momentum)


X = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 60.0], [6.0, 30.0]])


def test_unbiased_variance_is_kept() -> None:
    # C27: biased 3.5 normalizes, unbiased 4.6667 is kept
    mean, var, tracked = state()
    take_in((mean, var, tracked), X)
    torch.testing.assert_close(mean, torch.tensor([0.3, 3.0]))
    torch.testing.assert_close(var, torch.tensor([1.366667, 47.56667]))
    assert tracked == 1


def test_cumulative_average_is_the_average_of_the_batches() -> None:
    mean, var, tracked = state(1)
    batches = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [9.0]]), torch.tensor([[0.0], [2.0]])]
    for batch in batches:
        take_in((mean, var, tracked), batch, None)
    torch.testing.assert_close(mean, torch.tensor([(2 + 7 + 1) / 3]))
    torch.testing.assert_close(var, torch.tensor([(2 + 8 + 2) / 3]))


def test_momentum_one_keeps_the_batch_to_the_last_bit() -> None:
    mean, var, tracked = state()
    mean += 1e8
    take_in((mean, var, tracked), X, 1.0)
    assert torch.equal(mean, X.mean(0))


def test_empty_batch_changes_nothing() -> None:
    buffers = state()
    take_in(buffers, torch.empty(0, 2))
    assert [b.tolist() for b in buffers] == [[0, 0], [1, 1], 0]


def test_single_value_has_no_unbiased_variance() -> None:
    mean, var, tracked = state()
    take_in((mean, var, tracked), X[:1])
    assert mean.tolist() == pytest.approx([0.1, 1.0])
    assert var.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_overflowing_batch_leaves_its_channel_alone(poison: float) -> None:
    # C34
    mean, var, tracked = state()
    x = X.clone()
    x[0, 1] = poison
    take_in((mean, var, tracked), x)
    torch.testing.assert_close(mean, torch.tensor([0.3, 0.0]))
    torch.testing.assert_close(var, torch.tensor([1.366667, 1.0]))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_checkpoint_counts_the_batch_once(reentrant: bool, nested: bool) -> None:
    # C33
    buffers = state()

    def forward(x: torch.Tensor) -> torch.Tensor:
        take_in(buffers, x.detach())
        return x * 2

    def inner(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(forward, x, use_reentrant=reentrant) if nested else forward(x)

    x = X.clone().requires_grad_()
    checkpoint(inner, x, use_reentrant=reentrant).pow(2).sum().backward()
    assert buffers[2] == 1
    torch.testing.assert_close(buffers[0], 0.1 * X.mean(0))


@pytest.mark.compile
@pytest.mark.parametrize("outside", ["compile(checkpoint)", "checkpoint(compile)"])
def test_compiled_checkpoint_counts_the_batch_once(outside: str) -> None:
    buffers = state()

    def forward(x: torch.Tensor) -> torch.Tensor:
        take_in(buffers, x.detach())
        return (x * 2).sin()

    torch._dynamo.reset()
    if outside == "checkpoint(compile)":
        compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
        run = lambda x: checkpoint(compiled, x, use_reentrant=False)  # noqa: E731
    else:
        run = torch.compile(
            lambda x: checkpoint(forward, x, use_reentrant=False), fullgraph=True, backend="aot_eager"
        )
    run(X.clone().requires_grad_()).pow(2).sum().backward()
    assert buffers[2] == 1
    torch.testing.assert_close(buffers[0], 0.1 * X.mean(0))


def test_vmap_over_its_own_buffers_and_not_over_shared_ones() -> None:
    batches = torch.stack([X, X * 2, X - 1])
    mean, var, tracked = torch.zeros(3, 2), torch.ones(3, 2), torch.zeros(3, dtype=torch.long)
    torch.vmap(lambda m, v, t, x: (take_in((m, v, t), x), x)[1])(mean, var, tracked, batches)
    torch.testing.assert_close(mean, 0.1 * batches.mean(1))
    assert tracked.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="track_running_stats=False"):
        torch.vmap(lambda x: (take_in(state(), x), x)[1])(batches)


def test_shapes_must_agree() -> None:
    mean, var, tracked = state()
    with pytest.raises(RuntimeError, match="one shape"):
        ops.running_update_(mean, var, tracked, *ops.moments(torch.ones(4, 3), [0], None), 0.1)
    assert tracked == 0


def test_opcheck() -> None:
    torch.library.opcheck(ops.running_update_, (*state(), *ops.moments(X, [0], None), 0.1))


def test_half_buffers_move_as_far_as_half_can() -> None:
    mean, var = torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
    take_in((mean, var, torch.tensor(0)), X)
    assert mean.dtype == torch.bfloat16
    torch.testing.assert_close(mean.float(), torch.tensor([0.3, 3.0]), rtol=2**-8, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_channels_may_differ_in_their_counts(momentum: float | None) -> None:
    """Under a mask each channel has its own: empty ones keep everything, single values the variance."""
    count = torch.tensor([0.0, 1.0, 5.0, 5.0, torch.nan]).double()
    mean, m2 = (
        torch.tensor([9.0, 2.0, 3.0, torch.inf, 1.0]).double(),
        torch.tensor([9.0, 0.0, 8.0, 1.0, 1.0]).double(),
    )
    results = []
    for mode in ("auto", "reference"):
        running = torch.full((5,), 0.5), torch.full((5,), 4.0), torch.tensor(2)
        with ops.use_kernels(mode):
            ops.running_update_(*running, count, mean, m2, momentum)
            ops.running_update_(*running, torch.zeros(5).double(), mean, m2, momentum)
        results.append(running)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    kept = torch.full((5,), 0.5), torch.full((5,), 4.0)
    factor = momentum or 1 / 3
    kept[0][1:3] += (mean[1:3] - 0.5).float() * factor
    kept[1][2] += (8.0 / 4 - 4.0) * factor
    torch.testing.assert_close(results[0], (*kept, torch.tensor(3)), rtol=1e-6, atol=0)
