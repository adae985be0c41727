"""Training: arguments, trainers, batches, averaging, and runs."""
