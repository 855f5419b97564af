"""Other libraries on the same workloads, each in an environment of its own, through its public API."""
