"""What torch does to a layer besides calling it: autocast, copies, checkpoints, threads, transforms."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, stack_module_state, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import musigma as ms
from native import RUN

Make = Callable[[Any], nn.Module]
LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "LayerNorm": (lambda m: m.LayerNorm(6), (8, 6)),
    "RMSNorm": (lambda m: m.RMSNorm(6, eps=1e-6), (8, 6)),
    "GroupNorm": (lambda m: m.GroupNorm(2, 6), (8, 6, 5)),
    "InstanceNorm1d": (lambda m: m.InstanceNorm1d(6, affine=True, track_running_stats=True), (8, 6, 5)),
    "BatchNorm1d": (lambda m: m.BatchNorm1d(6), (8, 6)),
    "BatchNorm1d, cumulative": (lambda m: m.BatchNorm1d(6, momentum=None), (8, 6)),
    "BatchNorm2d": (lambda m: m.BatchNorm2d(6), (4, 6, 3, 5)),
    "BatchNorm1d, evaluating": (lambda m: m.BatchNorm1d(6).eval(), (8, 6)),
}
EVERY = pytest.mark.parametrize("name", LAYERS)
TORCH_CANNOT = pytest.mark.xfail(not RUN, strict=True, raises=RuntimeError, reason="needs native kernels")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def outcome(layer: nn.Module, x: Tensor) -> tuple[torch.dtype, ...] | None:
    """Dtypes of the result and of all gradients; None where the call is refused."""
    x = x.detach().requires_grad_()
    try:
        y = layer(x)
    except RuntimeError:
        return None
    with torch.autocast("cpu", enabled=False):
        y.float().square().sum().backward()
    return (y.dtype, x.grad.dtype, *(p.grad.dtype for p in layer.parameters()))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@EVERY
def test_autocast_gives_torchs_dtypes_wherever_torch_gives_any(name: str, cast: torch.dtype) -> None:
    """torch refuses some pairs of input and weight type; ours take them all, in the input's dtype."""
    make, shape = LAYERS[name]
    for x_dtype, w_dtype in itertools.product(FLOATS, FLOATS):
        x = torch.randn(shape).to(x_dtype)
        with torch.autocast("cpu", dtype=cast):
            ours, theirs = outcome(make(ms.nn).to(w_dtype), x), outcome(make(nn).to(w_dtype), x)
        assert ours is not None
        assert ours[0] == x_dtype
        assert theirs in (None, ours)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["BatchNorm1d", "LayerNorm", "GroupNorm", "RMSNorm", "NormAct"])
def test_mapped_gradients_of_an_autocast_forward(
    name: str, cast: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """C44: torch's kernels meet half-precision gradients beside float32 weights, and fail."""
    if name != "RMSNorm":  # which torch composes of ops that map
        request.applymarker(TORCH_CANNOT)
    layer = {
        "BatchNorm1d": lambda: ms.nn.BatchNorm1d(4),
        "LayerNorm": lambda: ms.nn.LayerNorm(4),
        "GroupNorm": lambda: ms.nn.GroupNorm(2, 4),
        "RMSNorm": lambda: ms.nn.RMSNorm(4),
        "NormAct": lambda: ms.nn.NormAct(ms.nn.LayerNorm(4), "gelu"),
    }[name]()
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 1))
    with torch.autocast("cpu", dtype=cast):
        out = model(torch.randn(8, 4)).squeeze(-1)
    assert out.dtype == cast

    def gradients(upstream: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, list(model.parameters()), upstream, retain_graph=True)

    rows = torch.eye(8, dtype=cast)
    for got, want in zip(vmap(gradients)(rows), zip(*map(gradients, rows), strict=True), strict=True):
        # the mapped one is the float64 reference, the other a kernel: the half type's rounding lies between
        assert_close(got, torch.stack(want), rtol=0, atol=2e-2)


@pytest.mark.parametrize("training", [True, False])
def test_an_ensemble_is_the_loop_over_its_members(training: bool) -> None:
    """C42: with its own statistics for each, taken in under vmap."""
    nets = [nn.Sequential(nn.Linear(3, 4), ms.nn.BatchNorm1d(4), ms.nn.LayerNorm(4)) for _ in range(3)]
    for net in nets:
        net.train(training)
    x = torch.randn(8, 3)
    alone = copy.deepcopy(nets)
    want = torch.stack([net(x) for net in alone])
    parameters, buffers = stack_module_state(nets)
    got = vmap(lambda p, b: functional_call(nets[0], (p, b), (x,)))(parameters, buffers)
    assert_close(got, want, rtol=0, atol=1e-5)
    for i, net in enumerate(alone):
        assert_close({k: v[i] for k, v in buffers.items()}, dict(net.named_buffers()))


def test_single_samples_through_a_batch_norm() -> None:
    """C42: in evaluation a Jacobian a sample; in training there is nothing to normalize one value by."""
    net = nn.Sequential(nn.Linear(3, 4), ms.nn.BatchNorm1d(4)).eval()
    x = torch.randn(8, 3)
    jacobians = vmap(jacrev(lambda sample: net(sample[None])[0]))(x)
    assert jacobians.shape == (8, 4, 3)
    weight = net[0].weight / (net[1].running_var + net[1].eps).sqrt()[:, None]
    assert_close(jacobians, weight.expand(8, 4, 3))
    net.train()
    with pytest.raises(ValueError, match=r"more than 1 value per channel .*\.eval\(\).*GroupNorm"):
        vmap(lambda sample: net(sample[None])[0])(x)


@EVERY
def test_a_layer_survives_copies_and_pickles(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make(ms.nn), torch.randn(shape)
    layer(x)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    want = copy.deepcopy(layer)
    for twin in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(saved, weights_only=False),
    ):
        expected = copy.deepcopy(want)
        assert torch.equal(twin(x), expected(x))
        assert_close(twin.state_dict(), expected.state_dict(), rtol=0, atol=0)


@EVERY
def test_a_layer_made_on_meta_takes_its_state_by_assignment(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make(ms.nn), torch.randn(shape)
    layer(x)
    with torch.device("meta"):
        empty = make(ms.nn)
    y = empty(x.to("meta"))
    assert (y.device.type, y.shape) == ("meta", x.shape)
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    empty.load_state_dict(state, assign=True)
    assert all(empty.state_dict()[k].data_ptr() == v.data_ptr() for k, v in state.items())
    assert torch.equal(empty(x), layer(x))
    assert_close(empty.state_dict(), layer.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
@EVERY
def test_a_checkpointed_layer_learns_the_same(name: str, reentrant: bool) -> None:
    make, shape = LAYERS[name]
    layer = make(ms.nn)
    plain = copy.deepcopy(layer)
    x = torch.randn(shape) + 1
    grads = []
    for run in (lambda t: checkpoint(layer, t, use_reentrant=reentrant), plain):
        t = x.clone().requires_grad_()
        run(t).pow(3).sum().backward()
        grads.append(t.grad)
    assert torch.equal(*grads)
    assert_close(layer.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert_close([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()], rtol=0, atol=0)


@EVERY
def test_inference_mode_and_back(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make(ms.nn), torch.randn(shape)
    want = copy.deepcopy(layer)
    with torch.inference_mode():
        inside = layer(x)
        made_inside = make(ms.nn)
        assert torch.equal(made_inside(x), inside)
    assert inside.is_inference()
    assert torch.equal(want(x), inside)
    assert_close(layer.state_dict(), want.state_dict(), rtol=0, atol=0)
    layer(x).sum().backward()


@EVERY
def test_gradients_add_up_over_several_backward_passes(name: str) -> None:
    make, shape = LAYERS[name]
    layer = make(ms.nn)
    batches = [torch.randn(shape) for _ in range(3)]
    total = [torch.zeros_like(p) for p in layer.parameters()]
    for x in batches:
        layer(x).pow(3).sum().backward()
        alone = torch.autograd.grad(layer(x).pow(3).sum(), list(layer.parameters()))
        total = [t + g for t, g in zip(total, alone, strict=True)]
    assert_close([p.grad for p in layer.parameters()], total, rtol=0, atol=0)


@EVERY
def test_threads_of_python_do_not_see_each_other(name: str) -> None:
    make, shape = LAYERS[name]
    layers = [make(ms.nn) for _ in range(4)]
    inputs = [torch.randn(shape) * (k + 1) for k in range(4)]

    def gradient(k: int) -> Tensor:
        x = inputs[k].clone().requires_grad_()
        layers[k](x).pow(3).sum().backward()
        return x.grad

    want = [gradient(k) for k in range(4)]
    got: list[list[Tensor]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda k=k: got[k].extend(gradient(k) for _ in range(20))) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        assert len(got[k]) == 20
        assert all(torch.equal(g, want[k]) for g in got[k])


class Normalized(Dataset[Tensor]):
    """Examples that are normalized where they are loaded."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        # enough for a second thread to be woken
        x = torch.arange(400.0 * 400).mul(index + 1).sin().reshape(400, 400)
        return ms.functional.batch_norm(ms.functional.layer_norm(x, (400,)), None, None, training=True)


def test_forked_workers_call_the_ops_their_parent_has_called() -> None:
    torch.set_num_threads(2)
    data = Normalized()
    want = torch.stack([data[i] for i in range(4)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads
        loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork", timeout=60)
        (got,) = loader
    # torch's kernels, where ours are not built, add in another order with another number of threads
    assert_close(got, want)
