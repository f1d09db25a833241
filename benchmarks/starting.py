"""The processor time until Unskew is imported, or until a command has answered."""

import resource
import statistics
import subprocess
import sys

from measure import Row, at_most

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import unskew": ["-c", "import unskew"],
    "unskew --help": ["-m", "unskew", "--help"],
    "unskew run --help": ["-m", "unskew", "run", "--help"],
}


def suite(repeats):
    """Each command, the commands taking turns."""
    times = {name: [] for name in COMMANDS}
    for turn in range(repeats + 1):
        for name, words in COMMANDS.items():
            seconds = _processor_time(words)
            if turn:  # the first turn fills the caches
                times[name].append(seconds)
    milliseconds = {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}
    bare = milliseconds["python -c pass"]
    return [
        at_most("import unskew, beyond starting Python", milliseconds["import unskew"] - bare, "ms", 10),
        at_most("unskew --help", milliseconds["unskew --help"], "ms", 200, f"Python alone: {bare:.0f} ms"),
        Row("unskew run --help", milliseconds["unskew run --help"], "ms", remark="imports PyTorch"),
    ]


def _processor_time(words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
