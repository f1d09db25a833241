"""The command line: commands, what they print, and how long work is shown."""
