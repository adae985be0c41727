"""What `hf-deqnar bench` measures. Timings are medians of runs that take turns, and never part of a test."""
