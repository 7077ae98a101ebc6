"""Times musigma's ops against torch's, eager and compiled, and a copy of the same bytes."""

from musigma.lab.bench._cell import CHANNELS, ROWS, Cell
from musigma.lab.bench._gate import Error, gate
from musigma.lab.bench._grid import compiled, everything, full, quick, select
from musigma.lab.bench._markdown import check_marks, long, short, write_into
from musigma.lab.bench._models import MODELS, Model
from musigma.lab.bench._picture import picture
from musigma.lab.bench._row import AS_IT_COMES, REUSED, Measured, ModelRow, Row, Run, Saved
from musigma.lab.bench._run import Settings, run
from musigma.lab.bench._summary import Bar, Judged, Mean, bars, geometric_mean, means
from musigma.lab.bench._text import HEAD, line, summary
from musigma.lab.bench._timing import CLOCKS, How, Spread, interleave
from musigma.lab.bench._worker import CAN_REUSE

__all__ = [
    "AS_IT_COMES",
    "CAN_REUSE",
    "CHANNELS",
    "CLOCKS",
    "HEAD",
    "MODELS",
    "REUSED",
    "ROWS",
    "Bar",
    "Cell",
    "Error",
    "How",
    "Judged",
    "Mean",
    "Measured",
    "Model",
    "ModelRow",
    "Row",
    "Run",
    "Saved",
    "Settings",
    "Spread",
    "bars",
    "check_marks",
    "compiled",
    "everything",
    "full",
    "gate",
    "geometric_mean",
    "interleave",
    "line",
    "long",
    "means",
    "picture",
    "quick",
    "run",
    "select",
    "short",
    "summary",
    "write_into",
]
