"""Treatments work on a copy, are measured again, and are undone where they don't help."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import classify, labels, normal, stack
from sick import SICK
from torch import Tensor, nn

from musigma.doctor import Case, Record, Report, _treatments, examine, list_rules, treat
from musigma.doctor._treatments import Applied, Patient, treatment
from musigma.doctor.treatments.standardize import Standardized


def examined(case: Case) -> Report:
    return examine(
        case.model, case.inputs, case.targets, loss=case.loss, optimizer=case.optimizer, intent=case.intent
    )


def treated(case: Case, **options: Any) -> tuple[nn.Module, Record]:
    return treat(case.model, examined(case), **options)


@pytest.mark.parametrize(
    ("name", "mended"),
    [
        ("default_deep", {"INI202", "INI207", "GRD501", "SIG405"}),
        ("xavier_relu_deep", {"INI202", "INI205", "GRD501"}),
        ("tiny_weights", {"INI202", "INI205"}),
        ("huge_weights", {"INI202", "INI206", "INI210"}),
        ("uniform_positive", {"INI202", "INI206", "INI210"}),
        ("constant_weights", {"INI201"}),
        ("cloned_branches", {"INI201"}),
        ("all_zero", {"INI201", "GRD504", "SIG405"}),
        ("dead_layer", {"INI209", "GRD504", "SIG405"}),
        ("raw_inputs", {"INP101", "INI210"}),
        ("raw_images", {"INP101", "INP104", "INI210"}),
        ("confident_head", {"INI210"}),
        ("offset_targets", {"INI210"}),
    ],
)
def test_what_can_be_mended_is(name: str, mended: set[str]) -> None:
    torch.manual_seed(0)
    case = SICK[name][0]()
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    model, record = treated(case)
    assert mended <= set(record.mended), str(record)
    assert all(torch.equal(v, before[k]) for k, v in case.model.state_dict().items())
    # What the record says is what an examination of the treated model finds.
    again = examine(model, case.inputs, case.targets, loss=case.loss, intent=case.intent)
    assert set(again.codes) == set(record.after.codes)


def test_the_treated_copy_learns_what_the_original_could_not() -> None:
    torch.manual_seed(0)
    x = normal(256, 64)
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(stack(20, 64), nn.Linear(64, 2))
    model, _ = treat(net, examine(net, x, y, loss=nn.CrossEntropyLoss()))

    def trained(m: nn.Module) -> float:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            optimizer.step()
        return loss.item()

    assert trained(net) > 0.68  # ln 2 = 0.693: it has learned next to nothing
    assert trained(model) < 0.5


def test_treatments_agree_for_one_seed_and_differ_for_another() -> None:
    torch.manual_seed(0)
    case = SICK["tiny_weights"][0]()
    report = examined(case)
    first, again, other = (treat(case.model, report, seed=s)[0].state_dict() for s in (0, 0, 1))
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_what_can_t_be_mended_is_listed_with_the_reason() -> None:
    torch.manual_seed(0)
    _, record = treated(SICK["nan_input"][0]())
    reasons = {f.code: reason for f, reason in record.untreated}
    assert "nothing mends it automatically" in reasons["INP103"]
    assert record.given == ()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    _treatments.treatments()
    kept = {n: t for n, t in _treatments._REGISTRY.items() if "INP101" not in t.mends}
    monkeypatch.setattr(_treatments, "_REGISTRY", kept)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda m: m.weight.data.fill_(float("nan")), "undone: it brought SIG401"),
        (lambda m: m.weight.data.mul_(2), "undone: INP101 stayed as they were"),
    ],
    ids=["worse", "useless"],
)
def test_a_treatment_that_makes_things_worse_is_undone(harm: Any, said: str) -> None:
    @treatment("quack", mends=("INP101",), order=1)
    def apply(patient: Patient, findings: tuple[Any, ...]) -> Applied:
        harm(patient.model)
        return Applied(patient.model, "did something")

    net = nn.Linear(4, 2)
    model, record = treat(net, examine(net, normal(64, 4) + 50))
    assert [g.reason for g in record.given] == [said]
    assert torch.equal(model.weight, net.weight)


@pytest.mark.usefixtures("registry")
def test_a_broken_promise_to_keep_the_function_is_undone() -> None:
    @treatment("liar", mends=("INP101",), order=1, keeps_function=True)
    def apply(patient: Patient, findings: tuple[Any, ...]) -> Applied:
        net = nn.Sequential(nn.BatchNorm1d(4), patient.model)
        return Applied(net, "put a norm in front")

    net = nn.Linear(4, 2)
    _, record = treat(net, examine(net, normal(64, 4) + 50))
    assert [g.reason for g in record.given] == ["undone: it changed what the model computes"]


def test_two_treatments_can_t_claim_one_code() -> None:
    _treatments.treatments()
    with pytest.raises(ValueError, match="mended by 'standardize'"):
        treatment("other", mends=("INP101",), order=1)(lambda patient, findings: Applied(patient.model, ""))


def test_every_code_that_a_treatment_mends_is_a_rule() -> None:
    known = {r.code for r in list_rules()}
    assert {c for t in _treatments.treatments() for c in t.mends} <= known


def test_selected_codes_alone_are_treated() -> None:
    torch.manual_seed(0)
    case = SICK["raw_images"][0]()
    _, record = treated(case, select=["INI210"])
    assert [g.treatment for g in record.given] == ["shrink_head"]
    assert {f.code: r for f, r in record.untreated}["INP101"] == "it was not selected"


@pytest.mark.parametrize(
    ("shape", "statistics"),
    [((64, 6), 6), ((64, 5, 6), 30)],
    ids=["rows", "sequence"],
)
def test_standardizing_what_is_flattened_gives_every_position_statistics(
    shape: tuple[int, ...], statistics: int
) -> None:
    x = normal(*shape) * 7 + 30
    net = nn.Sequential(nn.Flatten(), nn.Linear(statistics, 3))
    model, record = treat(net, examine(net, x))
    assert record.mended == ("INP101",)
    z = model.standardize["input"](x).double()
    # The layer rounds to float32: a few units in the last place of values around 30/7.
    assert z.mean(0).abs().max() < 1e-5
    assert (z.std(0, unbiased=False) - 1).abs().max() < 1e-5


def test_a_pixel_that_is_nearly_always_dark_is_not_blown_up() -> None:
    x = normal(64, 3, 4, 4) * 7 + 30
    x[1:, :, 0, 0] = 0
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    model, record = treat(net, examine(net, x))
    assert record.mended == ("INP101",)
    z = model.standardize["input"](x).double()
    assert z.mean((0, 2, 3)).abs().max() < 1e-5
    assert (z.std((0, 2, 3), unbiased=False) - 1).abs().max() < 1e-5
    # By a std of its own it would be √63 ≈ 8 away
    assert z[0, :, 0, 0].abs().max() < 4


@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (nn.Conv2d(3, 4, 3), (32, 3, 8, 8), 1),
        (nn.Conv1d(3, 4, 3), (32, 3, 9), 1),
        (nn.Linear(5, 4), (32, 7, 5), 2),
    ],
    ids=["conv2d", "conv1d", "linear on sequences"],
)
def test_standardizing_follows_the_axis_of_the_features(
    layer: nn.Module, shape: tuple[int, ...], axis: int
) -> None:
    x = normal(*shape) * 7 + 30
    model, record = treat(layer, examine(layer, x))
    assert record.mended == ("INP101",)
    z = model.standardize["input"](x).double()
    assert z.mean([d for d in range(z.ndim) if d != axis]).abs().max() < 1e-5


def test_statistics_come_from_the_data_that_is_given() -> None:
    x = normal(512, 4) * 5 + 20
    net = nn.Linear(4, 2)
    loader = [(x[:256], None), (x[256:], None)]
    model, _ = treat(net, examine(net, x[:64]), data=loader)
    mean = model.standardize["input"].mean
    assert torch.allclose(mean.double().flatten(), x.double().mean(0), atol=1e-5)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(3, 8)
        self.head = nn.Linear(8, 2)
        self.note = "kept"

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(F.relu(self.a(x) + self.b(y)) * scale)


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_only_the_inputs_that_need_it_are_standardized(form: str) -> None:
    x, y = normal(64, 4) * 9 + 40, normal(64, 3, seed=1)
    inputs: Any = (x, y) if form == "tuple" else {"y": y, "x": x}
    net = TwoInputs()
    model, record = treat(net, examine(net, inputs))
    assert "INP101" in record.mended
    assert list(model.standardize) == ["x"]
    assert torch.equal(model(x, y), model(x, y=y, scale=1.0))
    assert torch.equal(model(x, y), net(model.standardize["x"](x), y))


def test_the_wrapper_keeps_attributes_modes_and_state() -> None:
    net = TwoInputs().eval()
    wrapped = Standardized(net, {})
    assert wrapped.note == "kept"
    assert wrapped.a is net.a
    assert not wrapped.training
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        wrapped.nothing_of_the_kind
    again = Standardized(TwoInputs(), {})
    again.load_state_dict(wrapped.state_dict())
    assert torch.equal(again.head.weight, net.head.weight)


def test_an_input_that_enters_with_others_is_left_to_its_owner() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(torch.cat([x, y], dim=1))

    net = Joined()
    _, record = treat(net, examine(net, (normal(64, 4) * 30, normal(64, 3))))
    (given,) = record.given
    assert not given.kept
    assert "together with other inputs" in given.reason


def test_biases_before_a_norm_are_removed_and_the_function_kept() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    x = normal(64, 8)
    model, record = treat(net, examine(net, x, labels(64, 3), loss=nn.CrossEntropyLoss()))
    assert record.mended == ("NRM301",)
    assert model[0].bias is None
    # float32 sums that are rounded differently without the bias
    assert torch.allclose(model(x), net(x), atol=1e-5)


def test_stale_running_statistics_are_recalibrated() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(4, momentum=0.001), nn.Linear(4, 3))
    x = normal(256, 4) * 3 + 100
    for _ in range(20):
        net(x)
    net.eval()
    model, record = treat(net, examine(net, x, intent="inference"))
    assert "NRM304" in record.mended
    assert torch.allclose(model[0].running_mean, x.mean(0), rtol=1e-5)
    assert not model.training


def test_momentum_of_the_other_convention_is_turned_round() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8, momentum=0.9), nn.ReLU(), nn.Linear(8, 3)
    )
    model, record = treated(classify(net, normal(64, 4), 3))
    assert "NRM306" in record.mended
    assert model[1].momentum == pytest.approx(0.1, abs=1e-12)


def test_the_record_is_json_and_text() -> None:
    torch.manual_seed(0)
    _, record = treated(SICK["raw_images"][0]())
    data = json.loads(json.dumps(record.to_dict(), allow_nan=False))
    assert {g["treatment"] for g in data["given"]} >= {"standardize"}
    assert str(record).startswith("mended: ")
    assert "standardize" in str(record)


def test_a_report_without_its_batch_needs_an_example() -> None:
    net = nn.Linear(4, 2)
    x = normal(64, 4) * 9
    with pytest.raises(ValueError, match="pass example=inputs"):
        treat(net, Report(()))
    _, record = treat(net, Report(()), x)
    assert record.mended == ("INP101",) or "INP101" not in record.after.codes


def test_bad_arguments_are_refused() -> None:
    net = nn.Linear(4, 2)
    report = examine(net, normal(64, 4) * 9)
    with pytest.raises(TypeError, match=r"\['INP101'\]"):
        treat(net, report, select="INP101")  # type: ignore[arg-type]  # the mistake itself
    with pytest.raises(ValueError, match="at least one batch"):
        treat(net, report, data=[])


def test_a_shuffling_loader_is_read_in_the_same_order_each_time() -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 5 + 20
    data = torch.utils.data.TensorDataset(x)
    loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True, drop_last=True)
    model = nn.Linear(4, 2)
    report = examine(model, x)
    before = torch.get_rng_state()
    means = [treat(model, report, data=loader)[0].standardize["input"].mean for _ in range(2)]
    assert torch.equal(*means)
    assert torch.equal(torch.get_rng_state(), before)
