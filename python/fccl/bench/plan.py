"""From the command line to a plan of the run, with every reason why it cannot be done."""

from __future__ import annotations

import argparse
import datetime
import sys
from typing import Any

from fccl import _machine
from fccl._version import __version__
from fccl.bench.config import ARENA, DIRECT, YARDSTICKS, BenchConfig, SizePlan
from fccl.bench.sizes import ITEM_SIZE, sweep

__all__ = ["OPERATIONS", "known_backends", "make_config", "make_meta"]

#: Names of the operations, the keys of `fccl.bench.cases.CASES` (which needs torch, and this does not).
OPERATIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
)

# Where the kernel does not tell the size of the last-level cache.
_ASSUMED_CACHE = 32 << 20


def known_backends() -> list[str]:
    """The torch backends that can be measured here."""
    import torch.distributed as dist

    known = ["fccl"]
    if dist.is_gloo_available():
        known.append("gloo")
    if dist.is_mpi_available():
        known.append("mpi")
    return known


def _backends(args: argparse.Namespace) -> list[str]:
    known = known_backends()
    if args.backend not in known:
        raise ValueError(f"--backend: unknown backend {args.backend!r}; here there are {', '.join(known)}")
    names = [args.backend]
    for name in filter(None, (part.strip() for part in args.compare.split(","))):
        if name not in [*known, *YARDSTICKS]:
            raise ValueError(
                f"--compare: unknown backend {name!r}; here there are {', '.join([*known, *YARDSTICKS])}"
            )
        if name not in names:
            names.append(name)
    # After fccl on ordinary tensors, where that is measured.
    place = names.index("fccl") + 1 if "fccl" in names else len(names)
    names[place:place] = [name for name, asked in ((DIRECT, args.direct), (ARENA, args.arena)) if asked]
    return names


def make_config(args: argparse.Namespace, notes: list[str]) -> BenchConfig:
    """Checks the arguments and plans the run; remarks for the user are appended to `notes`.

    Raises:
        ValueError: the run cannot be done as asked; the message is for people.
    """
    from fccl.bench.buffers import planned_buffers
    from fccl.bench.case import SharedCase
    from fccl.bench.cases import CASES
    from fccl.bench.pattern import check_op

    case = CASES[args.op]
    backends = _backends(args)
    if args.ranks < case.least_ranks:
        raise ValueError(f"--ranks must be at least {case.least_ranks}, not {args.ranks}")
    if not 0 <= args.root < args.ranks:
        raise ValueError(f"--root must be a rank, 0 to {args.ranks - 1}, not {args.root}")
    if args.iters is not None and args.iters < 1:
        raise ValueError(f"--iters must be at least 1, not {args.iters}")
    if args.warmup < 0 or args.min_time < 0 or args.timeout <= 0:
        raise ValueError("--warmup and --min-time must not be negative, and --timeout must be positive")
    form = args.form or case.forms[0]
    if form not in case.forms:
        forms = " or ".join(case.forms) if len(case.forms) > 1 else ""
        raise ValueError(
            f"--form: {args.op} has "
            + (f"the forms {forms}" if forms else "one form only, which has no name")
        )
    if args.direct and (form not in case.direct_forms or args.mode != "sync"):
        raise ValueError(
            f"--direct: fccl has all_reduce, all_gather (--form tensor), broadcast and barrier, synchronous, not "
            f"{args.op}" + (f" --form {form}" if form else "") + f" --mode {args.mode}"
        )
    if args.mode == "async" and form == "pingpong":
        raise ValueError("--form pingpong is synchronous: one message must be there before the next is sent")
    if args.corrupt is not None and args.corrupt not in backends:
        raise ValueError(
            f"--corrupt: {args.corrupt!r} is not among the measured backends ({', '.join(backends)})"
        )
    if case.reduces:
        check_op(args.dtype, args.redop)
    for name in YARDSTICKS:
        if not case.moves_data and name in backends:
            backends.remove(name)
            notes.append(f"{args.op} moves no data: there is nothing to compare with {name}")

    item_size = ITEM_SIZE[args.dtype]
    plans: list[SizePlan] = []
    if not case.moves_data:
        plans.append(SizePlan(0, 0, 1, 0))
    else:
        memory = _machine.available_memory() // 2
        cache = _machine.last_level_cache_bytes() or _ASSUMED_CACHE
        skipped = []
        for asked in sweep(args.begin, args.end, args.factor):
            count = case.count_for(asked, item_size, args.ranks)
            size = case.size_for(count, item_size, args.ranks)
            if count == 0:
                skipped.append(str(asked))
                continue
            if plans and plans[-1].size == size:
                continue
            per_call = sum(case.layout(count, args.ranks, form).tensors) * item_size
            buffers = planned_buffers(
                per_call,
                size,
                args.ranks,
                cache=cache,
                memory=memory // 2 if args.arena else memory,
                working_set=args.working_set,
            )
            plans.append(SizePlan(size, count, buffers, buffers * per_call * args.ranks))
        if skipped:
            least = case.size_for(
                max(1, 16 // item_size) if issubclass(case, SharedCase) else 1, item_size, args.ranks
            )
            notes.append(
                f"left out {', '.join(skipped)} bytes: {args.op} of {args.dtype} on {args.ranks} ranks "
                f"needs at least {least}"
            )
        if not plans:
            raise ValueError(f"no size to measure: {notes[-1]}")
    return BenchConfig(
        op=args.op,
        form=form,
        ranks=args.ranks,
        dtype=args.dtype,
        redop=args.redop,
        root=args.root,
        backends=backends,
        mode=args.mode,
        plans=plans,
        iterations=args.iters,
        min_time=args.min_time,
        warmup=args.warmup,
        check=args.check,
        timeout=args.timeout,
        huge_pages=args.huge_pages,
        corrupt=args.corrupt,
    )


def make_meta(config: BenchConfig, command_line: list[str]) -> dict[str, Any]:
    """The "meta" part of the JSON file, without what only the run itself can tell."""
    import torch

    return {
        "fccl": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "command_line": ["fccl", *command_line],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _machine.cpu_model(),
        "cores": _machine.core_count(),
        "last_level_cache_bytes": _machine.last_level_cache_bytes(),
        "load_average_before": _machine.load_average(),
        "handover_ns_before": _machine.handover_ns(),
        "threads_per_rank": 1,
        "pages": "huge (asked for)" if config.huge_pages else "ordinary",
        "redop": config.redop,
        "check": config.check,
        "engines": {},
        "dropped": {},
        "sizes": [],
    }
