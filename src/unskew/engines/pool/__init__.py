"""Worker processes, one a core, with data and weights in shared memory."""
