"""A federation of processes on this machine, as ``lamina flower up`` runs it. The protocol does not depend on it.

`processes` starts processes, and `guard` ends them; `federation` is a SuperLink with its SuperNodes;
`jobs` is what runs on it.
"""
