"""Checks and measures fccl's CUDA half on a machine with one GPU. Started by check.sh.

A row is printed as each stage ends, and the whole table last; it is also written to the output folder as gpu-check.md,
with everything that was said beside it in gpu-check.log. The exit status is 1 if any stage failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import signal
import sys
from pathlib import Path
from types import FrameType

import machine
import table
from stage import REPOSITORY, Outcome, Setting, Stage, run_stage
from stages import STAGES


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line.

    Args:
        arguments: without the program's name.
    """
    parser = argparse.ArgumentParser(prog="check.sh", description=__doc__)
    parser.add_argument("--list", action="store_true", help="say what stages there are, and run none")
    parser.add_argument(
        "--only", action="append", metavar="STAGE", default=[], help="run this stage (may be repeated)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the output folder; by default that which $OUT names, or 'out' in the work folder",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=REPOSITORY / "build" / "gpu-check",
        help="the folder for builds, kept from run to run",
    )
    parser.add_argument(
        "--arch", default="90", help="what to compile for, as FCCL_CUDA_ARCHITECTURES has it (90)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="FACTOR", help="multiplies all time limits"
    )
    parser.add_argument(
        "--installed",
        action="store_true",
        help="check the fccl that this Python has, and build only the standalone programs",
    )
    parser.add_argument("--stages", type=Path, help=argparse.SUPPRESS)  # a file with other STAGES, for tests
    return parser.parse_args(arguments)


def stages_of(file: Path | None) -> list[Stage]:
    """The stages, in order.

    Args:
        file: a Python file that has others; None: the usual ones.
    """
    if file is None:
        return STAGES
    spec = importlib.util.spec_from_file_location("other_stages", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.STAGES)


def chosen(stages: list[Stage], only: list[str]) -> list[Stage]:
    """Those that `--only` names, or all.

    Args:
        stages: all.
        only: names.

    Raises:
        SystemExit: there is no stage of a name.
    """
    names = [stage.name for stage in stages]
    for name in only:
        if name not in names:
            print(f"check.sh: there is no stage {name!r}; there are {', '.join(names)}", file=sys.stderr)
            raise SystemExit(2)
    return [stage for stage in stages if not only or stage.name in only]


def stop(number: int, _frame: FrameType | None) -> None:
    """Ends this process in the ordinary way, so that what it has started is ended too."""
    raise SystemExit(128 + number)


def main(arguments: list[str]) -> int:
    """Runs the stages; returns the exit status.

    Args:
        arguments: the command line, without the program's name.
    """
    options = parse(arguments)
    stages = chosen(stages_of(options.stages), options.only)
    if options.list:
        for line in table.aligned([[s.name, f"{s.seconds:.0f} s", s.what] for s in stages]):
            print(line)
        return 0
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    out: Path = options.out or Path(os.environ.get("OUT") or options.work / "out")
    out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    log = out.resolve() / "gpu-check.log"
    log.write_text("")
    gpu, why_not = machine.find_gpu(sys.executable)
    setting = Setting(
        python=sys.executable,
        work=options.work.resolve(),
        log=log,
        architectures=options.arch,
        jobs=options.jobs,
        installed=options.installed,
        patience=options.patience,
        gpu=gpu,
        why_no_gpu=why_not,
    )
    facts = [gpu or why_not, f"Python {platform.python_version()}", *machine.facts(sys.executable)]
    print("; ".join(facts), flush=True)
    print(table.line_of(table.HEADINGS), flush=True)
    results: list[tuple[str, Outcome]] = []
    try:
        for stage in stages:
            outcome = run_stage(stage, setting)
            results.append((stage.name, outcome))
            print(table.line_of(table.row_of(stage.name, outcome)), flush=True)
    finally:  # also when it is interrupted: what is known is kept
        page = table.document("fccl on a GPU", facts, results)
        (out / "gpu-check.md").write_text(page)
        print(f"\n{page}")
    return 1 if any(outcome.verdict.is_failure for _, outcome in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
