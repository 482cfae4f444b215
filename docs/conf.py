"""Settings of the documentation site, which `make docs` builds with Sphinx.

The source folder is the checkout, so that links between README.md, docs/ and files of the package
work as they do in an editor. Nothing is downloaded.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "_site")]

from fedquilt import __version__  # noqa: E402

project = "fedquilt"
release = __version__
copyright = "the authors of fedquilt"

extensions = ["sphinx.ext.autodoc", "myst_parser", "public_names"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/api/*.rst",
    "docs/internals/*.md",
    "docs/results/*.md",
    "fedquilt/papers/README.md",
]
# Folders that need not be searched for pages.
exclude_patterns = [".*", "bench", "build", "data", "dist", "results", "runs", "tests", "wandb"]

html_theme = "furo"
html_title = f"fedquilt {release}"
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_site"]
html_show_sourcelink = False
html_copy_source = False
python_maximum_signature_line_length = 88

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
default_role = "name"  # Single backticks in docstrings, see _site/public_names.py.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False

nitpicky = True  # Names in signatures that do not exist are warnings.
suppress_warnings = ["misc.highlighting_failure"]  # Blocks with … in place of code.
