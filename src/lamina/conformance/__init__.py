"""Conformance: the same gradients, or model and data, for an algorithm of lamina and another implementation.

`compare.py` has the function `conform`. `federation.py` runs both sides and `feed.py` gives them gradients. `target.py`
finds the other implementation, which `function.py`, `optimizer.py` or `strategy.py` calls. `verdict.py` says what is
different.
"""

from lamina.conformance.compare import conform
from lamina.conformance.verdict import Conformance, Difference

__all__ = ["Conformance", "Difference", "conform"]
