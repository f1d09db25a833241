"""The simulation over processes and machines that torchrun starts: rank 0 has the run, the others work for it."""
