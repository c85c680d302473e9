"""Whether the GPUs of a group really reach each other's memory.

What a driver says of that may be wrong: IOMMUs and PCIe switches can lose stores between GPUs that it calls peers, or
end a process that relies on them. So it is tried first, by one child process per rank, with real collectives over
fccl's kernels and a deadline. What worked once is remembered, by the GPUs and their driver.

    python -m fccl._gpu_probe RANK SIZE DEVICE RENDEZVOUS     (the child)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

SECONDS = 60  # for children to start and end
COLLECTIVE_SECONDS = 15


def is_wanted() -> bool:
    """Whether links are tried at all; ``FCCL_CUDA_PROBE=0`` takes the driver at its word."""
    return os.environ.get("FCCL_CUDA_PROBE") != "0"


def is_proven(key: str) -> bool:
    """Whether these GPUs have passed before.

    Args:
        key: names the GPUs, in the order of their ranks, the driver and fccl.
    """
    return _memory_of(key).exists()


def make_rendezvous() -> str:
    """A path at which no file is yet, for the children to meet at."""
    return os.path.join(tempfile.mkdtemp(prefix="fccl-probe-"), "store")


def remove_rendezvous(path: str) -> None:
    """Removes what make_rendezvous() has made."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def run(key: str, rank: int, size: int, device: int, rendezvous: str) -> str:
    """Has a child take this rank's part in a trial; all ranks call it together.

    Args:
        key: as for ``is_proven``.
        rank: of the child, in a group of ``size``.
        size: how many ranks there are.
        device: the child's GPU, as this process counts them.
        rendezvous: a path that all ranks have.

    Returns:
        Why it failed, or an empty string.
    """
    command = [*_CHILD, str(rank), str(size), str(device), rendezvous]
    environment = {**os.environ, "FCCL_CUDA_KERNELS": "1", "FCCL_CUDA_PROBE": "0"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a trial of the links between the GPUs had not ended after {SECONDS} s"
    except OSError as error:
        return f"no process could be started to try the links between the GPUs: {error}"
    if done.returncode == 0:
        _remember(key)
        return ""
    lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return (
        f"a trial of the links between the GPUs failed ({how}): {lines[-1] if lines else 'it said nothing'}"
    )


_CHILD = [sys.executable, "-m", "fccl._gpu_probe"]


def _memory_of(key: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fccl" / ("gpu-links-" + hashlib.sha256(key.encode()).hexdigest()[:32])


def _remember(key: str) -> None:
    file = _memory_of(key)
    with contextlib.suppress(OSError):  # then it is tried again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(key + "\n")


# ---- the child ----


def _try_links(rank: int, size: int, device: int, rendezvous: str) -> str:
    import torch
    import torch.distributed as dist

    import fccl

    torch.cuda.set_device(device)
    store = dist.FileStore(rendezvous, size)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("fccl", store=store, rank=rank, world_size=size, timeout=timeout)
    count = 1024  # in every machine's range of the kernels
    for turn in range(20):
        values = torch.full((count,), float(rank + turn), device="cuda")
        dist.all_reduce(values)
        gathered = torch.empty(size * count, device="cuda")
        dist.all_gather_into_tensor(gathered, torch.full((count,), float(rank), device="cuda"))
        sent = torch.full((count,), float(rank), device="cuda")
        dist.broadcast(sent, turn % size)
        expected = torch.arange(float(size), device="cuda").repeat_interleave(count)
        if not (values == size * (size - 1) / 2 + size * turn).all():
            return f"turn {turn}: a sum came out wrong"
        if not torch.equal(gathered, expected):
            return f"turn {turn}: gathered numbers came out wrong"
        if not (sent == turn % size).all():
            return f"turn {turn}: a broadcast came out wrong"
    ran = fccl.cuda.launch_counts()
    why = fccl.cuda.why_no_kernels()
    dist.destroy_process_group()
    return "" if sum(ran.values()) == 60 else f"the kernels did not run: {why or ran}"


def main(arguments: list[str]) -> int:
    rank, size, device = map(int, arguments[:3])
    try:
        why = _try_links(rank, size, device, arguments[3])
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    if why:
        print(why, flush=True)
    return 1 if why else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a GPU in trouble may keep an orderly end from ever coming
