"""What a strategy does with tensors across ranks: reduce with true means, gather with gradients.

These work over any backend. Where the group's backend is fccl and the tensor on the CPU, the collective
does the job alone: it averages in fp32, takes strided tensors and all dtypes. For any other backend, known
gaps are filled here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import direct

_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def reduce(tensor: Tensor, group: dist.ProcessGroup | None, reduce_op: Any) -> Tensor:
    """All-reduces ``tensor`` over ``group`` with one collective.

    Args:
        tensor: the tensor, of the same shape and dtype on every rank.
        group: the process group; the default group if None.
        reduce_op: "mean" or "avg", the name of another ``torch.distributed.ReduceOp`` ("sum", "min", ...)
            in any case, or the ReduceOp itself; None means sum.

    Returns:
        ``tensor`` itself, reduced in place. The mean of an integer or bool tensor is a new tensor of torch's
        default dtype, as ``tensor / world_size`` is, and ``tensor`` keeps its value. On a rank that is not
        in ``group``: ``tensor``, untouched.

    Raises:
        ValueError: ``reduce_op`` names no reduction.
    """
    op = _parse_op(reduce_op)
    if dist.get_rank(group) < 0:
        return tensor
    if op != _AVG:
        return _all_reduce(tensor, op, group)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return _integer_mean(tensor, group)
    if _is_native(tensor, group):
        return _all_reduce(tensor, _AVG, group)
    return _float_mean(tensor, group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Tensor:
    """Gathers ``tensor`` from all ranks of ``group``.

    Args:
        tensor: a tensor of shape ``[...]``, of the same shape and dtype on every rank.
        group: the process group; the default group if None.
        sync_grads: whether gradients flow back: each rank's ``tensor`` gets the sum of all ranks' gradients
            for its slice. The backward pass is a collective too, so all ranks must run it.

    Returns:
        A new tensor of shape ``[world, ...]``, in rank order.

    Raises:
        ValueError: this rank is not in ``group``.
    """
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"all_gather: rank {dist.get_rank()} is not a member of the group it was called with"
        )
    return _AllGather.apply(tensor, group) if sync_grads else _gather(tensor.detach(), group)


def _parse_op(reduce_op: Any) -> Any:
    if reduce_op is None:
        return _SUM
    if not isinstance(reduce_op, str):
        return reduce_op
    name = "AVG" if reduce_op.lower() == "mean" else reduce_op.upper()
    names = ("AVG", "SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    if name not in names:
        raise ValueError(
            f"reduce: reduce_op is {reduce_op!r}; expected 'mean' or one of {names}, in any case"
        )
    return getattr(dist.ReduceOp, name)


def _is_native(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.device.type == "cpu" and dist.get_backend(group) == "fccl"


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    work = tensor.detach()
    if work.layout == torch.strided and not _is_native(tensor, group):
        if work.dtype == torch.bool:
            # Gloo adds the bytes: True + True would leave a 2 behind.
            work = work.view(torch.uint8)
            op = {_SUM: dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN}.get(op, op)
        # Gloo reads a strided tensor as if it were dense.
        work = work.contiguous()
    direct.all_reduce(work, op, group)
    if work.layout == torch.strided and work.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(work)
    return tensor


def _float_mean(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    wide = tensor.detach()
    if wide.dtype.itemsize < torch.float32.itemsize:
        wide = wide.to(torch.float32)  # one rounding, at the end
    wide = _all_reduce(wide, _SUM, group).div_(dist.get_world_size(group))
    if wide.dtype != tensor.dtype:
        with torch.no_grad():
            tensor.copy_(wide)
    return tensor


def _integer_mean(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # float64 cannot overflow where the sum of integers could, and is exact up to 2**53.
    total = _all_reduce(tensor.detach().to(torch.float64), _SUM, group)
    return total.div_(dist.get_world_size(group)).to(torch.get_default_dtype())


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    if tensor.numel():
        source, target = tensor.contiguous().reshape(-1), gathered.view(-1)
        if not _is_native(tensor, group):  # Gloo refuses some dtypes, but bytes are bytes
            source, target = source.view(torch.uint8), target.view(torch.uint8)
        direct.all_gather_into_tensor(target, source, group)
    return gathered


class _AllGather(torch.autograd.Function):
    """``[...]`` to ``[world, ...]``; its adjoint is ``_SumOfMySlice``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _SumOfMySlice.apply(grad, ctx.group), None


class _SumOfMySlice(torch.autograd.Function):
    """``[world, ...]`` to ``[...]``: the sum over ranks of the slice that belongs to this rank."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = _all_reduce(stacked.detach().clone(memory_format=torch.contiguous_format), _SUM, group)
        return total[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _AllGather.apply(grad, ctx.group), None
