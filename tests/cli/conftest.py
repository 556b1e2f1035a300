"""The pictures and the short run of the training tests."""

from __future__ import annotations

from tests.train.conftest import photos as photos
from tests.train.conftest import trained as trained
