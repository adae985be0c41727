"""Allocator settings that keep freed memory in the process, on Linux with glibc.

glibc returns large blocks to the system as soon as they are freed, and requests them again in the next operation. A
training step on CPUs allocates and frees many blocks of the size of the logits, and much of its time is then spent on
page faults. With these settings glibc reuses freed memory. The process does not shrink between operations, and its peak
can be slightly higher because of fragmentation.
"""

import ctypes
import os
import platform

# Numbers of the mallopt options (malloc.h), and values for which memory is never returned; all fit a C int.
SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, 2**31 - 1),  # blocks below this size are allocated on the heap, not with mmap
    "M_TRIM_THRESHOLD": (-1, -1),  # the heap is never trimmed
    "M_TOP_PAD": (
        -2,
        500_000_000,
    ),  # additional growth of the heap; untouched pages use no memory
}
OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def keep_freed_memory() -> str | None:
    """Let glibc keep freed memory for the rest of this process; returns a message for the log.

    Returns None and changes nothing without glibc, or if the environment selects an allocator or its settings.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc" or chosen_by_environment():
        return None
    mallopt = ctypes.CDLL(None).mallopt
    for number, value in SETTINGS.values():
        if mallopt(number, value) != 1:  # old versions refuse a threshold this high
            return None
    return f"glibc keeps freed memory for the next step ({', '.join(SETTINGS)}); set MALLOC_* variables to choose."


def chosen_by_environment() -> bool:
    """Whether the user has set malloc's variables or loads another allocator."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return True
    return any(name in os.environ.get("LD_PRELOAD", "") for name in OTHER_ALLOCATORS)
