"""Leases as other processes leave them behind."""

import json

from lamina.storage import leases


def abandon(lease):
    """Leave a lease as a killed process of this machine does: it is not renewed, and no such process exists."""
    give(lease, started="0")


def give(lease, **facts):
    """Let a lease of this process be another's."""
    leases._renewed.discard(lease)  # a renewal would take it back
    rewrite(lease.path, **facts)


def rewrite(path, **facts):
    """Change facts about the owner of a lease."""
    changed = path.with_name("lease.new.partial")
    changed.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    changed.replace(path)
