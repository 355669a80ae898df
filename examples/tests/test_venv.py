"""scripts/venv.sh says in one sentence what is missing, and prints nothing else on stdout."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
VENV = REPOSITORY / "scripts" / "venv.sh"
EMPTY_LOCK = "# nothing to install\n"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(VENV), *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def system(cache: pathlib.Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(cache), "RLMESH_BASE_PYTHON": sys.executable}


def test_no_python(tmp_path: pathlib.Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(EMPTY_LOCK)
    done = run(str(lock), PATH=str(tmp_path), HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "apt-get install python3 python3-venv" in done.stderr


def test_python_without_venv(tmp_path: pathlib.Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(EMPTY_LOCK)
    stub = tmp_path / "python3"
    stub.write_text('#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\n')
    stub.chmod(0o755)
    done = run(str(lock), PATH=str(tmp_path), HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "python3-venv" in done.stderr


def test_usage_and_unreadable_file(tmp_path: pathlib.Path) -> None:
    assert run(**system(tmp_path)).returncode == 2
    missing = run(str(tmp_path / "missing.txt"), **system(tmp_path))
    assert missing.returncode == 1 and "missing.txt" in missing.stderr


@pytest.fixture
def lock(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "lock.txt"
    path.write_text(EMPTY_LOCK)
    return path


def test_callers_at_the_same_time_get_one_environment(tmp_path: pathlib.Path, lock: pathlib.Path) -> None:
    environment = system(tmp_path / "cache")
    # What an interrupted caller left behind does not disturb the next one.
    first = subprocess.Popen([str(VENV), str(lock)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    others = [run(str(lock), **environment) for _ in range(2)]
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    paths = {out.decode(), *(other.stdout for other in others)}
    assert len(paths) == 1
    path = pathlib.Path(paths.pop().strip())
    assert subprocess.run([path / "bin" / "python", "-c", "import pip"], check=False).returncode == 0
    assert [entry.name for entry in (tmp_path / "cache" / "rlmesh").iterdir() if entry.is_dir()] == [path.name]
    # Scripts run from where it lies now.
    assert (path / "bin" / "pip").read_text().startswith(f"#!{path}/bin/python")


def test_another_lock_makes_another_environment(tmp_path: pathlib.Path, lock: pathlib.Path) -> None:
    environment = system(tmp_path / "cache")
    before = run(str(lock), **environment).stdout
    lock.write_text(EMPTY_LOCK + "# changed\n")
    after = run(str(lock), **environment).stdout
    assert before != after
    assert before.startswith(str(tmp_path)) and after.startswith(str(tmp_path))
    assert before.count("\n") == after.count("\n") == 1


def test_a_lock_without_hashes_is_refused(tmp_path: pathlib.Path, lock: pathlib.Path) -> None:
    lock.write_text("numpy\n")
    done = run(str(lock), **system(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (1, "")
    assert not [entry for entry in (tmp_path / "cache" / "rlmesh").iterdir() if entry.is_dir()]
