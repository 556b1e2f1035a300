"""Measure cost and speed of models."""
