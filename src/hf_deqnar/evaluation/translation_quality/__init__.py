"""Folder of a metric that `evaluate.load(str(hf_deqnar.METRICS))` loads without network access."""
