"""The libraries that fccl is compared with: how each is installed, started and called.

A library is called by the thinnest call it has from Python, on the same tensors as fccl.
"""

from __future__ import annotations

import datetime
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fccl.bench.buffers import Buffer

__all__ = ["LIBRARIES", "Library", "Peer", "folder_of"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Library:
    """How to get a library and to start ranks with it.

    Attributes:
        requirements: What pip installs; with dependencies, and without.
        operations: Operations of ``fccl bench`` that it can be measured with.
        launcher: Words in front of the command that starts all ranks, with ``{bin}`` for the folder of its
            programs and ``{ranks}``; empty if the ranks are started one by one.
        environment: For the ranks; ``{build}`` is the folder where it may build things.
        peer: Its face within a rank.
    """

    requirements: tuple[str, ...]
    bare_requirements: tuple[str, ...]
    operations: tuple[str, ...]
    launcher: tuple[str, ...]
    environment: dict[str, str]
    peer: Callable[[], Peer]


class Peer(ABC):
    """A library within a rank."""

    @abstractmethod
    def identity(self) -> tuple[int, int]:
        """Rank and number of ranks; the first call."""

    @abstractmethod
    def begin(self, rank: int, ranks: int, folder: Path) -> None:
        """Sets up, after fccl's group has been made; ``folder`` is the run's, for what it has to write."""

    @abstractmethod
    def bind(self, op: str, buffer: Buffer, root: int) -> Call:
        """The call of an operation on a buffer, all arguments bound. Reductions are sums."""

    @abstractmethod
    def version(self) -> str:
        """Name and version."""

    @abstractmethod
    def end(self) -> None:
        """Leaves."""


class _OneByOne(Peer):
    """A library whose ranks are started one by one and learn from the environment who they are."""

    def identity(self) -> tuple[int, int]:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def end(self) -> None:
        pass


class _Gloo(_OneByOne):
    """Gloo without torch's Python wrapper."""

    def begin(self, rank: int, ranks: int, folder: Path) -> None:
        store = dist.FileStore(str(folder / "gloo"), ranks)
        self._group = dist.ProcessGroupGloo(store, rank, ranks, datetime.timedelta(seconds=60))

    def version(self) -> str:
        return f"Gloo of torch {torch.__version__}"

    def bind(self, op: str, buffer: Buffer, root: int) -> Call:
        group, tensors = self._group, buffer.tensors
        if op == "all_reduce":
            return lambda: group.allreduce(tensors[:1], dist.AllreduceOptions()).wait()
        if op == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank = root
            return lambda: group.broadcast(tensors[:1], options).wait()
        return lambda: group.barrier(dist.BarrierOptions()).wait()


class _Mpi(Peer):
    """MPI through mpi4py, whose upper-case methods work on memory as it is (no pickling)."""

    _TYPES = {
        torch.float32: "FLOAT",
        torch.float64: "DOUBLE",
        torch.int8: "INT8_T",
        torch.uint8: "UINT8_T",
        torch.int16: "INT16_T",
        torch.int32: "INT32_T",
        torch.int64: "INT64_T",
    }

    def identity(self) -> tuple[int, int]:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        return self._world.rank, self._world.size

    def begin(self, rank: int, ranks: int, folder: Path) -> None:
        pass

    def version(self) -> str:
        return str(self._mpi.Get_library_version()).splitlines()[0].strip("\0 ")

    def _memory(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.dtype not in self._TYPES:
            raise ValueError(f"MPI has no {tensor.dtype}")
        memory = self._mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, tensor.numel(), getattr(self._mpi, self._TYPES[tensor.dtype])]

    def bind(self, op: str, buffer: Buffer, root: int) -> Call:
        world = self._world
        if op == "barrier":
            return world.Barrier
        parts = [self._memory(tensor) for tensor in buffer.tensors]
        if op == "all_reduce":
            return functools.partial(world.Allreduce, self._mpi.IN_PLACE, parts[0], self._mpi.SUM)
        if op == "broadcast":
            return functools.partial(world.Bcast, parts[0], root)
        source, output = parts
        share = [output[0], source[1], output[2]]
        return functools.partial(world.Allgather, source, share)

    def end(self) -> None:
        self._mpi.Finalize()


class _DeepSpeed(_OneByOne):
    """DeepSpeed's all_reduce over shared memory, an operator of torch's that its inference engine uses."""

    def begin(self, rank: int, ranks: int, folder: Path) -> None:
        # Compiled at first use, by the rank that the others wait for.
        if rank == 0:
            module = self._load()
        dist.barrier()
        if rank != 0:
            module = self._load()
        module.initialize(ranks, rank)

    @staticmethod
    def _load() -> Any:
        from deepspeed.ops.op_builder import ShareMemCommBuilder

        return ShareMemCommBuilder().load(verbose=False)

    def version(self) -> str:
        import deepspeed

        return f"DeepSpeed {deepspeed.__version__}, inference_all_reduce_"

    def bind(self, op: str, buffer: Buffer, root: int) -> Call:
        tensor = buffer.tensors[0]
        # It returns without having done anything on other types.
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"DeepSpeed's operator has no {tensor.dtype}")
        return functools.partial(torch.ops.deepspeed.inference_all_reduce_, tensor)


_MPI_OPERATIONS = ("all_reduce", "all_gather", "broadcast", "barrier")

LIBRARIES: dict[str, Library] = {
    "mpich": Library(
        requirements=("mpich>=5,<6", "mpi4py>=4.1"),
        bare_requirements=(),
        operations=_MPI_OPERATIONS,
        launcher=("{bin}/mpiexec", "-n", "{ranks}"),
        environment={},
        peer=_Mpi,
    ),
    "openmpi": Library(
        requirements=("openmpi>=5,<6", "mpi4py>=4.1"),
        bare_requirements=(),
        operations=_MPI_OPERATIONS,
        # As root in a container, and with more ranks than cores, it wants to be told that this is meant.
        launcher=("{bin}/mpiexec", "-n", "{ranks}", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"),
        environment={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        peer=_Mpi,
    ),
    "deepspeed": Library(
        requirements=(
            "hjson",
            "einops",
            "msgpack",
            "ninja",
            "numpy",
            "packaging",
            "psutil",
            "py-cpuinfo",
            "pydantic",
            "tqdm",
        ),
        # Without dependencies: they would bring another torch.
        bare_requirements=("deepspeed>=0.19",),
        operations=("all_reduce",),
        launcher=(),
        environment={
            "DS_BUILD_OPS": "0",
            "LOCAL_SIZE": "{ranks}",
            "TORCH_EXTENSIONS_DIR": "{build}/extensions",
        },
        peer=_DeepSpeed,
    ),
    "gloo": Library(
        requirements=(),
        bare_requirements=(),
        operations=("all_reduce", "broadcast", "barrier"),
        launcher=(),
        environment={},
        peer=_Gloo,
    ),
}


def folder_of(name: str) -> Path:
    """Where a library's environment is kept."""
    return Path(__file__).resolve().parents[2] / "build" / "peers" / name
