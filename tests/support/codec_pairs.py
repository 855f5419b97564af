"""Every codec, with methods that differ in what they send."""

import pytest

CODECS = [
    "bf16",
    "fp16",
    {"name": "qsgd", "bits": 3, "bucket": 16},
    "sign",
    {"name": "topk", "share": 0.1},
    {"name": "randk", "share": 0.2},
    {"name": "sketch", "share": 0.2, "rows": 2},
    [{"name": "topk", "share": 0.3}, {"name": "qsgd", "bits": 5}],
]
METHODS = ["fedavg", "scaffold", "fedlamb", "mimelamb", "fedlada"]


def codec_pairs(methods_of_a_codec):
    """Return all pairs as test cases; all but so many of a codec are long."""
    return [
        pytest.param(
            codec,
            method,
            id=f"{codec}-{method}",
            marks=[] if (i - j) % len(METHODS) < methods_of_a_codec else [pytest.mark.long],
        )
        for i, codec in enumerate(CODECS)
        for j, method in enumerate(METHODS)
    ]
