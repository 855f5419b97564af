"""A module and a loss as a function of one flat vector: gradients, layers, batches, losses, dropout, fingerprints."""
