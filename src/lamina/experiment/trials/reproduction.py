"""Plan a comparison that a paper reports: the shipped experiment files, their variants and small versions."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from lamina.base.errors import unknown
from lamina.data.dataset import Dataset, Splits
from lamina.data.readers import sources
from lamina.experiment.build import build_parts
from lamina.experiment.config import Claim, Experiment, Tried, load
from lamina.experiment.sections import Named
from lamina.experiment.trials import claims, compare
from lamina.storage.files import write_json, writing_to

FOLDER_AS_GIVEN = "as-given"  # of the variant that changes nothing
SMALL_TRAIN, SMALL_TEST, SMALL_ROUNDS = 2000, 500, 10
Scale = Literal["full", "small"]


def papers() -> dict[str, Path]:
    """Return the experiment files that come with lamina, by name."""
    folder = Path(str(resources.files("lamina") / "papers"))
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def find(name: str) -> Path:
    """Return the experiment file of a name; a name that ends in ``.toml`` is the user's own file."""
    if name.endswith(".toml"):
        return Path(name)
    if name not in papers():
        raise unknown("paper's claim", name, papers())
    return papers()[name]


def plan(file: Path, overrides: list[str], scale: Scale = "full") -> dict[str, Experiment]:
    """Return the comparisons that a file's claims need, by variant, after checking every option they use."""
    experiment = load(file, overrides)
    claims.check(experiment)
    experiments = {}
    for variant, names in claims.needed(experiment).items():
        chosen = "compare.algorithms=[" + ",".join(f'"{name}"' for name in names) + "]"
        variant_experiment = load(file, [*overrides, *claims.variants(experiment)[variant], chosen])
        variant_experiment = small(variant_experiment) if scale == "small" else variant_experiment
        build_parts(variant_experiment)  # refuses a wrong option before anything runs
        compare.all_points(variant_experiment)
        experiments[variant] = variant_experiment
    return experiments


def small(experiment: Experiment) -> Experiment:
    """Return a smoke test of an experiment: part of the data, few rounds, one seed, no tuning, and no ResNet."""
    rounds = min(experiment.train.rounds, SMALL_ROUNDS)
    one_of_each = {
        name: Tried.model_validate({key: values[len(values) // 2 :][:1] for key, values in tried.values().items()})
        for name, tried in experiment.compare.grid.items()
    }
    if experiment.model.name.startswith("resnet"):
        experiment = experiment.model_copy(update={"model": Named(name="small_cnn")})
    return experiment.changed(
        data={"name": small_source(experiment.data.name)},
        train={"rounds": rounds},
        run={"checkpoint_every": rounds},
        compare={"seeds": 1, "tuning_rounds": None, "grid": one_of_each},
    )


def small_source(name: str) -> str:
    """Register part of a data set under its own name, which run folders then record, and return that name."""
    if name not in sources.SOURCES:
        raise unknown("data set", name, sources.SOURCES)
    source, part = sources.SOURCES[name], f"{name}-small"

    def read(root: Path) -> Splits:
        whole = sources.load(name, root if root.is_dir() else None)  # the default directory need not exist
        return Splits(_some(whole.train, SMALL_TRAIN), _some(whole.test, SMALL_TEST))

    sources.SOURCES[part] = dataclasses.replace(source, description=f"a part of {name}", read=read, hub=None)
    return part


def _some(data: Dataset, samples: int) -> Dataset:
    """Return that many random samples, the same every time."""
    return data if len(data) <= samples else data.holdout(samples / len(data), seed=0)[1]


def in_reach(claim: Claim, rounds: int) -> Claim:
    """Return a claim about the last rounds, or all rounds, in place of rounds that a small version does not reach."""
    at = "final" if isinstance(claim.at, int) and claim.at > rounds else claim.at
    within = None if claim.within is not None and claim.within > rounds else claim.within
    return claim.model_copy(update={"at": at, "within": within})


def too_short(claim: Claim, experiments: dict[str, Experiment]) -> str:
    """Return a note if the runs are too short for a verdict on a claim, else an empty string."""
    wanted = max(claim.at if isinstance(claim.at, int) else 0, claim.within or 0)
    variants = {variant for label in claims.labels(claim) for _, variant in claims.named_in(label)}
    rounds = min(experiments[variant].train.rounds for variant in variants)
    if rounds >= wanted:
        return ""
    return f"no verdict on '{claim.text}': it is about round {wanted}, and the runs have {rounds}"


def described(finding: claims.Finding, scale: Scale) -> dict[str, Any]:
    """Return a finding for claims.json; a small version has no verdict."""
    pairs = [
        {
            "better": pair.better,
            "worse": pair.worse,
            "lead": pair.lead and pair.lead.mean,
            "interval": None if pair.lead is None or pair.lead.margin is None else [pair.lead.low, pair.lead.high],
            "seeds": 0 if pair.lead is None else pair.lead.seeds,
            "outcome": pair.outcome,
            "remark": pair.remark,
        }
        for pair in finding.pairs
    ]
    return {
        "text": finding.claim.text,
        "paper": finding.claim.paper,
        "here": finding.values,
        **({"first_touch": finding.touches} if finding.touches else {}),
        **({"verdict": finding.verdict, "pairs": pairs} if scale == "full" else {}),
    }


def save(findings: list[claims.Finding], folder: Path, scale: Scale) -> None:
    """Write claims.json beside the folders of the comparisons."""
    with writing_to(folder):
        write_json(folder / "claims.json", {"scale": scale, "claims": [described(each, scale) for each in findings]})
