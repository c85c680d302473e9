"""Fused Collective Communication Library.

``import fccl`` registers the c10d backend ``"fccl"``; nothing else is needed before
``torch.distributed.init_process_group("fccl")``. The compiled module is loaded at the first use.

- ``empty``, ``zeros``, ``empty_like``: tensors in memory that the ranks share; ``is_shared``, ``memory_stats``,
  ``release_cached``: about them; ``shared_buckets``: for the gradients of ``DistributedDataParallel``
- ``hooks``: gradient hooks in C++
- ``cuda``: fccl's own kernels on GPUs
- ``lightning``, ``pytorch_lightning``: strategies
- ``all_reduce``, ``all_gather_into_tensor``, ``broadcast``, ``barrier``: torch's, without the microseconds that its
  Python wrapper takes
- ``backend_of``: what carries a process group; ``is_available``
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fccl import _registration
from fccl._version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fccl import cuda as cuda
    from fccl import hooks as hooks
    from fccl._C import FcclBackend
    from fccl.direct import all_gather_into_tensor as all_gather_into_tensor
    from fccl.direct import all_reduce as all_reduce
    from fccl.direct import barrier as barrier
    from fccl.direct import broadcast as broadcast
    from fccl.memory import empty as empty
    from fccl.memory import empty_like as empty_like
    from fccl.memory import is_shared as is_shared
    from fccl.memory import memory_stats as memory_stats
    from fccl.memory import release_cached as release_cached
    from fccl.memory import shared_buckets as shared_buckets
    from fccl.memory import zeros as zeros

# Loaded when first used: the registration path stays light, because torch runs it at `import torch`.
_LAZY_MODULES = ("cuda", "direct", "hooks", "lightning", "memory", "pytorch_lightning", "bench")
_LAZY_FUNCTIONS = {
    "all_gather_into_tensor": "direct",
    "all_reduce": "direct",
    "barrier": "direct",
    "broadcast": "direct",
    "empty": "memory",
    "empty_like": "memory",
    "is_shared": "memory",
    "memory_stats": "memory",
    "release_cached": "memory",
    "shared_buckets": "memory",
    "zeros": "memory",
}

__all__ = ["__version__", "backend_of", "hooks", "is_available", *_LAZY_FUNCTIONS]

_registration.register()


def is_available() -> bool:
    """Whether the compiled module is there, fits the installed torch, and torch has distributed.

    Returns:
        True if ``init_process_group("fccl")`` can work. ``fccl._extension.load()`` says why if not.
    """
    from fccl import _extension

    try:
        _extension.load()
    except ImportError:
        return False
    return True


def backend_of(group: ProcessGroup | None = None) -> FcclBackend:
    """The fccl backend object behind a process group.

    Args:
        group: A process group made with fccl; the default group if None.

    Returns:
        The backend, with ``engine``, ``why_inner``, ``zero_copy_count``, ``why_no_zero_copy``,
        ``collective_counts()``, ``why_no_gpu_kernels`` and ``gpu_launch_counts()``.

    Raises:
        ValueError: The group does not use fccl, there is no default group, or this rank is not in
            the group.
    """
    return _registration.backend_of(group)


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"fccl.{name}")
    if name in _LAZY_FUNCTIONS:
        function = getattr(importlib.import_module(f"fccl.{_LAZY_FUNCTIONS[name]}"), name)
        globals()[name] = function  # found at once from now on
        return function
    raise AttributeError(f"module 'fccl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
