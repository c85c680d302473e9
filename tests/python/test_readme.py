"""Every code block of the README and the guides does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("lightning", "hooks", "benchmarking", "memory", "direct")),
)


def blocks(language: str) -> list[tuple[str, int, str]]:
    """(document, number of the line it starts at, text) of each fenced block in ``language``."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append((document, text[: match.start()].count("\n") + 1, match[1]))
    return found


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{shlex.join(command)} ended with {done.returncode}:\n{output}"
    return output


def name_of(block: tuple[str, int, str]) -> str:
    return f"{block[0]}:{block[1]}"


PYTHON = blocks("python")
COMMANDS = [
    (document, line, command)
    for document, line, text in blocks("bash")
    for command in text.splitlines()
    if command.startswith("fccl ")
]


def test_there_are_examples_of_all_three_uses():
    readme = [text for document, _, text in PYTHON if document == "README.md"]
    assert any("Trainer(strategy=" in text for text in readme)
    assert any("fccl.hooks.register(" in text for text in readme)
    assert any(document == "README.md" for document, _, _ in COMMANDS)


@pytest.mark.parametrize("block", PYTHON, ids=map(name_of, PYTHON))
def test_python_block(block, tmp_path):
    script = tmp_path / "train.py"
    # The group's engine is looked at before it is gone: an example that fell back to Gloo proves little.
    probe = """
import os as _os, torch.distributed as _dist
_destroy = _dist.destroy_process_group
def _checked(*args, **kwargs):
    import fccl as _fccl
    if _dist.is_initialized():
        # One write: both ranks share the pipe, and pieces of print() would mix.
        _os.write(1, f"ENGINE {_fccl.backend_of().engine}\\n".encode())
    return _destroy(*args, **kwargs)
_dist.destroy_process_group = _checked
"""
    script.write_text(probe + block[2])
    if "Trainer(" in block[2]:
        pytest.importorskip("lightning", reason="the extra fccl[lightning] is not installed")
        command = [sys.executable, str(script)]
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launcher, str(script)]
    output = run(command, tmp_path)
    assert output.count("ENGINE shared-memory") == 2, output


@pytest.mark.parametrize("command", COMMANDS, ids=map(name_of, COMMANDS))
def test_command(command, tmp_path):
    words = shlex.split(command[2])
    # The same options, at sizes that take a moment.
    for option, value in (("--end", "4K"), ("--factor", "32")):
        if option in words:
            words[words.index(option) + 1] = value
    if words[1] == "bench":
        words += ["--iters", "5", "--warmup", "1"]
    output = run([sys.executable, "-m", "fccl", *words[1:]], tmp_path)
    if words[1] == "bench":
        assert "all_reduce" in output and "gloo" in output and "memcpy" in output


def headings_of(document):
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_between_documents():
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            path, _, heading = target.partition("#")
            there = document.parent / path if path else document
            assert there.exists(), f"{document.name}: {target} does not exist"
            assert not heading or heading in headings_of(there), f"{document.name}: no heading for {target}"
