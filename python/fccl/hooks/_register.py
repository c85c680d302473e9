"""Attaching a hook to a model."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fccl import _extension
from fccl.hooks._base import GradientHook
from fccl.hooks._join import JoinWatch


def register(ddp: DistributedDataParallel, hook: GradientHook) -> None:
    """Makes ``hook`` exchange the gradients of ``ddp``, in the model's process group.

    Call it once per model, on every rank alike, before the first ``backward()``. The model keeps the hook
    alive, and shows its name in ``ddp._get_ddp_logging_data()["comm_hook"]``. A pickled or deep-copied model
    comes back without its hook, as with every hook of DDP.

    Args:
        ddp: the ``DistributedDataParallel`` instance itself; not the module in it, nor what
            ``torch.compile`` made of it.
        hook: one of this module's, ``AllReduce()`` for example.

    Raises:
        TypeError: ``ddp`` or ``hook`` is something else.
        RuntimeError: the model has a hook already, or reduces its gradients in compiled Python code, past any
            hook; or the hook has state and serves another model.
        ValueError: a pattern of ``BlockQuantize(exempt=[...])`` matches no parameter.
        ImportError: the compiled module is missing or was built for another torch.
    """
    _check_model(ddp)
    check_hook(hook, "fccl.hooks.register")
    extension = _extension.load()
    hook._prepare(ddp)
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
    hook._attach(ddp)
    ddp.logger._set_comm_hook_name(hook.name)
    ddp.join_hook = JoinWatch(ddp, join_state)  # type: ignore[method-assign]


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
