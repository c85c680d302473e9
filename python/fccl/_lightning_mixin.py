"""What fccl changes in Lightning's ``DDPStrategy``, free of any Lightning import.

``lightning.pytorch`` and ``pytorch_lightning`` are separate class hierarchies with a registry each, so the
difference lives here once, and ``fccl.lightning`` and ``fccl.pytorch_lightning`` each put it in front of
their own ``DDPStrategy``. Everything that is not here is Lightning's.

Importing or unpickling anything of this package registers the backend "fccl", in spawned children too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from . import _tensor_ops, direct, hooks, memory
from ._object_broadcast import broadcast_object

T = TypeVar("T")

# Releases of Lightning on PyPI that had been tampered with.
_COMPROMISED_RELEASES = ("2.6.2", "2.6.3")

# Names must be lower case and must not contain "ddp", which Lightning treats specially.
_REGISTERED = (("fccl", "popen"), ("fccl_spawn", "spawn"), ("fccl_fork", "fork"), ("fccl_notebook", "fork"))


def import_lightning(name: str, distribution: str) -> Any:
    """Imports Lightning's module ``name`` for the strategy on top of it.

    Args:
        name: for example "lightning.pytorch.strategies".
        distribution: the installed package it comes from.

    Raises:
        ImportError: Lightning is not installed, or is one of the compromised releases.
    """
    wanted = "install it with: pip install 'fccl[lightning]'"
    try:
        version = importlib.metadata.version(distribution)
        if version in _COMPROMISED_RELEASES:
            raise ImportError(f"{distribution} {version} is a compromised release: remove it and {wanted}")
        return importlib.import_module(name)
    except ModuleNotFoundError as error:  # importlib.metadata's own error is one, too
        if (error.name or distribution).partition(".")[0] not in (distribution, name.partition(".")[0]):
            raise  # Lightning is there; something that it needs is not
        raise ImportError(
            f"fccl's Lightning strategy needs the package '{distribution}'; {wanted}"
        ) from error


class FcclStrategyMixin:
    """Sends a ``DDPStrategy``'s communication to fccl. Goes before a ``DDPStrategy`` among the bases."""

    if TYPE_CHECKING:
        root_device: torch.device
        is_global_zero: bool
        model: Any
        _process_group_backend: str | None
        _ddp_comm_state: object | None
        _ddp_comm_hook: Any
        _ddp_comm_wrapper: Callable[..., Any] | None

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Any = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = "fccl",
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        """As Lightning's ``DDPStrategy``, with these differences.

        Args:
            accelerator: as in Lightning.
            parallel_devices: as in Lightning.
            cluster_environment: as in Lightning.
            checkpoint_io: as in Lightning.
            precision_plugin: as in Lightning.
            ddp_comm_state: state handed to a Python hook.
            ddp_comm_hook: one of fccl's hooks (``fccl.hooks.BF16Compress()``) or any Python callable
                ``hook(state, bucket)``, a ``functools.partial`` included. Registered on the CPU too.
            ddp_comm_wrapper: wraps the hook, as torch's ``fp16_compress_wrapper`` does.
            model_averaging_period: as in Lightning.
            process_group_backend: "fccl" unless given. Another backend is respected.
            timeout: of the process group.
            start_method: how the launcher starts processes.
            **kwargs: for ``torch.nn.parallel.DistributedDataParallel``.
        """
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend or "fccl",
            timeout=timeout,
            start_method=start_method,
            **kwargs,
        )  # type: ignore[call-arg]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this class as "fccl", "fccl_spawn", "fccl_fork" and "fccl_notebook".

        Each of these also with "_find_unused_parameters_true" and "_find_unused_parameters_false".
        """
        for name, start_method in _REGISTERED:
            strategy_registry.register(
                name,
                cls,
                description=f"DDP over fccl with `start_method` '{start_method}'",
                override=True,
                start_method=start_method,
            )
            for unused in (False, True):
                strategy_registry.register(
                    f"{name}_find_unused_parameters_{str(unused).lower()}",
                    cls,
                    description=f"`{name}` with `find_unused_parameters` as {unused}",
                    override=True,
                    start_method=start_method,
                    find_unused_parameters=unused,
                )

    def setup_distributed(self) -> None:
        """Initialises the process group, unless there is one already: then says if it is another backend."""
        wanted = self._process_group_backend
        existed = _is_initialized()
        super().setup_distributed()  # type: ignore[misc]
        if existed:
            self._report_other_backend(wanted)
        else:
            # Leave while the interpreter is whole, so that no peer takes this exit for a death. This form
            # also runs in children of multiprocessing, where atexit's does not.
            Finalize(None, _destroy_process_group, exitpriority=0)

    def _report_other_backend(self, wanted: str | None) -> None:
        present = dist.get_backend()
        if present == wanted:
            return
        self._process_group_backend = present
        if self.is_global_zero:
            warnings.warn(
                f"{type(self).__name__}(process_group_backend={wanted!r}): a process group with backend"
                f" {present!r} exists already in this process and is used as it is, with the timeout it was"
                " made with. To change the backend, call torch.distributed.destroy_process_group() first or"
                " start a new process.",
                stacklevel=3,
            )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over all ranks with one collective and no barrier.

        Args:
            tensor: the tensor; anything else is returned unchanged.
            group: the process group; the default group if None.
            reduce_op: "mean" or "avg", "sum", another operation's name, or a ``ReduceOp``.

        Returns:
            ``tensor``, reduced in place; 16-bit means are accumulated in fp32. The mean of integers or bools
            is a new floating-point tensor, so that it is the true mean.
        """
        if not isinstance(tensor, Tensor) or not _is_initialized():
            return tensor
        return _tensor_ops.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``decision`` is true on all ranks (``all``) or on any, with one collective."""
        vote = torch.tensor(int(bool(decision)), dtype=torch.int32, device=self._control_device())
        return bool(self.reduce(vote, reduce_op="min" if all else "max"))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers a tensor of the same shape ``[...]`` from all ranks into a new one, ``[world, ...]``.

        With ``sync_grads``, each rank's tensor receives the sum of all ranks' gradients for its slice.
        """
        if not _is_initialized():
            return tensor
        return _tensor_ops.all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Broadcasts an object from global rank ``src``.

        A tensor is not pickled. It arrives on the CPU if it was there at ``src``, else on this rank's device.
        """
        if not _is_initialized():
            return obj
        result: T = broadcast_object(obj, src, self._control_device(), self.root_device)
        return result

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits until every rank has come here. Arguments, a name for example, are Lightning's and not used."""
        if self.root_device.type == "cpu" and _is_initialized():
            direct.barrier()
        else:
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    def _control_device(self) -> torch.device:
        """Where a few bytes travel best: on the host, if the default group can do that."""
        on_host = _is_initialized() and dist.get_backend() in ("fccl", "gloo")
        return torch.device("cpu") if on_host else self.root_device

    def _setup_model(self, model: Any) -> Any:
        """Makes the ``DistributedDataParallel``, with its gradient buckets in memory that the ranks share."""
        if self.root_device.type != "cpu" or not _is_initialized() or dist.get_backend() != "fccl":
            return super()._setup_model(model)  # type: ignore[misc]
        with memory.shared_buckets():
            return super()._setup_model(model)  # type: ignore[misc]

    def _register_ddp_hooks(self) -> None:
        # Lightning's own method drops a hook without a word if the device is not CUDA.
        hook, state, wrapper = self._ddp_comm_hook, self._ddp_comm_state, self._ddp_comm_wrapper
        if hook is None:
            return
        if isinstance(hook, type) or not callable(hook):
            hooks.check_hook(hook, "DDPStrategy(ddp_comm_hook=...)")
        if isinstance(hook, hooks.GradientHook):
            if state is None and wrapper is None:
                hooks.register(self.model, hook)
                return
            hook = hook.as_python_hook()
        hook = _with_name(hook)
        if wrapper is not None:
            hook = wrapper(hook)
        self.model.register_comm_hook(state, _as_accepted_by_ddp(hook))


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _destroy_process_group() -> None:
    if _is_initialized() and dist.get_backend() == "fccl":
        dist.destroy_process_group()


def _with_name(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, or a function around it if it has no name: wrappers, DDP and its logging data want one."""
    if hasattr(hook, "__name__") and hasattr(hook, "__qualname__"):
        return hook
    inner = getattr(hook, "func", hook)  # of a functools.partial
    return _renamed(hook, getattr(inner, "__qualname__", type(inner).__qualname__))


def _as_accepted_by_ddp(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` with a name that DDP takes.

    DDP refuses hooks named bf16_compress_hook wherever torch lacks NCCL. fccl adds bfloat16 on the CPU.
    """
    hook = _with_name(hook)
    if hook.__name__.startswith("bf16_compress") and dist.get_backend() == "fccl":
        return _renamed(hook, hook.__qualname__)
    return hook


def _renamed(hook: Callable[..., Any], qualname: str) -> Callable[..., Any]:
    def comm_hook(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    comm_hook.__qualname__ = qualname
    comm_hook.__signature__ = inspect.signature(hook)  # type: ignore[attr-defined]  # DDP checks annotations
    return comm_hook
