"""What is priced: one KV iteration of one CTA, validated once.

``tile_m`` counts query rows and ``tile_n`` keys that *one CTA* works on. With two CTAs the pair
shares each B operand, so that every CTA holds half of it:

* forward, 2 CTAs: the pair takes 2 x tile_m query rows against the same tile_n keys; K and V halve.
* backward, 2 CTAs: the pair takes 2 x tile_n keys against the same tile_m query rows; Q and dO
  halve, and dQ (tile_m/2 rows a CTA, reduced over the pair's 2 x tile_n keys) needs the peer's dS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roofline.errors import RooflineError
from roofline.formats import Format, find_format
from roofline.gpus import Gpu, find_gpu

DIRECTIONS = ("forward", "backward")
#: Rows of one MMA step in 16-bit formats, the smallest slice of a tile any MMA can take.
GRANULE = 16
MAX_SIZE = 1 << 16


@dataclass(frozen=True)
class Tile:
    """A tile on a GPU: sizes in elements, per CTA; see the module's text for ``ctas=2``."""

    gpu: Gpu
    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    direction: str
    ctas: int
    format: Format

    @classmethod
    def of(
        cls,
        gpu: str | Gpu,
        tile_m: int,
        tile_n: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        direction: str = "forward",
        ctas: int = 1,
        dtype: str = "bf16",
    ) -> Tile:
        """A validated tile; RooflineError names the first broken rule."""
        found = find_gpu(gpu) if isinstance(gpu, str) else gpu
        check_size("tile_m", tile_m, GRANULE)
        check_size("tile_n", tile_n, GRANULE)
        check_size("head_dim", head_dim)
        if head_dim_v is not None:
            check_size("head_dim_v", head_dim_v)
        check_direction(direction)
        if ctas not in (1, 2) or isinstance(ctas, bool):
            raise RooflineError(f"ctas {ctas!r}: one tensor-core operation spans 1 or 2 CTAs")
        if ctas == 2 and not found.has_tmem:
            raise RooflineError(
                f"ctas 2: {found.name} ({found.arch}) has no two-CTA MMA (tcgen05 cta_group::2); "
                "use ctas 1 or a Blackwell GPU"
            )
        fmt = find_format(dtype)
        if not found.has(fmt.rate_field):
            offered = [f.removeprefix("mma_") for f in found.quantities if f.startswith("mma_")]
            raise RooflineError(
                f"dtype {fmt.name}: {found.name} has no {fmt.name} MMA; "
                f"choose one of {', '.join(offered)}"
            )
        dim_v = head_dim if head_dim_v is None else head_dim_v
        return cls(found, tile_m, tile_n, head_dim, dim_v, direction, ctas, fmt)

    def __str__(self) -> str:
        dims = str(self.head_dim)
        if self.head_dim_v != self.head_dim:
            dims += f"/{self.head_dim_v}"
        return f"{self.tile_m}x{self.tile_n}, head_dim {dims}"


def check_direction(direction: str) -> str:
    """``direction`` if it is a known pass; RooflineError otherwise."""
    if direction not in DIRECTIONS:
        raise RooflineError(f"pass {direction!r} is unknown; choose {' or '.join(DIRECTIONS)}")
    return direction


def check_size(name: str, value: int, multiple: int = 1) -> int:
    """``value`` if it is an int in 1..65536 and a multiple; RooflineError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RooflineError(f"{name} {value!r}: must be an integer")
    if value <= 0:
        raise RooflineError(f"{name} {value}: must be positive")
    if value > MAX_SIZE:
        raise RooflineError(f"{name} {value}: no tile is this large; at most {MAX_SIZE}")
    if value % multiple:
        below = max(multiple, value // multiple * multiple)
        raise RooflineError(
            f"{name} {value}: must be a multiple of {multiple}, what one MMA takes; "
            f"try {below} or {below + multiple}"
        )
    return value


def parse_tile(text: str) -> tuple[int, int]:
    """(tile_m, tile_n) of "256x128"; RooflineError if it is not MxN."""
    match = re.fullmatch(r"(-?\d{1,9})[xX](-?\d{1,9})", text.strip())
    if match is None:
        raise RooflineError(
            f"tile {text!r}: must be MxN, query rows x keys of one CTA, such as 256x128"
        )
    return int(match[1]), int(match[2])
