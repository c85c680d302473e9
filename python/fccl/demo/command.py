"""``fccl demo``: the command."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from fccl import _machine
from fccl._interruptible import until_interrupted
from fccl._version import __version__

__all__ = ["add_parser", "run"]

_RANKS = 2

_DESCRIPTION = """\
Trains a perceptron with 2.5 million parameters on the handwritten digits that scikit-learn ships
(1797 real images, nothing is downloaded), with Lightning's Trainer(strategy="fccl", devices=2), and
then the same with Gloo: the same seed, one thread per rank, each run in processes of its own. Then
it compares the two.
"""

_EPILOG = """\
what the lines of the table mean
  test accuracy         share of the 360 test images that are recognised; must reach --min-accuracy
  median step           from the end of one training step to the end of the next, everything
                        included: loading the batch, forward, backward, optimizer, progress bar. Of
                        each step the slowest rank's time; the first five steps and the first of each
                        epoch are left out.
  gradient all-reduce   what a step waits for it: from the moment when a rank has computed its last
                        gradient until backward() returns, which is when all buckets have been
                        reduced; median of the slowest rank's. Waiting for a slower rank is in it,
                        what hides behind the backward pass is not. Measured with a hook on the first
                        layer's gradients, the same way in both runs.
  collectives per step  all that the default process group has begun, by its own sequence number,
                        gradient buckets included. The rest is Lightning's: at each batch it asks all ranks
                        whether to stop.

In float32 on two ranks the mean of two gradients is one addition and an exact halving: both runs must
agree to the bit, step by step and on every rank.

exit status
  0 all well; 1 the runs' losses or any rank's weights differ, an accuracy is too low, or fccl did not
  run on shared memory; 2 cannot run (what is missing is said); 3 a run failed; 130 interrupted
"""

# Left over from a surrounding launcher, these would make Lightning believe that the ranks exist already.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
)


class RunFailure(RuntimeError):
    """A training run did not come to its end."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser of ``fccl``."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small model with fccl and with Gloo, side by side",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, metavar="N", help="epochs of each run (default 15)")
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N", help="training steps of each run, instead of epochs"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="images per batch and rank (default 32)"
    )
    parser.add_argument("--seed", type=int, default=2, help="seed of both runs (default 2)")
    parser.add_argument(
        "--min-accuracy",
        type=float,
        default=0.95,
        metavar="A",
        help="test accuracy that both must reach (default 0.95)",
    )
    parser.add_argument("--no-progress", action="store_true", help="without Lightning's progress bar")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds for each run (default 300)"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the results as JSON; '-' writes them to standard output and everything else to "
        "standard error",
    )
    parser.set_defaults(run=run)


def _missing() -> list[str]:
    """The packages that the demo needs and that are not installed."""
    packages = {"lightning": "lightning", "sklearn": "scikit-learn"}
    return [package for module, package in packages.items() if importlib.util.find_spec(module) is None]


def _worker_command(backend: str, folder: Path, args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "fccl.demo.worker", "--backend", backend, "--out", str(folder)]
    command += ["--epochs", str(args.epochs), "--steps", str(args.steps)]
    command += ["--batch-size", str(args.batch_size), "--seed", str(args.seed)]
    return command + (["--no-progress"] if args.no_progress else [])


def train_once(backend: str, args: argparse.Namespace, stdout: int) -> list[dict[str, Any]]:
    """Makes one run in its own process tree; returns the records of its ranks.

    Raises:
        RunFailure: it failed or took too long. None of its processes is left.
    """
    with tempfile.TemporaryDirectory(prefix=f"fccl-demo-{backend}-") as name:
        folder = Path(name)
        environment = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
        environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        process = subprocess.Popen(
            _worker_command(backend, folder, args), env=environment, stdout=stdout, start_new_session=True
        )
        try:
            code = process.wait(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            raise RunFailure(f"the {backend} run did not end within {args.timeout:g} s") from None
        finally:
            # Whatever happened, no process of the run's session is left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            how = f"exit status {code}" if code > 0 else f"signal {-code}"
            raise RunFailure(f"the {backend} run failed ({how}); what it said is above")
        files = [folder / f"rank{rank}.json" for rank in range(_RANKS)]
        absent = [rank for rank, file in enumerate(files) if not file.exists()]
        if absent:
            raise RunFailure(f"the {backend} run ended without the results of rank {absent[0]}")
        return [json.loads(file.read_text()) for file in files]


def run(args: argparse.Namespace, command_line: list[str]) -> int:
    """Runs the command; returns the exit status."""
    out = sys.stderr if args.json == "-" else sys.stdout
    missing = _missing()
    if missing:
        print(
            f"fccl demo needs {' and '.join(missing)}, which this Python does not have: "
            "pip install 'fccl[demo]'",
            file=sys.stderr,
        )
        return 2
    if args.epochs < 1 or args.steps < 0 or args.batch_size < 1:
        print("fccl demo: --epochs and --batch-size must be at least 1, --steps at least 0", file=sys.stderr)
        return 2
    try:
        from fccl import _extension

        _extension.load()
    except ImportError as error:
        print(f"fccl demo: {error}", file=sys.stderr)
        return 2

    def compare() -> int:
        try:
            return _compare(args, command_line, out)
        except RunFailure as failure:
            print(f"fccl demo: {failure}", file=sys.stderr)
            return 3

    return until_interrupted(compare, "\nfccl demo: interrupted; all processes have been ended")


def _compare(args: argparse.Namespace, command_line: list[str], out: IO[str]) -> int:
    from fccl.demo.compare import Run, conclusion, differences, summarize, table

    runs: dict[str, Run] = {}
    for backend, strategy in (
        ("fccl", "Trainer(strategy='fccl')"),
        ("gloo", "Trainer(strategy='ddp'), over Gloo"),
    ):
        print(f"\n=== {strategy}, {_RANKS} processes ===", file=out, flush=True)
        runs[backend] = summarize(train_once(backend, args, 2 if out is sys.stderr else 1))
    fccl, gloo = runs["fccl"], runs["gloo"]
    wrong = differences(fccl, gloo, args.min_accuracy)

    print(
        f"\n=== side by side: {fccl.parameters / 1e6:.2f} million parameters, {_RANKS} ranks ===\n", file=out
    )
    print(table(fccl, gloo), file=out)
    if not wrong:
        steps = f"all {fccl.steps} losses of each rank"
        print(f"\n{steps} and the final weights of all ranks are equal to the bit in both runs.", file=out)
    print(f"\n{conclusion(fccl, gloo)}", file=out, flush=True)
    for each in wrong:
        print(f"NOT RIGHT: {each}", file=out)
    if args.json is not None:
        _write_json(args.json, fccl, gloo, wrong, command_line)
    return 1 if wrong else 0


def _write_json(path: str, fccl: Any, gloo: Any, wrong: list[str], command_line: list[str]) -> None:
    import torch

    document = {
        "meta": {
            "fccl": __version__,
            "torch": torch.__version__,
            "command_line": ["fccl", *command_line],
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "cpu": _machine.cpu_model(),
            "cores": _machine.core_count(),
        },
        "runs": {"fccl": fccl.to_dict(), "gloo": gloo.to_dict()},
        "step_ratio": round(gloo.step_ms / fccl.step_ms, 4) if fccl.step_ms else None,
        "gradient_all_reduce_ratio": round(gloo.wait_ms / fccl.wait_ms, 4) if fccl.wait_ms else None,
        "problems": wrong,
    }
    text = json.dumps(document, indent=1)
    if path == "-":
        print(text, flush=True)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")
