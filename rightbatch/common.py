"""Small functions that every folder uses: the keys of an estimate, what falls due between two counts, the parts of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def named(key: str, estimate: tuple | None) -> dict:
    """{key, key_low, key_high} of (value, low, high), or of None."""
    return dict(zip((key, f"{key}_low", f"{key}_high"), estimate or (None, None, None)))


def crossed(before: int, after: int, every: int) -> bool:
    """Whether a multiple of `every` lies above `before` and not above `after`."""
    return every > 0 and after // every > before // every


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over processes, as FSDP2 and tensor parallelism have it."""
    return hasattr(tensor, "placements")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor, the tensor itself if it is not sharded."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor, gathered from its processes; the tensor itself if it is not sharded."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor
