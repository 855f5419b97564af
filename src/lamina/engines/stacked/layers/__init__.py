"""Stacked forms of torch's layers: one layer that computes all clients."""
