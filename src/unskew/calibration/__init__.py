"""Calibration: the classifier of a trained model, unskewed from class statistics that clients add up."""
