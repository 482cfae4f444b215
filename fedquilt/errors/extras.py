"""Optional packages of fedquilt (extras), and instructions on how to install one."""

from fedquilt.version import __version__


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra of fedquilt, as the end of a sentence.

    fedquilt is on no package index. It comes from a checkout or from a wheel that `make wheel`
    builds.
    """
    wheel = f"fedquilt-{__version__}-py3-none-any.whl"
    return (
        f"pip install -e '.[{extra}]' in a checkout of fedquilt, or pip install '{wheel}[{extra}]' "
        "with its wheel"
    )
