"""Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, path: str = str(ROOT), **options: Any) -> subprocess.CompletedProcess[str]:
    """Return what a Python that imports from ``path`` did with these arguments, on one thread, and its texts."""
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "timeout": 300, "capture_output": True, "text": True, "check": False} | options
    return subprocess.run([sys.executable, *arguments], **options)
