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
