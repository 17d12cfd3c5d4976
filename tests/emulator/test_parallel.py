"""emulate(processes=N), in a process of its own: it forks, and a test worker that other tests have
filled with threads (autograd's, a thread pool's) is no place to fork from."""

import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("parallel_cases.py")


def test_the_cases_pass_in_a_fresh_process(root: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(CASES)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n8 passed" in done.stdout, done.stdout
