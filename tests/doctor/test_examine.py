"""Examining leaves everything as it was, takes models of any shape, and refuses what it can't examine."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import labels
from torch import Tensor, nn

from musigma.doctor import Case, Report, examine
from musigma.doctor._examination import Examination
from musigma.doctor._validation import validate


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def busy_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 3)
    )


def state(net: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {k: v.clone() for k, v in net.state_dict().items()},
        "versions": [t._version for t in (*net.parameters(), *net.buffers())],
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()},
        "modes": [m.training for m in net.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()],
        "requires": [p.requires_grad for p in net.parameters()],
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("intent", [None, "train", "inference"])
def test_everything_stays_as_it_was(training: bool, intent: Any) -> None:
    net = busy_net().train(training)
    net[1].eval()  # a frozen layer
    x, y = normal(32, 8), torch.arange(32) % 3
    F.cross_entropy(net(x), y).backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    before, batch = state(net), x.clone()
    steps = copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(5)
    rng = torch.get_rng_state()
    examine(net, x, y, loss=nn.CrossEntropyLoss(), optimizer=optimizer, intent=intent)
    assert same(state(net), before)
    assert torch.equal(x, batch)
    assert torch.equal(torch.get_rng_state(), rng)
    assert same(optimizer.state_dict()["state"][0]["momentum_buffer"], steps["state"][0]["momentum_buffer"])


def test_everything_stays_as_it_was_when_the_model_raises() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            self.norm(self.layer(x))
            raise RuntimeError("no further")

    net = Net()
    before = state(net)
    with pytest.raises(RuntimeError, match="no further") as caught:
        examine(net, normal(4, 8))
    assert same(state(net), before)
    assert any("musigma.doctor" in note for note in caught.value.__notes__)


def test_a_model_that_overwrites_its_input_overwrites_a_copy() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = normal(16, 4)
    before = x.clone()
    examine(net, x)
    assert torch.equal(x, before)


def test_two_examinations_agree() -> None:
    net, x = busy_net(), normal(32, 8)
    torch.manual_seed(1)
    first = examine(net, x).to_dict()
    torch.manual_seed(2)
    assert examine(net, x).to_dict() == first


class Wrapped(nn.Module):
    """A model whose output comes in the given wrapping."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 3)
        self.wrap = wrap

    def forward(self, x: Tensor, **more: Any) -> Any:
        return self.wrap(self.layer(x))


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: (t, t.argmax(1)),
        lambda t: [t, None],
        lambda t: {"logits": t, "name": "x"},
        lambda t: OrderedDict(a=(t, {"b": t})),
        Output,
        lambda t: t.mean(),
        lambda t: t.double(),
        lambda t: torch.complex(t, t),
        lambda t: t[:, 0],
    ],
    ids=["tensor", "tuple", "list", "dict", "nested", "dataclass", "scalar", "double", "complex", "vector"],
)
def test_outputs_of_every_shape_are_differentiated(wrap: Any) -> None:
    exam = Examination(Wrapped(wrap), normal(16, 8))
    gradient = exam.trace.gradients["layer.weight"]
    assert gradient is not None
    assert gradient.abs().max() > 0
    assert examine(Wrapped(wrap), normal(16, 8)).codes == ()


@pytest.mark.parametrize("wrap", [lambda t: t.argmax(1), lambda t: None, lambda t: "text", lambda t: t > 0])
def test_outputs_without_a_gradient_leave_the_gradient_rules_silent(wrap: Any) -> None:
    report = examine(Wrapped(wrap), normal(16, 8))
    assert report.codes == ()
    assert report.measurements["loss_source"] in ("projection", "none")


def test_a_model_that_computes_its_own_loss() -> None:
    class WithLoss(Wrapped):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            logits = self.layer(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    report = examine(WithLoss(None), {"x": normal(16, 8), "labels": torch.arange(16) % 3})
    assert report.measurements["loss_source"] == "own"
    assert 0.5 < report.measurements["loss"] < 2


@pytest.mark.parametrize(
    "inputs",
    [normal(16, 8), (normal(16, 8),), {"x": normal(16, 8)}, (normal(16, 8), None)],
    ids=["tensor", "tuple", "dict", "with-none"],
)
def test_inputs_in_every_form(inputs: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layer(x)

    report = examine(Net(), inputs)
    assert [row["name"] for row in report.measurements["inputs"]] == ["x"]


def test_the_measured_moments_are_those_of_the_activations() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    x = normal(64, 8).double()
    z = net[0](x).detach()
    rows = {row["module"]: row for row in examine(net, x).measurements["layers"]}
    # Sums of a thousand doubles: a few hundred roundings.
    assert rows["0"]["mean"] == pytest.approx(float(z.mean()), rel=1e-12)
    assert rows["0"]["std"] == pytest.approx(float(z.std(unbiased=False)), rel=1e-12)
    assert rows["0"]["between_std"] == pytest.approx(float(z.var(0, unbiased=False).mean().sqrt()), rel=1e-12)
    assert rows["1"]["zeros"] == float((z <= 0).double().mean())
    y = torch.arange(64) % 3
    rows = {r["name"]: r for r in examine(net, x, y, loss=nn.CrossEntropyLoss()).measurements["parameters"]}
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(x), y), net[0].weight)
    assert rows["0.weight"]["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-9)


def test_intent_train_examines_an_eval_model_in_train_mode() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = normal(32, 4) * 9
    assert not Examination(net, x, intent="inference").trace.norms[0].batch_statistics
    assert not Examination(net, x).trace.norms[0].batch_statistics
    assert Examination(net, x, intent="train").trace.norms[0].batch_statistics


@pytest.mark.parametrize("count", [1, 2, 3])
def test_small_batches_are_examined(count: int) -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    report = examine(net, normal(count, 8), torch.zeros(count, dtype=torch.long), loss=nn.CrossEntropyLoss())
    assert "error" not in {f.severity for f in report}, str(report)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_are_examined(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
    assert examine(net, normal(64, 8).to(dtype)).codes == ()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_caller_s_grad_mode_doesn_t_matter(mode: Any) -> None:
    net = busy_net()
    with mode():
        report = examine(net, normal(32, 8), torch.arange(32) % 3, loss=nn.CrossEntropyLoss())
    rows = {row["name"]: row for row in report.measurements["parameters"]}
    assert rows["0.weight"]["gradient_norm"] > 0
    assert all(p.requires_grad and not p.is_inference() for p in net.parameters())


def test_sparse_gradients_are_measured() -> None:
    net = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    ids = torch.randint(20, (32, 3), generator=torch.Generator().manual_seed(0))
    exam = Examination(net, ids)
    gradient = exam.trace.gradients["0.weight"]
    assert gradient is not None
    assert not gradient.is_sparse
    assert examine(net, ids).codes == ()


def test_hooks_of_the_caller_run_on_the_copy_and_stay() -> None:
    net = nn.Sequential(nn.Linear(8, 3))
    net[0].register_forward_hook(lambda m, args, out: out * 2)
    x = normal(64, 8)
    rows = examine(net, x).measurements["layers"]
    # The doubling is part of the model: an op of its own.
    assert [row["op"] for row in rows] == ["linear", "mul"]
    assert rows[1]["std"] == pytest.approx(2 * rows[0]["std"], rel=1e-6)
    assert len(net[0]._forward_hooks) == 1


def test_an_uninitialized_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="uninitialized"):
        examine(nn.Sequential(nn.LazyLinear(3)), normal(8, 4))


def test_a_model_without_parameters_is_examined() -> None:
    assert examine(nn.ReLU(), normal(8, 4)).codes == ()


def test_a_data_parallel_model_is_unwrapped() -> None:
    net = nn.DataParallel(nn.Sequential(nn.Linear(4, 2)))
    assert [r["name"] for r in examine(net, normal(8, 4)).measurements["parameters"]] == [
        "0.weight",
        "0.bias",
    ]


def test_an_optimizer_is_stepped_on_the_copy_only() -> None:
    net, x = busy_net(), normal(32, 8)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    exam = Examination(net, x, torch.arange(32) % 3, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    assert exam.step.optimizer == "Adam"
    # Adam's first step moves every weight with a gradient by the rate.
    assert exam.step.moved["4.weight"] == pytest.approx(1e-2, rel=1e-3)
    assert not optimizer.state


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.0),
        lambda ps: torch.optim.LBFGS(ps),
        None,
    ],
    ids=["rate 0", "needs a closure", "none"],
)
def test_where_the_optimizer_can_t_step_plain_descent_does(optimizer: Any) -> None:
    exam = Examination(busy_net(), normal(32, 8), optimizer=optimizer)
    assert exam.step.optimizer == "SGD(lr=0.1, clipped)"
    assert exam.step.moved["4.weight"] > 0


def test_a_loss_that_is_infinite_is_found_where_activations_are_finite() -> None:
    report = examine(nn.Linear(8, 2), normal(16, 8), loss=lambda out: (out - out).sum().log())
    (finding,) = report.by_code("SIG401")
    assert "the loss is -inf" in finding.message


def test_masks_of_minus_infinity_are_no_finding() -> None:
    class Masked(nn.Module):
        def __init__(self, returned: bool) -> None:
            super().__init__()
            self.layer, self.returned = nn.Linear(8, 4), returned
            self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.layer(x)
            masked = scores.masked_fill(scores > 9, -torch.inf) + self.mask
            return masked if self.returned else masked.softmax(-1)

    for returned in (True, False):
        assert "SIG401" not in examine(Masked(returned), normal(16, 8), select=["SIG"]).codes


def test_a_bare_summed_loss_is_refused_with_the_shape() -> None:
    with pytest.raises(ValueError, match=r"shape \(16,\).*\.mean\(\)"):
        examine(
            Wrapped(lambda t: t),
            normal(16, 8),
            torch.arange(16) % 3,
            loss=nn.CrossEntropyLoss(reduction="none"),
        )
    with pytest.raises(TypeError, match="floating tensor; got float"):
        examine(Wrapped(lambda t: t), normal(16, 8), loss=lambda out: 1.0)


@pytest.mark.parametrize(
    ("model", "inputs", "more", "kind", "said"),
    [
        (nn.Linear, normal(4, 8), {}, TypeError, "got the class Linear; call it"),
        ("net", normal(4, 8), {}, TypeError, "got str"),
        (None, [normal(4, 8)], {}, TypeError, "make it a tuple"),
        (None, normal(4, 8).numpy(), {}, TypeError, "as_tensor"),
        (None, (), {}, ValueError, "at least one tensor"),
        (None, {}, {}, ValueError, "at least one tensor"),
        (None, torch.zeros(0, 8), {}, ValueError, r"\(0, 8\)"),
        (None, normal(4, 8), {"optimizer": torch.optim.SGD}, TypeError, "the class SGD"),
        (None, normal(4, 8), {"optimizer": 0.1}, TypeError, "got float"),
        (None, normal(4, 8), {"mask": [True]}, TypeError, "mask must be a tensor"),
        (None, normal(4, 8), {"mask": torch.ones(4, 8) * 1j}, TypeError, "complex64"),
        (None, normal(4, 8), {"mask": torch.full((4, 8), -math.inf)}, ValueError, "-inf among"),
        (None, normal(4, 8), {"mask": torch.full((4, 8), math.nan)}, ValueError, "nan among"),
        (None, normal(4, 8), {"mask": torch.ones(4, 8).bool().logical_not()}, ValueError, "~mask"),
        (None, normal(4, 8), {"mask": torch.ones(4)}, ValueError, r"\(4,\) for .* \(4, 8\).*mask\[:, None\]"),
        (None, normal(4, 8), {"mask": torch.ones(3, 8)}, ValueError, r"\(batch, positions\)"),
        (None, normal(4, 9, 8), {"mask": torch.ones(4, 7)}, ValueError, r"got shape \(4, 7\)"),
        (None, normal(4, 9, 8), {"mask": torch.ones(4, 9, 8, 1)}, ValueError, r"got shape"),
        (None, normal(4, 8), {"loss": nn.MSELoss}, TypeError, "the class MSELoss; call it"),
        (None, normal(4, 8), {"loss": "mse"}, TypeError, "got str; such as"),
        (None, normal(4, 8), {"loss": 0.5}, TypeError, "got float"),
        (None, normal(4, 8), {"targets": labels(3, 2)}, ValueError, r"got 3, shape \(3,\).* \(4, 8\)"),
        (None, normal(4, 8), {"targets": normal(1, 2)}, ValueError, r"got 1"),
        (None, normal(4, 8), {"targets": normal(0, 2)}, ValueError, r"got 0"),
        (None, normal(4, 8), {"intent": "infer"}, ValueError, "'infer'"),
    ],
)
def test_what_can_t_be_examined_is_refused(model: Any, inputs: Any, more: Any, kind: Any, said: str) -> None:
    # Below the annotations, which the test run's type checker would refuse first.
    with pytest.raises(kind, match=said):
        validate(model or nn.Linear(8, 2), inputs, **more)


@pytest.mark.parametrize(
    ("inputs", "more"),
    [
        (normal(4, 9, 8), {"mask": torch.ones(4, 9, dtype=torch.bool)}),
        (normal(4, 9, 8), {"mask": torch.ones(4, 1)}),
        (normal(4, 9, 8), {"mask": torch.ones(1, 9, dtype=torch.long)}),
        (normal(4, 9, 8), {"mask": torch.ones(9)}),
        (normal(4, 9, 8), {"mask": torch.rand(4, 9, 8)}),
        (normal(4, 3, 5, 6), {"mask": torch.ones(4, 5, 6).bool()}),
        (normal(4, 3, 9), {"mask": torch.ones(4, 9).bool()}),
        (torch.arange(4), {"mask": torch.ones(4).bool()}),
        ({"x": normal(4, 8), "ids": torch.ones(4, 9).long()}, {"mask": torch.ones(4, 9)}),
        (normal(4, 8), {"targets": labels(4, 2)}),
        (normal(4, 9, 8), {"targets": labels(36, 2)}),
        (normal(9, 4, 8), {"targets": labels(4, 2)}),
        (normal(4, 8), {"targets": torch.tensor(1.0)}),
        (normal(4, 8), {"targets": (labels(3, 2),)}),
        ((normal(4, 8), normal(2, 8)), {"targets": labels(2, 2)}),
        (normal(4, 8), {"loss": lambda out: out.mean()}),
    ],
)
def test_masks_targets_and_losses_of_every_usual_form_are_taken(inputs: Any, more: Any) -> None:
    validate(nn.Linear(8, 2), inputs, **more)


def test_what_is_refused_is_refused_before_anything_runs() -> None:
    ran = []
    net = nn.Linear(8, 2)
    net.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match="one entry per example"):
        examine(net, normal(4, 8), labels(3, 2), loss=nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        examine(net, normal(4, 8), mask=torch.ones(4, 7).bool())
    assert not ran


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="none of its 2"):
        examine(nn.Linear(8, 2), normal(4, 8), optimizer=other)


def test_a_model_that_can_t_be_copied_is_refused_with_the_reason() -> None:
    net = nn.Linear(8, 2)
    net.left = net(normal(4, 8))  # a tensor with a history
    with pytest.raises(TypeError, match="deepcopy"):
        examine(net, normal(4, 8))


def test_rules_that_lack_something_are_listed() -> None:
    report = examine(nn.Linear(8, 2), normal(16, 8))
    assert report.skipped["INI210"] == "needs loss, targets"


def test_case_takes_what_examine_takes() -> None:
    case = Case(nn.Linear(2, 2), normal(4, 2), intent="train", name="n")
    assert isinstance(examine(case.model, case.inputs, intent=case.intent, name=case.name), Report)
