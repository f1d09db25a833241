"""Contrast of colors as WCAG 2 defines it."""

import numpy as np


def linear(colour):
    """Linear sRGB of a color such as "#1f2e3d"."""
    value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """The contrast of two linear colors, from 1 to 21."""
    bright, dim = sorted((float(np.dot((0.2126, 0.7152, 0.0722), c)) for c in (one, other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)
