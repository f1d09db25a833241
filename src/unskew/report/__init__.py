"""The report: one page that explains a run, or compares several."""
