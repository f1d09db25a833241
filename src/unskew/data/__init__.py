"""Image sets, who holds which examples, and the batches a client trains on."""
