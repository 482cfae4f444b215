"""Reports of runs and studies as pages that need neither a network nor a server.

collect.py    runs and studies from their folders, as plain values
tables.py     rows of numbers for charts and tables
thinning.py   bounds on the number of points that are drawn
quilt.py      positions that each round trained, from the settings of a run
sentences.py  one sentence below each chart
charts.py     charts from rows
figures.py    charts with their sentences, tables and controls, for runs
study_figures.py  the same for several runs
document.py   the HTML page
files.py      charts as image files

Charts need the extra `report` (altair and vl-convert). Reading and counting do not.
"""

from fedquilt.report.document import Content, content, page

__all__ = ["Content", "content", "page"]
