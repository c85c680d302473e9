"""Options of ``fccl bench`` that not every operation has: their defaults, and a word where one does not apply."""

from __future__ import annotations

import argparse
from typing import Any

from fccl.bench.config import TRAIN

__all__ = ["DEFAULTS", "settle"]

#: What holds for an option that is not given.
DEFAULTS: dict[str, Any] = {
    "begin": 4,
    "end": 64 << 20,
    "factor": 4,
    "dtype": "float32",
    "redop": "sum",
    "root": 0,
    "form": None,
    "mode": "sync",
    "backend": "fccl",
    "compare": "gloo,memcpy",
    "arena": False,
    "direct": False,
    "models": "mlp,cnn,transformer",
    "steps": 30,
    "iters": None,
    "min_time": 1.0,
    "working_set": None,
    "huge_pages": False,
    "check": "ends",
    "corrupt": None,
    "plot": None,
}
_TRAIN_COMPARE = "gloo"

_NAMES = {"redop": "--op", "mode": "--mode (or --async)"}
_OF_TRAIN = ("models", "steps")
_NOT_OF_TRAIN = tuple(name for name in DEFAULTS if name not in (*_OF_TRAIN, "compare"))
_OF_DATA = ("begin", "end", "factor", "dtype", "arena", "working_set", "huge_pages", "plot")


def settle(args: argparse.Namespace) -> None:
    """Fills in defaults, in place.

    Raises:
        ValueError: an option was given that the operation has no use for; the message is for people.
    """
    from fccl.bench.cases import CASES

    without: dict[str, str] = {}
    if args.op == TRAIN:
        without = dict.fromkeys(_NOT_OF_TRAIN, "train has models and steps, not messages")
    else:
        case = CASES[args.op]
        without = dict.fromkeys(_OF_TRAIN, f"only {TRAIN} has models and steps")
        if not case.moves_data:
            without.update(dict.fromkeys(_OF_DATA, f"{args.op} moves no data"))
        if not case.reduces:
            without["redop"] = f"{args.op} reduces nothing"
        if not case.rooted:
            without["root"] = f"{args.op} has no root"
    for name, why in without.items():
        if getattr(args, name) is not None:
            raise ValueError(
                f"{_NAMES.get(name, '--' + name.replace('_', '-'))} does not apply to {args.op}: {why}"
            )
    if args.begin is None and args.end is not None:
        args.begin = min(DEFAULTS["begin"], args.end)
    for name, default in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, _TRAIN_COMPARE if (args.op, name) == (TRAIN, "compare") else default)
