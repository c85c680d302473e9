#!/usr/bin/env python3
"""Run PyTorch's own distributed test-suite against any c10d backend.

The test methods are those of ``DistributedTest._DistTestBase`` in
``torch.testing._internal.distributed.distributed_test``, which is part of the
torch wheel; no file of the PyTorch repository is needed and no test code is
copied.  Each test runs in its own freshly started process group of
``--world-size`` ranks, as in PyTorch's CI, and is reported as
passed, failed or skipped, with the reason.

The suite knows only the backends built into PyTorch: decorators and test bodies
compare the backend's name with ``"gloo"``, ``"nccl"``, ``"mpi"`` and so on.  To
have a third-party backend tested like one of these, name the one it stands in
for with ``--claims``:

    # the CPU tests, the same set that gloo gets
    run_dist_suite.py --backend foo --import foo_backend --claims gloo
    # the CUDA tests, the same set that nccl gets (one GPU per rank)
    run_dist_suite.py --backend foo --import foo_backend --claims nccl
    # gloo's set and the CPU all_to_all tests, which PyTorch runs for mpi only
    run_dist_suite.py --backend foo --import foo_backend --claims gloo,mpi
    # the reference results, and a comparison with them
    run_dist_suite.py --backend gloo --json gloo.json
    run_dist_suite.py --backend foo --import foo_backend --baseline gloo.json

``--import MODULE`` names a module that calls ``Backend.register_backend`` when it
is imported.  It is imported in every rank, before the process group is made.

For a backend that is not built in, the following is patched at run time (see
``ADAPTATIONS``; each can be switched off with ``--no-adapt NAME`` to see what
stock PyTorch does):

    features           the name is put into the suite's tables of what the claimed
                       backend has and lacks
    profiler           collectives must show up in the profiler as "<name>:<op>"
    monitored-barrier  torch.distributed.monitored_barrier refuses any backend
                       not called "gloo"; that check is lifted
    ddp-backend-name   DDP's logging data call every third-party backend "custom"

Beyond what PyTorch's runner checks, a test also fails if any rank, not only rank
0, ends with an unexpected exit code.

The suite skips everything, CPU tests too, where there are GPUs but fewer than
ranks; hide them there with CUDA_VISIBLE_DEVICES= to run the CPU tests.

The exit status is 0 if nothing failed (with ``--baseline``: if every test that
passed there passed here, skip list aside), 1 otherwise, 2 for a usage error.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import platform
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from dist_suite import ADAPTATIONS, BUILT_IN, CONFIG_ENV, build_suite
from dist_suite_results import compare, read_skip_lists, run_test

# What the forkserver imports once, so that each rank starts in milliseconds.
# Not the backend, which may start threads, and not the suite, which is adapted.
PRELOAD = [
    "torch",
    "torch.testing._internal.common_distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.optim",
    "torch.profiler",
]


# A rank imports this file under this name before it unpickles a method of the class.
if __name__ == "__mp_main__" and CONFIG_ENV in os.environ:
    build_suite(json.loads(os.environ[CONFIG_ENV]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run PyTorch's distributed test-suite against a c10d backend.",
        epilog="See the comment at the top of this file for more.",
    )
    parser.add_argument(
        "--backend",
        default=os.environ.get("BACKEND", "gloo"),
        help="name of the backend (default: $BACKEND, else gloo)",
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="module to import, which registers the backend; may be repeated",
    )
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="DIR",
        help="directory to search for the modules to import; may be repeated",
    )
    parser.add_argument(
        "--claims",
        metavar="NAME[,NAME]",
        help="built-in backends whose tests to run; the first is what the backend "
        "is taken for where only one is possible (default: the backend itself, "
        "gloo for a third-party one)",
    )
    parser.add_argument(
        "--no-adapt",
        action="append",
        default=[],
        choices=ADAPTATIONS,
        help="leave out one of the adaptations; may be repeated",
    )
    parser.add_argument(
        "--profiler-prefix",
        metavar="NAME",
        help="collectives are profiled as NAME:op (default: the backend's name); for a "
        "backend that delegates to another",
    )
    parser.add_argument("--world-size", type=int, default=2, metavar="N")
    parser.add_argument(
        "--small-world",
        action="store_true",
        help="also run the tests of subgroups that PyTorch skips below 8 ranks; they need at least 3",
    )
    parser.add_argument("--select", default="", metavar="REGEX", help="only tests whose name matches")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="FILE",
        help="file with tests not to run: a name or shell pattern per line, "
        "optionally followed by '#' and the reason; may be repeated",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="SECONDS",
        help="for each test (default: %(default)s)",
    )
    parser.add_argument(
        "--start-method",
        choices=("auto", "spawn", "forkserver"),
        default="auto",
        help="auto: spawn where there is a GPU, else forkserver, which is several times faster",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="OMP_NUM_THREADS of each rank, 0 to leave it alone (default: 1)",
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--baseline", metavar="FILE", help="results of an earlier run to compare with")
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="keep the output of each test's ranks here (default: not kept)",
    )
    parser.add_argument("--list", action="store_true", help="list the tests, run nothing")
    parser.add_argument("--verbose", action="store_true", help="full failure reasons")
    options = parser.parse_args()
    if options.world_size < 1:
        parser.error("--world-size must be positive")
    if options.small_world and options.world_size < 3:
        parser.error("--small-world needs --world-size 3 or more")
    try:
        re.compile(options.select)
    except re.error as error:
        parser.error(f"--select: {error}")
    return options


def make_config(options: argparse.Namespace, scratch: str) -> dict:
    """Set the environment that the suite expects; return the ranks' options."""
    name = options.backend.lower()
    claims = options.claims or (name if name in BUILT_IN else "gloo")
    os.environ["WORLD_SIZE"] = str(options.world_size)
    os.environ["INIT_METHOD"] = f"file://{scratch}/shared_init_file"
    os.environ["TEMP_DIR"] = scratch
    # The suite leaves files in the temporary directory.  multiprocessing's own,
    # which it removes when the interpreter exits, must outlive the scratch one.
    multiprocessing.util.get_temp_dir()
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    if options.threads > 0:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    start_method = options.start_method
    if start_method == "auto":
        import torch

        # A GPU that the parent has touched is unusable after a fork.
        start_method = "spawn" if torch.cuda.is_available() else "forkserver"
    config = {
        "backend": name,
        "claims": [claim.strip().lower() for claim in claims.split(",")],
        "imports": options.imports,
        "paths": [os.path.abspath(path) for path in options.path],
        "adapt": [item for item in ADAPTATIONS if item not in options.no_adapt],
        "profiler_prefix": options.profiler_prefix,
        "small_world": options.small_world,
        "timeout": options.timeout,
        "start_method": start_method,
    }
    os.environ[CONFIG_ENV] = json.dumps(config)
    return config


def main() -> int:
    options = parse_arguments()
    skip_list = read_skip_lists(options.skip)
    baseline = {}
    if options.baseline:
        baseline = json.loads(Path(options.baseline).read_text())["tests"]

    with tempfile.TemporaryDirectory(prefix="dist_suite_") as scratch:
        os.mkdir(os.path.join(scratch, "barrier"))
        log_dir = os.path.abspath(options.log_dir or scratch)
        os.makedirs(log_dir, exist_ok=True)
        config = make_config(options, scratch)
        if config["start_method"] == "forkserver":
            multiprocessing.set_forkserver_preload(PRELOAD)
        suite = build_suite(config)
        import torch
        from torch.testing._internal import common_distributed

        common_distributed.logger.setLevel(logging.WARNING)

        names = [
            name for name in unittest.TestLoader().getTestCaseNames(suite) if re.search(options.select, name)
        ]
        if options.list:
            print("\n".join(names))
            return 0
        print(
            f"torch {torch.__version__}, backend {config['backend']} tested as "
            f"{'+'.join(config['claims'])}, {options.world_size} ranks, "
            f"{len(names)} tests",
            flush=True,
        )

        tests: dict[str, dict] = {}
        start = time.monotonic()
        for index, name in enumerate(names, 1):
            listed = [r for p, r in skip_list if fnmatch.fnmatchcase(name, p)]
            if listed:
                reason = "skip list" + (f": {listed[0]}" if listed[0] else "")
                record = {"status": "skipped", "seconds": 0.0, "reason": reason}
            else:
                with mock.patch.object(sys, "stdout", sys.stderr):
                    record = run_test(suite, name, log_dir)
            tests[name] = record
            print(
                f"[{index:3}/{len(names)}] {record['status']:7} "
                f"{record['seconds']:6.1f}s  {name}"
                + (f"  ({record['reason']})" if record["reason"] else ""),
                flush=True,
            )
            if options.verbose and record["status"] == "failed":
                print(record.get("detail", ""), flush=True)
        seconds = time.monotonic() - start

    count = {
        status: sum(record["status"] == status for record in tests.values())
        for status in ("passed", "failed", "skipped")
    }
    report = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "world_size": options.world_size,
        **config,
        **count,
        "seconds": round(seconds, 1),
        "tests": tests,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    good = compare(tests, baseline) if options.baseline else not count["failed"]
    print(
        f"\n{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped in {seconds:.0f} s"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
