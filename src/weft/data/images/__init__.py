"""Decode untrusted image files: format, structure, colour, and the evaluation crop."""
