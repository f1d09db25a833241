"""The table of a small partition, for tests."""

import numpy as np


def counts_table(population, labels, classes):
    """[K, C], the examples of each class for each client."""
    owner = np.repeat(np.arange(population.clients), population.sizes)
    codes = owner * classes + labels[population.order]
    return np.bincount(codes, minlength=population.clients * classes).reshape(population.clients, classes)
