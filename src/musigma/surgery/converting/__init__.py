"""One kind of normalization in place of another, or of none."""

from musigma.surgery.converting._convert import convert
from musigma.surgery.converting._insert import insert
from musigma.surgery.converting._remove import remove

__all__ = ["convert", "insert", "remove"]
