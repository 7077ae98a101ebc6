"""Healthy nets get no errors and no warnings; sick ones get the codes of what they have."""

from __future__ import annotations

import pytest
import torch
from healthy import DOCUMENTED, HEALTHY
from sick import SICK

from musigma.doctor import Case, Report, examine


def run(case: Case) -> Report:
    return examine(
        case.model, case.inputs, case.targets, loss=case.loss, optimizer=case.optimizer, intent=case.intent
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 6))])
@pytest.mark.parametrize("name", list(HEALTHY))
def test_a_healthy_net_gets_no_error_and_no_warning(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    report = run(HEALTHY[name]())
    allowed = DOCUMENTED.get(name, frozenset())
    assert [f.code for f in report if f.severity != "info" and f.code not in allowed] == [], str(report)
    assert "error" not in {f.severity for f in report}


@pytest.mark.parametrize("name", list(SICK))
def test_a_sick_net_gets_its_codes(name: str) -> None:
    torch.manual_seed(0)
    build, codes = SICK[name]
    assert codes <= set(run(build()).codes)
