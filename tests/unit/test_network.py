"""The draft's TensorRT network, tested in processes of their own: TensorRT stays out of this one.

Needs the package tensorrt-rtx, which builds without a GPU; without it these tests fail.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("network_numbers.py", "network_builds.py", "quantized_numbers.py")


@pytest.mark.parametrize("file", FILES)
def test_in_a_process_of_its_own(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, f"tests/network/{file}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
