"""Runs a case of rank_cases/ in several processes, one per rank, all on the first GPU.

    ranks.py CASE WORLD [--device cpu]

The case is a module with a function ``run(rank, world, device)``, called with a group of fccl made, whose result is
what rank 0 prints at the end: the note of a stage. A module may say by ``DIES = {rank}`` which rank is killed in it,
and by ``TIMEOUT_SECONDS`` how long the group waits.
With ``--device cpu`` a case can be tried where there is no GPU, as far as it makes sense.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

TIMEOUT_SECONDS = 60  # of the group


def start_ranks(case: str, world: int, device: str) -> int:
    """Starts a process for each rank and waits for all; returns the exit status.

    Args:
        case: a module of rank_cases.
        world: how many ranks.
        device: "cuda" or "cpu".
    """
    dying: set[int] = getattr(importlib.import_module(f"rank_cases.{case}"), "DIES", set())
    with tempfile.TemporaryDirectory(prefix="fccl-ranks-") as folder:
        outputs = [Path(folder, f"rank{rank}") for rank in range(world)]
        ranks = []
        for rank in range(world):
            with outputs[rank].open("wb") as output:
                command = [sys.executable, __file__, case, str(world), "--device", device]
                command += ["--rank", str(rank), "--store", os.path.join(folder, "store")]
                ranks.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        codes = [rank.wait() for rank in ranks]
        texts = [output.read_text(errors="replace").strip() for output in outputs]
    # Those who did as they should speak first, and rank 0 last of all; whoever failed, after it.
    failed = [rank for rank in range(world) if (codes[rank] != 0) != (rank in dying)]
    for rank in sorted(range(world), key=lambda rank: (rank in failed, rank == 0)):
        print(f"-- rank {rank}, exit status {codes[rank]}\n{texts[rank]}", flush=True)
    return 1 if failed else 0


def be_rank(case: str, rank: int, world: int, device: str, store: str) -> int:
    """The life of one rank; returns its exit status.

    Args:
        case: a module of rank_cases.
        rank: which.
        world: how many.
        device: "cuda" or "cpu".
        store: a path at which the ranks meet.
    """
    import torch
    import torch.distributed as dist

    import fccl  # noqa: F401 - registers the backend where torch does not look for entry points

    if device == "cuda":
        torch.cuda.set_device(0)
    try:
        module = importlib.import_module(f"rank_cases.{case}")
        dist.init_process_group(
            "fccl",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=getattr(module, "TIMEOUT_SECONDS", TIMEOUT_SECONDS)),
        )
        note = module.run(rank, world, torch.device(device))
        if not getattr(module, "DIES", None):
            dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
        return 1
    print(note, flush=True)
    return 0


def main(arguments: list[str]) -> int:
    """Starts the ranks, or is one.

    Args:
        arguments: the command line, without the program's name.
    """
    parser = argparse.ArgumentParser(prog="ranks.py", description=__doc__)
    parser.add_argument("case")
    parser.add_argument("world", type=int)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is None:
        return start_ranks(options.case, options.world, options.device)
    return be_rank(options.case, options.rank, options.world, options.device, options.store)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a GPU in trouble may keep an orderly end from ever coming
