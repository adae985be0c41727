"""Benchmarks of `hf-deqnar bench`. Timings are medians of interleaved runs; no test depends on them."""
