"""Layers that two or more networks use with the same meaning."""
