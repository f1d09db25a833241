"""The benchmarks are outside the package and run rarely: at least each of them imports what there is."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_suites_of_make_bench_start():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "run.py"), "no-such-suite"],
        capture_output=True,
        text=True,
        env={**os.environ, "UNSKEW_DATA": ""},
    )
    assert done.returncode == 2
    assert "there is no suite 'no-such-suite'; there are partitions, large" in done.stderr
