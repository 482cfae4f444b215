"""`python -m fedquilt`, which is the `fedquilt` script."""

import sys


def main() -> int:
    """Run the command line. Ctrl-C while its modules are imported ends it without a trace too."""
    try:
        from fedquilt.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
