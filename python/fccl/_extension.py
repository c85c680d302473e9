"""Loading the compiled module, with messages for people."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import sys
import traceback
from types import ModuleType

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
_module: ModuleType | None = None


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _at_exit(module: ModuleType) -> None:
    """Threads are joined while the interpreter still works, and peers learn that this rank left, and why."""
    why = "its program has ended"
    # Set by an exception that nobody caught, before exit handlers run; in a session by any before.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    if error is not None:
        why = f"its program ended with {traceback.format_exception_only(type(error), error)[-1].strip()}"
    module.shutdown_all(why)


def load() -> ModuleType:
    """Imports ``fccl._C`` once and checks that it fits the installed torch.

    Returns:
        The module.

    Raises:
        ImportError: It was not built, or was built for another torch; says how to rebuild.
    """
    global _module
    if _module is not None:
        return _module
    import torch
    import torch.distributed

    if not torch.distributed.is_available():
        raise ImportError("fccl needs a torch built with distributed support, and this one is not")
    missing = ImportError(
        "fccl's compiled module is missing: it is not built. In fccl's source folder, with a C++20 "
        f"compiler, run: {_REBUILD}"
    )
    try:
        built_for = str(importlib.import_module("fccl._build").TORCH_VERSION)
    except ModuleNotFoundError:
        raise missing from None
    if importlib.util.find_spec("fccl._C") is None:
        raise missing
    # Before the module is loaded: against another torch it may do worse than not load.
    if _minor(built_for) != _minor(torch.__version__):
        raise ImportError(
            f"fccl was built for torch {built_for} and torch {torch.__version__} is installed; c10d has no "
            f"stable binary interface. In fccl's source folder run: {_REBUILD}"
        )
    try:
        module = importlib.import_module("fccl._C")
    except ImportError as error:
        raise ImportError(
            f"fccl's compiled module, built for torch {built_for}, does not load with torch "
            f"{torch.__version__}: {error}\nIn fccl's source folder run: {_REBUILD}"
        ) from error
    atexit.register(_at_exit, module)
    _module = module
    return module
