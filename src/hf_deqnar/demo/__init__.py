"""A page that shows translations while they converge."""
