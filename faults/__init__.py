"""The fault campaign: see `python -m faults --help` and docs/explanation/reliability.md."""
