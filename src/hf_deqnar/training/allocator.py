"""Keeping freed memory for the next operation, on Linux with glibc.

glibc returns large blocks to the system as soon as they are freed, and asks for them again in the next operation. A
training step on CPUs makes and frees blocks of the vocabulary's size all the time, and much of it is then spent on page
faults. A process may instead keep what it once had: it does not shrink in between, and may peak a little higher, as
blocks of the heap are not always where the next one fits.
"""

import ctypes
import os
import platform

# What mallopt calls these settings (malloc.h), and values that mean "never give back": all fit a C int.
SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, 2**31 - 1),  # blocks below this size come from the heap, not from a mapping of their own
    "M_TRIM_THRESHOLD": (-1, -1),  # the heap is never trimmed
    "M_TOP_PAD": (
        -2,
        500_000_000,
    ),  # the heap grows by this much more than is asked for; untouched, it costs nothing
}
OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def keep_freed_memory() -> str | None:
    """Let glibc keep freed memory for the rest of this process; returns a sentence for the log.

    None, and nothing is changed, where this does not apply: without glibc, or where somebody has chosen the allocator
    or its settings through the environment, which we respect.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc" or chosen_by_environment():
        return None
    mallopt = ctypes.CDLL(None).mallopt
    for number, value in SETTINGS.values():
        if mallopt(number, value) != 1:  # old ones refuse a threshold this high
            return None
    return f"glibc keeps freed memory for the next step ({', '.join(SETTINGS)}); set MALLOC_* variables to choose."


def chosen_by_environment() -> bool:
    """Whether the user has set malloc's variables or loads another allocator."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return True
    return any(name in os.environ.get("LD_PRELOAD", "") for name in OTHER_ALLOCATORS)
