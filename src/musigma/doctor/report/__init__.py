"""What the doctor found, drawn: tables for the terminal, and one HTML page that opens offline."""

from musigma.doctor.report._page import to_html, write_html

__all__ = ["to_html", "write_html"]
