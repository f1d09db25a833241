"""What runs of these tests are observed by."""

from unskew import STOP


def stop_after(number):
    """Stops a run after that round."""
    return lambda event: STOP if getattr(event, "round", 0) == number else None
