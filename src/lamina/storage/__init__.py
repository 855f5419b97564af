"""Persistence: files that survive a kill, checkpoints, and the identity of the run that wrote them."""
