"""What numbers are made with: the commit of a checkout, which is read and never written."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import unmask
from unmask.machine import commit, made_with


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_checkout_is_read_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        said = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return said.stdout.strip()

    source = tmp_path / "src" / "unmask" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    monkeypatch.setattr(unmask, "__file__", str(source))
    assert commit() == unmask.__version__
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    os.utime(source, (1, 1))  # git would note that this file is the same after all
    index = (tmp_path / ".git" / "index").read_bytes()
    assert commit() == f"{unmask.__version__}, commit {git('rev-parse', 'HEAD')[:12]}"
    assert (tmp_path / ".git" / "index").read_bytes() == index
    (tmp_path / "untracked").touch()
    assert not commit().endswith("-dirty")
    source.write_text("2")
    assert commit() == f"{unmask.__version__}, commit {git('rev-parse', 'HEAD')[:12]}-dirty"
    monkeypatch.setattr("unmask.machine.subprocess.run", _no_git)
    assert commit() == unmask.__version__


def _no_git(*args: object, **kwargs: object) -> None:
    raise FileNotFoundError


def test_a_gpu_is_named_if_this_process_has_used_it_and_left_alone_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: asked.append(i) or "a GPU")
    assert "a GPU" not in made_with()["machine"]
    assert not asked  # this would open it
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "a GPU" in made_with()["machine"]
