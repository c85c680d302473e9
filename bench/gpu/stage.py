"""What a stage of the check is, what came of it, and what it has to work with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import processes

REPOSITORY = Path(__file__).resolve().parents[2]
NO_SUCH_DEVICE = 77  # the exit status by which a program says that there is nothing to run on


class Verdict(Enum):
    """The word in a stage's row."""

    PASSED = "passed"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED OUT"
    SKIPPED = "skipped"

    @property
    def is_failure(self) -> bool:
        """Whether the whole check has failed then."""
        return self in (Verdict.FAILED, Verdict.TIMED_OUT)


@dataclass
class Outcome:
    """What came of a stage.

    Attributes:
        verdict: in a word.
        note: one line: what was found, or why not.
        rows: a table of its own, headings first; empty: none.
        seconds: how long it took.
    """

    verdict: Verdict
    note: str = ""
    rows: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0


class StageEndedError(Exception):
    """Ends a stage with an outcome."""

    def __init__(self, verdict: Verdict, note: str) -> None:
        """Takes the outcome's verdict and note."""
        super().__init__(note)
        self.outcome = Outcome(verdict, note)


def fail(note: str) -> StageEndedError:
    """To be raised by a stage that found something wrong."""
    return StageEndedError(Verdict.FAILED, note)


def skip(note: str) -> StageEndedError:
    """To be raised by a stage that cannot run here."""
    return StageEndedError(Verdict.SKIPPED, note)


@dataclass
class Setting:
    """What all stages have to work with.

    Attributes:
        python: the interpreter whose torch is used.
        work: the folder for builds, kept between runs.
        log: everything that commands say is appended to this file.
        architectures: what kernels are compiled for, as FCCL_CUDA_ARCHITECTURES.
        jobs: how many compilers at once.
        installed: use the fccl that the interpreter has; build only the standalone programs.
        patience: all time limits are multiplied by it.
        gpu: the device's name; empty if there is none.
        why_no_gpu: what the driver says then.
    """

    python: str
    work: Path
    log: Path
    architectures: str = "90"
    jobs: int = 1
    installed: bool = False
    patience: float = 1.0
    gpu: str = ""
    why_no_gpu: str = "no CUDA device"
    deadline: float = 0.0

    @property
    def site(self) -> Path:
        """Where fccl is installed for the check, apart from the interpreter's own packages."""
        return self.work / "site"

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment, with which Python finds the fccl to check.

        Args:
            extra: what to set beside.
        """
        env = dict(os.environ)
        if not self.installed:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.site), env.get("PYTHONPATH", "")]))
        env.update(extra or {})
        return env

    def run(self, command: Sequence[str | Path], extra: Mapping[str, str] | None = None) -> processes.Done:
        """Runs a command within the stage's time, and keeps what it says in the log.

        Args:
            command: the program and its arguments.
            extra: variables of its environment, beside this process's.

        Raises:
            StageEndedError: time is up, or the command cannot be started.
        """
        words = [str(word) for word in command]
        started = time.monotonic()
        try:
            done = processes.run(words, self.deadline - started, self.environment(extra), cwd=REPOSITORY)
        except OSError as error:
            raise fail(f"{words[0]} could not be started: {error}") from error
        how = "time was up" if done.code is None else f"exit status {done.code}"
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(words)}\n{done.output}\n({how}, {time.monotonic() - started:.1f} s)\n\n")
        if done.code is None:
            raise StageEndedError(
                Verdict.TIMED_OUT, f"{Path(words[0]).name}: {done.last_line or 'said nothing'}"
            )
        return done

    def run_program(
        self, command: Sequence[str | Path], extra: Mapping[str, str] | None = None
    ) -> processes.Done:
        """The same, for a command that must succeed.

        Args:
            command: the program and its arguments.
            extra: variables of its environment, beside this process's.

        Raises:
            StageEndedError: it did not, or found no GPU.
        """
        done = self.run(command, extra)
        if done.code == NO_SUCH_DEVICE:
            raise skip(done.last_line)
        if done.code != 0:
            wrong = [line for line in done.output.splitlines() if line.startswith("WRONG")]
            raise fail(
                wrong[0] if wrong else f"exit status {done.code}: {done.last_line or 'it said nothing'}"
            )
        return done


@dataclass(frozen=True)
class Stage:
    """One row of the table.

    Attributes:
        name: as `--only` takes it.
        what: a line for `--list`.
        seconds: its time limit.
        body: does the work within `Setting.run`, and returns the outcome; may raise StageEndedError.
        needs_gpu: skipped without one.
    """

    name: str
    what: str
    seconds: float
    body: Callable[[Setting], Outcome]
    needs_gpu: bool = True


def run_stage(stage: Stage, setting: Setting) -> Outcome:
    """Runs a stage; whatever goes wrong is in the outcome.

    Args:
        stage: which.
        setting: where.
    """
    started = time.monotonic()
    setting.deadline = started + stage.seconds * setting.patience
    with setting.log.open("a") as log:
        log.write(f"==== {stage.name}: {stage.what}\n\n")
    try:
        if stage.needs_gpu and not setting.gpu:
            raise skip(setting.why_no_gpu)
        outcome = stage.body(setting)
    except StageEndedError as ended:
        outcome = ended.outcome
    except Exception as error:  # a fault of the stage's own must not take the others with it
        outcome = Outcome(Verdict.FAILED, f"the check itself failed: {type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - started
    return outcome


def passed_with_rows(output: str) -> Outcome:
    """The outcome of a program whose lines "ROW | a | b |" are a table, and whose last line is the note.

    Args:
        output: all that it said.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    rows = [
        [cell.strip() for cell in line.removeprefix("ROW").strip().strip("|").split("|")]
        for line in lines
        if line.startswith("ROW |")
    ]
    return Outcome(Verdict.PASSED, lines[-1] if lines else "", rows)
