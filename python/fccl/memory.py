"""Tensors in memory that all ranks of a machine share, so that collectives on them need no copies.

An ordinary tensor is private to its process: a collective copies it, piece by piece, through memory that the
ranks share. A tensor made here lies in such memory from the start (the process's *arena*), and peers read
and write it in place. That is faster, and the result is the same to the bit. Collectives go without copies
where the tensors are in the arena on every rank that matters; where only some are, all ranks copy.

==========================================  ========================================================
Collective                                  Must be in the arena
==========================================  ========================================================
``all_reduce``                              the tensor, on all ranks
``all_gather``, ``all_gather_into_tensor``  the input, on all ranks
``reduce_scatter_tensor``                   the input, on all ranks (a list: if it is slices in a row)
``broadcast``                               the tensor, on the source rank
``reduce``                                  the tensor, on all ranks but the destination
``all_to_all``, ``gather``, ``scatter``     each piece by itself, on the rank that sends it
==========================================  ========================================================

Messages so small that they travel with the call itself are not concerned.

A forked child (a DataLoader worker) sees its parent's tensors here as it sees tensors after
``share_memory_()``: both look at the same memory.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["empty", "empty_like", "is_shared", "memory_stats", "release_cached", "shared_buckets", "zeros"]

_DDP_SWITCH = "DDP_DISABLE_COMM_MEM"


def _module() -> Any:
    from fccl import _extension

    return _extension.load()


def _sizes(size: tuple[Any, ...]) -> list[int]:
    if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)):
        size = tuple(size[0])
    return [operator.index(length) for length in size]


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """An uninitialised CPU tensor in shared memory.

    Args:
        *size: The shape, as numbers or as one sequence.
        dtype: The dtype; torch's default one if None.
        device: The CPU, where these tensors are, or None.
        requires_grad: Whether autograd records operations on it.

    Returns:
        The tensor. It can be viewed, resized, sliced and freed like any other. Where there is no shared
        memory for it, it is an ordinary tensor, and a warning says so once, unless shared memory was turned
        off.

    Raises:
        RuntimeError: a length is negative.
        TypeError: a length is not a whole number.
        ValueError: ``device`` is another one.
    """
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"fccl.empty: device is {device}; the memory that ranks share is the CPU's")
    tensor: Tensor = _module().arena_empty(_sizes(size), dtype or torch.get_default_dtype(), "fccl.empty")
    return tensor.requires_grad_(requires_grad)


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """As `empty`, filled with zeros."""
    return empty(*size, dtype=dtype, device=device).zero_().requires_grad_(requires_grad)


def empty_like(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """As `empty`, with the shape of ``tensor``, and its dtype unless one is given."""
    return empty(tensor.shape, dtype=dtype or tensor.dtype, device=device, requires_grad=requires_grad)


def is_shared(tensor: Tensor) -> bool:
    """Whether the tensor's memory is in this process's arena."""
    return bool(_module().in_arena(tensor))


def memory_stats() -> dict[str, Any]:
    """What the arena of this process holds.

    Returns:
        Numbers of bytes, unless said otherwise:

        - ``in_use``: held by tensors; ``peak``: the largest so far; ``tensors``: how many there are;
        - ``by_owner``: ``in_use`` by who asked: ``"fccl.empty"`` and ``"group NAME"`` for tensors that torch
          asked a process group for, such as DDP's buckets;
        - ``cached``: freed, and kept for the next tensor of the size (`release_cached` gives it back);
        - ``quarantined``: freed after a collective failed, while a peer may still write there;
        - ``refused``: number of requests that found no memory;
        - ``capacity``: the most it may hold (the environment variable ``FCCL_ARENA_SIZE``, or the machine's
          memory);
        - ``why_none``: why there is no arena in this process, or empty.
    """
    stats: dict[str, Any] = _module().memory_stats()
    return stats


def release_cached() -> None:
    """Gives the memory of freed tensors, which is kept for later ones, back to the system."""
    _module().release_cached()


@contextlib.contextmanager
def shared_buckets() -> Iterator[None]:
    """A ``DistributedDataParallel`` made in this context keeps its gradient buckets in shared memory.

    Example::

        with fccl.shared_buckets():
            model = DistributedDataParallel(model)

    torch asks the process group for the memory of the buckets if the environment variable
    ``DDP_DISABLE_COMM_MEM`` is 0. The variable is the process's, so it is set only where torch reads it: while
    the model is made, and during its forward passes until torch has rebuilt the buckets, early in training.
    If you have set the variable yourself, your value holds. ``fccl.lightning``'s strategy does the same.
    """
    if _DDP_SWITCH in os.environ and not _switched:
        yield
        return
    made: list[DistributedDataParallel] = []

    def note(module: torch.nn.Module, name: str, _: torch.nn.Module) -> None:
        if isinstance(module, DistributedDataParallel) and name == "module":
            made.append(module)

    handle = register_module_module_registration_hook(note)
    _switch_on()
    try:
        yield
    finally:
        _switch_off()
        handle.remove()
    for ddp in made:
        ddp.register_forward_pre_hook(_before_forward)
        ddp.register_forward_hook(_after_forward, always_call=True)


# Switched on as often as not yet switched off again.
_switched = 0


def _switch_on() -> None:
    global _switched
    _switched += 1
    os.environ[_DDP_SWITCH] = "0"


def _switch_off() -> None:
    global _switched
    _switched -= 1
    if not _switched:
        os.environ.pop(_DDP_SWITCH, None)


# Functions of the module, so that the model can still be pickled and copied.


def _before_forward(ddp: Any, _: Any) -> None:
    # torch rebuilds the buckets once, in a forward pass, and never if it looks for unused parameters.
    rebuilds = ddp.static_graph or not ddp.find_unused_parameters
    if rebuilds and not ddp._has_rebuilt_buckets and (_switched or _DDP_SWITCH not in os.environ):
        _switch_on()
        ddp._fccl_switched_on = True


def _after_forward(ddp: Any, *_: Any) -> None:
    if ddp.__dict__.pop("_fccl_switched_on", False):
        _switch_off()
