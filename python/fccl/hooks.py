"""Gradient hooks for ``DistributedDataParallel`` that run in C++, without the GIL.

    ddp = DistributedDataParallel(model)
    fccl.hooks.register(ddp, fccl.hooks.BF16Compress())

``AllReduce`` exchanges the exact mean of the gradients, ``BF16Compress`` halves the bytes. Both work over
any backend of ``torch.distributed``; over ``"fccl"`` the mean is formed inside the engine.

With both hooks, as with DDP alone:

- ``gradient_as_bucket_view``, ``find_unused_parameters``, ``static_graph``, ``no_sync()`` and
  ``join()``, with either value of ``divide_by_initial_world_size``, work;
- inf and NaN gradients reach every rank, so that a gradient scaler sees them everywhere;
- sparse gradients are exchanged as they are and averaged;
- an error in the exchange is raised by ``backward()``, and the model can be used again if the group can.

One difference: DDP alone divides every gradient before the sum, the hooks divide the sum. A sum beyond
the largest float32 (3.4e38) is therefore inf, even if the mean is below it; in return, small gradients
lose no bits to the division.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from fccl import _extension

# Not `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

__all__ = ["AllReduce", "BF16Compress", "GradientHook", "register"]


class GradientHook:
    """What fccl's hooks have in common: how to use one.

    ``register(ddp, hook)`` is the way that avoids Python during training. ``hook.as_python_hook()`` is for
    code that wants an ordinary Python hook. A hook carries no state from step to step: one object may serve
    any number of models, and it can be pickled.
    """

    _native_name = ""  # the class in fccl._C

    def __init__(self) -> None:
        if type(self) is GradientHook:
            raise TypeError(
                "GradientHook is the common base; use fccl.hooks.AllReduce() or fccl.hooks.BF16Compress()"
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
        """A new C++ hook."""
        return getattr(_extension.load(), self._native_name)()

    def __repr__(self) -> str:
        return f"{self.name}()"


class AllReduce(GradientHook):
    """Averages the gradients exactly: summed in float32 or better, divided once, after the sum.

    Over ``"fccl"`` on CPU: one all_reduce in the bucket's own memory, in fixed rank order, with the
    division in the accumulator; float64 is summed in float64. The same bits on every rank, from run to run.

    Over other backends (and for CUDA tensors, which NCCL carries): a sum in the backend's own order, divided
    afterwards. Since such backends round 16-bit floats at every step of a sum, float16 and bfloat16 buckets
    travel as float32 there: twice the bytes, in exchange for the exact mean.

    Complex gradients are averaged as pairs of real numbers.
    """

    _native_name = "AllReduce"


class BF16Compress(GradientHook):
    """Exchanges float32 and float64 gradients as bfloat16: a half or a quarter of the bytes.

    Each rank rounds its gradients to bfloat16 (8 significant bits, the range of float32; a float64 is
    rounded to float32 on the way). Over ``"fccl"`` on CPU the bfloat16 values are accumulated and divided in
    float32 and rounded once more for the way back. Over other backends the sum is in the backend's
    arithmetic (Gloo rounds to bfloat16 at every hop) and the division in the gradient's own dtype. The
    result is written back in that dtype.

    Values beyond bfloat16's largest (3.39e38), and float64 ones beyond float32's, become inf. inf and NaN
    stay what they are. 16-bit, complex and sparse gradients are exchanged as ``AllReduce`` does.

    Compression pays on slow links. On one machine with shared memory it rarely does.
    """

    _native_name = "BF16Compress"


def register(ddp: DistributedDataParallel, hook: GradientHook) -> None:
    """Makes ``hook`` exchange the gradients of ``ddp``, in the model's process group.

    Call it once per model, on every rank alike, before the first ``backward()``. The model keeps the hook
    alive, and shows its name in ``ddp._get_ddp_logging_data()["comm_hook"]``. A pickled or deep-copied model
    comes back without its hook, as with every hook of DDP.

    Args:
        ddp: the ``DistributedDataParallel`` instance itself; not the module in it, nor what
            ``torch.compile`` made of it.
        hook: ``AllReduce()`` or ``BF16Compress()``.

    Raises:
        TypeError: ``ddp`` or ``hook`` is something else.
        RuntimeError: the model has a hook already, or reduces its gradients in compiled Python code, past any
            hook.
        ImportError: the compiled module is missing or was built for another torch.
    """
    _check_model(ddp)
    check_hook(hook, "fccl.hooks.register")
    extension = _extension.load()
    try:
        join_state = extension.register_comm_hook(ddp.reducer, ddp.process_group, hook._native())
    except RuntimeError as error:
        if "can only be called once" not in str(error):
            raise
        raise RuntimeError(
            f"fccl.hooks.register(ddp, {hook!r}): this model has a communication hook already, and DDP takes"
            " one, once. Make a new DistributedDataParallel to use another. (mixed_precision=... and overlapped"
            " optimizers register hooks of their own.)"
        ) from error
    ddp.logger._set_comm_hook_name(hook.name)
    ddp.join_hook = _JoinWatch(ddp, join_state)  # type: ignore[method-assign]


def _check_model(ddp: Any) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        where = "fccl.hooks.register(ddp, hook) wants the DistributedDataParallel instance"
        inner = next(
            (
                name
                for name in ("_orig_mod", "_forward_module", "model", "module")
                if isinstance(getattr(ddp, name, None), DistributedDataParallel)
            ),
            None,
        )
        if inner is not None:
            advice = f"it is in this {type(ddp).__name__}'s attribute {inner!r}: pass that"
        elif any(base.__name__ == "LightningModule" for base in type(ddp).__mro__):
            advice = (
                "in Lightning, pass the hook to the strategy, which wraps the module:"
                " fccl.lightning.DDPStrategy(ddp_comm_hook=...)"
            )
        elif isinstance(ddp, torch.nn.Module):
            advice = "wrap the module first: ddp = DistributedDataParallel(module)"
        else:
            advice = "the arguments are (model, hook)"
        kind = f"the class {ddp.__name__}" if isinstance(ddp, type) else type(ddp).__name__
        raise TypeError(f"{where}, not {kind}; {advice}")
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            "fccl.hooks.register: this model was built with torch._dynamo.config.optimize_ddp ="
            " 'python_reducer': its gradients are reduced by compiled Python code, and DDP would ignore a C++"
            " hook without a word. Use another mode ('ddp_optimizer' is the default) or no hook."
        )


def check_hook(hook: Any, caller: str) -> None:
    """Raises a TypeError, in the name of ``caller``, unless ``hook`` is one of fccl's hook objects."""
    if isinstance(hook, GradientHook):
        return
    if isinstance(hook, type) and issubclass(hook, GradientHook):
        raise TypeError(f"{caller} wants a hook object, not the class: fccl.hooks.{hook.__name__}()")
    advice = "; a Python hook goes to ddp.register_comm_hook(state, hook)" if callable(hook) else ""
    raise TypeError(
        f"{caller} wants one of fccl's hooks, such as fccl.hooks.AllReduce(), not {type(hook).__name__}{advice}"
    )


class _JoinWatch:
    """Stands in for ``ddp.join_hook``, to learn when a join context begins and which divisor it wants.

    ``join_hook`` is what ``Join`` calls on every rank when a context begins, and the JoinHook it returns is
    what a rank that is out of data runs: together all that the C++ hook needs to be told.
    """

    def __init__(self, ddp: DistributedDataParallel, state: Any) -> None:
        self._ddp = weakref.ref(ddp)  # the model holds this object: no cycle
        self._state = state

    def __call__(self, **kwargs: Any) -> JoinHook:
        ddp = self._ddp()
        assert ddp is not None, "called through the model"
        inner = type(ddp).join_hook(ddp, **kwargs)
        self._state.divide_by_active_ranks = not kwargs.get("divide_by_initial_world_size", True)
        return _WatchedJoinHook(inner, self._state)

    def __reduce__(self) -> Any:
        # A copy of the model has no hook, so it gets its own plain join_hook back.
        return getattr, (self._ddp(), "join_hook")


class _WatchedJoinHook(JoinHook):
    """DDP's JoinHook, with notes to the C++ hook: its zeros come from no data, and when the context ends."""

    def __init__(self, inner: JoinHook, state: Any) -> None:
        self._inner = inner
        self._state = state

    def main_hook(self) -> None:
        self._state.has_data = False
        try:
            self._inner.main_hook()
        finally:
            self._state.has_data = True

    def post_hook(self, is_last_joiner: bool) -> None:
        # Here all ranks are out of data, and none has left: the one place where all of them can change the
        # number of collectives per bucket alike. (An exception that leaves the context early does not come
        # by; then the ranks go on counting who has data, at the cost of one small all_reduce per bucket.)
        self._state.divide_by_active_ranks = False
        self._inner.post_hook(is_last_joiner)


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
