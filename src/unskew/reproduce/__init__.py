"""The papers' tables and figures, each by one command: recipes, the runs they take, ours next to theirs."""
