"""``fccl bench``: the command."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

from fccl import _machine
from fccl._interruptible import until_interrupted
from fccl.bench.config import TRAIN, BenchConfig, Row, SizeOutcome
from fccl.bench.options import settle
from fccl.bench.plan import OPERATIONS, make_config, make_meta
from fccl.bench.plot import check_plot, write_plot
from fccl.bench.sizes import ITEM_SIZE, format_size, parse_dtype, parse_size
from fccl.bench.train import run_train

__all__ = ["add_parser", "note_cores", "note_moved_cores", "run"]

_DESCRIPTION = """\
Measures a collective, or messages, on this machine, in processes of its own, and compares backends.

All backends are measured in the same processes and take turns every few iterations, in an
order that is shuffled anew each time, so that whatever else the machine does hits all of them alike.
Every rank has one thread.
"""

_EPILOG = """\
what the columns mean (they follow nccl-tests, doc/PERFORMANCE.md)
  size     bytes: all_reduce, reduce and broadcast: the tensor; send_recv: a message; the others: the
           pieces of all ranks together. K, M and G are powers of 1024. Rounded down to whole
           elements, for pieces to 16 bytes each.
  count    elements of the tensor, or of one piece
  time     median over the iterations, in microseconds; an iteration takes as long as its slowest
           rank
  min      the fastest iteration
  algbw    size / time, in GB/s (10^9 bytes)
  busbw    algbw times 2(n-1)/n for all_reduce, (n-1)/n for what has pieces, 1 for the others (n
           ranks): what each rank's link would have to carry, which can be compared across numbers
           of ranks
  #wrong   wrong elements on all ranks. Inputs are whole numbers whose sums are exact in the dtype, so
           the tolerance is zero. Every buffer is checked whole before and after the timed iterations
           (--check every: in each of them too). For barrier: ranks that left before another had
           entered.
  ratio    time / time of the first backend: "gloo 5 x" means that Gloo takes five times as long

memcpy and add are physical yardsticks, over the same working set and on all ranks at the same moment.
memcpy: every rank copies the message once with the C library's memcpy; of what has pieces, those that a
rank must receive from others. add: an in-place add of two thirds of that, which makes as much traffic as
an all_reduce that copies nothing.

the working set
  Each call takes the next buffer of a rotation; a single buffer would measure the cache. Messages
  above 1 MiB rotate over 4 times the last-level cache (all ranks together, at least 4 buffers, at
  most half of the available memory), smaller ones over 8 buffers, which stay in the cache as a
  gradient that was just computed does. --working-set sets it for all sizes. Pages are ordinary ones
  (4 KiB) unless --huge-pages is given.

examples
  fccl bench all_reduce
  fccl bench all_reduce --ranks 4 --begin 1K --end 16M --factor 16 --dtype bfloat16
  fccl bench all_gather --form list --begin 64M --json all_gather.json
  fccl bench barrier --ranks 2
  fccl bench send_recv --form pingpong --end 1M --plot pingpong.png
  fccl bench train --models mlp,transformer
  fccl bench all_reduce --arena --compare gloo,memcpy,add --begin 1M
  fccl bench all_reduce --compare gloo --json - > result.json

exit status
  0 all results right; 1 a wrong result; 2 cannot run as asked; 3 a rank failed or died;
  130 interrupted
"""


_INTERRUPTED = "fccl bench: interrupted; all ranks have been ended"


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _dtype(text: str) -> str:
    try:
        return parse_dtype(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of ``fccl``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a collective and compare it with Gloo and with memcpy",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "op",
        metavar="OP",
        choices=(*OPERATIONS, TRAIN),
        help=", ".join(OPERATIONS) + f"; or {TRAIN}: steps of training",
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--ranks", type=int, default=2, metavar="N", help="number of processes (default 2)")
    what.add_argument(
        "--begin", type=_size, metavar="SIZE", help="smallest size, such as 4 or 1K (default 4)"
    )
    what.add_argument("--end", type=_size, metavar="SIZE", help="largest size (default 64M)")
    what.add_argument("--factor", type=int, help="factor from one size to the next (default 4)")
    what.add_argument("--dtype", type=_dtype, help=", ".join(ITEM_SIZE) + " (default float32)")
    what.add_argument("--op", dest="redop", help="sum, avg, prod, min, max, band, bor, bxor (default sum)")
    what.add_argument("--root", type=int, help="root of broadcast, reduce, gather and scatter (default 0)")
    what.add_argument(
        "--form",
        choices=("tensor", "list", "ring", "pingpong"),
        help="all_gather: into one tensor (default) or into a list; send_recv: ring, each rank to the next "
        "(default), or pingpong, from rank 0 to rank 1 and back",
    )
    what.add_argument(
        "--mode",
        choices=("sync", "async"),
        help="sync: the call blocks; async: async_op=True and then wait(), timed together (default sync)",
    )
    what.add_argument("--async", dest="mode", action="store_const", const="async", help="--mode async")
    what.add_argument("--backend", metavar="NAME", help="the backend to measure (default fccl)")
    what.add_argument(
        "--compare",
        metavar="NAMES",
        help="what to compare it with: torch backends, memcpy and add, separated by commas; '' for nothing "
        "(default gloo,memcpy; for train gloo)",
    )
    what.add_argument(
        "--direct",
        action="store_const",
        const=True,
        help="measure fccl also without torch's Python wrapper (fccl.all_reduce and so on), as 'fccl-direct'",
    )
    what.add_argument(
        "--arena",
        action="store_const",
        const=True,
        help="measure fccl also on tensors in memory that the ranks share (fccl.empty), as 'fccl-arena'",
    )
    training = parser.add_argument_group("train")
    training.add_argument(
        "--models",
        metavar="NAMES",
        help="what to train (default mlp,cnn,transformer)",
    )
    training.add_argument("--steps", type=int, metavar="N", help="timed steps (default 30)")
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--iters", type=int, metavar="N", help="timed iterations per size, instead of --min-time"
    )
    how.add_argument(
        "--min-time",
        type=float,
        metavar="S",
        help="seconds of measuring per size, all backends together; 10 to 5000 iterations (default 1)",
    )
    how.add_argument("--warmup", type=int, default=5, metavar="N", help="untimed rounds before (default 5)")
    how.add_argument(
        "--working-set", type=_size, metavar="SIZE", help="bytes to rotate over, all ranks together"
    )
    how.add_argument(
        "--huge-pages", action="store_const", const=True, help="ask for 2 MiB pages (transparent huge pages)"
    )
    how.add_argument(
        "--check",
        choices=("ends", "every", "none"),
        help="check every buffer before and after the timed iterations, in each of them too, or never "
        "(default ends)",
    )
    how.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that one collective may take (default 60)",
    )
    how.add_argument(
        "--corrupt",
        metavar="BACKEND",
        help="damage one element of each of BACKEND's results, to see for yourself that the check finds it",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--json",
        metavar="FILE",
        help="write the results as JSON; '-' writes them to standard output and everything else to "
        "standard error",
    )
    out.add_argument(
        "--plot",
        metavar="FILE",
        help="draw time and bus bandwidth against size; the file's ending says the format (.png, .svg, .pdf)",
    )
    out.add_argument("--verbose", action="store_true", help="show the Python traceback of a rank that fails")
    parser.set_defaults(run=run)


def _print_start(config: BenchConfig, meta: dict[str, Any], notes: list[str], out: IO[str]) -> None:
    ranks = f"{config.ranks} rank{'s' if config.ranks > 1 else ''}"
    print(f"# fccl {meta['fccl']}, torch {meta['torch']}: {config.op} ({config.row_mode}), {ranks}", file=out)
    cache = format_size(meta["last_level_cache_bytes"]) if meta["last_level_cache_bytes"] else "unknown"
    print(f"# {meta['cpu']}, {meta['cores']} cores, last-level cache {cache}", file=out)
    if config.plans[-1].size:
        plans = {plan.size: plan for plan in (config.plans[0], config.plans[-1])}.values()
        parts = [
            f"{plan.buffers} buffers per rank at {format_size(plan.size)} "
            f"({format_size(plan.working_set)} in all)"
            for plan in plans
        ]
        print(f"# rotating over {', '.join(parts)}; {meta['pages']} pages", file=out)
    load = meta["load_average_before"]
    busy = (
        "; the machine is busy, and numbers may be larger than they need be"
        if load > meta["cores"] / 2
        else ""
    )
    print(f"# load average before the run: {load:.2f}{busy}", file=out)
    note_cores(meta, out)
    print("# one thread per rank for every backend; backends take turns every few iterations", file=out)
    if config.ranks > meta["cores"]:
        print(f"# more ranks than cores ({config.ranks} on {meta['cores']}): they share them", file=out)
    if config.corrupt:
        print(f"# one element of each result of {config.corrupt} is damaged on purpose (--corrupt)", file=out)
    for note in notes:
        print(f"# note: {note}", file=out)


def _warn_inner(engines: dict[str, dict[str, str]], ranks: int, out: IO[str]) -> None:
    engine = engines.get("fccl")
    # A group of one rank has nothing to carry.
    if engine is None or engine["engine"] == "shared-memory" or ranks == 1:
        return
    line = "!" * 98
    why = engine["why"] or "it does not say why"
    print(
        f"{line}\n! fccl did NOT run on shared memory: its inner engine (Gloo) carried the calls, so these\n"
        f"! numbers are Gloo's, with an exchange of the calls' descriptions before each. Reason: {why}\n{line}",
        file=out,
        flush=True,
    )


def _note_first(outcome: SizeOutcome, ranks: int, meta: dict[str, Any], out: IO[str]) -> None:
    """Reports what only the first calls show: who refuses, and what carries the calls."""
    for name, why in outcome.dropped.items():
        print(f"# note: {name} does not do this and is left out: {why}", file=out)
    _warn_inner(outcome.engines, ranks, out)
    meta["engines"] = {name: engine["engine"] for name, engine in outcome.engines.items()}
    meta["why_inner"] = outcome.engines.get("fccl", {}).get("why", "")
    meta["dropped"] = outcome.dropped


def note_cores(meta: dict[str, Any], out: IO[str]) -> None:
    """Says how far apart the cores are, on which much depends."""
    apart = _machine.format_handover(meta["handover_ns_before"])
    if apart:
        print(f"# a cache line goes from core to core in {apart}", file=out)


def note_moved_cores(meta: dict[str, Any], out: IO[str]) -> None:
    """A virtual machine's cores may be moved in the middle of a run, to where they share less."""
    before, after = meta["handover_ns_before"], _machine.handover_ns()
    meta["handover_ns_after"] = after
    if before and after and not 1 / 1.5 < after[1] / before[1] < 1.5:
        print(
            f"# note: a cache line went from core to core in {_machine.format_handover(before)} before the run and in "
            f"{_machine.format_handover(after)} after it: the cores have been moved, and the run may mix two machines",
            file=out,
        )


def run(args: argparse.Namespace, command_line: list[str]) -> int:
    """Runs the command; returns the exit status."""
    out = sys.stderr if args.json == "-" else sys.stdout
    try:
        settle(args)
    except ValueError as error:
        print(f"fccl bench: {error}", file=sys.stderr)
        return 2
    if args.op == TRAIN:
        return until_interrupted(lambda: run_train(args, command_line, out), _INTERRUPTED)
    notes: list[str] = []
    try:
        config = make_config(args, notes)
        if args.plot is not None:
            check_plot(args.plot)
        if "fccl" in config.backends:
            from fccl import _extension

            _extension.load()
    except (ValueError, ImportError) as error:
        print(f"fccl bench: {error}", file=sys.stderr)
        return 2
    meta = make_meta(config, command_line)
    _print_start(config, meta, notes, out)

    return until_interrupted(lambda: _measure(config, meta, args, out), _INTERRUPTED)


@contextlib.contextmanager
def _progress(sizes: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, if tqdm is there; the function that it gives is called after each size."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    # Gone when the table's next lines are printed, drawn again below them.
    with tqdm(total=sizes, unit="size", leave=False, disable=not sys.stderr.isatty()) as bar:

        def step() -> None:
            bar.update()
            bar.clear()

        bar.refresh()
        yield step


def _measure(config: BenchConfig, meta: dict[str, Any], args: argparse.Namespace, out: IO[str]) -> int:
    from fccl.bench.cases import CASES
    from fccl.bench.report import Table, make_rows, write_json
    from fccl.bench.runner import RankFailure, combine, run_parts

    case = CASES[config.op]
    table = Table(config, case.reduces, out)
    rows: list[Row] = []
    status = 0
    try:
        # closing(): however this loop is left, the ranks have ended when it has been left.
        with contextlib.closing(run_parts(config)) as parts, _progress(len(config.plans)) as step:
            for plan, said in zip(config.plans, parts, strict=True):
                step()
                outcome = combine(said)
                if plan is config.plans[0]:
                    _note_first(outcome, config.ranks, meta, out)
                    table.head()
                new_rows = make_rows(config, plan, outcome, case.busbw_factor(config.ranks))
                table.size(plan, new_rows)
                rows += new_rows
                meta["sizes"].append(
                    {
                        "bytes": plan.size,
                        "count": plan.count,
                        "buffers_per_rank": plan.buffers,
                        "working_set_bytes": plan.working_set,
                        "iterations": len(outcome.times[config.backends[0]]),
                        "checked_calls": outcome.checked,
                    }
                )
    except RankFailure as failure:
        print(f"fccl bench: {config.op} failed; all ranks have been ended\n{failure}", file=sys.stderr)
        if args.verbose:
            for rank, trace in failure.tracebacks.items():
                print(f"--- rank {rank} ---\n{trace}", file=sys.stderr)
        meta["error"] = str(failure)
        status = 3
    note_moved_cores(meta, out)
    wrong = {row.backend: 0 for row in rows}
    for row in rows:
        wrong[row.backend] += row.wrong
    if "fccl" in meta["engines"]:  # once more below the table, where it is seen
        _warn_inner(
            {"fccl": {"engine": meta["engines"]["fccl"], "why": meta["why_inner"]}}, config.ranks, out
        )
    for name, count in wrong.items():
        if count:
            print(f"# WRONG: {count} wrong elements from {name}", file=out)
            status = status or 1
    if status == 0 and config.check != "none":
        print("# all results right", file=out)
    if args.json is not None:
        write_json(args.json, meta, rows)
    if args.plot is not None and rows:
        title = f"{config.op} ({config.row_mode}), {config.ranks} ranks, {config.dtype}, {meta['cpu']}"
        write_plot(args.plot, title, rows)
        print(f"# drawn: {args.plot}", file=out)
    return status
