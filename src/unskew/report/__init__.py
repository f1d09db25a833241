"""Runs and partitions as people look at them: tables, progress, pictures."""
