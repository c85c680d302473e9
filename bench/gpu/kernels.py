"""The stages that run the standalone programs: kernels without torch."""

from __future__ import annotations

from collections.abc import Callable

import build
import machine
from stage import Outcome, Setting, Verdict, fail, passed_with_rows, skip

Body = Callable[[Setting], Outcome]


def check_of(what: str) -> Body:
    """A stage that compares kernels with the CPU.

    Args:
        what: an argument of check_kernels.
    """

    def body(setting: Setting) -> Outcome:
        done = setting.run_program([build.program(setting, "check_kernels"), what])
        return Outcome(Verdict.PASSED, done.last_line)

    return body


def measurement_of(what: str) -> Body:
    """A stage that measures kernels.

    Args:
        what: an argument of measure_kernels.
    """

    def body(setting: Setting) -> Outcome:
        return passed_with_rows(setting.run_program([build.program(setting, "measure_kernels"), what]).output)

    return body


# Races between kernels of different ranks are what the protocol is about, by words that racecheck, which looks at
# shared memory, does not know; of the others it makes sense where kernels use shared memory, and these use none
# beside the compiler's own for sync_or(). So it runs once, on the kernels that meet most.
_SANITIZED = [
    ("memcheck", "buckets"),
    ("memcheck", "pack"),
    ("memcheck", "collectives"),
    ("initcheck", "buckets"),
    ("racecheck", "collectives"),
]


def sanitize(setting: Setting) -> Outcome:
    """The small cases under compute-sanitizer."""
    tool = machine.find_tool("compute-sanitizer")
    if tool is None:
        raise skip("no compute-sanitizer")
    check_kernels = build.program(setting, "check_kernels")
    for which, what in _SANITIZED:
        done = setting.run(
            [tool, "--tool", which, "--error-exitcode", "99", check_kernels, what, "--small", "--timeout=60"]
        )
        if done.code != 0:
            found = [line for line in done.output.splitlines() if line.startswith("=========")]
            summary = found[-1].strip("= ") if found else done.last_line
            raise fail(f"{which} of {what}: exit status {done.code}: {summary}")
    return Outcome(Verdict.PASSED, ", ".join(f"{which} of {what}" for which, what in _SANITIZED))
