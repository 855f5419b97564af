"""A run under torchrun: join the other processes, and share one run folder among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lamina.engines.stacked.ranks import Ranks
from lamina.errors import BadInput, LaminaError
from lamina.experiment.build import check_device
from lamina.experiment.config import Experiment
from lamina.experiment.folder import RunFolder
from lamina.experiment.log_lines import LogLines
from lamina.history import History
from lamina.simulation import Simulation
from lamina.storage.checkpoint import Checkpoints
from lamina.storage.locks import is_at, lost


class RankFolder:
    """The part of a run's folder that a process other than the first writes: the state of the clients it trains."""

    def __init__(self, path: Path, rank: int, *, found: bool) -> None:
        self.checkpoints = Checkpoints(path / "checkpoints" / f"rank-{rank}")
        self._found = found  # whether the first process resumes a run
        self._lock = path / "lock"  # the first process's; on another machine it may not be there
        self._file = self._lock.open("rb") if self._lock.exists() else None

    def rounds(self) -> list[int]:
        """Return the rounds that this process could resume after."""
        return self.checkpoints.rounds() if self._found else []

    def go_on_after(self, number: int) -> History:
        """Return an empty history: the first process keeps it."""
        return History()

    def checkpoint(self, simulation: Simulation) -> None:
        """Save the state after this round."""
        if self._file is not None and not is_at(self._file, self._lock):
            raise lost(self._lock.parent)
        self.checkpoints.save(simulation.state)

    def record(self, *_: object) -> None:
        """Do nothing: the first process writes everything else."""

    stopped = finish = diverge = record

    def close(self) -> None:
        """Close the first process's lock, which was only read."""
        if self._file is not None:
            self._file.close()


def join_ranks(experiment: Experiment) -> tuple[Experiment, Ranks]:
    """Under torchrun, join the other processes; return the experiment on this process's device, and its rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return experiment, Ranks(0, 1)
    device = experiment.run.device
    check_device(device)
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if experiment.run.engine == "loop":
        raise BadInput("torchrun shares the cohort of the stacked engine: run.engine = 'loop' runs in one process only")
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    settings = experiment.run.model_copy(update={"device": device, "engine": "stacked"})
    return experiment.model_copy(update={"run": settings}), Ranks.current()


def open_folder(
    path: Path, config: Mapping[str, Any], *, overwrite: bool = False, lines: LogLines | None = None
) -> RunFolder | RankFolder:
    """Open the run's folder, or under torchrun this process's part of it if the first process accepts the folder."""
    ranks = Ranks.current()
    if ranks.world == 1:
        return RunFolder(path, config, overwrite=overwrite, lines=lines)
    folder: RunFolder | None = None
    shared: list[Any] = [None]
    problem: LaminaError | None = None
    if ranks.rank == 0:
        try:
            folder = RunFolder(path, config, overwrite=overwrite, lines=lines)
            shared = [{"found": bool(folder.rounds()), "ended": folder.complete or folder.diverged is not None}]
        except LaminaError as error:
            problem = error
    torch.distributed.broadcast_object_list(shared)
    if problem is not None:
        raise problem
    if folder is not None:
        return folder
    if shared[0] is None or shared[0]["ended"]:
        raise SystemExit(0)  # the first process reports, and its exit code counts
    return RankFolder(path, ranks.rank, found=shared[0]["found"])


def everywhere(here: bool) -> bool:
    """Return whether a condition holds in all processes."""
    ranks = Ranks.current()
    device = "cuda" if ranks.world > 1 and torch.distributed.get_backend() == "nccl" else "cpu"
    return int(ranks.add(torch.tensor(int(not here), device=device))) == 0
