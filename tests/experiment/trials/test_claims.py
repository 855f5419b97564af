"""Verdicts on a paper's claims."""

import math

import pytest

import helpers
from lamina import BadInput, History
from lamina.cli import reproduce
from lamina.experiment.config import load, parse
from lamina.experiment.trials import claims, reproduction

PAPERS = reproduction.papers()


def entry(name, *accuracies, diverged=None, **columns):
    """One seed for every list of accuracies, a round for every number."""
    histories = [
        History(
            [{"round": r, "accuracy": a} | {k: v[r - 1] for k, v in columns.items()} for r, a in enumerate(seed, 1)]
        )
        for seed in accuracies
    ]
    return helpers.trial(name, histories, name, diverged=diverged)


def verdict(entries, **claim):
    made = parse({"claim": [{"text": "as the paper says", **claim}]}).claim[0]
    return claims.evaluate(made, entries)


THREE = {
    "a": entry("a", [0.5, 0.9], [0.7, 0.9]),
    "b": entry("b", [0.6, 0.8], [0.6, 0.8]),
    "c": entry("c", [0.4, 0.7], [0.4, 0.7]),
}


def test_an_order_holds_in_part_or_not():
    assert verdict(THREE, kind="order", expect=["a", "b", "c"]).verdict == "holds"
    half = verdict(THREE, kind="order", expect=["b", "a", "c"])
    assert half.verdict == "holds in part"
    assert half.pairs == {("b", "a"): False, ("b", "c"): True, ("a", "c"): True}
    assert verdict(THREE, kind="order", expect=["c", "b", "a"]).verdict == "does not hold"
    grouped = verdict(THREE, kind="order", expect=[["b", "a"], "c"])
    assert grouped.verdict == "holds"
    assert len(grouped.pairs) == 2  # a and b are not told apart


def test_a_pair_that_is_so_in_the_mean_but_not_in_every_seed_is_weak():
    two = {"a": entry("a", [0.5], [0.9]), "b": entry("b", [0.6], [0.7]), "c": entry("c", [0.4], [0.8])}
    found = verdict(two, kind="order", expect=["a", "b", "c"])
    assert found.verdict == "holds"  # 0.7, 0.65 and 0.6 in the mean
    assert found.weak == [("a", "b"), ("b", "c")]  # seed 0 has b first, seed 1 c before b
    assert verdict(two, kind="gap", expect=["a", "b"], at_least=0.04).weak == [("a", "b")]
    assert verdict(two, kind="order", expect=["a - c", "b - c"]).weak == [("a - c", "b - c")]
    assert verdict(two, kind="order", expect=["b", "a"]).weak == []  # not so in the mean: wrong, not weak
    fast = {"a": entry("a", [0.9, 0.9], [0.9, 0.9]), "b": entry("b", [0.1, 0.9], [0.9, 0.9])}
    assert verdict(fast, kind="rounds_to", expect=["a", "b"], target=0.8).weak == [
        ("a", "b")
    ]  # seed 1: both in 1 round
    assert verdict({"a": two["a"]}, kind="order", expect=["a", "b"]).weak == []  # not run


def test_what_is_printed_of_weak_pairs_targets_and_runs_that_diverged(capsys):
    two = {"a": entry("a", [0.5], [0.9]), "b": entry("b", [0.6], [0.7])}
    reproduce.show([verdict(two, kind="order", expect=["a", "b"])], "full")
    assert "verdict: holds (1 of 1 pairs; not in every seed a / b)" in capsys.readouterr().out
    reproduce.show([verdict(two, kind="order", expect=["b", "a"])], "full")
    assert "verdict: does not hold (0 of 1 pairs; not b / a)" in capsys.readouterr().out
    reproduce.show([verdict(two, kind="rounds_to", expect=["a", "b"], target=0.99)], "full")
    assert capsys.readouterr().out.count("never") == 2
    lost = {"a": entry("a", [0.5]), "b": entry("b", [0.5], diverged="in round 2")}
    reproduce.show([verdict(lost, kind="order", expect=["a", "b"], at="last", lower_is_better=True)], "full")
    said = capsys.readouterr().out
    assert "diverged" in said
    assert "never" not in said


def test_an_order_is_of_the_best_the_last_or_a_round_averaged_over_seeds():
    at_first = verdict(THREE, kind="order", expect=["a", "b"], at=1)
    assert at_first.values == pytest.approx({"a": 0.6, "b": 0.6})  # a: the mean of 0.5 and 0.7
    falling = {"a": entry("a", [0.9, 0.1]), "b": entry("b", [0.5, 0.5])}
    assert verdict(falling, kind="order", expect=["a", "b"]).verdict == "holds"
    assert verdict(falling, kind="order", expect=["a", "b"], at="last").verdict == "does not hold"


def test_a_claim_may_be_about_the_first_rounds_of_runs_that_are_not_equally_long():
    entries = {"a": entry("a", [0.5, 0.6, 0.9]), "b": entry("b", [0.4, 0.7])}
    assert verdict(entries, kind="order", expect=["a", "b"]).values == {"a": 0.9, "b": 0.7}
    assert verdict(entries, kind="order", expect=["a", "b"], within=2).values == {"a": 0.6, "b": 0.7}
    assert verdict(entries, kind="order", expect=["a", "b"], within=2, at="last").values == {"a": 0.6, "b": 0.7}
    assert verdict(entries, kind="rounds_to", expect=["b", "a"], within=2, target=0.65).values["a"] == math.inf
    later = {**entries, "a": entry("a", [0.5, 0.6, 0.9], diverged="in round 4")}
    assert verdict(later, kind="order", expect=["a", "b"], within=2, at="last").values["a"] == 0.6
    sooner = {**entries, "b": entry("b", [0.8], diverged="in round 2")}
    assert verdict(sooner, kind="order", expect=["a", "b"], within=2, at="last").values["b"] == -math.inf
    assert verdict(entries, kind="order", expect=["a", "b"], within=3).verdict == "not run"  # b has two rounds


def test_what_the_numbers_of_a_claim_are():
    def unit(**claim):
        return claims.unit(parse({"claim": [{"text": "so", "expect": ["a", "b"], **claim}]}).claim[0])

    assert unit(kind="order") == "accuracy, %, best"
    assert unit(kind="order", metric="loss", at=7) == "loss, round 7"
    assert unit(kind="order", at="last", within=100) == "accuracy, %, last of 100 rounds"
    assert unit(kind="rounds_to", target=0.7) == "rounds to accuracy 0.7"
    assert unit(kind="rounds_to", target=0.7, within=100) == "rounds to accuracy 0.7, of 100 rounds"


def test_another_metric_may_be_better_when_lower():
    entries = {"a": entry("a", [0, 0], consistency=[3.0, 1.0]), "b": entry("b", [0, 0], consistency=[2.0, 2.0])}
    spec = {"kind": "order", "expect": ["a", "b"], "metric": "consistency", "lower_is_better": True}
    assert verdict(entries, **spec, at="last").verdict == "holds"
    assert verdict(entries, **spec, at=1).verdict == "does not hold"
    assert verdict(entries, **spec).values == {"a": 1.0, "b": 2.0}


def test_rounds_to_a_target_never_reached_are_infinite():
    found = verdict(THREE, kind="rounds_to", expect=["a", "c"], target=0.85)
    assert found.values == {"a": 2.0, "c": math.inf}
    assert found.verdict == "holds"
    assert verdict(THREE, kind="rounds_to", expect=["c", "a"], target=0.85).verdict == "does not hold"
    neither = verdict(THREE, kind="rounds_to", expect=["b", "c"], target=0.85)
    assert neither.verdict == "does not hold"  # two that never get there are not told apart
    one_seed = {**THREE, "a": entry("a", [0.5, 0.9], [0.5, 0.6])}
    assert verdict(one_seed, kind="rounds_to", expect=["a", "c"], target=0.85).values["a"] == math.inf


def test_a_gap_is_wide_enough_or_narrow_enough():
    assert verdict(THREE, kind="gap", expect=["a", "b", "c"], at_least=0.05).verdict == "holds"
    assert verdict(THREE, kind="gap", expect=["a", "b", "c"], at_least=0.15).verdict == "holds in part"
    assert verdict(THREE, kind="gap", expect=["b", "a"], at_least=0.05).verdict == "does not hold"
    assert verdict(THREE, kind="gap", expect=["b", "a"], at_most=0.15).verdict == "holds"  # either way
    assert verdict(THREE, kind="gap", expect=["c", "a"], at_most=0.15).verdict == "does not hold"


def test_a_difference_between_variants():
    entries = {**THREE, "a@E=3": entry("a", [0.75]), "b@E=3": entry("b", [0.7])}
    found = verdict(entries, kind="order", expect=["a - b", "a@E=3 - b@E=3"])
    assert found.values == pytest.approx({"a - b": 0.1, "a@E=3 - b@E=3": 0.05})
    assert found.verdict == "holds"


def test_who_diverged_loses_and_who_did_not_run_gets_no_verdict():
    entries = {"a": entry("a", [0.5]), "b": entry("b", [0.9], diverged="in round 2"), "c": entry("c", [])}
    assert verdict(entries, kind="order", expect=["a", "b"], at="last").verdict == "holds"
    assert verdict(entries, kind="order", expect=["a", "b"], at="best").verdict == "does not hold"
    assert verdict(entries, kind="order", expect=["a", "c"]).verdict == "holds"  # not one round
    assert verdict(entries, kind="rounds_to", expect=["a", "c"], target=0.5).verdict == "holds"
    assert verdict(entries, kind="order", expect=["a", "d"]).verdict == "not run"
    assert verdict(entries, kind="order", expect=["b", "a"], at=2).verdict == "not run"  # a ended before
    asked = {"kind": "rounds_to", "expect": ["a", "b"], "target": 0.5}
    assert verdict(entries, **asked, metric="client_accuracy").verdict == "not run"  # never measured, not never reached


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"kind": "order", "expect": ["fedavg"]}, "at least two"),
        ({"kind": "order", "expect": ["fedavg", "fedlamb"], "at": 9, "within": 8}, "at = 9 is not within = 8 rounds"),
        ({"kind": "order", "expect": [["fedavg", "fedlamb"]]}, "at least two"),
        ({"kind": "order", "expect": ["fedavg", "fedlam"]}, "did you mean 'fedlamb'"),
        ({"kind": "order", "expect": ["fedavg", "fedlamb@Z"]}, "variant in claim.0"),
        ({"kind": "order", "expect": ["fedavg", "fedlamb"], "paper": {"fedprox": 1}}, "fedprox"),
        ({"kind": "rounds_to", "expect": ["fedavg", "fedlamb"]}, "target"),
        ({"kind": "order", "expect": ["fedavg", "fedlamb"], "target": 0.9}, "target"),
        ({"kind": "gap", "expect": ["fedavg", "fedlamb"]}, "at_least or at_most"),
        ({"kind": "order", "expect": ["fedavg", "fedlamb"], "variants": {"../x": []}}, "must be made of letters"),
        ({"kind": "better", "expect": ["fedavg", "fedlamb"]}, "'order', 'rounds_to' or 'gap'"),
        ({"kind": "order", "expect": ["fedavg", "fedlamb"], "papers": {}}, "did you mean 'paper'"),
    ],
)
def test_a_claim_that_cannot_be_looked_at_is_refused_in_one_line(claim, message):
    with pytest.raises(BadInput, match=message) as refused:
        claims.check(parse({"compare": {"algorithms": ["fedavg", "fedlamb"]}, "claim": [{"text": "t", **claim}]}))
    assert "\n" not in str(refused.value)


def test_a_file_without_claims_is_for_compare():
    with pytest.raises(BadInput, match="lamina compare"):
        claims.check(parse({}))


def test_the_papers_own_numbers_support_their_claims():
    """Rounds and accuracies as printed, put in place of ours: a slip in copying them would show."""
    for name, file in PAPERS.items():
        for claim in load(file).claim:
            if not claim.paper:
                continue
            fields = {"at": "best"} if claim.target is None else {}
            printed = {
                label: entry(
                    label, [value / 100] if claim.target is None else [0.0] * int(min(value, 4000) - 1) + [1.0]
                )
                for label, value in claim.paper.items()
            }
            found = claims.evaluate(claim.model_copy(update={"metric": "accuracy", **fields}), printed)
            assert found.verdict == "holds", (name, claim.text, found.pairs)
