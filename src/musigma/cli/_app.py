"""The commands under one name."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from musigma._version import __version__
from musigma.cli import _console, _exit
from musigma.cli._bench import bench
from musigma.cli._demo import demo
from musigma.cli._doctor import doctor
from musigma.cli._env import env
from musigma.cli._explain import explain

app = typer.Typer(
    name="musigma",
    help="Keep the mean and the spread of a network's inputs, activations and weights where they should be.",
    epilog="Exit code: 0 nothing found, 1 findings, 2 bad usage or a target that can't be used.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("doctor")(doctor)
app.command("explain")(explain)
app.command("env")(env)
app.command("demo")(demo)
app.command("bench")(bench)


def _version(asked: bool) -> bool:
    if asked:
        _console.out().print(f"musigma {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a fault of ours ends with its traceback and the code of bad usage, never 1."""
    try:
        app()
    except KeyboardInterrupt:  # between the interpreter's start and the command
        sys.exit(_exit.INTERRUPTED)
    except Exception:
        traceback.print_exc()
        sys.stderr.write(
            "\nThis is a fault of musigma, not of your model. Please report it with the lines above.\n"
        )
        sys.exit(_exit.UNUSABLE)
