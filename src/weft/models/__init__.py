"""The networks: one folder per paper, its record in the folder's `__init__`; `registry` builds them by name."""

from weft.models.families import list_models

__all__ = ["list_models"]
