"""A round, step by step: sampling, the objective, local training, aggregation, the server's update."""
