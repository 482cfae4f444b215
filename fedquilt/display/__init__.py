"""Short summaries of objects, as text for a terminal and as HTML for a notebook."""

from fedquilt.display.overview import Overview, Readable, shortened

__all__ = ["Overview", "Readable", "shortened"]
