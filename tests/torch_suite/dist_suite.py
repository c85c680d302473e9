"""PyTorch's distributed suite as a test class for any backend.

In the driver and in every rank: imports the backend and the suite, adapts the one to the other, and makes the
class. See run_dist_suite.py for what is adapted and why.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import threading
import time
from unittest import mock

CONFIG_ENV = "DIST_SUITE_CONFIG"  # how the ranks learn about the options
SUITE_MODULE = "torch.testing._internal.distributed.distributed_test"
CRASH_GRACE_SECONDS = 10  # for the other ranks, once one has died of a signal
BUILT_IN = ("gloo", "nccl", "ucc", "mpi", "xccl")
ADAPTATIONS = ("features", "profiler", "monitored-barrier", "ddp-backend-name")


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
