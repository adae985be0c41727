"""Parallel text: reading it, tokenizers for it, and scoring translations of it."""
