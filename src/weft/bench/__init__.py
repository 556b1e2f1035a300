"""Cost and speed of models."""
