"""The networks. Their table can be read without torch: `zoo` has the data, `registry` builds."""

from weft.models.zoo import list_models

__all__ = ["list_models"]
