"""health: whether an engine answers, whether it generates, and for how long it did not."""
