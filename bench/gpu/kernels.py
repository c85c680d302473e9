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


# Racecheck looks at shared memory, which these kernels have none of beside the compiler's own, and may let only one
# kernel run at a time: so it gets kernels that wait for nobody. What the communicating ones race for, it does not know.
_SANITIZED = [
    ("memcheck", "buckets"),
    ("memcheck", "pack"),
    ("memcheck", "collectives"),
    ("initcheck", "buckets"),
    ("racecheck", "buckets"),
]
_SERIALISED = (
    "waited in vain"  # what a rank's kernel says if the tool keeps its peers' from running beside it
)


def sanitize(setting: Setting) -> Outcome:
    """The small cases under compute-sanitizer."""
    tool = machine.find_tool("compute-sanitizer")
    if tool is None:
        raise skip("no compute-sanitizer")
    check_kernels = build.program(setting, "check_kernels")
    clean = []
    left_out = []
    for which, what in _SANITIZED:
        done = setting.run(
            [tool, "--tool", which, "--error-exitcode", "99", check_kernels, what, "--small", "--timeout=15"]
        )
        name = f"{which} of {what}"
        if done.code == 0:
            clean.append(name)
        elif done.code == 1 and what == "collectives" and _SERIALISED in done.output:
            left_out.append(f"{name} not possible: it lets no two kernels run at once")
        else:
            found = [line for line in done.output.splitlines() if line.startswith("=========")]
            summary = found[-1].strip("= ") if found else done.last_line
            raise fail(f"{name}: exit status {done.code}: {summary}")
    return Outcome(Verdict.PASSED, "; ".join([f"nothing found by {', '.join(clean)}", *left_out]))
