"""Trainers and what they need: batches of a token budget."""
