"""`python -m fedquilt`, which is the `fedquilt` script."""

import sys
from importlib.util import find_spec

from fedquilt.errors.extras import how_to_install
from fedquilt.errors.interrupts import STATUS, end_imports

NEEDED = ("tyro", "rich", "tomli_w")  # Packages of the extra `cli` without which no command runs.


def main() -> int:
    """Run the command line, and return its exit status.

    If packages of the extra `cli` are missing, a message is printed and the status is 2. Ctrl-C
    ends the command without a traceback, also while its modules are imported.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        needed = ", ".join(missing)
        print(
            f"ConfigError: the command line needs {needed}, which is not installed: "
            f"{how_to_install('cli')}.",
            file=sys.stderr,
        )
        return 2
    try:
        end_imports()
        from fedquilt.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return STATUS


if __name__ == "__main__":
    sys.exit(main())
