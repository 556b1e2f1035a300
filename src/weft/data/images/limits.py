"""Limits on images that all verbs share; without imports, so that the command line can show them."""

MAX_PIXELS = 100_000_000  # height x width, judged by the header; another value: the setting data.max_pixels
