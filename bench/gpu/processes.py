"""Runs a command with a time limit, and leaves nothing of it behind.

The command leads a process group of its own, which is killed as a whole: when time is up, when this process is
interrupted, and when the command has ended but something it started has not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        code: its exit status, negative for a signal; None if time was up.
        output: what it wrote, both streams together.
    """

    code: int | None
    output: str

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run(
    command: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Done:
    """Runs a command to its end, or to that of `timeout` seconds.

    Args:
        command: the program and its arguments.
        timeout: in seconds.
        env: its whole environment; None: this process's.
        cwd: the folder it runs in; None: this process's.

    Raises:
        OSError: it could not be started.
    """
    # A file, not a pipe: a grandchild that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(timeout, 0))
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Done(code, output.read().decode(errors="replace"))
