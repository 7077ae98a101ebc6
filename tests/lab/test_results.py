"""Every result holds, on more than one seed, and its judgement can fail."""

import pytest

import musigma as ms
from musigma.lab import Quantity

NAMES = [r.name for r in ms.lab.results()]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_it_holds(name: str, seed: int) -> None:
    outcome = ms.lab.run(name, seed=seed)
    assert outcome.holds, str(outcome)
    assert outcome.claim in str(outcome)
    assert len(outcome.figure().data) == len(outcome.curves) > 1


def test_input_scale_costs_many_times_more_steps() -> None:
    slow, fast = (q.measured for q in ms.lab.run("input-scale").quantities)
    assert slow > 100 * fast


def test_a_measurement_off_its_prediction_does_not_hold() -> None:
    assert not Quantity("q", 1.0, 1.2, 0.1, "").holds
    assert not Quantity("q", 1.0, float("nan"), 0.1, "").holds
    assert Quantity("q", -1.0, -1.05, 0.1, "").holds


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ValueError, match="there is input-scale"):
        ms.lab.run("input-scales")
