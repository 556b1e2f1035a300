"""TokenBackbone: what networks with one column of tokens have in common, such as CeiT and DeiT."""

# Annotations are real here, not postponed, as in `weft.models.base`.

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.grid import Grid
from weft.layers.position import fit_embedding, resize_embedding
from weft.layers.tokens import to_map
from weft.models.base import Backbone


class TokenBackbone(Backbone):
    """A backbone whose blocks all work on the same tokens: prefix tokens, then one per place of the grid.

    A subclass sets `blocks`, `norm`, `grid`, `pos_embed` (1 n c) and `num_prefix`.
    """

    blocks: nn.ModuleList
    norm: nn.Module
    grid: Grid
    pos_embed: Tensor
    num_prefix: int = 1

    @abstractmethod
    def grid_of(self, img_size: Grid) -> Grid:
        """Return the grid of tokens for an image size; raise a UsageError if no token is left."""

    def as_fmap(self, tap: Float[Tensor, "b n c"], level: int, norm: bool) -> Float[Tensor, "b c h w"]:
        return to_map((self.norm(tap) if norm else tap)[:, self.num_prefix :], self.grid)

    def pool(self, features: Float[Tensor, "b n c"]) -> Tensor:
        if self.global_pool == "avg":
            return features[:, self.num_prefix :].mean(dim=1)
        return features[:, 0] if self.global_pool == "token" else features

    def keep_levels(self, count: int, is_whole: bool, keep_norm: bool, keep_head: bool) -> None:
        self.blocks = self.blocks[:count]
        if not keep_norm:
            self.norm = nn.Identity()

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        size = Grid.of(img_size)
        grid, embed = self.grid_of(size), self.pos_embed
        if grid != self.grid:
            with torch.no_grad():
                resized = resize_embedding(embed, self.grid, grid, self.num_prefix)
            is_learned = isinstance(embed, nn.Parameter)
            self.pos_embed = nn.Parameter(resized, requires_grad=embed.requires_grad) if is_learned else resized
        self.img_size, self.grid = size, grid
        self.record_input_size(size)

    def resize_state_dict(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        state = dict(state)
        return state, fit_embedding(state, "pos_embed", self.pos_embed, self.grid, self.num_prefix)

    def no_weight_decay(self) -> set[str]:
        names = {"pos_embed", "cls_token", "dist_token"}
        return {name for name, _ in self.named_parameters() if name in names}
