"""One test of the suite: running it, and one line on how it ended; comparing two runs."""

from __future__ import annotations

import os
import re
import signal
import time
import unittest
from pathlib import Path


def read_skip_lists(files: list[str]) -> list[tuple[str, str]]:
    patterns = []
    for file in files:
        for line in Path(file).read_text().splitlines():
            pattern, _, reason = line.partition("#")
            if pattern.strip():
                patterns.append((pattern.strip(), reason.strip()))
    return patterns


def skip_reason(log: str, default: str) -> str:
    """The reason a rank gave in its log, where the suite has only a code."""
    found = re.search(r"for following reason: (.*)", log)
    return found.group(1) if found else default


def failure_reason(text: str, log: str, exit_codes: list) -> str:
    """One line out of the traceback of a failed test."""
    crashes = [
        f"rank {rank} died of {signal.Signals(-code).name}"
        for rank, code in enumerate(exit_codes)
        if code and code < 0 and -code not in (signal.SIGTERM, signal.SIGKILL)
    ]
    if crashes:
        return ", ".join(crashes)
    if re.search(r"^RuntimeError: Process \d+ terminated or timed out", text, re.M):
        # Where the main thread, which is listed last, was stuck.
        stuck = re.findall(r"\(most recent call first\):\n  File (.*)", log)
        return "timeout" + (f" at {stuck[-1]}" if stuck else "")
    # An exception with its message, up to the C++ frames that may follow it.
    pattern = r"^(?:[\w.]+(?:Error|Exception|Failure|Interrupt)\b.*|SystemExit.*)$"
    for source in (log, text) if "Expected exit code" in text else (text,):
        lines = [
            line
            for line in re.findall(pattern, source, re.M)
            if not re.match(r"RuntimeError: Process \d+ exited with", line)
        ]
        if lines:
            return lines[0][:300]
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "unknown"


def run_test(suite: type, name: str, log_dir: str) -> dict:
    log_path = os.path.join(log_dir, name + ".log")
    Path(log_path).unlink(missing_ok=True)
    test = suite(name)
    test.log_path = log_path
    result = unittest.TestResult()
    start = time.monotonic()
    test.run(result)
    seconds = round(time.monotonic() - start, 2)
    log = Path(log_path).read_text(errors="replace") if test.exit_codes else ""

    record = {"status": "passed", "seconds": seconds, "reason": ""}
    if test.exit_codes is not None:
        record["exit_codes"] = test.exit_codes
    failures = result.failures + result.errors
    if failures:
        text = failures[0][1]
        record["status"] = "failed"
        record["reason"] = failure_reason(text, log, test.exit_codes or [])
        record["detail"] = text + ("\n" + log[-4000:] if log else "")
    elif result.unexpectedSuccesses:
        record.update(status="failed", reason="unexpected success")
    elif result.skipped:
        record["status"] = "skipped"
        record["reason"] = skip_reason(log, result.skipped[0][1])
    elif test.exit_codes_checked and any(test.exit_codes or []):
        record["status"] = "failed"
        record["reason"] = f"exit codes of the ranks: {test.exit_codes}"
        record["detail"] = log[-4000:]
    return record


def compare(tests: dict, baseline: dict) -> bool:
    """Print what differs; return whether all that passed before passes still."""
    skip_listed = "skip list"
    good = True
    print("\nCompared with the baseline:")
    for name in sorted(set(tests) | set(baseline)):
        old = baseline.get(name, {"status": "absent"})
        new = tests.get(name, {"status": "not run", "reason": ""})
        if old["status"] == new["status"] or new["status"] == "not run":
            continue
        print(f"  {name}: {old['status']} -> {new['status']}: {new['reason']}")
        if old["status"] == "passed" and not new["reason"].startswith(skip_listed):
            good = False
    if good:
        print("  every test that passed there and was to run here passed")
    return good
