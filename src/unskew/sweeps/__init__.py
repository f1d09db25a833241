"""Sweeps: many settings tried on a validation part, the best of them as a recipe."""
