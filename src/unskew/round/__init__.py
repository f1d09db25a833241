"""A round, step by step: who comes, what they minimise, what they do, how results become one, how the server moves."""
