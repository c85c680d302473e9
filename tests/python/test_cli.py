"""The command line as a whole, and ``fccl info``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from fccl import _extension, _machine, cli
from fccl._version import __version__
from fccl.bench import plan
from fccl.bench.cases import CASES


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"fccl {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["info", "bench", "demo", "init_process_group", "strategy="]),
        (["info"], ["share memory", "--json"]),
        (
            ["bench"],
            ["all_reduce", "busbw", "GB/s", "working set", "examples", "exit status", "memcpy", "1024"],
        ),
        (["demo"], ["digits", "gradient all-reduce", "exit status", "--steps"]),
    ],
)
def test_help_explains(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments, "--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("arguments", [[], ["fly"], ["bench"], ["bench", "all_reduc"], ["info", "--fast"]])
def test_wrong_arguments_exit_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: fccl" in capsys.readouterr().err


def test_operations_of_the_parser_are_the_cases() -> None:
    assert set(plan.OPERATIONS) == set(CASES)


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    module = _extension.load()
    assert __version__ in text and torch.__version__ in text
    assert str(module.selected_isa()) in text
    assert _machine.cpu_model() in text


def test_info_json_says_what_the_module_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    module = _extension.load()
    assert facts["torch_built_for"] == module.build_info()["torch_version"]
    assert facts["cpu_features_used"] == module.selected_isa()
    assert facts["shares_memory"] is (module.why_no_shared_memory() == "")
    assert facts["arena_bytes"] == module.memory_stats()["capacity"] > 0 and facts["why_no_arena"] == ""
    assert facts["cores"] == _machine.core_count()
    assert facts["cuda_built"] is bool(module.build_info()["cuda"])
    assert facts["problem"] == ""


def test_info_without_the_compiled_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ImportError("it is not built; run the build")

    monkeypatch.setattr(_extension, "load", missing)
    assert cli.main(["info"]) == 1
    said = capsys.readouterr()
    assert "it is not built; run the build" in said.err
    assert torch.__version__ in said.out and "NOT USABLE" in said.out

    assert cli.main(["info", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["problem"] == "it is not built; run the build"
    assert facts["shares_memory"] is None


@pytest.mark.parametrize("command", [["bench", "barrier"], ["demo"]])
def test_commands_without_the_compiled_module(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ImportError("it is not built; run the build")

    monkeypatch.setattr(_extension, "load", missing)
    assert cli.main(command) == 2
    assert "it is not built; run the build" in capsys.readouterr().err


def test_python_dash_m_fccl() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fccl", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"fccl {__version__}\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    """``fccl info | true``: the output has nowhere to go."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fccl", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert "Traceback" not in errors and "BrokenPipe" not in errors


def test_machine_facts_are_plausible() -> None:
    assert _machine.core_count() >= 1
    assert _machine.available_memory() > 1 << 20
    assert _machine.last_level_cache_bytes() == 0 or _machine.last_level_cache_bytes() >= 1 << 16
    assert _machine.cpu_model()
