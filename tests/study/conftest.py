"""Fixtures of studies and comparisons."""

from tests.study.trainer import trainer  # noqa: F401
