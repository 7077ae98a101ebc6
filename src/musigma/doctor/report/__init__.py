"""What the doctor found, drawn: for the terminal, and as one HTML page that opens offline."""

from musigma.doctor.report._page import to_html, write_html
from musigma.doctor.report._terminal import comparison_table, to_rich

__all__ = ["comparison_table", "to_html", "to_rich", "write_html"]
