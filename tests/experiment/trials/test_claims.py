"""Verdicts on a paper's claims."""

import dataclasses
import math

import pytest

import helpers
import lamina
from lamina import BadInput, History
from lamina.cli import reproduce
from lamina.experiment.config import load, parse
from lamina.experiment.trials import claims, reproduction

PAPERS = reproduction.papers()


def entry(name, *accuracies, diverged=None, rounds=None, **columns):
    """One seed for every list of accuracies, a round for every number; `rounds` is how many it should have."""
    histories = [
        History(
            [{"round": r, "accuracy": a} | {k: v[r - 1] for k, v in columns.items()} for r, a in enumerate(seed, 1)]
        )
        for seed in accuracies
    ]
    trial = helpers.trial(name, histories, name, diverged=diverged)
    for record in trial.records if rounds else []:
        record.config["train"]["rounds"] = rounds
    return trial


def verdict(entries, **claim):
    made = parse({"claim": [{"text": "as the paper says", **claim}]}).claim[0]
    return claims.evaluate(made, entries)


THREE = {  # over two seeds, every pair differs by the same in both
    "a": entry("a", [0.5, 0.9], [0.6, 1.0]),
    "b": entry("b", [0.3, 0.7], [0.4, 0.8]),
    "c": entry("c", [0.1, 0.5], [0.2, 0.6]),
}


def outcomes(finding):
    return {(pair.better, pair.worse): pair.outcome for pair in finding.pairs}


def test_an_order_is_reproduced_partly_or_not():
    assert verdict(THREE, kind="order", expect=["a", "b", "c"]).verdict == "reproduced"
    half = verdict(THREE, kind="order", expect=["b", "a", "c"])
    assert half.verdict == "partly"
    assert outcomes(half) == {("b", "a"): "wrong", ("b", "c"): "right", ("a", "c"): "right"}
    assert verdict(THREE, kind="order", expect=["c", "b", "a"]).verdict == "not reproduced"
    grouped = verdict(THREE, kind="order", expect=[["b", "a"], "c"])
    assert grouped.verdict == "reproduced"
    assert len(grouped.pairs) == 2  # a and b are not told apart


@pytest.mark.parametrize(
    ("expect", "meaning"),
    [
        (["*", "fedavg"], [["fedams", "fedlamb", "mime"], "fedavg"]),
        (["fedavg", "*"], ["fedavg", ["fedams", "fedlamb", "mime"]]),
        (["*", ["fedavg", "fedlamb@Z=3"]], [["fedams", "mime"], ["fedavg", "fedlamb@Z=3"]]),
    ],
    ids=str,
)
def test_a_star_is_a_list_of_all_other_algorithms(expect, meaning):
    tree = {"compare": {"algorithms": ["fedavg", "fedams", "fedlamb", "mime"]}}
    (claim,) = parse(tree | {"claim": [{"text": "all", "kind": "order", "expect": expect}]}).claim
    assert claim.expect == meaning


def test_a_star_without_other_algorithms_is_refused():
    alone = {
        "compare": {"algorithms": ["fedavg"]},
        "claim": [{"text": "all", "kind": "order", "expect": ["*", "fedavg"]}],
    }
    with pytest.raises(BadInput, match="name at least two, the best first"):
        claims.check(parse(alone))


def test_a_lead_that_is_less_than_its_interval_is_a_tie():
    # differences 0.1 and 0.3: mean 0.2, standard error 0.1, times 12.7
    two = {"a": entry("a", [0.5], [0.9]), "b": entry("b", [0.4], [0.6])}
    found = verdict(two, kind="order", expect=["a", "b"])
    assert found.pairs[0].lead.mean == pytest.approx(0.2)
    assert found.pairs[0].lead.margin == pytest.approx(1.27, abs=0.001)
    assert (found.verdict, found.pairs[0].remark, found.seeds) == ("tie", "holds by less than the interval", 2)
    reverse = verdict(two, kind="order", expect=["b", "a"])
    assert (reverse.verdict, reverse.pairs[0].remark) == ("tie", "reversed by less than the interval")


def test_one_seed_has_only_a_sign_and_says_so():
    one = {"a": entry("a", [0.5]), "b": entry("b", [0.4]), "same": entry("same", [0.5])}
    found = verdict(one, kind="order", expect=["a", "b"])
    assert (found.verdict, found.pairs[0].remark) == ("reproduced", "one seed")
    assert verdict(one, kind="order", expect=["b", "a"]).verdict == "not reproduced"
    equal = verdict(one, kind="order", expect=["a", "same"])
    assert (equal.verdict, equal.pairs[0].remark) == ("tie", "equal")


def test_the_verdict_of_a_claim_with_pairs_of_every_kind():
    entries = {
        **THREE,
        "swings": entry("swings", [0.0, 1.0], [0.9, 1.0]),  # its lead over c is 0.2 and 0.55
        "dead": entry("dead", [0.1, 0.1], [0.1, 0.1]),
    }
    for expect, outcome in (
        (["a", "swings"], "tie"),
        (["a", ["c", "swings"]], "partly"),
        (["c", ["a", "swings"]], "not reproduced"),
        (["a", ["c", "dead"]], "partly"),
        (["a", "dead"], "not comparable"),
        (["a", ["swings", "dead"]], "tie"),
    ):
        assert verdict(entries, kind="order", expect=expect).verdict == outcome, expect


def test_only_the_seeds_that_both_methods_have_are_compared():
    entries = {**THREE, "more": entry("more", [0.3, 0.7], [0.4, 0.8], [0.1, 0.9])}
    (pair,) = verdict(entries, kind="order", expect=["a", "more"]).pairs
    assert (pair.lead.seeds, pair.lead.mean, pair.outcome) == (2, pytest.approx(0.2), "right")


def test_what_is_printed_of_pairs_targets_and_runs_that_diverged(capsys):
    two = {"a": entry("a", [0.5, 0.6], [0.9, 0.8]), "b": entry("b", [0.6, 0.5], [0.7, 0.6])}
    reproduce.show([verdict(two, kind="order", expect=["a", "b"])], "full")
    printed = capsys.readouterr().out
    assert "verdict: tie (0 of 1 pair, 2 seeds)" in printed
    assert "+10 [-117, +137]" in printed
    assert "holds by less than the interval" in printed
    one = {"a": entry("a", [0.5, 0.6]), "b": entry("b", [0.4, 0.5])}
    reproduce.show([verdict(one, kind="order", expect=["b", "a"])], "full")
    assert "verdict: not reproduced (0 of 1 pair, one seed)" in capsys.readouterr().out
    reproduce.show([verdict(two, kind="rounds_to", expect=["a", "b"], target=0.7)], "full")
    printed = capsys.readouterr().out
    assert printed.count("not within 2 rounds") == 4  # both, and their first touch
    assert "first touch" in printed
    lost = {"a": entry("a", [0.5]), "b": entry("b", [0.5], diverged="in round 2", rounds=2)}
    reproduce.show([verdict(lost, kind="order", expect=["b", "a"], at="last", lower_is_better=True)], "full")
    printed = capsys.readouterr().out
    assert "diverged" in printed
    assert "not within" not in printed


def test_an_order_is_of_the_last_ten_rounds_the_best_the_last_or_one_round():
    at_first = verdict(THREE, kind="order", expect=["a", "b"], at=1)
    assert at_first.values == pytest.approx({"a": 0.55, "b": 0.35})
    falling = {"a": entry("a", [0.9, *[0.4] * 9, 0.2]), "b": entry("b", [0.1, *[0.5] * 9, 0.3])}
    spec = {"kind": "order", "expect": ["a", "b"]}
    assert verdict(falling, **spec).values == pytest.approx({"a": 0.38, "b": 0.48})  # without the first of 11 rounds
    assert verdict(falling, **spec, at="best").values == {"a": 0.9, "b": 0.5}
    assert verdict(falling, **spec, at="last").values == {"a": 0.2, "b": 0.3}
    assert verdict(falling, **spec).verdict == "not reproduced"
    assert verdict(falling, **spec, at="best").verdict == "reproduced"


def test_a_claim_may_be_about_the_first_rounds_of_runs_that_are_not_equally_long():
    entries = {"a": entry("a", [0.5, 0.6, 0.9]), "b": entry("b", [0.4, 0.7])}
    spec = {"kind": "order", "expect": ["a", "b"], "at": "best"}
    assert verdict(entries, **spec).values == {"a": 0.9, "b": 0.7}
    assert verdict(entries, **spec).pairs[0].remark == "runs of 2 and 3 rounds"
    assert verdict(entries, **spec, within=2).values == {"a": 0.6, "b": 0.7}
    assert verdict(entries, **spec, within=2).verdict == "not reproduced"
    asked = {"kind": "rounds_to", "expect": ["b", "a"], "within": 2, "target": 0.65}
    assert verdict(entries, **asked).touches == {"b": 2.0, "a": math.inf}
    later = {**entries, "a": entry("a", [0.5, 0.6, 0.9], diverged="in round 4", rounds=5)}
    assert verdict(later, **spec, within=2).values["a"] == 0.6
    sooner = {**entries, "b": entry("b", [0.8], diverged="in round 2", rounds=2)}
    assert verdict(sooner, **spec, within=2).values["b"] == -math.inf


def test_what_the_numbers_of_a_claim_are():
    def unit(**claim):
        return claims.unit(parse({"claim": [{"text": "so", "expect": ["a", "b"], **claim}]}).claim[0])

    assert unit(kind="order") == "accuracy, %, last 10 rounds"
    assert unit(kind="order", within=100) == "accuracy, %, last 10 of 100 rounds"
    assert unit(kind="order", at="best") == "accuracy, %, best"
    assert unit(kind="order", metric="loss", at=7) == "loss, round 7"
    assert unit(kind="order", at="last", within=100) == "accuracy, %, last of 100 rounds"
    assert unit(kind="rounds_to", target=0.7) == "rounds until accuracy stays at 0.7"
    assert unit(kind="rounds_to", target=0.7, within=100) == "rounds until accuracy stays at 0.7, of 100 rounds"


def test_another_metric_may_be_better_when_lower():
    entries = {"a": entry("a", [0, 1], consistency=[3.0, 1.0]), "b": entry("b", [0, 1], consistency=[2.0, 2.0])}
    spec = {"kind": "order", "expect": ["a", "b"], "metric": "consistency", "lower_is_better": True}
    assert verdict(entries, **spec, at="last").verdict == "reproduced"
    assert verdict(entries, **spec, at=1).verdict == "not reproduced"
    assert verdict(entries, **spec, at="best").values == {"a": 1.0, "b": 2.0}


def rising(first, rounds=20, top=0.9):
    """Return accuracies that reach the top in a round and stay there; the mean of five does four rounds later."""
    return [top if number >= first else -9.0 + number / rounds for number in range(1, rounds + 1)]


def test_rounds_to_a_target_are_those_until_a_run_stays_there():
    spike = rising(12)
    spike[4] = 0.95
    entries = {"a": entry("a", rising(6), rising(7)), "spike": entry("spike", spike, spike)}
    found = verdict(entries, kind="rounds_to", expect=["a", "spike"], target=0.9)
    assert found.values == {"a": 10.5, "spike": 16.0}  # five rounds at 0.9
    assert found.touches == {"a": 6.5, "spike": 5.0}
    assert found.pairs[0].lead.mean == 5.5


def test_a_run_that_misses_the_target_needs_more_rounds_than_it_had():
    never = rising(99)
    entries = {
        "a": entry("a", rising(6), rising(7)),
        "never": entry("never", never, never),
        "once": entry("once", rising(6), never),
    }
    found = verdict(entries, kind="rounds_to", expect=["a", "never"], target=0.9)
    assert (found.values["never"], found.rounds) == (math.inf, 20)
    assert found.pairs[0].lead.mean == 21 - 10.5
    assert found.pairs[0].outcome == "right"
    assert verdict(entries, kind="rounds_to", expect=["never", "a"], target=0.9).verdict == "not reproduced"
    slow = {"a": entry("a", [0.1, 0.2]), "b": entry("b", [0.1, 0.3])}
    neither = verdict(slow, kind="rounds_to", expect=["a", "b"], target=0.9)
    assert (neither.verdict, neither.pairs[0].remark) == ("tie", "neither within 2 rounds")
    once = verdict(entries, kind="rounds_to", expect=["once", "never"], target=0.9)
    assert (once.values["once"], once.pairs[0].lead.mean, once.verdict) == (math.inf, (21 - 10) / 2, "tie")


def test_a_target_that_both_reach_in_the_first_rounds_tells_nothing():
    fast = {"a": entry("a", [0.9, 0.95, 0.9, 0.9]), "b": entry("b", [0.89, 0.89, 0.99, 0.99])}
    found = verdict(fast, kind="rounds_to", expect=["a", "b"], target=0.9)
    assert found.values == {"a": 1.0, "b": 3.0}
    assert (found.verdict, found.pairs[0].remark) == ("not comparable", "both are there within 3 rounds")
    assert verdict(fast, kind="rounds_to", expect=["a", "b"], target=0.92).verdict == "not reproduced"


def test_a_gap_is_wide_enough_or_narrow_enough():
    assert verdict(THREE, kind="gap", expect=["a", "b", "c"], at_least=0.15).verdict == "reproduced"
    assert verdict(THREE, kind="gap", expect=["a", "b", "c"], at_least=0.25).verdict == "partly"
    assert verdict(THREE, kind="gap", expect=["b", "a"], at_least=0.05).verdict == "not reproduced"
    assert verdict(THREE, kind="gap", expect=["b", "a"], at_most=0.25).verdict == "reproduced"  # either way
    assert verdict(THREE, kind="gap", expect=["c", "a"], at_most=0.25).verdict == "not reproduced"


def test_a_gap_says_if_its_bound_is_within_the_interval():
    two = {"a": entry("a", [0.5], [0.9]), "b": entry("b", [0.4], [0.6])}  # 0.2 and its interval -1.07 to 1.47

    def remark(**bounds):
        (pair,) = verdict(two, kind="gap", expect=["a", "b"], **bounds).pairs
        return pair.outcome, pair.remark

    assert remark(at_least=0.1) == ("right", "holds by less than the interval")
    assert remark(at_least=0.3) == ("wrong", "missed by less than the interval")
    assert remark(at_most=0.3) == ("right", "holds by less than the interval")
    assert remark(at_most=2.0) == ("right", "")
    assert remark(at_most=0.1) == ("wrong", "missed by less than the interval")
    assert remark(at_least=2.0) == ("wrong", "")


def test_a_difference_between_variants_is_that_of_each_seed():
    entries = {**THREE, "a@E=3": entry("a", [0.1, 0.75], [0.1, 0.9]), "b@E=3": entry("b", [0.1, 0.7], [0.1, 0.85])}
    found = verdict(entries, kind="order", expect=["a - b", "a@E=3 - b@E=3"], at="last")
    assert found.values == pytest.approx({"a - b": 0.2, "a@E=3 - b@E=3": 0.05})
    assert found.verdict == "reproduced"


def test_who_diverged_is_not_compared_and_a_method_that_should_be_better_loses():
    entries = {"a": entry("a", [0.5]), "b": entry("b", [0.9], diverged="in round 2", rounds=2)}
    entries["a"].records[0].config["train"]["rounds"] = 2
    for at in ("final", "best", "last"):
        survived = verdict(entries, kind="order", expect=["a", "b"], at=at)
        assert (survived.verdict, survived.pairs[0].remark) == ("not comparable", "b diverged")
        lost = verdict(entries, kind="order", expect=["b", "a"], at=at)
        assert (lost.verdict, lost.pairs[0].remark) == ("not reproduced", "b diverged")
    assert verdict(entries, kind="gap", expect=["b", "a"], at_most=0.5).verdict == "not comparable"
    assert verdict(entries, kind="order", expect=["a", "b"], at=1).verdict == "not reproduced"  # before it diverged
    three = entry("b", [0.9], [0.9], [0.9])
    three.records[1] = dataclasses.replace(three.records[1], diverged="in round 2")
    for record in three.records:
        record.config["train"]["rounds"] = 2
    found = verdict({**entries, "b": three}, kind="order", expect=["a", "b"])
    assert found.pairs[0].remark == "b diverged in 1 of 3 seeds"


def test_a_method_that_did_not_run_gets_no_verdict():
    entries = {"a": entry("a", [0.5]), "b": entry("b", [0.9])}
    assert verdict(entries, kind="order", expect=["a", "d"]).verdict == "not run"
    assert verdict(entries, kind="order", expect=["a", ["b", "d"]]).verdict == "not run"


def test_runs_that_are_too_short_and_metrics_that_were_not_measured_are_not_comparable():
    entries = {"a": entry("a", [0.5, 0.6]), "b": entry("b", [0.7, 0.9])}
    for late in ({"at": 4}, {"within": 4}):
        found = verdict(entries, kind="order", expect=["a", "b"], **late)
        assert (found.verdict, found.pairs[0].remark) == ("not comparable", "a has 2 of 4 rounds")
    asked = {"kind": "rounds_to", "expect": ["a", "b"], "target": 0.5}
    assert verdict(entries, **asked, metric="client_accuracy").pairs[0].remark == "a has no client_accuracy"


def test_a_method_with_its_default_rate_is_not_comparable():
    default = lamina.algorithms.find("fedavg").card.lr
    for rate, grid, outcome in (
        (default, {}, "not comparable"),
        (default, {"fedavg": {"lr": [0.1]}}, "reproduced"),  # as the paper gives it
        (2 * default, {}, "reproduced"),  # train.lr
    ):
        entries = {"fedavg": entry("fedavg", [0.5, 0.9]), "b": entry("b", [0.1, 0.2])}
        entries["fedavg"].records[0].config["compare"] = {"grid": grid}
        entries["fedavg"].records[0].config["train"]["lr"] = rate
        assert verdict(entries, kind="order", expect=["fedavg", "b"]).verdict == outcome


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


@pytest.mark.long
def test_the_papers_own_numbers_support_their_claims():
    """Rounds and accuracies as printed, put in place of ours: a slip in copying them would show."""
    for name, file in PAPERS.items():
        for claim in load(file).claim:
            if not claim.paper:
                continue
            fields = {"at": "best", "within": None} if claim.target is None else {"within": None}
            printed = {
                label: entry(label, [value / 100] if claim.target is None else rising(min(value, 4001), 4100, top=1.0))
                for label, value in claim.paper.items()
            }
            found = claims.evaluate(claim.model_copy(update={"metric": "accuracy", **fields}), printed)
            assert found.verdict == "reproduced", (name, claim.text, found.pairs)
