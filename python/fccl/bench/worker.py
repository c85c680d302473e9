"""One rank of a benchmark: ``python -m fccl.bench.worker``, started by `fccl.bench.runner`.

It reads the configuration as JSON from standard input and writes one line of JSON per size to the
descriptor it is given, and a last line if something fails. One set of processes holds a process group for
each backend.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from fccl.bench.board import Board, BoardStopped
from fccl.bench.config import TRAIN, BenchConfig
from fccl.bench.operation_rank import OperationRank
from fccl.bench.rank import BenchRank

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--board", type=int, required=True)
    parser.add_argument("--results", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--init-method", required=True)
    args = parser.parse_args()

    # Ctrl-C is the parent's business; and no rank outlives its parent, however that ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != args.parent:
        return 1

    results = os.fdopen(args.results, "w")

    def send(message: dict[str, Any]) -> None:
        results.write(json.dumps(message) + "\n")
        results.flush()

    torch.set_num_threads(1)
    config = BenchConfig.from_dict(json.load(sys.stdin))
    # A little more than a collective may take, so that the collective's own message comes first.
    board = Board(args.board, config.ranks, args.rank, config.timeout + 5)
    rank: BenchRank | None = None
    try:
        import fccl  # noqa: F401  (registers the backend)

        if config.op == TRAIN:
            from fccl.bench.train_rank import TrainRank

            rank = TrainRank(config, args.rank, board)
        else:
            rank = OperationRank(config, args.rank, board)
        rank.make_groups(args.init_method)
        for index, plan in enumerate(config.plans):
            board.wait_turn(index + 1)
            send({"size": index, **rank.measure(plan)})
        rank.phase = "leaving"
        board.align()
        dist.destroy_process_group()
    except BaseException as error:
        send(
            {
                "error": f"{type(error).__name__}: {error}",
                "phase": rank.phase if rank is not None else "starting",
                "stopped": isinstance(error, BoardStopped),
                "traceback": traceback.format_exc(),
            }
        )
        # A failed group may have threads that wait for peers: leave without tearing it down.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
