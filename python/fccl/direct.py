"""Collectives beneath torch's Python wrapper: the same calls, for those to whom a microsecond matters.

``torch.distributed.all_reduce`` checks, dispatches and records for about two microseconds before a backend sees the
tensor, which is more than the exchange of a small message takes. The functions here hand CPU tensors to the fccl
backend of the group at once. They are synchronous, and do the same, in the same order among the group's other
calls: both kinds may be mixed at will, even one on one rank and the other on its peers.

Whatever is not a plain CPU tensor on a group of fccl's takes the way through torch.distributed: other backends and
devices, complex numbers, ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, tensor subclasses, dispatch and function modes,
``torch.compile``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_unary

__all__ = ["all_gather_into_tensor", "all_reduce", "barrier", "broadcast"]

_SUM = dist.ReduceOp.SUM
_GroupMember = dist.GroupMember
# The single-tensor gather by its name in this torch: the new one came with 2.13, where the old one warns.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class _NoModule:
    """Stands in for the compiled module where it cannot be loaded: then no group is fccl's."""

    @staticmethod
    def _refuse(*args: Any) -> bool:
        return False

    direct_all_reduce = direct_all_gather = direct_broadcast = direct_barrier = _refuse


_native: Any = None


def _load() -> Any:
    """The compiled module, from the first call on."""
    global _native
    from fccl import _extension

    module: Any = _NoModule
    with contextlib.suppress(ImportError):
        module = _extension.load()
    if dist.is_initialized():  # before, the module may still be found
        _native = module
    return module


def _may_be_direct(tensor: Tensor) -> bool:
    # What is no tensor torch refuses with better words.
    return isinstance(tensor, Tensor) and not has_torch_function_unary(tensor) and not is_compiling()


def all_reduce(tensor: Tensor, op: Any = _SUM, group: dist.ProcessGroup | None = None) -> None:
    """Reduces a tensor over all ranks, in place; as ``torch.distributed.all_reduce``, synchronous.

    Args:
        tensor: Of any shape, of the same number of elements and dtype on every rank.
        op: A ``torch.distributed.ReduceOp``.
        group: The process group; the default group if None.

    Raises:
        ValueError: No process group has been initialised, or the tensor is refused.
        TypeError: ``op`` is not defined for the tensor's dtype.
        torch.distributed.DistBackendError: The ranks' calls do not fit each other; a rank died, left, or did not
            come in time.
    """
    if _may_be_direct(tensor) and (_native or _load()).direct_all_reduce(
        _GroupMember.WORLD if group is None else group, tensor, op
    ):
        return
    dist.all_reduce(tensor, op=op, group=group)


def all_gather_into_tensor(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gathers tensors of all ranks into one, in rank order; as torch's function of this name, synchronous.

    Args:
        output: Of ``world_size`` times as many elements as ``input``: the ranks' tensors one after the other. May
            hold ``input`` at this rank's place, which saves a copy.
        input: Of the same number of elements and dtype on every rank.
        group: The process group; the default group if None.

    Raises:
        ValueError: As `all_reduce`.
        torch.distributed.DistBackendError: As `all_reduce`.
    """
    if (
        _may_be_direct(output)
        and _may_be_direct(input)
        and (_native or _load()).direct_all_gather(
            _GroupMember.WORLD if group is None else group, output, input
        )
    ):
        return
    getattr(dist, _ALL_GATHER)(output, input, group=group)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    group_src: int | None = None,
) -> None:
    """Copies a tensor of one rank to all others; as ``torch.distributed.broadcast``, synchronous.

    Args:
        tensor: The data on the source, where they arrive on the others; of the same number of elements and dtype.
        src: The source's global rank.
        group: The process group; the default group if None.
        group_src: The source's rank in ``group``, instead of ``src``.

    Raises:
        ValueError: As `all_reduce`; also if both of ``src`` and ``group_src`` are given, or none.
        torch.distributed.DistBackendError: As `all_reduce`.
    """
    if _may_be_direct(tensor) and (src is None) != (group_src is None):
        root = group_src
        if root is None:
            root = src if group is None else _rank_in_group(group, src)
        if root is not None and (_native or _load()).direct_broadcast(
            _GroupMember.WORLD if group is None else group, tensor, root
        ):
            return
    dist.broadcast(tensor, src, group, group_src=group_src)


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Waits until every rank of the group has come here; as ``torch.distributed.barrier``, synchronous.

    Args:
        group: The process group; the default group if None.

    Raises:
        torch.distributed.DistBackendError: As `all_reduce`.
    """
    if not is_compiling() and (_native or _load()).direct_barrier(
        _GroupMember.WORLD if group is None else group
    ):
        return
    dist.barrier(group=group)


def _rank_in_group(group: Any, global_rank: int | None) -> int | None:
    """None where torch shall say what is wrong."""
    if not isinstance(group, dist.ProcessGroup) or global_rank is None:
        return None
    try:
        return dist.get_group_rank(group, global_rank)
    except ValueError:
        return None
