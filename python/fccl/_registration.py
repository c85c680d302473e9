"""Registers the backend with torch.distributed and makes its objects.

Nothing here imports the compiled module before a process group is made.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from fccl._C import FcclBackend

NAME = "fccl"


def register() -> None:
    """Makes ``init_process_group("fccl")`` known. Cheap and idempotent."""
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu", "cuda"])


def create_backend(options: Any, pg_options: Any = None) -> FcclBackend:
    """Called by torch for each process group (and rank in it).

    Args:
        options: torch's ``_DistributedBackendOptions``: store, group_rank, group_size, timeout,
            group_id, global_ranks_in_group.
        pg_options: A ``ProcessGroupNCCL.Options`` for the inner NCCL, or None.

    Returns:
        The backend.

    Raises:
        ValueError: ``FCCL_CUDA_INNER`` is neither ``nccl`` nor ``gloo``.
        ImportError: The compiled module is missing or does not fit; see ``fccl._extension.load``.
        TypeError: ``pg_options`` is something else.
        NotImplementedError: The group shall be reconfigurable (torch 2.14 and later).
    """
    from fccl import _extension

    module = _extension.load()
    rank, size = options.group_rank, options.group_size
    timeout: timedelta = options.timeout
    ranks = list(options.global_ranks_in_group)
    name = str(options.group_id)

    if getattr(options, "enable_reconfigure", False):
        raise NotImplementedError(
            "fccl groups cannot be reconfigured (enable_reconfigure=True): their members are settled when they are "
            "made. Destroy the process group and initialise a new one, in the same processes if you like"
        )
    cuda_by_gloo = cuda_inner() == "gloo"
    nccl = None if cuda_by_gloo else _nccl_class()
    if pg_options is not None and not (nccl is not None and isinstance(pg_options, nccl.Options)):
        raise TypeError(
            "fccl takes ProcessGroupNCCL.Options (for its inner NCCL) as pg_options, "
            f"got {type(pg_options).__name__}{' and FCCL_CUDA_INNER=gloo' if cuda_by_gloo else ''}"
        )

    def make_gloo(store: dist.Store) -> Any:
        inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        inner.options.global_ranks_in_group = ranks
        inner.options.group_name = name
        _begin_counting(inner)
        return inner

    def make_nccl(store: dist.Store) -> Any:
        assert nccl is not None
        nccl_options = pg_options
        if nccl_options is None:
            nccl_options = nccl.Options()
            nccl_options.is_high_priority_stream = False
        nccl_options._timeout = timeout
        nccl_options.global_ranks_in_group = ranks
        nccl_options.group_name = name
        inner = nccl(store, rank, size, nccl_options)
        _begin_counting(inner)
        return inner

    if size > 1 and not dist.is_gloo_available():
        raise RuntimeError(
            "fccl stands on Gloo for what it does not carry itself, and this torch has no Gloo"
        )
    cuda_factory = make_nccl if nccl is not None else None
    if cuda_by_gloo and torch.cuda.is_available():
        cuda_factory = make_gloo
    backend: FcclBackend = module.FcclBackend(
        store=options.store,
        rank=rank,
        size=size,
        timeout=timeout,
        group_name=name,
        global_ranks=ranks,
        cpu_factory=make_gloo,
        cuda_factory=cuda_factory,
        cuda_by_gloo=cuda_by_gloo,
    )
    return backend


def _begin_counting(inner: Any) -> None:
    """Has a backend begin its sequence numbers, which torch 2.14 and later do by themselves (and warn)."""
    if torch.__version__ < (2, 14):
        inner._set_sequence_number_for_group()


def cuda_inner() -> str:
    """What carries CUDA tensors where fccl's kernels do not, by ``FCCL_CUDA_INNER``: ``nccl`` or ``gloo``.

    Raises:
        ValueError: It is something else.
    """
    value = os.environ.get("FCCL_CUDA_INNER", "nccl")
    if value not in _CUDA_INNERS:
        raise ValueError(f"FCCL_CUDA_INNER is {value!r}, expected one of {', '.join(_CUDA_INNERS)}")
    return value


_CUDA_INNERS = ("nccl", "gloo")


def _nccl_class() -> Any:
    """``ProcessGroupNCCL`` where torch has it and sees a GPU (it throws without one), else None."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return None
    return dist.ProcessGroupNCCL


def backend_of(group: dist.ProcessGroup | None = None) -> FcclBackend:
    """See ``fccl.backend_of``."""
    from fccl import _extension

    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                "there is no default process group; call torch.distributed.init_process_group first"
            )
        group = dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"expected a process group this rank belongs to, got {group!r}")
    found = []
    fccl_class = _extension.load().FcclBackend
    for device in group._device_types:
        backend = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checking wrapper around every backend.
        backend = getattr(backend, "wrapped_pg", backend)
        if isinstance(backend, fccl_class):
            return backend  # type: ignore[no-any-return]
        found.append(f"{device}: {backend.name()}")
    raise ValueError(
        f"process group {group.group_name!r} does not use fccl; its backends are {', '.join(found)}"
    )
