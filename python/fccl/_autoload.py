"""Entry points through which torch finds the backend without ``import fccl`` in the program.

Spawned children re-import torch but not the user's main module before unpickling, so the
registration must come with torch. Importing this module has imported ``fccl``, which registers; the
functions only make sure of it.
"""

from __future__ import annotations


def register() -> None:
    """For the group ``torch.distributed.backends`` (torch 2.14 and later)."""
    from fccl import _registration

    _registration.register()


def autoload() -> None:
    """For the group ``torch.backends``, called by ``import torch`` itself.

    Whatever escaped from here would break every ``import torch`` on the machine, so nothing does:
    a program that wants fccl learns the reason from its own ``import fccl``.
    """
    try:
        register()
    except Exception:
        pass
