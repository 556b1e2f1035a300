"""Layers that two or more of the networks use with the same meaning."""
