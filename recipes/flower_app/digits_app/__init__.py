"""A Flower app on digits."""
