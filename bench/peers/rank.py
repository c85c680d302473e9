"""One rank of a comparison; started by ``run.py``, as many times as there are ranks.

fccl and the library are loaded into the same process and take turns, as the backends of ``fccl bench`` do.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from libraries import LIBRARIES, Peer

from fccl.bench.board import Board
from fccl.bench.buffers import Buffer
from fccl.bench.config import BenchConfig
from fccl.bench.operation_rank import OperationRank


class _PeerRank(OperationRank):
    """Measures a library beside fccl.

    Args:
        config: The run.
        rank: This rank.
        board: The run's board.
        name: The library.
        peer: Its face.
    """

    def __init__(self, config: BenchConfig, rank: int, board: Board, name: str, peer: Peer) -> None:
        super().__init__(config, rank, board)
        self.without_group = (name,)
        self._name, self._peer = name, peer

    def call_of(self, name: str, buffer: Buffer) -> Callable[[], Any]:
        if name == self._name:
            return self._peer.bind(self.config.op, buffer, self.config.root)
        return super().call_of(name, buffer)


def main() -> None:
    """Measures; writes what this rank has to say to ``FOLDER/RANK.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=LIBRARIES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    peer = LIBRARIES[args.peer].peer()
    number, ranks = peer.identity()
    torch.set_num_threads(1)
    config = BenchConfig.from_dict(json.loads((args.folder / "config.json").read_text()))
    said: dict[str, Any] = {"parts": [], "error": ""}
    try:
        if ranks != config.ranks:
            raise RuntimeError(f"the launcher started {ranks} ranks, expected {config.ranks}")
        descriptor = os.open(args.folder / "board", os.O_RDWR)
        board = Board(descriptor, ranks, number, config.timeout + 5)
        rank = _PeerRank(config, number, board, args.peer, peer)
        rank.make_groups((args.folder / "rendezvous").as_uri())
        peer.begin(number, ranks, args.folder)
        said["version"] = peer.version()
        said["parts"] = [rank.measure(plan) for plan in config.plans]
        board.align()
        dist.destroy_process_group()
    except BaseException as error:
        said["error"] = f"rank {number}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    (args.folder / f"{number}.json").write_text(json.dumps(said))
    if said["error"]:
        os._exit(1)  # peers that wait in the library are ended by the launcher
    peer.end()


if __name__ == "__main__":
    main()
