"""Training: arguments, trainers, batches, averaging, and a whole run."""
