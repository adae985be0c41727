"""Documents: formats, whose markup is kept, and the translation of the sentences between it."""
