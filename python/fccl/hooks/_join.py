"""Telling a C++ hook of ``DDP.join()``, of which DDP tells no hook."""

import weakref
from typing import Any

from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel


class JoinWatch:
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
