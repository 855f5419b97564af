"""Every codec, and methods that differ in what they send."""

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


def pairs(shift: int) -> list[tuple]:
    """Return cases (codec, method, feedback): every codec with two methods, one of them with error feedback.

    Tests with different shifts pair a codec with different methods: four tests that differ by one take every pair.
    """
    return [
        (codec, METHODS[(i + shift + second) % len(METHODS)], not second)
        for i, codec in enumerate(CODECS)
        for second in (0, 1)
    ]
