"""Warnings of the compiled module, shown at the line of the user's that they are about."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(str(module))) + os.sep for module in (__file__, torch.__file__)
)


def warn_user(message: str) -> None:
    """Warns at the innermost frame that is neither fccl's nor torch's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
