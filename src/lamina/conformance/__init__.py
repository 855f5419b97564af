"""Conformance: the same gradients, or model and data, for an algorithm of lamina and another implementation.

`conform` compares; `federation.py` runs our side, `target.py` and its neighbours run the other implementation, and
`verdict.py` says what was found.
"""

from lamina.conformance.federation import conform
from lamina.conformance.verdict import Conformance, Difference

__all__ = ["Conformance", "Difference", "conform"]
