"""Every layer compiles whole, and training under the compiler is training: outputs, gradients and state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import musigma as ms

pytestmark = pytest.mark.compile

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: ms.nn.LayerNorm(6), (4, 6)),
    "LayerNorm of one value": (lambda: ms.nn.LayerNorm(1), (4, 1)),
    "LayerNorm2d": (lambda: ms.nn.LayerNorm2d(6), (2, 6, 3, 3)),
    "RMSNorm": (lambda: ms.nn.RMSNorm(6), (4, 6)),
    "GroupNorm": (lambda: ms.nn.GroupNorm(2, 6), (4, 6, 5)),
    "GroupNorm of one value": (lambda: ms.nn.GroupNorm(6, 6), (4, 6)),
    "InstanceNorm1d": (lambda: ms.nn.InstanceNorm1d(6, affine=True, track_running_stats=True), (4, 6, 5)),
    "BatchNorm1d": (lambda: ms.nn.BatchNorm1d(6), (8, 6)),
    "BatchNorm1d, cumulative": (lambda: ms.nn.BatchNorm1d(6, momentum=None), (8, 6)),
    "BatchNorm2d, no statistics": (lambda: ms.nn.BatchNorm2d(6, track_running_stats=False), (2, 6, 3, 3)),
    "BatchNorm1d, evaluating": (lambda: ms.nn.BatchNorm1d(6).eval(), (8, 6)),
    "SyncBatchNorm": (lambda: ms.nn.SyncBatchNorm(6), (8, 6)),
    "FrozenBatchNorm1d": (lambda: ms.nn.FrozenBatchNorm1d(6), (8, 6)),
    "NormAct": (lambda: ms.nn.NormAct(ms.nn.BatchNorm1d(6), "gelu"), (8, 6)),
    "AddNorm": (lambda: ms.nn.AddNorm(nn.Linear(6, 6), ms.nn.LayerNorm(6)), (8, 6)),
    "LayerNormGRU": (lambda: ms.nn.LayerNormGRU(6, 5), (3, 2, 6)),
    "BatchNormLSTM": (lambda: ms.nn.BatchNormLSTM(6, 5, max_steps=2), (3, 4, 6)),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def output(layer: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    y = layer(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.filterwarnings("ignore::musigma._errors.MusigmaWarning")
@pytest.mark.parametrize("mode", ["auto", "reference"])
@pytest.mark.parametrize("name", LAYERS)
def test_whole_graph_outputs_gradients_and_state(name: str, mode: Any) -> None:
    make, shape = LAYERS[name]
    layer = make()
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with ms.ops.use_kernels(mode):
        for _ in range(2):
            x = torch.randn(shape, requires_grad=True)
            y, expected = output(compiled, x), output(eager, x)
            assert_close(y, expected)
            g = torch.randn_like(y)
            inputs = [(x, *m.parameters()) for m in (layer, eager)]
            assert_close(torch.autograd.grad(y, inputs[0], g), torch.autograd.grad(expected, inputs[1], g))
    assert_close(layer.state_dict(), eager.state_dict())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_trained_by_inductor(momentum: float | None) -> None:
    layer = ms.nn.BatchNorm1d(6, momentum=momentum)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True)
    for _ in range(3):
        x = torch.randn(8, 6) + 2
        assert_close(compiled(x), eager(x))
    assert_close(layer.state_dict(), eager.state_dict())


def test_other_batch_sizes_need_no_more_graphs_than_torchs_own() -> None:
    counts = []
    for make in (nn.BatchNorm1d, ms.nn.BatchNorm1d):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(make(6), fullgraph=True, backend=counter)
        for n in (4, 5, 7, 9, 16):
            assert compiled(torch.randn(n, 6)).shape == (n, 6)
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("order", ["compile(checkpoint)", "checkpoint(compile)"])
def test_a_checkpointed_batch_is_taken_in_once_when_compiled(order: str) -> None:
    """C33 inside and outside of the compiler."""
    layer, plain = ms.nn.BatchNorm1d(2), ms.nn.BatchNorm1d(2)
    x = (torch.randn(16, 2) + 3).requires_grad_()
    plain(x)
    if order == "compile(checkpoint)":

        def run(t: Tensor) -> Tensor:
            return checkpoint(layer, t, use_reentrant=False)

        y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    else:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        y = checkpoint(compiled, x, use_reentrant=False)
    y.pow(3).sum().backward()
    assert_close(layer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["LayerNorm", "BatchNorm1d, evaluating", "GroupNorm", "FrozenBatchNorm1d"])
def test_an_exported_model_needs_no_op_of_ours(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    program = torch.export.export(layer, (x,))
    assert not [n for n in program.graph.nodes if "musigma" in str(n.target)]
    assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_exported_batch_norm_goes_on_training(momentum: float | None) -> None:
    layer, x = ms.nn.BatchNorm1d(6, momentum=momentum), torch.randn(8, 6)
    program = torch.export.export(copy.deepcopy(layer), (x,))
    assert not [n for n in program.graph.nodes if "musigma" in str(n.target)]
    module = program.module()
    for _ in range(2):
        assert_close(module(x), layer(x))
    assert_close(module.state_dict(), layer.state_dict())
