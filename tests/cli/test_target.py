"""Everything that can be wrong with a TARGET, and what its owner is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from musigma.cli._target import TargetError, load
from musigma.doctor import Case

GOOD = """
    import torch
    from musigma.doctor import Case

    def case():
        return Case(torch.nn.Linear(3, 2), torch.zeros(4, 3), name="good")
"""


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Targets put folders on the search path and modules in the table; neither may outlive a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if str(tmp_path) in origin or name.startswith("_musigma_target"):
            del sys.modules[name]


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source))
    return path


def refused(target: str) -> TargetError:
    with pytest.raises(TargetError) as caught:
        load(target)
    return caught.value


def test_a_file_by_absolute_and_by_relative_path(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", GOOD)
    assert load(f"{path}:case").name == "good"
    assert load("mine.py:case").name == "good"
    assert load("./mine.py:case").name == "good"


def test_a_module_in_the_working_folder(tmp_path: Path) -> None:
    write(tmp_path / "pkg_of_mine/__init__.py", "")
    write(tmp_path / "pkg_of_mine/net.py", GOOD)
    assert load("pkg_of_mine.net:case").name == "good"


def test_a_file_called_like_an_installed_module_hides_nothing(tmp_path: Path) -> None:
    before = sys.modules["json"]
    assert load(f"{write(tmp_path / 'json.py', GOOD)}:case").name == "good"
    assert sys.modules["json"] is before


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "a/net.py", GOOD)
    two = write(tmp_path / "b/net.py", GOOD.replace("good", "other"))
    assert [load(f"{p}:case").name for p in (one, two, one)] == ["good", "other", "good"]


def test_neighbours_and_resources_of_the_file_are_found(tmp_path: Path) -> None:
    write(tmp_path / "deep/helper_of_mine.py", "NAME = 'from a neighbour'")
    write(tmp_path / "deep/weights.txt", "3")
    path = write(
        tmp_path / "deep/net.py",
        """
        from pathlib import Path
        import torch
        import helper_of_mine
        from musigma.doctor import Case

        def case():
            n = int((Path(__file__).parent / "weights.txt").read_text())
            return Case(torch.nn.Linear(n, 2), torch.zeros(4, n), name=helper_of_mine.NAME)
        """,
    )
    assert load(f"{path}:case").name == "from a neighbour"


def test_a_dataclass_in_the_file_can_be_defined(tmp_path: Path) -> None:
    # With string annotations dataclasses look the class's module up in sys.modules.
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    body = "@dataclass\nclass C:\n    x: int\n"
    assert load(f"{write(tmp_path / 'net.py', head + body + dedent(GOOD))}:case").name == "good"


@pytest.mark.parametrize("target", ["net.py", "net.py:", ":case", "", "pkg.module"])
def test_without_both_halves_the_form_is_named(target: str) -> None:
    error = refused(target)
    assert "path/to/file.py:factory or package.module:factory" in str(error)
    assert repr(target) in str(error)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "network.py", GOOD)
    assert "no file netwrk.py; did you mean network.py?" in str(refused("netwrk.py:case"))


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    assert "there is no folder nowhere" in str(refused("nowhere/net.py:case"))


def test_a_missing_module_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "pkg_of_mine/__init__.py", "")
    write(tmp_path / "pkg_of_mine/network.py", GOOD)
    assert "no module named 'pkg_of_min'; did you mean pkg_of_mine" in str(refused("pkg_of_min.network:case"))
    error = refused("pkg_of_mine.netwrk:case")
    assert "no module named 'pkg_of_mine.netwrk'; did you mean network?" in str(error)
    assert not error.trace


def test_a_missing_attribute_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "net.py", GOOD.replace("def case", "def make_case"))
    assert "net.py has no attribute 'make_cas'; did you mean make_case?" in str(refused("net.py:make_cas"))
    assert "it defines make_case" in str(refused("net.py:zzzzz"))


def test_what_is_no_function_is_said(tmp_path: Path) -> None:
    write(tmp_path / "net.py", "import torch\nmodel = [1, 2]\n")
    assert "must be a function that returns a Case; it is a list of int, int" in str(refused("net.py:model"))


def test_a_factory_with_arguments_is_not_called(tmp_path: Path) -> None:
    write(tmp_path / "net.py", "def case(width, depth=2): raise SystemError('called')\n")
    assert "must take no arguments; it takes (width, depth=2)" in str(refused("net.py:case"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("None", "it returned None"),
        ("(torch.nn.Linear(3, 2), torch.zeros(4, 3))", "it returned a tuple of Linear, Tensor"),
        ("torch.nn.Linear(3, 2)", "it returned a torch.nn.modules.linear.Linear"),
        ("{}", "it returned a dict"),
    ],
)
def test_anything_but_a_case_is_refused(tmp_path: Path, value: str, said: str) -> None:
    write(tmp_path / "net.py", f"import torch\ndef case(): return {value}\n")
    error = str(refused("net.py:case"))
    assert said in error
    assert "return musigma.doctor.Case(model, inputs, ...)" in error


def test_a_factory_that_raises_shows_its_own_traceback_whole(tmp_path: Path) -> None:
    write(
        tmp_path / "net.py",
        """
        def read():
            return {}["vocabulary"]

        def case():
            try:
                return read()
            except KeyError as error:
                raise RuntimeError("no vocabulary") from error
        """,
    )
    error = refused("net.py:case")
    assert str(error) == "net.py:case raised RuntimeError: no vocabulary"
    # Both tracebacks of the chain, each from the owner's first line on
    assert "KeyError: 'vocabulary'" in error.trace
    assert "direct cause" in error.trace
    assert 'return {}["vocabulary"]' in error.trace
    assert "musigma" + "/cli" not in error.trace
    first = next(line for line in error.trace.splitlines() if line.startswith("  File"))
    assert "net.py" in first


def test_a_file_that_raises_while_imported_is_shown_whole(tmp_path: Path) -> None:
    write(tmp_path / "net.py", "x = 1\nimport no_such_package_at_all\n")
    error = refused("net.py:case")
    assert "importing net.py raised ModuleNotFoundError: No module named 'no_such_package_at_all'" in str(
        error
    )
    assert 'net.py", line 2' in error.trace
    assert "importlib" not in error.trace


def test_a_module_that_raises_while_imported_is_not_called_missing(tmp_path: Path) -> None:
    write(tmp_path / "broken_of_mine.py", "import no_such_package_at_all\n")
    error = refused("broken_of_mine:case")
    assert "importing broken_of_mine raised ModuleNotFoundError" in str(error)
    assert 'broken_of_mine.py", line 1' in error.trace


def test_a_package_that_raises_while_imported_is_not_called_missing(tmp_path: Path) -> None:
    write(tmp_path / "pkg_broken/__init__.py", "1 / 0\n")
    write(tmp_path / "pkg_broken/net.py", GOOD)
    error = refused("pkg_broken.net:case")
    assert "ZeroDivisionError" in str(error)
    assert "1 / 0" in error.trace


def test_a_syntax_error_shows_its_line(tmp_path: Path) -> None:
    write(tmp_path / "net.py", "def case(:\n")
    error = refused("net.py:case")
    assert "SyntaxError" in str(error)
    assert "def case(:" in error.trace


def test_a_script_that_exits_does_not_end_the_command(tmp_path: Path) -> None:
    write(tmp_path / "net.py", "raise SystemExit(0)\n")
    assert "guard it with if __name__" in str(refused("net.py:case"))


def test_the_case_comes_back_as_it_was_made(tmp_path: Path) -> None:
    assert isinstance(load(f"{write(tmp_path / 'net.py', GOOD)}:case"), Case)
