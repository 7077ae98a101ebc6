"""A model that is exported, traced or made a graph of runs where there is no musigma, and as it ran here."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import musigma as ms

# The type checker asks for the shapes of things that have none yet.
pytestmark = pytest.mark.compile

f = ms.functional

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: ms.nn.LayerNorm(6), (4, 6)),
    "LayerNorm2d": (lambda: ms.nn.LayerNorm2d(6), (4, 6, 3, 5)),
    "RMSNorm": (lambda: ms.nn.RMSNorm(6), (4, 6)),
    "GroupNorm": (lambda: ms.nn.GroupNorm(2, 6), (4, 6, 5)),
    "InstanceNorm1d": (lambda: ms.nn.InstanceNorm1d(6), (4, 6, 5)),
    "InstanceNorm1d, tracking": (lambda: ms.nn.InstanceNorm1d(6, track_running_stats=True), (4, 6, 5)),
    "BatchNorm1d": (lambda: ms.nn.BatchNorm1d(6), (8, 6)),
    "BatchNorm1d, cumulative": (lambda: ms.nn.BatchNorm1d(6, momentum=None), (8, 6)),
    "BatchNorm2d, no statistics": (lambda: ms.nn.BatchNorm2d(6, track_running_stats=False), (4, 6, 3, 3)),
    "SyncBatchNorm": (lambda: ms.nn.SyncBatchNorm(6), (8, 6)),
    "FrozenBatchNorm1d": (lambda: ms.nn.FrozenBatchNorm1d(6), (8, 6)),
    "NormAct": (lambda: ms.nn.NormAct(ms.nn.BatchNorm1d(6), "gelu"), (8, 6)),
}
CASES = [
    pytest.param(name, training, id=f"{name}-{'train' if training else 'eval'}")
    for name in LAYERS
    for training in (True, False)
]


class Masked(nn.Module):
    """A function of input and mask as a module; what it calls has no counterpart in torch."""

    def __init__(self, run: Callable[[Masked, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("running_var", torch.ones(6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.run(self, x, mask)


MASKED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda m, x, mask: f.layer_norm(x.mT, (6,), m.weight, mask=mask.mT),
    "rms_norm": lambda m, x, mask: f.rms_norm(x.mT, (6,), m.weight, mask=mask.mT),
    "group_norm": lambda m, x, mask: f.group_norm(x, 2, m.weight, mask=mask),
    "instance_norm": lambda m, x, mask: f.instance_norm(x, mask=mask, activation="silu"),
    "batch_norm": lambda m, x, mask: f.batch_norm(
        x, m.running_mean, m.running_var, m.weight, training=True, mask=mask, add=x
    ),
    "add_rms_norm": lambda m, x, mask: f.add_rms_norm(x.mT, x.mT, (6,), m.weight)[0],
    "moments": lambda m, x, mask: ms.moments(x, (0, 2), mask=mask).var(),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(make: Callable[[], nn.Module], shape: tuple[int, ...], training: bool) -> nn.Module:
    """A layer whose statistics and parameters are not what they were made with."""
    layer = make()
    layer(torch.randn(shape) + 1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    return layer.train(training)


def ours_in(graph: Any) -> list[str]:
    return sorted({str(n.target) for n in graph.nodes if "musigma" in str(n.target)})


@pytest.mark.parametrize(("name", "training"), CASES)
def test_exported_with_a_free_batch_size(name: str, training: bool) -> None:
    """C48: no op of ours; in evaluation no buffer is written; statistics serve on another batch size."""
    make, shape = LAYERS[name]
    layer = trained(make, shape, training)
    sizes = ({0: torch.export.Dim("n", min=2, max=64)},)
    program = torch.export.export(copy.deepcopy(layer), (torch.randn(shape),), dynamic_shapes=sizes)
    assert ours_in(program.graph) == []
    buffers = dict(layer.named_buffers())
    # in-place ops are still in the graph; below, one that is free of them says the same in its signature
    writes = [n for n in program.graph.nodes if "_." in str(n.target)]
    assert bool(writes) == (training and "Frozen" not in name and bool(buffers))
    module = program.module()
    for n in (7, shape[0]):
        x = torch.randn(n, *shape[1:]) + 1
        assert_close(module(x), layer(x), rtol=1e-5, atol=1e-5)
    # float32 in another order of operations
    exported = {k: v for k, v in module.state_dict().items() if k in buffers}
    assert_close(exported, buffers, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_what_torch_has_no_kernel_for_is_exported_in_torchs_own_ops(name: str, strict: bool) -> None:
    model = Masked(MASKED[name])
    x, mask = torch.randn(4, 6, 5), torch.rand(4, 1, 5) > 0.3
    with torch.no_grad():
        program = torch.export.export(copy.deepcopy(model), (x, mask), strict=strict)
        assert ours_in(program.graph) == []
        assert_close(program.module()(x, mask), model(x, mask))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("mode", ["auto", "off", "reference"])
def test_no_mode_puts_an_op_of_ours_into_an_exported_program(mode: Any) -> None:
    model = nn.Sequential(ms.nn.LayerNorm(6), ms.nn.RMSNorm(6), ms.nn.BatchNorm1d(6), ms.nn.GroupNorm(2, 6))
    with ms.ops.use_kernels(mode):
        program = torch.export.export(model, (torch.randn(8, 6),))
    functional = program.run_decompositions()
    assert ours_in(program.graph) == ours_in(functional.graph) == []
    written = list(functional.graph_signature.buffers_to_mutate.values())
    assert written == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
    model.eval()
    functional = torch.export.export(model, (torch.randn(8, 6),)).run_decompositions()
    assert not functional.graph_signature.buffers_to_mutate


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "training"), CASES)
def test_traced_by_jit(name: str, training: bool) -> None:
    make, shape = LAYERS[name]
    layer = trained(make, shape, training)
    traced = torch.jit.trace(copy.deepcopy(layer), (torch.randn(shape),), check_trace=False)
    assert "musigma::" not in str(traced.inlined_graph)
    if not training:
        x = torch.randn(shape) + 1
        assert_close(traced(x), layer(x), rtol=1e-5, atol=1e-5)


ALONE = """
import sys
sys.modules["musigma"] = None  # importing it raises
import torch
for path in sys.argv[1:]:
    load = torch.jit.load if path.endswith(".jit") else lambda p: torch.export.load(p).module()
    x, *more, want = torch.load(path + ".data")
    with torch.no_grad():
        got = load(path)(x, *more)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
print("ran", len(sys.argv) - 1)
"""


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
def test_saved_programs_run_in_a_process_without_musigma(tmp_path: Path) -> None:
    saved = []

    def keep(name: str, save: Callable[[str], Any], *data: Tensor) -> None:
        saved.append(str(tmp_path / name))
        save(saved[-1])
        torch.save(data, saved[-1] + ".data")

    for i, (name, (make, shape)) in enumerate(LAYERS.items()):
        layer, x = trained(make, shape, training=False), torch.randn(shape)
        program = torch.export.export(copy.deepcopy(layer), (x,))
        keep(f"{i}.pt2", lambda path, p=program: torch.export.save(p, path), x, layer(x).detach())
        if name in ("LayerNorm", "BatchNorm1d"):
            traced = torch.jit.trace(copy.deepcopy(layer), (x,))
            keep(f"{i}.jit", lambda path, t=traced: torch.jit.save(t, path), x, layer(x).detach())
    model, x, mask = Masked(MASKED["group_norm"]), torch.randn(4, 6, 5), torch.rand(4, 1, 5) > 0.3
    program = torch.export.export(model, (x, mask))
    keep("masked.pt2", lambda path: torch.export.save(program, path), x, mask, model(x, mask).detach())
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, *saved], capture_output=True, text=True
    )
    assert run.stdout.strip() == f"ran {len(saved)}", run.stderr


@pytest.mark.parametrize(("name", "training"), CASES)
def test_torch_fx_traces_through(name: str, training: bool) -> None:
    """torch.fx takes only torch's own modules for leaves, so it runs our forward with proxies."""
    make, shape = LAYERS[name]
    model = nn.Sequential(nn.Identity(), trained(make, shape, training))
    plain = copy.deepcopy(model)
    graph = torch.fx.symbolic_trace(model)
    assert [n.target.__name__ for n in graph.graph.nodes if n.op == "call_function"]
    x = torch.randn(shape) + 1
    assert_close(graph(x), plain(x), rtol=0, atol=0)
    assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)


def test_a_trace_leaves_the_running_statistics_as_torchs_own_does() -> None:
    ours, theirs = ms.nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    x = torch.randn(8, 6) + 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = [torch.jit.trace(m, (x,), check_trace=False) for m in (ours, theirs)]
    for _ in range(2):
        assert_close(traced[0](x), traced[1](x))
    assert_close(ours.state_dict(), theirs.state_dict())
