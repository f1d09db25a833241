from analysis.finished import finished, run, runs_of

__all__ = ["finished", "run", "runs_of"]
