"""The kernels in Triton's interpreter, in a process of their own (it is chosen at import)."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_interpreted_kernels_equal_the_dense_oracle():
    """Runs tests/gpu/test_kernels_native.py on the CPU; no test may be skipped."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, "tests/gpu/test_kernels_native.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout
