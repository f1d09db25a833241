"""The processor time until Unskew is imported, or until a command has answered."""

import resource
import subprocess
import sys
from functools import partial

from measure import Row, at_most, medians

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import unskew": ["-c", "import unskew"],
    "unskew --help": ["-m", "unskew", "--help"],
    "unskew run --help": ["-m", "unskew", "run", "--help"],
}


def suite(repeats):
    """Each command, the commands taking turns."""
    commands = {name: partial(_run, words) for name, words in COMMANDS.items()}
    milliseconds = {name: 1000 * seconds for name, seconds in medians(commands, repeats, _processor_time).items()}
    bare = milliseconds["python -c pass"]
    return [
        at_most("import unskew, beyond starting Python", milliseconds["import unskew"] - bare, "ms", 10),
        at_most("unskew --help", milliseconds["unskew --help"], "ms", 200, f"Python alone: {bare:.0f} ms"),
        Row("unskew run --help", milliseconds["unskew run --help"], "ms", remark="imports PyTorch"),
    ]


def _run(words):
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)


def _processor_time():
    """Of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
