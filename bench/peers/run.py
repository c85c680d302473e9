#!/usr/bin/env python3
"""Compares fccl with another library of collectives, in one process per rank.

    python bench/peers/run.py mpich
    python bench/peers/run.py openmpi all_gather --begin 1M
    python bench/peers/run.py deepspeed --dtype bf16

Run it with the Python that fccl is installed in. The library is installed from PyPI into an environment of its own
under build/peers, on top of that one, the first time. Method, columns and checks are those of ``fccl bench``;
``fccl-direct`` is fccl by an equally thin call (``fccl.all_reduce``), on ordinary tensors, ``fccl-arena`` is
torch.distributed's call on tensors in memory that the ranks share.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from libraries import LIBRARIES, Library, folder_of

from fccl.bench.board import board_bytes
from fccl.bench.cases import CASES
from fccl.bench.command import add_parser, note_cores, note_moved_cores
from fccl.bench.config import BenchConfig
from fccl.bench.options import settle
from fccl.bench.plan import make_config, make_meta
from fccl.bench.report import Table, make_rows, write_json
from fccl.bench.runner import combine

_HERE = Path(__file__).resolve().parent
_GRACE_SECONDS, _LEAVE_SECONDS = 3.0, 20.0


def _python_for(name: str, library: Library) -> str:
    """The Python of an environment that has the library, and everything of the one this runs in."""
    if not library.requirements and not library.bare_requirements:
        return sys.executable
    folder = folder_of(name)
    ready = folder / "ready"
    if ready.exists():
        return str(folder / "bin" / "python")
    print(f"# installing {name} into {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    packages = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (Path(packages) / "below.pth").write_text("\n".join(lines) + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    environment = {**os.environ, **library.environment}
    if library.requirements:
        # On top of what is there already, so that the library's own files win.
        subprocess.run([*install, *library.requirements], check=True, env=environment)
    if library.bare_requirements:
        subprocess.run([*install, "--no-deps", *library.bare_requirements], check=True, env=environment)
    ready.touch()
    return str(python)


def _parse(arguments: list[str]) -> tuple[str, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", metavar="LIBRARY", choices=LIBRARIES, help=", ".join(LIBRARIES))
    parser.add_argument("op", nargs="?", default="all_reduce", help="the operation (default all_reduce)")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of `fccl bench`")
    mine, rest = parser.parse_known_args(arguments)
    bench = argparse.ArgumentParser(prog="run.py LIBRARY")
    add_parser(bench.add_subparsers(required=True))
    # The operation may be left out, in front of options.
    op = [mine.op] if not mine.op.startswith("-") else ["all_reduce", mine.op]
    args = bench.parse_args(["bench", *op, *rest, *mine.options])
    return mine.peer, args


def _plan(name: str, args: argparse.Namespace) -> BenchConfig:
    operations = LIBRARIES[name].operations
    if args.op not in operations:
        raise ValueError(f"{name} is compared in {', '.join(operations)}, not in {args.op}")
    for option in ("backend", "compare", "corrupt", "redop", "plot"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{'op' if option == 'redop' else option} is an option of `fccl bench` only")
    args.compare = ""
    args.direct = True
    if CASES[args.op].moves_data:
        args.arena = True
    settle(args)
    config = make_config(args, [])
    backends = [backend for backend in config.backends if backend != "fccl"]
    return BenchConfig.from_dict({**config.to_dict(), "backends": [*backends, name]})


def _start(
    name: str, library: Library, python: str, folder: Path, ranks: int
) -> list[subprocess.Popen[bytes]]:
    home = folder_of(name)
    words = {"bin": str(home / "bin"), "build": str(home), "ranks": str(ranks)}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        # DeepSpeed names its shared memory after these.
        "MASTER_ADDR": "peers",
        "MASTER_PORT": str(os.getpid()),
        **{key: value.format(**words) for key, value in library.environment.items()},
    }
    command = [python, str(_HERE / "rank.py"), name, str(folder)]
    if library.launcher:
        launcher = [word.format(**words) for word in library.launcher]
        return [subprocess.Popen([*launcher, *command], env=environment, stdout=2, start_new_session=True)]
    return [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=2,
            start_new_session=True,
        )
        for rank in range(ranks)
    ]


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or one has failed: the others may then wait for it within the library, for ever."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(_GRACE_SECONDS)  # they may have something to say
            return
        time.sleep(0.05)


def _run(name: str, python: str, config: BenchConfig) -> list[dict[str, Any]]:
    """Starts the ranks, waits for them, and returns what each has to say."""
    library = LIBRARIES[name]
    with tempfile.TemporaryDirectory(prefix="fccl-peers-") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        (folder / "board").write_bytes(bytes(board_bytes(config.ranks)))
        processes = _start(name, library, python, folder, config.ranks)
        try:
            _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(_LEAVE_SECONDS)
            for left in Path("/dev/shm").glob(f"*_peers_{os.getpid()}_*"):  # DeepSpeed leaves it behind
                left.unlink()
        said = []
        for rank in range(config.ranks):
            file = folder / f"{rank}.json"
            said.append(json.loads(file.read_text()) if file.exists() else {"error": f"rank {rank} died"})
    return said


def main() -> int:
    """Entry point; returns the exit status, as that of ``fccl bench``."""
    name, args = _parse(sys.argv[1:])
    try:
        config = _plan(name, args)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    python = _python_for(name, LIBRARIES[name])
    meta = make_meta(config, ["peers", *sys.argv[1:]])
    said = _run(name, python, config)
    errors = [part["error"] for part in said if part["error"]]
    if errors:
        print("\n".join(errors), file=sys.stderr)
        return 3
    meta["library"] = said[0]["version"]
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"# fccl {meta['fccl']}, torch {meta['torch']}; {meta['library']}", file=out)
    print(
        f"# {config.op}, {config.ranks} ranks; {meta['cpu']}, {meta['cores']} cores; {meta['date']}", file=out
    )
    print(f"# load average before the run: {meta['load_average_before']:.2f}", file=out)
    note_cores(meta, out)
    case = CASES[config.op]
    table = Table(config, case.reduces, out)
    table.head()
    rows = []
    for index, plan in enumerate(config.plans):
        outcome = combine([part["parts"][index] for part in said])
        for dropped, why in outcome.dropped.items():
            print(f"# {dropped} does not do this: {why}", file=out)
        new = make_rows(config, plan, outcome, case.busbw_factor(config.ranks))
        table.size(plan, new)
        rows += new
    note_moved_cores(meta, out)
    if args.json is not None:
        write_json(args.json, meta, rows)
    wrong = {row.backend for row in rows if row.wrong}
    print(f"# WRONG results from {', '.join(sorted(wrong))}" if wrong else "# all results right", file=out)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
