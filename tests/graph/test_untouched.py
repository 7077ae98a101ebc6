"""Recording leaves everything as it was: state, randomness, gradients, hooks; after failures too."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.graph.nets import Calls, resnet, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook, register_module_forward_pre_hook
from torch.overrides import handle_torch_function, has_torch_function

from musigma._errors import MusigmaWarning
from musigma.graph import record


class Busy(nn.Module):
    """Touches everything that a forward can touch; fails at the end if it is told to."""

    def __init__(self, fail: bool) -> None:
        super().__init__()
        self.fail = fail
        self.lin = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("state", torch.zeros(8))
        self.register_buffer("view_of_weight", self.lin.weight.detach()[0])
        self.register_buffer("nothing", None)
        self.register_parameter("empty", None)
        self.calls = 0
        self.history: list[Tensor] = []
        self.table: dict[str, int] = {"kept": 1}
        self.alias = self.state

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(x)
        self.table.clear()
        self._non_persistent_buffers_set.add("count")
        self.last = x
        self.count += 1
        self.state.mul_(0.5).add_(1)
        self.view_of_weight.add_(1)
        self.count = self.count + 5
        with torch.no_grad():
            self.lin.weight.mul_(2)
            self.lin.bias.data = torch.ones(8)
        self.bn.eval()
        self.lin.weight.requires_grad_(False)
        self.register_buffer("late", torch.ones(1))
        self.bn.register_forward_hook(lambda *args: None)
        h = self.drop(self.bn(self.lin(F.relu(x, inplace=True))))
        h = h + torch.randn(8, generator=self.generator) + np.random.rand()
        self.drop.train(False)
        if torch.is_grad_enabled():
            h.sum().backward(retain_graph=True)
        if self.fail:
            raise ArithmeticError("as told")
        return h


def snapshot(model: nn.Module, example: Tensor) -> dict[str, Any]:
    """Everything that must be the same afterwards, values and identities."""
    return {
        "state": {
            name: (id(t), t.clone(), t._version) for name, t in model.state_dict(keep_vars=True).items()
        },
        "names": [name for name, _ in model.named_buffers()] + [name for name, _ in model.named_parameters()],
        "attributes": {
            path: {k: id(v) for k, v in m.__dict__.items() if not isinstance(v, int | bool)}
            for path, m in model.named_modules()
        },
        "flags": {path: (m.training, getattr(m, "calls", None)) for path, m in model.named_modules()},
        "contents": {
            path: {k: [*map(id, v)] for k, v in m.__dict__.items() if isinstance(v, list | dict | set)}
            for path, m in model.named_modules()
        },
        "hooks": {path: len(m._forward_hooks) for path, m in model.named_modules()},
        "grads": {
            name: (id(p.grad), None if p.grad is None else p.grad.clone(), p.requires_grad)
            for name, p in model.named_parameters()
        },
        "example": example.clone(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "generator": model.generator.get_state() if isinstance(model, Busy) else None,
        "global hooks": len(torch.nn.modules.module._global_forward_hooks),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(before: Any, after: Any, path: str = "") -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys(), path
        for key in before:
            assert_same(before[key], after[key], f"{path}/{key}")
    elif isinstance(before, tuple):
        for index, (left, right) in enumerate(zip(before, after, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    elif isinstance(before, Tensor):
        assert torch.equal(before, after), path
    elif isinstance(before, np.ndarray):
        assert np.array_equal(before, after), path
    else:
        assert before == after, path


# Parameters are written in place by the model itself, which raises their version whoever restores them.
def without_parameter_versions(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    parameters = {name for name, _ in model.named_parameters()} | {"view_of_weight"}
    state["state"] = {n: v[:2] if n in parameters else v for n, v in state["state"].items()}
    return state


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_everything_is_as_it_was(fail: bool, grad: bool) -> None:
    model, example = Busy(fail), x()
    F.mse_loss(model.bn(model.lin(x(seed=1))), x(seed=2)).backward()
    before = without_parameter_versions(snapshot(model, example), model)
    with torch.set_grad_enabled(grad):
        before["grad mode"] = grad
        if fail:
            with pytest.raises(ArithmeticError, match="as told"):
                record(model, example)
        else:
            record(model, example)
        after = without_parameter_versions(snapshot(model, example), model)
    assert_same(before, after)


def test_pythons_generator_is_restored() -> None:
    # In a process of its own: under pytest beartype draws from it at every checked call of ours.
    program = """
import random, torch, musigma.graph
class Draws(torch.nn.Module):
    def forward(self, x):
        return x * random.random()
before = random.getstate()
musigma.graph.record(Draws(), torch.ones(2))
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_buffers_of_a_trained_batch_norm_are_untouched_bit_for_bit() -> None:
    model = resnet().train()
    before = snapshot(model, example := x(2, 3, 8, 8))
    record(model, example)
    assert_same(before, snapshot(model, example))


def test_embedding_that_shortens_its_rows_is_put_back() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.ReLU())
    before = model[0].weight.detach().clone()
    graph = record(model, torch.tensor([1, 2]))
    assert torch.equal(model[0].weight, before)
    assert graph.nodes[0].writes == ("weight",)


def test_write_that_only_a_schema_tells_is_put_back() -> None:
    with torch.library._scoped_library("musigma_graph_test", "FRAGMENT") as library:
        library.define("bump(Tensor x, Tensor(a!) weight) -> Tensor")
        library.impl("bump", lambda t, w: t * w.add_(1).sum(), "CompositeExplicitAutograd")
        net = Calls(lambda net, t: torch.ops.musigma_graph_test.bump(t, net.up.weight))
        before = net.up.weight.detach().clone()
        with torch.no_grad():
            graph = record(net, x())
    assert graph.nodes[1].writes == ("weight",)
    assert torch.equal(net.up.weight, before)


def scale_secretly(t: Tensor, weight: Tensor) -> Tensor:
    if has_torch_function((t, weight)):
        return handle_torch_function(scale_secretly, (t, weight), t, weight)
    with torch.no_grad():
        weight.mul_(2)
    return t * 2


def test_write_that_nothing_tells_is_at_least_reported() -> None:
    net = Calls(lambda net, t: scale_secretly(t, net.up.weight))
    with pytest.warns(MusigmaWarning, match=r"up\.weight was overwritten by .*scale_secretly"):
        graph = record(net, x())
    assert graph.nodes[1].writes == ("weight",)


def test_results_equal_a_plain_forward() -> None:
    model, twin, example = resnet(), None, x(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    last: list[Tensor] = []
    graph = record(model, example, listen=lambda node, args, kwargs, outputs: last.extend(outputs))
    assert graph.output == (len(graph) - 1,)
    assert torch.equal(last[-1], twin(example))


def test_dropout_draws_what_a_plain_forward_would_draw() -> None:
    model, example = Calls(lambda net, t: F.dropout(t, 0.5)), x()
    state = torch.get_rng_state()
    plain = model(example)
    torch.set_rng_state(state)
    heard: list[Tensor] = []
    record(model, example, listen=lambda node, args, kwargs, outputs: heard.extend(outputs))
    assert torch.equal(heard[-1], plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_after_recording_is_the_plain_one() -> None:
    # The graph of autograd saved buffers and inputs: restoring must not change what it saved.
    class Decay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((8,), 2.0))
            self.bn = nn.BatchNorm1d(8)
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, t: Tensor) -> Tensor:
            self.scale.mul_(0.5)
            return self.bn(t * self.weight * self.scale).square()

    model, example = Decay(), x(6, 8)
    twin, heard = copy.deepcopy(model), []
    record(model, example, listen=lambda node, args, kwargs, outputs: heard.append(outputs[0]))
    loss = (heard[-1] * torch.arange(8.0)).sum()
    expected = (twin(example) * torch.arange(8.0)).sum()
    assert torch.equal(
        torch.autograd.grad(loss, model.weight)[0], torch.autograd.grad(expected, twin.weight)[0]
    )
    assert torch.equal(model.scale, torch.full((8,), 2.0))


def test_grad_mode_is_the_callers() -> None:
    modes: list[bool] = []

    def note(net: Calls, t: Tensor) -> Tensor:
        modes.append(t.requires_grad)
        return t

    record(Calls(note), x())
    with torch.no_grad():
        record(Calls(note), x())
    assert modes == [True, False]


def test_own_hooks_of_the_model_run_as_ever() -> None:
    net, seen = Calls(lambda net, t: t * 2), []
    net.lin.register_forward_hook(lambda module, args, output: seen.append(output.shape) or output + 1)
    graph = record(net, x())
    assert [node.op for node in graph] == ["linear", "add", "mul"]
    assert seen == [torch.Size([2, 4, 8])]
    assert len(net.lin._forward_hooks) == 1


def test_failure_keeps_its_own_traceback_and_says_what_was_called() -> None:
    failing = Calls(lambda net, t: t @ t)
    with pytest.raises(RuntimeError, match="Expected size") as caught:
        record(failing, x())
    assert any(entry.name == "<lambda>" for entry in caught.traceback)
    (note,) = caught.value.__notes__
    assert "Calls(float32[2, 4, 8])" in note
    assert "forward(x" in note
    assert "%0 = linear" in note


def test_wrong_number_of_arguments_is_told_with_the_signature() -> None:
    with pytest.raises(TypeError, match="positional argument") as caught:
        record(nn.Linear(8, 8), (x(), x()))
    assert "before its first op" in caught.value.__notes__[0]
    assert "forward(input" in caught.value.__notes__[0]


def test_interrupt_leaves_nothing_behind() -> None:
    def interrupt(net: Calls, t: Tensor) -> Tensor:
        raise KeyboardInterrupt

    net = Calls(interrupt)
    before = snapshot(net, example := x())
    with pytest.raises(KeyboardInterrupt):
        record(net, example)
    assert_same(before, snapshot(net, example))
    assert len(record(nn.Linear(8, 8), x())) == 1


def test_failing_listener_leaves_nothing_behind() -> None:
    def listen(*args: object) -> None:
        raise LookupError("listener")

    model = resnet()
    before = snapshot(model, example := x(2, 3, 8, 8))
    with pytest.raises(LookupError, match="listener"):
        record(model, example, listen=listen)
    assert_same(before, snapshot(model, example))


def test_failed_module_does_not_stay_on_the_stack() -> None:
    class Retry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(3, 3), nn.Linear(8, 8)

        def forward(self, t: Tensor) -> Tensor:
            try:
                return self.bad(t)
            except RuntimeError:
                return self.good(t) + 1

    graph = record(Retry(), x())
    assert [(node.op, node.module) for node in graph] == [("linear", "good"), ("add", "")]


def test_lazy_modules_are_refused_untouched() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias are uninitialized.*call the model once"):
        record(lazy, x())
    assert isinstance(lazy[0], nn.LazyLinear)


@pytest.mark.parametrize("example", [[torch.ones(2)], {0: torch.ones(2)}, 3, None])
def test_example_of_another_type_is_refused(example: Any) -> None:
    with pytest.raises(TypeError, match="tensor, a tuple of positional arguments or a dict"):
        record(nn.Linear(2, 2), example)


def test_model_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError):
        record(torch.relu, x())  # type: ignore[arg-type]


@pytest.mark.parametrize("everywhere", [False, True], ids=["own", "global"])
def test_failing_pre_hook_does_not_stay_on_the_stack(everywhere: bool) -> None:
    def refuse(module: nn.Module, *args: object) -> None:
        if getattr(module, "refused", False):
            raise LookupError

    class Retry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Linear(8, 8), nn.Linear(8, 8)
            self.bad.refused = True
            if not everywhere:
                self.bad.register_forward_pre_hook(refuse)

        def forward(self, t: Tensor) -> Tensor:
            try:
                return self.bad(t)
            except LookupError:
                return self.good(t) + 1

    # A hook that stands before ours stops the call before we hear of it.
    hook = register_module_forward_pre_hook(refuse) if everywhere else None
    try:
        graph = record(nn.Sequential(Retry(), nn.ReLU()), x())
    finally:
        if hook is not None:
            hook.remove()
    assert [(node.op, node.module) for node in graph] == [("linear", "0.good"), ("add", "0"), ("relu", "1")]


def test_buffer_that_is_a_view_of_a_parameter_stays_one_while_it_runs() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("row", self.weight.detach()[:4])

        def forward(self, t: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(3)
            return t[..., :4] * self.row

    model, heard = Aliased(), []
    graph = record(model, x(), listen=lambda node, args, kwargs, outputs: heard.append(outputs[0]))
    assert torch.equal(heard[-1], x()[..., :4] * 3)
    assert graph.nodes[-1].inputs[1] == 0
    assert torch.equal(model.row, torch.ones(4))
    assert torch.equal(model.weight, torch.ones(8))


def test_modules_running_in_other_threads_are_not_recorded() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            inside.set()
            assert leave.wait(20)
            return t * 2

    def meanwhile(net: Calls, t: Tensor) -> Tensor:
        thread = threading.Thread(target=net.up, args=(t.detach(),))
        thread.start()
        assert inside.wait(20)
        result = net.lin(t) + 1
        leave.set()
        thread.join()
        return result

    net = Calls(meanwhile)
    net.up = Waits()
    graph = record(net, x())
    assert [node.module for node in graph] == ["lin", "", "lin", ""]
    assert [node.op for node in graph] == ["linear", "detach", "linear", "add"]


def test_no_global_hook_is_left_behind() -> None:
    # torch's own handle forgets one of the tables, and torch.compile warns of any entry
    record(nn.Linear(2, 2), torch.ones(1, 2))
    assert not _has_any_global_hook()


class InsideATransform(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda v: v.square().sum()))(x).add(torch.vmap(torch.relu_)(x))


def test_an_example_that_a_transform_wraps_is_put_back_as_a_plain_tensor() -> None:
    # what was kept inside the transform is dead after it: putting it back made the example crash the process
    x = torch.ones(6, 4)
    record(InsideATransform(), x)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(x)
    assert x.untyped_storage().nbytes() == 96
    assert torch.equal(x, torch.ones(6, 4))


def test_recordings_of_several_threads_leave_one_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    before = [(id(b), b.clone()) for b in model.buffers()]
    threads = [
        threading.Thread(target=lambda: [record(model, torch.ones(3, 4)) for _ in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(id(b) == i and torch.equal(b, v) for b, (i, v) in zip(model.buffers(), before, strict=True))
