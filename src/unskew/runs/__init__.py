"""A run's life, in order: config, prepare, train, finish, finished; and the folder that keeps it."""
