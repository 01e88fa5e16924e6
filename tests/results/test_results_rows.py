"""Rows, counts and means, against numbers worked out by hand."""

import math

import h5py
import numpy as np
import pytest
from results_example import EVERYTHING, SMALL, rows, values

# Four clients with 1, 2, 0 and 5 test samples.
N_TEST = [1, 2, 0, 5]
ACCURACY = np.array([1.0, 0.5, 0.9, 0.2])  # the 0.9 counts for nothing
LOSS = np.array([0.1, 0.7, 0.0, 0.4])
ERROR = np.array([1.0, 2.0, 5.0, 4.0])  # every client counts


def one_evaluation(accuracy=ACCURACY, loss=LOSS):
    found = values(EVERYTHING, 0.25)
    return found | {
        "personal/test_accuracy": accuracy,
        "personal/test_loss": loss,
        "global/test_accuracy": 1 - accuracy,
        "personal/estimation_error": ERROR,
    }


def test_means_of_an_evaluation(create, tmp_path):
    writer = create(EVERYTHING, dtype="float64", n_test=N_TEST)
    means = writer.evaluation(0, 1, 0.5, one_evaluation())
    assert means["personal_test_accuracy"] == pytest.approx((1 + 0.5 + 0.2) / 3, rel=1e-15)
    assert means["personal_test_accuracy_by_sample"] == pytest.approx((1 * 1 + 2 * 0.5 + 5 * 0.2) / 8, rel=1e-15)
    assert means["personal_test_loss"] == pytest.approx(0.4, rel=1e-15)
    assert means["personal_test_loss_by_sample"] == pytest.approx((0.1 + 1.4 + 2.0) / 8, rel=1e-15)
    assert means["global_test_accuracy"] == pytest.approx((0 + 0.5 + 0.8) / 3, rel=1e-15)
    assert means["personal_train_accuracy"] == 0.25
    assert means["personal_estimation_error"] == 3.0
    assert means["global_estimation_error"] == 0.25
    assert len(means) == 2 * 2 * 3 * 2 + 2
    with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:
        for name, value in means.items():
            assert file[f"evaluations/{name}"][0] == value
        assert np.array_equal(
            file["per_client/personal/test_accuracy"][0], [1.0, 0.5, math.nan, 0.2], equal_nan=True
        )  # NaN without samples
        assert np.array_equal(file["per_client/alpha"][0], [0.25] * 4)  # exposed for every client
        assert np.array_equal(file["per_client/personal/estimation_error"][0], ERROR)


def test_stored_means_follow_from_the_stored_values_to_the_last_bit(create, tmp_path):
    """float32 values: the means are those of what is in the file, not of the float64 that was given."""
    writer = create(EVERYTHING, n_test=N_TEST)
    means = writer.evaluation(0, 1, 0.5, one_evaluation())
    with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:
        stored = file["per_client/personal/test_accuracy"][0].astype("float64")
    assert means["personal_test_accuracy"] == np.nanmean(stored) != (1 + 0.5 + 0.2) / 3


def test_no_client_with_samples_gives_nan(create):
    means = create(EVERYTHING, n_test=[0, 0, 0, 0]).evaluation(0, 0, 0.0, one_evaluation())
    assert math.isnan(means["personal_test_accuracy"])
    assert math.isnan(means["personal_test_loss_by_sample"])


def test_a_diverged_client_is_not_left_out(create):
    loss = np.array([0.1, math.nan, 0.0, 0.4])
    writer = create(EVERYTHING, n_test=N_TEST)
    assert math.isnan(writer.evaluation(0, 0, 0.0, one_evaluation(loss=loss))["personal_test_loss"])


def final(writer, path):
    writer.final()
    with h5py.File(path / "results.h5", "r", swmr=True) as file:
        return {name: item[()] for name, item in file["final"].items() if isinstance(item, h5py.Dataset)}


def test_final_summarises_the_last_evaluation_and_the_course(create, tmp_path):
    writer = create(EVERYTHING, dtype="float64", n_test=N_TEST)
    writer.rounds(0, rows(EVERYTHING, 0, 5))
    writer.evaluation(0, 0, 0.0, one_evaluation())
    writer.evaluation(1, 5, 1.0, one_evaluation())
    found = final(writer, tmp_path)
    assert (found["rounds"], found["evaluation"], found["round"]) == (5, 1, 5)
    assert found["vectors_up"] == found["seconds"] == 0 + 1 + 2 + 3 + 4
    assert (found["bytes_up"], found["bytes_down"]) == (40, 80)
    mean = (1 + 0.5 + 0.2) / 3
    spread = math.sqrt(((1 - mean) ** 2 + (0.5 - mean) ** 2 + (0.2 - mean) ** 2) / 3)
    assert found["personal_test_accuracy_mean"] == pytest.approx(mean, rel=1e-15)
    assert found["personal_test_accuracy_mean_by_sample"] == 3 / 8
    assert found["personal_test_accuracy_std"] == pytest.approx(spread, rel=1e-14)
    assert found["personal_test_accuracy_worst_decile"] == 0.2  # ceil(3 / 10) = 1 client, the lowest
    assert found["personal_test_loss_worst_decile"] == 0.7  # the highest
    assert found["personal_estimation_error_mean"] == 3.0
    assert found["personal_estimation_error_std"] == math.sqrt((4 + 1 + 4 + 1) / 4)
    assert "personal_estimation_error_worst_decile" not in found


@pytest.mark.parametrize(
    ("done", "mean", "variance"),
    [(12, 6.5, 8.25), (11, 5.5, 8.25), (4, 1.5, 1.25), (1, 0.0, 0.0)],  # of 2..11, 1..10, 0..3, 0
)
def test_final_summarises_the_participants_of_the_last_ten_rounds(create, tmp_path, done, mean, variance):
    writer = create(EVERYTHING, rounds=15)
    writer.rounds(0, rows(EVERYTHING, 0, done))  # round r: loss r / 8, accuracy 2 r / 8
    found = final(writer, tmp_path)
    for metric, factor in (("loss", 1 / 8), ("accuracy", 1 / 4)):
        assert found[f"participants_test_{metric}_mean"] == factor * mean
        assert found[f"participants_test_{metric}_std"] == pytest.approx(factor * math.sqrt(variance), rel=1e-14)


def test_final_knows_no_participants_before_a_round_or_without_their_tests(create, tmp_path):
    names = {f"participants_test_{metric}_{name}" for metric in ("loss", "accuracy") for name in ("mean", "std")}
    found = final(create(EVERYTHING), tmp_path)
    assert all(math.isnan(found[name]) for name in names)
    (tmp_path / "results.h5").unlink()
    assert not names & final(create(EVERYTHING, participants=False), tmp_path).keys()


def test_a_round_whose_participants_have_no_test_samples_is_not_left_out(create, tmp_path):
    writer = create(EVERYTHING)
    writer.rounds(0, rows(EVERYTHING, 0, 3) | {"participants_test_loss": np.array([0.5, math.nan, 0.5])})
    found = final(writer, tmp_path)
    assert math.isnan(found["participants_test_loss_mean"])
    assert found["participants_test_accuracy_mean"] == 0.25


def test_final_counts_the_averagings_of_the_rounds_done(create, tmp_path):
    everyone = [0, 1, 1, 0, 0, 1]
    own = [[1, 0], [1, 1], [0, 0], [1, 0], [0, 0], [0, 1]]
    for done, counts in ((5, (2, [2, 0], [4, 2])), (0, (0, [0, 0], [0, 0]))):
        writer = create(EVERYTHING)
        if done:
            coins = {"coins_global": np.array(everyone)[:done, None], "coins_cluster": np.array(own)[:done]}
            writer.rounds(0, rows(EVERYTHING, 0, done) | coins)
        found = final(writer, tmp_path)
        assert (found["global_rounds"], list(found["cluster_rounds"]), list(found["mean_rounds"])) == counts
        (tmp_path / "results.h5").unlink()


@pytest.mark.parametrize("coins", [{}, {"cluster": 2}, {"global": 1, "cluster": 3}, {"global": 2, "cluster": 2}])
def test_other_coins_say_nothing_about_averagings(create, tmp_path, coins):
    assert (
        not {"global_rounds", "cluster_rounds", "mean_rounds"} & final(create(EVERYTHING, coins=coins), tmp_path).keys()
    )


def test_clients_of_more_clusters_than_announced_are_refused(create):
    with pytest.raises(ValueError, match="/clusters/n_clients: got int64"):
        create(EVERYTHING, cluster=[0, 1, 2, 0])


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_worst_decile_is_the_mean_over_a_tenth_of_the_clients_rounded_up(create, tmp_path, clients, worst):
    base = SMALL | {"clients": clients, "dtype": "float64"}
    writer = create(base)
    error = np.random.default_rng(0).permutation(clients).astype(float)  # 0 ... N-1; the highest are the worst
    writer.evaluation(0, 0, 0.0, values(base) | {"global/test_squared_error": error})
    found = final(writer, tmp_path)["global_test_squared_error_worst_decile"]
    assert found == np.mean(np.arange(clients - worst, clients))


def test_best_evaluation_is_chosen_on_the_validation_samples(create, tmp_path):
    writer = create(EVERYTHING, dtype="float64")
    for row, (validation, test) in enumerate([(0.5, 0.6), (0.8, 0.7), (0.7, 0.9)]):
        one = values(EVERYTHING, 0.1)
        one |= {"personal/validation_accuracy": np.full(4, validation), "personal/test_accuracy": np.full(4, test)}
        one |= {"personal/validation_loss": np.full(4, validation), "personal/test_loss": np.full(4, test)}
        writer.evaluation(row, row, 0.0, one)
    found = final(writer, tmp_path)
    assert (found["personal_test_accuracy_best_evaluation"], found["personal_test_accuracy_best"]) == (1, 0.7)
    assert (found["personal_test_loss_best_evaluation"], found["personal_test_loss_best"]) == (0, 0.6)
    assert found["global_test_loss_best_evaluation"] == 0  # all equal: the first
    with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:
        attributes = file["final/personal_test_accuracy_best"].attrs
        assert attributes["chosen_on"] == b"validation"
        assert "comment" not in attributes


def test_without_validation_samples_the_best_is_called_optimistic(create, tmp_path):
    writer = create(SMALL, dtype="float64")
    for row, error in enumerate([0.5, math.inf, 0.25]):
        writer.evaluation(row, row, 0.0, values(SMALL) | {"global/test_squared_error": np.full(4, error)})
    found = final(writer, tmp_path)
    assert (found["global_test_squared_error_best_evaluation"], found["global_test_squared_error_best"]) == (2, 0.25)
    with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:
        attributes = file["final/global_test_squared_error_best"].attrs
        assert attributes["chosen_on"] == b"test"
        assert b"optimistic" in attributes["comment"]


def test_final_before_any_evaluation_says_so(create, tmp_path):
    found = final(create(SMALL), tmp_path)
    assert (found["rounds"], found["evaluation"], found["global_test_loss_best_evaluation"]) == (0, -1, -1)
    assert math.isnan(found["global_test_loss_mean"])


def test_a_continued_run_overwrites_in_place_and_the_counts_never_fall(create, tmp_path):
    def counts():
        with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:
            done, seconds = file.attrs["rounds_done"], list(file["rounds/seconds"][:4])
            return done, file.attrs["evaluations_done"], seconds

    writer = create(SMALL)
    writer.rounds(0, rows(SMALL, 0, 4))
    writer.evaluation(0, 2, 0.0, values(SMALL))
    writer.evaluation(1, 4, 0.0, values(SMALL))
    writer.rounds(1, rows(SMALL, 1, 2, factor=10))
    writer.evaluation(0, 2, 0.0, values(SMALL))
    assert counts() == (4, 2, [0, 10, 20, 3])
    writer.rounds(3, rows(SMALL, 3, 3))
    assert counts() == (6, 2, [0, 10, 20, 3])


def test_what_does_not_fit_is_refused_before_anything_is_written(create, tmp_path):
    writer = create(EVERYTHING)
    good = rows(EVERYTHING, 0, 2)
    for wrong, message in (
        (lambda: writer.rounds(1, good), "no gap"),
        (lambda: writer.rounds(0, rows(EVERYTHING, 0, 7)), "0 of 6 are done"),
        (lambda: writer.rounds(0, good | {"extra": good["kind"]}), r"unknown \['extra'\]"),
        (lambda: writer.rounds(0, {k: v for k, v in good.items() if k != "seconds"}), r"missing \['seconds'\]"),
        (lambda: writer.rounds(0, {k: v for k, v in good.items() if k != "forward_passes"}), r"\['forward_passes'\]"),
        (
            lambda: writer.rounds(0, {k: v for k, v in good.items() if k != "participants_test_loss"}),
            r"missing \['participants_test_loss'\]",
        ),
        (lambda: writer.rounds(0, good | {"coins_cluster": np.zeros((2, 3))}), "/rounds/coins_cluster: got"),
        (lambda: writer.rounds(0, good | {"vectors_up": np.array([0.5, 1])}), "/rounds/vectors_up: got float64"),
        (lambda: writer.evaluation(1, 0, 0.0, values(EVERYTHING)), "no gap"),
        (lambda: writer.evaluation(0, 0, 0.0, values(SMALL)), "missing"),
        (lambda: writer.evaluation(0, 0, 0.0, values(EVERYTHING) | {"alpha": np.zeros(3)}), "/per_client/alpha"),
        (lambda: writer.models("personal", 3, np.zeros((2, 9))), "does not fit"),
        (lambda: writer.models("cluster", 0, np.zeros((2, 9))), "not announced"),
        (lambda: writer.timing(np.zeros((3, 5))), "expected"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    with h5py.File(tmp_path / "results.h5", "r", swmr=True) as file:
        assert (file.attrs["rounds_done"], file.attrs["evaluations_done"]) == (0, 0)
        assert np.isnan(file["rounds/seconds"][()]).all()
