"""Every command of the README runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]
ELSEWHERE = {"scripts/reproduce", "scripts/test", "source .venv/bin/activate"}
"""CI runs the first two as they are (this test is part of the second); the third only sets PATH."""
SMOKE = " ".join([*TINY, "trainer=smoke"])


def shortened(command: str) -> str:
    """The command with a tiny data set and the smoke budget added where it trains or prepares."""
    if re.match(r"lra (train|sweep)|python -m lra.train", command):
        return f"{command.replace(' trainer=smoke', '')} {SMOKE}"
    if re.match(r"lra data (prepare|verify) listops", command):
        return f"{command} {' '.join(TINY)}"
    return command


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Variables that point the commands at the interpreter of this test and at empty folders."""
    folder = tmp_path_factory.mktemp("readme")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "LRA_DATA_DIR": str(folder / "data"),
        "LRA_RUNS_DIR": str(folder / "runs"),
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_run_in_the_order_given(environment, tmp_path):
    ran = 0
    for command in COMMANDS:
        if command in ELSEWHERE or "--budget paper" in command:
            continue
        if command.startswith("lra table"):
            command += f" --runs {environment['LRA_RUNS_DIR']} --out {tmp_path / 'table'}"
        done = subprocess.run(
            ["bash", "-c", shortened(command)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout + done.stderr
        ran += 1
    assert ran >= 10


def test_the_readme_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) < 250
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_scripts_of_the_readme_are_executable():
    for command in ELSEWHERE - {"source .venv/bin/activate"}:
        assert os.access(ROOT / command, os.X_OK), command
