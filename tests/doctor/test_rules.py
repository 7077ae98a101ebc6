"""Every rule's documentation is run: its Example fires, what it says to use instead doesn't."""

from __future__ import annotations

import json
import re
import sys
import types
from functools import lru_cache
from typing import Any

import pytest
import torch

from musigma.doctor import Case, Report, _rules, examine, explain, list_rules

CODES = [r.code for r in list_rules()]


def run(case: Case) -> Report:
    return examine(
        case.model, case.inputs, case.targets, loss=case.loss, optimizer=case.optimizer,
        scheduler=case.scheduler, mask=case.mask, independent=case.independent, intent=case.intent,
    )  # fmt: skip


@lru_cache
def documented(code: str, section: str) -> Report:
    """What is found in the case that a section of a rule's documentation builds."""
    rule = next(r for r in list_rules() if r.code == code)
    found = re.search(r"```python\n(.*?)```", rule.section(section), re.DOTALL)
    assert found is not None
    space: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(found.group(1), space)
    return run(space["case"])


@pytest.mark.parametrize("code", CODES)
def test_the_documented_example_fires(code: str) -> None:
    report = documented(code, "Example")
    assert code in report.codes
    for f in report.by_code(code):
        assert f.where
        assert f.message.endswith(".")
        assert f.evidence
        assert "nan" not in f.message.split()


@pytest.mark.parametrize("code", CODES)
def test_the_documented_alternative_is_silent(code: str) -> None:
    report = documented(code, "Use instead")
    assert code not in report.codes, str(report)
    assert not [f for f in report if f.severity == "error"], str(report)


@pytest.mark.parametrize("code", CODES)
def test_reports_of_every_rule_are_json(code: str) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    report = documented(code, "Example")
    read = json.loads(report.to_json(), parse_constant=refuse)
    assert [f["code"] for f in read["findings"]] == [f.code for f in report]


def test_explain_gives_the_documentation_by_code_and_by_name() -> None:
    assert explain("INI207") == explain("samples-collapse") == explain("ini207")
    for section in _rules.SECTIONS:
        assert f"## {section}" in explain("INI207")


@pytest.mark.parametrize(
    ("asked", "hint"), [("INI20", "INI20"), ("NRM999", "NRM30"), ("dead-rlu", "dead-relu"), ("", "INP101")]
)
def test_explain_names_the_nearest_rule(asked: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        explain(asked)


def test_a_sum_behind_a_norm_is_explained_where_the_probe_loss_is() -> None:
    """C96 (pytorch#63541): the sum of a centred normalization has no gradient; the documentation says so."""
    assert "exactly zero gradient" in (examine.__doc__ or "")


DOCUMENTED = "\n\n".join(
    ["ZZZ901 some-rule: nothing.", *(f"## {s}\n\n```python\ncase = 1\n```" for s in _rules.SECTIONS)]
)


@pytest.fixture
def file_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function in a made-up rule file with the given docstring, and a registry to spoil."""
    monkeypatch.setattr(_rules, "_REGISTRY", dict(_rules._REGISTRY))

    def make(text: str | None, name: str = "zzz901_some_rule") -> Any:
        module = types.ModuleType(name, text)
        monkeypatch.setitem(sys.modules, name, module)
        check = types.FunctionType((lambda exam: ()).__code__, module.__dict__)
        check.__module__ = name
        return check

    return make


def register(check: Any, code: str = "ZZZ901", name: str = "some-rule", **options: Any) -> Any:
    return _rules.rule(code, name, severity=options.pop("severity", "info"), **options)(check)


@pytest.mark.parametrize("section", _rules.SECTIONS)
def test_a_rule_without_a_section_is_refused(file_of: Any, section: str) -> None:
    with pytest.raises(ValueError, match=re.escape(section)):
        register(file_of(DOCUMENTED.replace(f"## {section}\n", "")))


def test_a_rule_without_documentation_is_refused(file_of: Any) -> None:
    with pytest.raises(ValueError, match="ZZZ901 some-rule"):
        register(file_of(None))


def test_an_example_without_code_is_refused(file_of: Any) -> None:
    with pytest.raises(ValueError, match="python block"):
        register(file_of(DOCUMENTED.replace("```python\ncase = 1\n```", "later")))


@pytest.mark.parametrize(
    ("code", "name"), [("INP101", "some-rule"), ("ZZZ901", "unstandardized-input")], ids=["code", "name"]
)
def test_a_taken_code_or_name_is_refused(file_of: Any, code: str, name: str) -> None:
    with pytest.raises(ValueError, match="is taken by INP101"):
        register(file_of(DOCUMENTED.replace("ZZZ901 some-rule", f"{code} {name}")), code, name)


@pytest.mark.parametrize(
    ("code", "name", "options", "said"),
    [
        ("INP1", "some-rule", {}, "three capitals"),
        ("ZZZ901", "Some Rule", {}, "lower-case"),
        ("ZZZ901", "some-rule", {"needs": ("loss", "batches")}, "batches"),
    ],
)
def test_a_malformed_registration_is_refused(
    file_of: Any, code: str, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        register(file_of(DOCUMENTED), code, name, **options)


def test_selection_by_prefix_and_by_name() -> None:
    assert {r.code[:3] for r in _rules.select_rules(["INP"], None)} == {"INP"}
    assert [r.code for r in _rules.select_rules(["dead-relu"], None)] == ["INI209"]
    left = _rules.select_rules(["INI2"], ["INI20"])
    assert left
    assert all(r.code.startswith("INI21") for r in left)


@pytest.mark.parametrize("argument", ["select", "ignore"])
def test_selection_refuses_what_no_rule_has(argument: str) -> None:
    with pytest.raises(ValueError, match="begins with 'XYZ'"):
        _rules.select_rules(**{"select": None, "ignore": None, argument: ["XYZ"]})
    with pytest.raises(TypeError, match=r"\['INP'\]"):
        _rules.select_rules(**{"select": None, "ignore": None, argument: "INP"})
