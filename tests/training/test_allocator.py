"""Page faults of a process that keeps freed memory, against one that does not. No timings."""

import os
import platform
import subprocess
import sys

import pytest

from hf_deqnar.training.allocator import chosen_by_environment, keep_freed_memory

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")

LOOP = """
import resource, sys, torch
from hf_deqnar.training.allocator import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert "M_MMAP_THRESHOLD" in keep_freed_memory()
def run():
    for _ in range(5):  # blocks of 4 MB and of 36 MB: more than glibc learns to keep by itself
        for size in (1, 9):
            torch.ones(size * 2**20).add(1).exp()
run()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def clean_environment() -> dict[str, str]:
    variables = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    return {name: value for name, value in os.environ.items() if not name.startswith(variables)}


def page_faults(how: str) -> int:
    command = [sys.executable, "-c", LOOP, how]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    return int(done.stdout)


@on_glibc
def test_keeping_freed_memory_avoids_page_faults():
    returned, kept = page_faults("returned"), page_faults("kept")
    assert returned > 10_000
    assert kept < returned / 10


@pytest.mark.parametrize(
    ("name", "value", "chosen"),
    [
        ("MALLOC_TOP_PAD_", "0", True),
        ("MALLOC_ARENA_MAX", "2", True),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=128", True),
        ("GLIBC_TUNABLES", "glibc.cpu.x86_ibt=off", False),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2", True),
        ("LD_PRELOAD", "/usr/lib/libtcmalloc_minimal.so.4", True),
        ("LD_PRELOAD", "/usr/lib/libfakeroot.so", False),
    ],
)
def test_allocator_settings_of_the_environment_are_respected(monkeypatch, name, value, chosen):
    for variable in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(variable)
    assert not chosen_by_environment()
    monkeypatch.setenv(name, value)
    assert chosen_by_environment() == chosen
    if chosen:
        assert keep_freed_memory() is None


def test_other_systems_are_not_changed(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert keep_freed_memory() is None
