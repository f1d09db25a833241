"""The fault campaign: see `python -m faults --help` and docs/reliability.md."""
