"""Decode untrusted image files: format, limits, bit depth, colour."""

MAX_PIXELS = 100_000_000  # height x width, judged by the header; another value: the setting data.max_pixels
