"""Loggers that live outside the package, named ``outside_loggers:function`` in tests."""

import json


class Lines:
    """Figures as JSON lines in the log's folder."""

    def start(self, folder, seen, facts):
        self.file = folder / "figures.jsonl"
        return ()

    def write(self, step, figures):
        with self.file.open("a") as lines:
            lines.write(json.dumps({"step": step, **figures}) + "\n")

    def close(self, finished):
        self.write(-1, {"finished": finished})


def lines():
    """A logger."""
    return Lines()


def nothing():
    """No logger: it gives nothing."""


def broken():
    """A logger whose server is not there."""
    raise ConnectionError("no server")
