"""What several cases expect of fccl on CUDA."""

from __future__ import annotations

import torch

import fccl


def expect_kernels(device: torch.device, launches: int) -> None:
    """Fails unless fccl's own kernels have served the default group's calls.

    Args:
        device: on which the calls were; on a CPU there is nothing to expect.
        launches: how many of them.

    Raises:
        AssertionError: they have not.
    """
    if device.type == "cuda":
        ran = fccl.cuda.launch_counts()
        why = fccl.cuda.why_no_kernels()
        assert not why, f"the kernels are not in use: {why}"
        assert sum(ran.values()) == launches, f"{launches} calls, and the kernels ran {ran}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, wherever they are; a NaN is as good as another.

    Args:
        a: one of them.
        b: the other.
    """
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.is_floating_point():
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
