"""fccl's own kernels on GPUs: whether a group uses them, and what graphs need.

CUDA tensors go to NCCL. With ``FCCL_CUDA_KERNELS=1`` in the environment of all ranks, small all_reduce, all_gather
and broadcast between GPUs of one machine go to fccl's kernels instead; see docs/cuda.md.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from fccl import _registration


def why_no_kernels(group: ProcessGroup | None = None) -> str:
    """Why a group's CUDA tensors do not go through fccl's own kernels.

    The ranks settle that together at their first all_reduce, all_gather or broadcast of a CUDA tensor.

    Args:
        group: a process group made with fccl; None: the default group.

    Returns:
        One line, or an empty string if kernels are in use, or nothing is settled yet.

    Raises:
        ValueError: the group does not use fccl, or there is no default group.
    """
    return _registration.backend_of(group).why_no_gpu_kernels


def launch_counts(group: ProcessGroup | None = None) -> dict[str, int]:
    """How often this rank has launched each of fccl's kernels for a group.

    Args:
        group: a process group made with fccl; None: the default group.

    Returns:
        By kernel, e.g. ``{"one-shot all_reduce": 3}``. Replays of a CUDA graph are not counted.

    Raises:
        ValueError: the group does not use fccl, or there is no default group.
    """
    return _registration.backend_of(group).gpu_launch_counts()


def warm_up(group: ProcessGroup | None = None, device: torch.device | int | None = None) -> bool:
    """Makes what fccl's kernels need to be captured into CUDA graphs. A collective: call it on all ranks.

    Captured calls need memory of their own, since a graph is replayed at any time. Without it (and whenever this
    returns False) captured collectives go to NCCL. That memory stays for as long as the process: graphs may outlive
    the group. Graphs of one group must be replayed one after the other, in the same order on all ranks.

    Args:
        group: a process group made with fccl; None: the default group.
        device: the group's GPU on this rank; None: the current device.

    Returns:
        Whether captured collectives can go through fccl's kernels; if not, ``why_no_kernels()`` says why.

    Raises:
        RuntimeError: this torch sees no GPU; or a rank has no memory for it.
        ValueError: the group does not use fccl, or there is no default group.
    """
    backend = _registration.backend_of(group)
    if not torch.cuda.is_available():
        raise RuntimeError("fccl.cuda.warm_up: this torch sees no GPU (torch.cuda.is_available() is False)")
    index = (
        torch.device("cuda", device).index
        if isinstance(device, int)
        else torch.device(device or "cuda").index
    )
    backend.warm_up(torch.cuda.current_device() if index is None else index)
    return backend.why_no_gpu_kernels == ""
