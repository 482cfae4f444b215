"""Sentences below charts, with numbers worked out by hand."""

from __future__ import annotations

from fedquilt.report import sentences


def point(share, round, value):
    return {"share": share, "round": round, "value": value}


def test_a_run_names_the_share_that_gains_most_and_least():
    rows = [point("1", 2, 0.5), point("0.5", 2, 0.4), point("1", 6, 0.9), point("0.5", 6, 0.35)]
    assert sentences.of_curves(rows, "accuracy", True, True) == (
        "Between rounds 2 and 6, accuracy of share 1 improves by 40.00 points, to 90.0%, the best "
        "change of 2 shares; share 0.5 becomes worse by 5.00 points, to 35.0%."
    )


def test_an_error_improves_when_it_falls():
    rows = [point("1", 1, 3.0), point("1", 4, 2.0)]
    assert sentences.of_curves(rows, "rmse", False, False) == (
        "Between rounds 1 and 4, rmse of share 1 improves by 1, to 2."
    )


def test_without_figures_the_sentence_says_so():
    assert sentences.of_curves([], "accuracy", True, True) == sentences.NO_FIGURES
    assert sentences.of_curves([point("1", 1, None)], "a", True, True) == sentences.NO_FIGURES
    assert sentences.of_comparison([], "1", True, True) == sentences.NO_FIGURES


def final(entry, value, seeds=3, share="1"):
    return {"entry": entry, "share": share, "value": value, "seeds": seeds}


def test_a_comparison_names_the_gap_to_the_second_and_the_seeds():
    rows = [final("a", 0.60), final("b", 0.65), final("c", 0.10), final("d", 0.99, share="0.5")]
    assert sentences.of_comparison(rows, "1", True, True) == (
        "b has the best mean at share 1, 65.0%, which is 5.00 points better than a, over 3 seeds."
    )
    assert sentences.of_comparison(rows, "1", True, False) == (
        "c has the best mean at share 1, 10.0%, which is 50.00 points better than a, over 3 seeds."
    )


def test_a_comparison_names_ties_single_rows_and_other_numbers_of_seeds():
    assert sentences.of_comparison([final("a", 0.5), final("b", 0.5)], "1", True, True) == (
        "a and b both have 50.0% at share 1, over 3 seeds."
    )
    assert sentences.of_comparison([final("a", 0.5, 1)], "1", True, True) == (
        "a has 50.0% at share 1, over 1 seed."
    )
    text = sentences.of_comparison([final("a", 0.5, 1), final("b", 0.4, 2)], "1", True, True)
    assert text.endswith("better than b, over 1 seed against 2 seeds.")


def test_a_front_is_listed_from_the_cheapest_on():
    rows = [
        {"entry": "big", "share": "1", "cost": 9, "front": True},
        {"entry": "bad", "share": "1", "cost": 5, "front": False},
        {"entry": "small", "share": "0.5", "cost": 1, "front": True},
    ]
    assert sentences.of_pareto(rows, "accuracy") == (
        "2 points of 3 are on the front (small at share 0.5, big at share 1); each of the other 1 "
        "is beaten in accuracy by one that costs no more."
    )


def test_participation_weighs_bins_by_their_rounds():
    rows = [
        {"first": 1, "last": 3, "fate": "trained", "clients": 2.0},
        {"first": 1, "last": 3, "fate": "late", "clients": 0.0},
        {"first": 4, "last": 4, "fate": "trained", "clients": 0.0},
        {"first": 4, "last": 4, "fate": "late", "clients": 2.0},
    ]
    assert sentences.of_participation(rows, 4) == (
        "75.0% of 8 requests in 4 rounds gave an update that counts; the others were 2 late."
    )


def test_lost_positions_are_summed_and_the_worst_rounds_named():
    rows = [
        {"first": 1, "last": 1, "planned": 10, "arrived": 10, "lost": 0.0},
        {"first": 2, "last": 3, "planned": 10, "arrived": 5, "lost": 0.5},
    ]
    assert sentences.of_lost(rows) == (
        "The link lost 25.0% of all positions that clients trained, and at most 50.0%, in rounds 2 "
        "to 3."
    )
    assert sentences.of_lost(rows[:1]) == "The link lost no position."


def test_a_quilt_says_how_evenly_positions_were_trained():
    assert sentences.of_quilt([3, 3], "c", 3).startswith("In 3 rounds each of the 2 positions")
    assert sentences.of_quilt([4, 2, 0, 0], "c", 4) == (
        "In 4 rounds the positions of axis c were trained between 0 and 4 times; 2 of 4 were never "
        "trained."
    )
    assert sentences.of_quilt([0], "c", 1) == "No position of axis c was trained in 1 round."


def test_budgets_samples_costs_growth_and_attacks():
    rows = [{"budget": "share 0.5", "clients": 1}, {"budget": "share 1", "clients": 3}]
    assert sentences.of_fleet(rows) == "3 of 4 clients (75%) have share 1, the most."
    rows[0]["clients"] = 3
    assert sentences.of_fleet(rows) == "6 clients: 3 each have share 0.5 and share 1, the most."
    assert sentences.of_samples([3, 5], [2, 2]) == "A client has 3 to 5 samples of 2 classes."
    assert sentences.of_costs(2000, 1000, 10**6, 2) == (
        "2 rounds took 2 kB to clients, 1 kB back and 1M multiply-adds of clients."
    )
    sizes = [{"params": 10}, {"params": 10}, {"params": 40}]
    assert sentences.of_growth(sizes) == (
        "The whole model changes its size 1 time, from 10 to 40 parameters."
    )
    attacked = [
        {"entry": "a", "share": "1", "standard": 0.9, "robust": 0.4},
        {"entry": "b", "share": "1", "standard": 0.7, "robust": 0.6},
    ]
    assert sentences.of_robustness(attacked, True) == (
        "Under attack b at share 1 loses least, 10.00 points, and a at share 1 most, 50.00 points."
    )
    used = [
        {"entry": "rafl", "nets": "own nets", "value": 0.8},
        {"entry": "rafl", "nets": "one net that fits every device", "value": 0.25},
    ]
    assert sentences.of_utilization(used) == (
        "The clients' own nets of rafl use 80.0% of the limits of their devices, and one net that "
        "fits every device would use 25.0%."
    )
