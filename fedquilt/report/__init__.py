"""Reports of runs and studies as pages that need neither a network nor a server.

collect.py    runs and studies from their folders, as plain values
prepared.py   a run prepared from its settings again, without training
quilt.py      positions that each round trained
tables.py     rows of numbers
thinning.py   bounds on the number of points that are drawn
sentences.py  one sentence below each chart
charts.py     charts from rows
figure.py     a chart with its sentence, its table and its controls
figures.py, study_figures.py, details.py
              figures of one run, of several runs, and of what some runs record
document.py   the HTML page, with page.css, page.js and live.js
files.py      charts as image files
follow.py     the newest content, read again by one thread when files have changed
watch.py      the server of a live page

All of it needs the extra `report` (altair and vl-convert-python), and watch.py the extra `watch`.
"""

from fedquilt.errors import ConfigError
from fedquilt.errors.extras import how_to_install

try:
    import altair  # noqa: F401
    import vl_convert  # noqa: F401
except ImportError as error:
    raise ConfigError(
        "a report was asked for; it needs altair and vl-convert-python, of which one is not "
        f"installed: {how_to_install('report')}."
    ) from error

from fedquilt.report.document import Content, content, page

__all__ = ["Content", "content", "page"]
