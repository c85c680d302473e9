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
import faulthandler
import fnmatch
import importlib
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

CONFIG_ENV = "DIST_SUITE_CONFIG"  # how the ranks learn about the options
SUITE_MODULE = "torch.testing._internal.distributed.distributed_test"
CRASH_GRACE_SECONDS = 10  # for the other ranks, once one has died of a signal
BUILT_IN = ("gloo", "nccl", "ucc", "mpi", "xccl")
ADAPTATIONS = ("features", "profiler", "monitored-barrier", "ddp-backend-name")

# What the forkserver imports once, so that each rank starts in milliseconds.
# Not the backend, which may start threads, and not the suite, which is adapted.
PRELOAD = [
    "torch",
    "torch.testing._internal.common_distributed",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.optim",
    "torch.profiler",
]


class BackendName(str):
    """The name of a backend which also equals the names that it claims.

    The suite's ``BACKEND == "nccl"``, ``BACKEND != "gloo"`` and
    ``BACKEND in {"gloo"}`` then hold for the claimed names, while torch, which
    converts what it is given with ``lower()``, gets the real one.
    """

    claims: tuple[str, ...]

    def __new__(cls, name: str, claims: tuple[str, ...]) -> BackendName:
        self = super().__new__(cls, name)
        self.claims = claims
        return self

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in self.claims

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # found in sets and dicts under the first claim
        return hash(self.claims[0])

    def __reduce__(self):
        return (BackendName, (str(self), self.claims))


# --------------------------------------------------------------------------
# Adapting the suite.  Runs in the driver and in every rank.
# --------------------------------------------------------------------------


def import_suite(config: dict):
    """Import the backend and the suite, and adapt the one to the other."""
    for directory in reversed(config["paths"]):
        if directory not in sys.path:
            sys.path.insert(0, directory)

    from torch.testing._internal import common_distributed

    for module in config["imports"]:
        importlib.import_module(module)

    name, claims, adapt = config["backend"], config["claims"], config["adapt"]
    third_party = name not in BUILT_IN
    if "features" in adapt:
        cases = common_distributed.DistTestCases
        if third_party:
            cases.backend_feature["plugin"].add(name)
        for backends in cases.backend_feature.values():
            if backends.intersection(claims):
                backends.add(name)
        for backends in cases.skip_collective.values():
            if claims[0] in backends:
                backends.add(name)
    if config["small_world"]:
        common_distributed.skip_if_small_worldsize = lambda func: func
    common_distributed.get_timeout = lambda test_id: config["timeout"]

    # The suite reads BACKEND from the environment, once, when it is imported;
    # at this point its decorators decide what to skip.  Later it reads the
    # variable only to ask what kind of backend it deals with.
    os.environ["BACKEND"] = claims[0]
    environ = type(os.environ)
    getitem = environ.__getitem__
    alias = BackendName(name, tuple(claims))

    def getitem_with_alias(self, key):
        return alias if key == "BACKEND" else getitem(self, key)

    with mock.patch.object(environ, "__getitem__", getitem_with_alias):
        suite = importlib.import_module(SUITE_MODULE)

    if third_party:
        adapt_suite(suite, config)
    return suite


def adapt_suite(suite, config: dict) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.nn.parallel import DistributedDataParallel

    name, claims, adapt = config["backend"], config["claims"], config["adapt"]

    if "profiler" in adapt:
        for backends in (
            suite.PROFILING_SUPPORTED_BACKENDS,
            suite.CUDA_PROFILING_SUPPORTED_BACKENDS,
            suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
        ):
            if set(backends).intersection(claims):
                backends.append(name)
        prefix = config["profiler_prefix"] or name
        if prefix != name:
            get_event = suite.get_profiling_event

            def get_profiling_event(event_name, profiler, *args, **kwargs):
                modern = isinstance(profiler, suite.torch.profiler.profile)
                for event in profiler.events() if modern else profiler.function_events:
                    if event.name.startswith(prefix + ":"):
                        event.name = name + event.name[len(prefix) :]
                return get_event(event_name, profiler, *args, **kwargs)

            suite.get_profiling_event = get_profiling_event

    if "monitored-barrier" in adapt and "gloo" in claims:
        monitored_barrier = distributed_c10d.monitored_barrier

        def monitored_barrier_for_any_backend(*args, **kwargs):
            with mock.patch.object(distributed_c10d, "get_backend", lambda group=None: "gloo"):
                return monitored_barrier(*args, **kwargs)

        distributed_c10d.monitored_barrier = monitored_barrier_for_any_backend
        dist.monitored_barrier = monitored_barrier_for_any_backend

    if "ddp-backend-name" in adapt:
        get_logging_data = DistributedDataParallel._get_ddp_logging_data

        def get_ddp_logging_data(self):
            data = get_logging_data(self)
            if data.get("backend_name") == "custom":
                data["backend_name"] = name
            return data

        DistributedDataParallel._get_ddp_logging_data = get_ddp_logging_data


def build_suite(config: dict) -> type:
    """Make the test class, and publish it where the ranks look it up."""
    suite = import_suite(config)

    class DistSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        log_path = os.devnull
        exit_codes: list | None = None
        exit_codes_checked = True

        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def _spawn_processes(self) -> None:
            context = multiprocessing.get_context(config["start_method"])
            timeout = config["timeout"]

            def process(target, name, args, kwargs):
                # Pass the environment along: a forkserver has its own.
                environment = dict(os.environ)
                args = (environment, self.log_path, timeout, target, args, kwargs)
                return context.Process(target=rank_main, name=name, args=args)

            self._start_processes(process)

        def _join_processes(self, fn) -> None:
            self.exit_codes_checked = not (
                fn in self.skip_return_code_checks or fn in self.special_return_code_checks
            )
            joined = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(joined,), daemon=True)
            watcher.start()
            try:
                super()._join_processes(fn)
            finally:
                joined.set()
                watcher.join()

        def _watch(self, joined: threading.Event) -> None:
            """End the test some time after a rank has crashed.

            PyTorch's runner would wait for the other ranks till its timeout.
            """
            deadline = float("inf")
            while self.exit_codes_checked and not joined.wait(0.2):
                # Not process.exitcode: the main thread polls that, and only one
                # thread may.
                codes = [process._popen.returncode for process in self.processes]
                if deadline == float("inf") and any((code or 0) < 0 for code in codes):
                    deadline = time.monotonic() + CRASH_GRACE_SECONDS
                if time.monotonic() > deadline:
                    for process in self.processes:
                        process.kill()
                    return

        def _check_return_codes(self, fn, elapsed_time) -> None:
            self.exit_codes = [process.exitcode for process in self.processes]
            super()._check_return_codes(fn, elapsed_time)

        def tearDown(self) -> None:
            processes = self.processes
            super().tearDown()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()

    DistSuite.__module__ = __name__
    DistSuite.__qualname__ = "DistSuite"
    globals()["DistSuite"] = DistSuite
    return DistSuite


def rank_main(environment: dict, log_path: str, timeout: float, target, args, kwargs) -> None:
    """What each rank executes: set up its environment and log, run the test."""
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(max(timeout - 2, timeout / 2), file=2)
    # Read from the environment already, which a forkserver has of its own.
    import torch.distributed as dist

    dist.set_debug_level_from_env()
    sys.modules[SUITE_MODULE].INIT_METHOD = environment["INIT_METHOD"]
    target(*args, **kwargs)


if __name__ == "__mp_main__" and CONFIG_ENV in os.environ:
    build_suite(json.loads(os.environ[CONFIG_ENV]))


# --------------------------------------------------------------------------
# The driver.
# --------------------------------------------------------------------------


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


def read_skip_lists(files: list[str]) -> list[tuple[str, str]]:
    patterns = []
    for file in files:
        for line in Path(file).read_text().splitlines():
            pattern, _, reason = line.partition("#")
            if pattern.strip():
                patterns.append((pattern.strip(), reason.strip()))
    return patterns


def skip_reason(log: str, default: str) -> str:
    """The reason a rank gave in its log, where the suite has only a code."""
    found = re.search(r"for following reason: (.*)", log)
    return found.group(1) if found else default


def failure_reason(text: str, log: str, exit_codes: list) -> str:
    """One line out of the traceback of a failed test."""
    crashes = [
        f"rank {rank} died of {signal.Signals(-code).name}"
        for rank, code in enumerate(exit_codes)
        if code and code < 0 and -code not in (signal.SIGTERM, signal.SIGKILL)
    ]
    if crashes:
        return ", ".join(crashes)
    if re.search(r"^RuntimeError: Process \d+ terminated or timed out", text, re.M):
        # Where the main thread, which is listed last, was stuck.
        stuck = re.findall(r"\(most recent call first\):\n  File (.*)", log)
        return "timeout" + (f" at {stuck[-1]}" if stuck else "")
    # An exception with its message, up to the C++ frames that may follow it.
    pattern = r"^(?:[\w.]+(?:Error|Exception|Failure|Interrupt)\b.*|SystemExit.*)$"
    for source in (log, text) if "Expected exit code" in text else (text,):
        lines = [
            line
            for line in re.findall(pattern, source, re.M)
            if not re.match(r"RuntimeError: Process \d+ exited with", line)
        ]
        if lines:
            return lines[0][:300]
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "unknown"


def run_test(suite: type, name: str, log_dir: str) -> dict:
    log_path = os.path.join(log_dir, name + ".log")
    Path(log_path).unlink(missing_ok=True)
    test = suite(name)
    test.log_path = log_path
    result = unittest.TestResult()
    start = time.monotonic()
    test.run(result)
    seconds = round(time.monotonic() - start, 2)
    log = Path(log_path).read_text(errors="replace") if test.exit_codes else ""

    record = {"status": "passed", "seconds": seconds, "reason": ""}
    if test.exit_codes is not None:
        record["exit_codes"] = test.exit_codes
    failures = result.failures + result.errors
    if failures:
        text = failures[0][1]
        record["status"] = "failed"
        record["reason"] = failure_reason(text, log, test.exit_codes or [])
        record["detail"] = text + ("\n" + log[-4000:] if log else "")
    elif result.unexpectedSuccesses:
        record.update(status="failed", reason="unexpected success")
    elif result.skipped:
        record["status"] = "skipped"
        record["reason"] = skip_reason(log, result.skipped[0][1])
    elif test.exit_codes_checked and any(test.exit_codes or []):
        record["status"] = "failed"
        record["reason"] = f"exit codes of the ranks: {test.exit_codes}"
        record["detail"] = log[-4000:]
    return record


def compare(tests: dict, baseline: dict) -> bool:
    """Print what differs; return whether all that passed before passes still."""
    skip_listed = "skip list"
    good = True
    print("\nCompared with the baseline:")
    for name in sorted(set(tests) | set(baseline)):
        old = baseline.get(name, {"status": "absent"})
        new = tests.get(name, {"status": "not run", "reason": ""})
        if old["status"] == new["status"] or new["status"] == "not run":
            continue
        print(f"  {name}: {old['status']} -> {new['status']}: {new['reason']}")
        if old["status"] == "passed" and not new["reason"].startswith(skip_listed):
            good = False
    if good:
        print("  every test that passed there and was to run here passed")
    return good


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
