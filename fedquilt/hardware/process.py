"""Memory of this machine and of this process."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from fedquilt.errors import ConfigError


def free_memory(device: str = "cpu", root: Path = Path("/")) -> int:
    """Return the bytes that training could take on a device.

    On a CPU, limits that are set for this process count too. On a GPU, it is the memory that the
    driver reports as free.

    Args:
        device: Name of a device, as torch has it.
        root: Folder that has `proc` and `sys`, for tests.

    Raises:
        ConfigError: There is no such GPU, or the free memory cannot be determined.
    """
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{device} was to be measured; torch sees no GPU here. cpu would work."
            )
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    measured = [_system_memory(root), _container_memory(root)]
    limits = [value for value in measured if value is not None]
    if not limits:
        raise ConfigError(
            "the free memory of this machine could not be found out. Install psutil, which knows "
            "how."
        )
    return min(limits)


def _system_memory(root: Path) -> int | None:
    """Return the free memory of the machine in bytes, or None if it cannot be determined.

    It is read from `proc/meminfo` below `root`, or else by psutil if that is installed.
    """
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    except OSError:
        pass  # The system is not Linux
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def _container_memory(root: Path) -> int | None:
    """Return the bytes that are left within the limit of a control group, or None without a limit.

    A container may have far less memory than its machine.
    """
    groups = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit_text, used_text = (
                (groups / limit).read_text().strip(),
                (groups / used).read_text().strip(),
            )
        except OSError:
            continue
        if limit_text.isdigit():  # The text is "max" if there is no limit
            return max(0, int(limit_text) - int(used_text))
    return None


def keep_pages() -> None:
    """Let the C library keep freed memory, for the whole process.

    Training on a CPU is then up to a third faster. A net's activations take a few megabytes each.
    By default, glibc returns such blocks to the system and requests them again at every operation,
    page by page. With another C library, this function has no effect.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # This is the maximum that glibc accepts. Larger blocks are still returned to the system.
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # Values from malloc.h
