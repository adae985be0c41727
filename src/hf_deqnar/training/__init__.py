"""What training needs; so far, batches with a budget of tokens."""
