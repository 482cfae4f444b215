"""`python -m fedquilt` is the `fedquilt` script."""

import sys

from fedquilt.cli import main

sys.exit(main())
