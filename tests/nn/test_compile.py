"""Every layer compiles whole, and training under the compiler is training: outputs, gradients and state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import musigma as ms
from native import BUILT as NATIVE

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


SIZES: dict[str, tuple[Callable[[Any], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda m: m.LayerNorm(6), (6,)),
    "RMSNorm": (lambda m: m.RMSNorm(6), (6,)),
    "GroupNorm": (lambda m: m.GroupNorm(2, 6), (6, 5)),
    "InstanceNorm1d": (lambda m: m.InstanceNorm1d(6, track_running_stats=True), (6, 5)),
    "BatchNorm1d": (lambda m: m.BatchNorm1d(6), (6,)),
    "BatchNorm2d": (lambda m: m.BatchNorm2d(6), (6, 4, 4)),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", SIZES)
def test_other_batch_sizes_need_no_more_graphs_than_torchs_own(
    name: str, memory_format: torch.memory_format
) -> None:
    """Nor do other image sizes, evaluation, or a call without gradients."""
    make, rest = SIZES[name]
    if memory_format == torch.channels_last and len(rest) != 3:
        return
    counts = []
    for module in (nn, ms.nn):
        torch._dynamo.reset()
        counter = CompileCounter()
        layer = make(module)
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        shapes = [(n, *rest) for n in (4, 5, 9)] + [(8, 6, *(3 for _ in rest[1:]))]
        for training in (True, False):
            layer.train(training)
            for shape in shapes:
                x = torch.randn(shape)
                x = x.to(memory_format=memory_format) if len(shape) == 4 else x
                y = compiled(x.requires_grad_())
                y.sum().backward()
                with torch.no_grad():
                    compiled(x)
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0]


def test_a_model_is_one_graph_without_breaks() -> None:
    counters.clear()
    model = nn.Sequential(
        nn.Linear(6, 6),
        ms.nn.LayerNorm(6),
        nn.GELU(),
        ms.nn.BatchNorm1d(6),
        ms.nn.RMSNorm(6),
        nn.Linear(6, 6),
    )
    compiled = torch.compile(model, backend="aot_eager")
    for n in (4, 5, 6, 9):
        compiled(torch.randn(n, 6)).sum().backward()
    assert not counters["graph_break"]
    # one for the first batch size, one for all others
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_both_kinds_of_momentum_train_in_one_graph(backend: str, momentum: float | None) -> None:
    """C41: the cumulative average reads its counter, which torch's layer can do only outside of a graph."""
    layer = ms.nn.BatchNorm1d(3, momentum=momentum)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for step in range(3):
        x = torch.randn(4 + step, 3) + 2
        assert_close(compiled(x), eager(x))
    assert_close(layer.state_dict(), eager.state_dict())
    assert layer.num_batches_tracked == 3


def test_the_wrapper_and_the_layer_have_one_mode() -> None:
    """C45: and it is that mode in which the compiled layer runs."""
    layer = ms.nn.BatchNorm1d(3)
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(8, 3) + 2
    for switch, mode in (
        (compiled.eval, False),
        (compiled.train, True),
        (layer.eval, False),
        (layer.train, True),
    ):
        switch()
        assert layer.training is compiled.training is mode
        before = layer.num_batches_tracked.item()
        compiled(x)
        assert layer.num_batches_tracked == before + mode
    frozen = torch.compile(ms.nn.BatchNorm1d(3).eval(), backend="eager")
    assert not frozen.training


@pytest.mark.parametrize("backend", ["eager", "aot_eager_decomp_partition", "inductor"])
@pytest.mark.parametrize("norm", ["layer", "rms", "group", "batch"])
def test_compiled_is_as_exact_as_eager(norm: str, backend: str) -> None:
    """C47: to the bit, with native kernels; 2e6 values of mean 3, in bfloat16 too."""
    layer = {
        "layer": lambda: ms.nn.LayerNorm((200, 1000)),
        "rms": lambda: ms.nn.RMSNorm((200, 1000)),
        "group": lambda: ms.nn.GroupNorm(1, 10),
        "batch": lambda: ms.nn.BatchNorm1d(10, track_running_stats=False),
    }[norm]()
    wide = copy.deepcopy(layer).double()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(10, 200, 1000) + 3).to(dtype)
        x = x.movedim(0, 1).contiguous() if norm in ("group", "batch") else x
        with torch.no_grad():
            y, expected = compiled(x), wide(x.double())
            if NATIVE:
                assert torch.equal(y, layer(x))
        # half a unit of rounding, and what the sums of torch's own kernels leave
        limit = 5e-6 if dtype == torch.float32 else torch.finfo(dtype).eps * expected.abs().max()
        assert (y.double() - expected).abs().max() <= limit


def test_compiled_autograd_takes_whole_models() -> None:
    def grads(run: Callable[[], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), ms.nn.LayerNorm(6), ms.nn.BatchNorm1d(6), ms.nn.RMSNorm(6))
        with run():
            for n in (8, 4, 4):
                net(torch.randn(n, 6)).pow(2).sum().backward()
        return [p.grad for p in net.parameters()]

    got = grads(lambda: torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")))
    assert_close(got, grads(nullcontext))


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


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_exported_batch_norm_goes_on_training(momentum: float | None) -> None:
    layer, x = ms.nn.BatchNorm1d(6, momentum=momentum), torch.randn(8, 6)
    program = torch.export.export(copy.deepcopy(layer), (x,))
    assert not [n for n in program.graph.nodes if "musigma" in str(n.target)]
    module = program.module()
    for _ in range(2):
        assert_close(module(x), layer(x))
    assert_close(module.state_dict(), layer.state_dict())
