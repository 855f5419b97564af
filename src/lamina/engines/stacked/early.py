"""Begin the next round on a GPU before the host has reported this one.

The host takes longer to report a round than a small model takes for its local steps, and a GPU would idle meanwhile. So
the next round's steps are queued as soon as the server's step is. If the next round must start from another state (a
member has diverged, a callback has changed the model, the run ends), its steps are discarded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.engines.stacked.feed import NextRound
from lamina.engines.stacked.rows import Member, RoundInProgress, Started
from lamina.engines.state import ServerStep
from lamina.objective.objective import Buffers


@dataclass
class EarlyRound:
    """A round whose local steps were begun before the round before it was reported."""

    now: RoundInProgress
    started: Started
    _versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._versions = _versions(self.now.members)

    def is_round_of(self, members: Sequence[Member]) -> bool:
        """Return whether these members, with these states and plans, are to be trained.

        Tensors that were replaced or written in place are noticed, except for writes through `.data`, which torch does
        not count.
        """
        if len(members) != len(self.now.members) or _versions(members) != self._versions:
            return False
        return all(
            one.algorithm is other.algorithm
            and one.protocol is other.protocol
            and one.state.server is other.state.server
            and _are_same(one.state.buffers, other.state.buffers)
            and one.plan.index is other.plan.index
            and one.plan.lr == other.plan.lr
            for one, other in zip(members, self.now.members, strict=True)
        )


def _are_same(one: Buffers, other: Buffers) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _versions(members: Sequence[Member]) -> list[int]:
    """Return how often the tensors of the members' states were written in place, by a user's callback, say."""
    states = [member.state for member in members]
    return [t._version for s in states for t in (*s.server, *s.buffers.values()) if isinstance(t, Tensor)]


def can_begin_next(now: RoundInProgress, steps: Mapping[int, ServerStep]) -> bool:
    """Return whether the next round most likely follows, and needs nothing of this one but the servers' steps."""
    algorithm, number = now.members[0].algorithm, now.members[0].plan.number
    needs = algorithm.needs(number + 1)
    is_private = any(member.protocol.privacy is not None for member in now.members)  # nothing may precede its ledger
    return (
        now.continues
        and len(steps) == len(now.members)
        and not (is_private or needs.full_gradient or needs.control_variate)
    )


def next_members(now: RoundInProgress, steps: Mapping[int, ServerStep], upcoming: NextRound) -> list[Member]:
    """Return the members as they will be in the next round."""
    members = []
    for e, (member, plan) in enumerate(zip(now.members, upcoming.plans, strict=True)):
        buffers = member.state.buffers | steps[e].buffers
        state = dataclasses.replace(member.state, server=steps[e].server, buffers=buffers)
        plan = dataclasses.replace(plan, lr=member.protocol.rate(plan.number))  # members may share a plan
        members.append(dataclasses.replace(member, state=state, plan=plan))
    return members


def read_later(numbers: Tensor) -> Callable[[], list[float]]:
    """Start to copy numbers to the host; return a function that waits for them alone, not for what is started later."""
    if not numbers.is_cuda:
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    done = torch.cuda.current_stream().record_event()

    def wait() -> list[float]:
        done.synchronize()
        values: list[float] = copy.tolist()
        return values

    return wait
