"""A real federation's machines: certificates, keys, and Flower's processes, started, watched and stopped.

Nothing here imports PyTorch: what watches over processes stays small.
"""
