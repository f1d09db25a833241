"""Operating a real federation: certificates, keys, and Flower's processes, started, supervised and stopped.

Nothing here imports PyTorch, so the supervisors stay small.
"""
