"""What ``import lamina`` offers: `Simulation`, `compare`, `tune`, and the list of public names."""
