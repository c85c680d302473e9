"""What fccl's hooks have in common in Python, and the form of them that DDP takes for a Python hook."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fccl import _extension

# Not `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.


class GradientHook:
    """What fccl's hooks have in common: how to use one.

    ``register(ddp, hook)`` is the way that avoids Python during training. ``hook.as_python_hook()`` is for
    code that wants an ordinary Python hook. Hooks can be pickled and copied, by their arguments. All but
    ``BlockQuantize`` carry no state from step to step: one object may serve any number of models.
    """

    _native_name = ""  # the class in fccl._C

    def __init__(self) -> None:
        if type(self) is GradientHook:
            raise TypeError(
                "GradientHook is the common base; use one of its kinds, such as fccl.hooks.AllReduce()"
            )

    @property
    def name(self) -> str:
        """The hook's name in DDP's logging data, e.g. ``"fccl.hooks.AllReduce"``."""
        return f"fccl.hooks.{type(self).__name__}"

    def as_python_hook(
        self, group: dist.ProcessGroup | None = None
    ) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
        """This hook as a Python one, for ``ddp.register_comm_hook(state, hook)`` and wrappers of hooks.

        The exchange is the same C++ code, but each bucket takes the GIL twice, and such a hook is not told
        about join contexts: ``join(divide_by_initial_world_size=False)`` divides by the world size all the
        same, as with torch's own hooks. ``register`` has neither drawback.

        Args:
            group: the process group to exchange in; None: the ``state`` given to ``register_comm_hook`` if
                that is a process group, else the default group.

        Returns:
            A callable ``hook(state, bucket)`` whose Future holds the averaged bucket, a 1-D tensor of the
            bucket's size and dtype.
        """
        return _PythonHook(self, group)

    def _native(self) -> Any:
        """A C++ hook."""
        return getattr(_extension.load(), self._native_name)()

    def _prepare(self, ddp: DistributedDataParallel) -> None:
        """Raises if it cannot serve this model."""

    def _attach(self, ddp: DistributedDataParallel) -> None:
        """Learns that it serves this model."""

    def __repr__(self) -> str:
        return f"{self.name}()"


class _PythonHook:
    """What ``as_python_hook`` returns: a callable that DDP, Lightning and hook wrappers accept."""

    def __init__(self, hook: GradientHook, group: dist.ProcessGroup | None) -> None:
        self._hook = hook
        self._group = group
        self._lock = threading.Lock()
        self._native: Any = None
        self.__name__ = type(hook).__name__
        self.__qualname__ = hook.name

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                f"{self.__qualname__}: called with a {type(bucket).__name__}, not a GradBucket. DDP does that"
                " with torch._dynamo.config.optimize_ddp = 'python_reducer', which these hooks do not support."
            )
        with self._lock:
            if self._native is None:
                self._native = self._hook._native()
        group = self._group
        if group is None:
            group = (
                state if isinstance(state, dist.ProcessGroup) else dist.distributed_c10d._get_default_group()
            )
        # DDP insists on a Future that Python has completed.
        return self._native.run(group, bucket).then(_tensor_of)

    def __repr__(self) -> str:
        return f"{self._hook!r}.as_python_hook({'' if self._group is None else self._group!r})"

    def __reduce__(self) -> Any:
        return _PythonHook, (self._hook, self._group)


def _tensor_of(future: torch.futures.Future[Any]) -> torch.Tensor:
    value = future.value()
    return value[0] if isinstance(value, (list, tuple)) else value
