"""The trial of links between GPUs, without a GPU: what the parent makes of its child's end."""

import os
import sys

import pytest

from fccl import _gpu_probe


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Has a program of ours stand in for the child."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def is_now(program):
        monkeypatch.setattr(_gpu_probe, "_CHILD", [sys.executable, "-c", program])

    return is_now


def run():
    return _gpu_probe.run("some GPUs", 1, 2, 0, "/nowhere")


def test_what_passed_is_remembered(child):
    child(
        "import os, sys; assert sys.argv[1:] == ['1', '2', '0', '/nowhere'];"
        "assert os.environ['FCCL_CUDA_PROBE'] == '0'"
    )
    assert not _gpu_probe.is_proven("some GPUs")
    assert run() == ""
    assert _gpu_probe.is_proven("some GPUs")
    assert not _gpu_probe.is_proven("other GPUs")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "import sys; print('noise'); print('turn 3: a sum came out wrong'); sys.exit(1)",
            "(exit code 1): turn 3: a sum",
        ),
        ("import os; os.kill(os.getpid(), 11)", "(signal 11): it said nothing"),
    ],
)
def test_what_failed_is_told_and_not_remembered(child, program, said):
    child(program)
    assert said in run()
    assert not _gpu_probe.is_proven("some GPUs")


def test_a_child_that_hangs_is_killed(child, monkeypatch, tmp_path):
    monkeypatch.setattr(_gpu_probe, "SECONDS", 2)
    pid = tmp_path / "pid"
    child(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    assert "had not ended after 2 s" in run()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_memory_that_cannot_be_written_is_no_error(child, monkeypatch):
    child("pass")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert run() == ""
    assert not _gpu_probe.is_proven("some GPUs")


def test_the_rendezvous_is_new_and_goes():
    path = _gpu_probe.make_rendezvous()
    assert not os.path.exists(path)
    assert os.path.isdir(os.path.dirname(path))
    open(path, "w").close()
    _gpu_probe.remove_rendezvous(path)
    assert not os.path.exists(os.path.dirname(path))


def test_the_real_child_says_why(monkeypatch, tmp_path):
    """Without a GPU it fails, in words."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "(exit code 1): " in _gpu_probe.run("no GPUs", 0, 1, 0, str(tmp_path / "store"))
