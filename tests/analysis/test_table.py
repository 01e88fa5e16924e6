"""The table of hpcfl show: the numbers in it, and its complaints."""

import io
import re

import h5py
import numpy as np
import pytest
from analysis_example import finished
from rich.console import Console

from hpcfl.analysis.table import table
from hpcfl.cli import main
from hpcfl.errors import InputError
from hpcfl.results import ResultsWriter, Schema
from hpcfl.results_schema import fields


def shown(*files, width=140, merged=False):
    out = io.StringIO()
    Console(file=out, width=width).print(table(files, merged=merged))
    return out.getvalue()


def cells(text, row):
    """The two lines of the row'th run, split at two spaces or more."""
    lines = text[text.index("──") :].splitlines()[1:]
    return [re.split(r"\s{2,}", line.strip()) for line in lines[2 * row : 2 * row + 2]]


def test_numbers_of_a_run(tmp_path):
    first, second = cells(shown(finished(tmp_path)), 0)
    # std of (0.9, 0.5, 0.7, 0.3) about 0.6: sqrt(0.2 / 4)
    assert first == ["job-001", "done", "4", "0.6000", "0.3000", "0.5000", "0.6000", "0.6000", "4,000", "10.00", "5.0"]
    assert second == ["apfl, seed 1", "10 rounds", "±0.2236", "±0.2236", "@ 10", "4,000", "20.00"]


def test_runs_of_every_kind_share_a_table(tmp_path):
    finished(tmp_path)
    finished(tmp_path, job="local", algorithm="local", models=("personal",))
    finished(tmp_path, job="fedavg", algorithm="fedavg", models=("global",), splits=("train", "validation", "test"))
    finished(tmp_path, job="ridge", metrics=("loss", "squared_error"))
    text = shown(tmp_path)
    assert "accuracy" in text
    assert "(sq. error)" in text
    rows = {cells(text, k)[0][0]: cells(text, k) for k in range(4)}
    assert rows["local-001"][0][3:7] == ["0.6000", "0.3000", "-", "0.6000"]
    assert rows["fedavg-001"][0][3:7] == ["-", "0.2000", "0.5000", "0.5000"]
    assert rows["ridge-001"][0][3:7] == ["(0.6000)", "(0.9000)", "(0.5000)", "(0.4000)"]  # worst: highest, best: lowest
    assert rows["ridge-001"][1][4] == "@ 0"
    assert "best by" not in text
    assert "sq. error" in shown(tmp_path / "ridge-001")
    assert re.search(r"best by\s.*\n.*validation", shown(tmp_path / "fedavg-001"))


def test_estimation_errors_have_a_column_where_a_run_has_them(tmp_path):
    finished(tmp_path)
    assert "estimation" not in shown(tmp_path)
    finished(tmp_path, truth=True)
    finished(tmp_path, models=("global",), truth=True)
    text = shown(tmp_path)
    assert re.search(r"estimation\s.*\n.*error\s", text)
    errors = [[line[8] for line in cells(text, row)[:1]] + [cells(text, row)[1][-3]] for row in range(3)]
    assert errors[0][0] == "-"
    assert errors[1:] == [["6.0000", "±2.2361"], ["5.0000", "±2.2361"]]  # the global model's where there is no other


def test_participants_have_a_column_where_a_run_tested_them(tmp_path):
    finished(tmp_path)
    assert "participants" not in shown(tmp_path)
    finished(tmp_path, participants=True, rounds=12)
    finished(tmp_path, participants=True, truth=True)
    text = shown(tmp_path)
    assert re.search(r"participants\s.*\n.*last 10 rounds\s", text)
    first, second = zip(*(cells(text, row) for row in range(3)), strict=True)
    # r / 16 in the last ten rounds, 2..11 and 0..9: means 6.5 / 16, 4.5 / 16, deviations sqrt(8.25) / 16 = 0.17952
    assert [line[8] for line in first] == ["-", "0.4062", "0.2812"]
    assert [line[5] for line in second] == ["4,000", "±0.1795", "±0.1795"]
    assert [line[9] for line in first] == ["-", "-", "6.0000"]  # the estimation errors come after them
    assert [line[10] for line in first] == ["4,000", "4,800", "4,000"]
    for row in range(3):
        assert cells(text, row)[0][3:8] == ["0.6000", "0.3000", "0.5000", "0.6000", "0.6000"]


def test_participants_beside_a_regression(tmp_path):
    finished(tmp_path, participants=True)
    finished(tmp_path, participants=True, metrics=("loss", "squared_error"))
    finished(tmp_path, metrics=("loss", "squared_error"))
    text = shown(tmp_path)
    assert [cells(text, row)[0][8] for row in range(3)] == ["0.2812", "(0.2812)", "-"]


def test_participants_of_a_run_that_has_begun(tmp_path):
    """Nothing before the first round; then those of fewer than ten rounds, and no complaint before the run's end."""
    schema = Schema(
        4, 10, 5, 1, 1, None, ("personal",), ("train", "test"), ("loss", "squared_error"), participants=True
    )
    n = np.arange(4)
    clients = {"id": n, "cluster": 0 * n, "n_train": n, "n_test": n}
    attributes = {"protocol": "participants"}
    writer = ResultsWriter.create(tmp_path / "x.h5", schema, clients=clients, config="", attributes=attributes)
    assert cells(shown(tmp_path / "x.h5"), 0)[0] == ["x", "running", "4", *["-"] * 6, "0", "0.00", "0.0"]
    names = {field.name for field in fields(schema) if field.group == "/rounds"}
    writer.rounds(0, dict.fromkeys(names, np.array([1, 2, 1])) | {"participants_test_squared_error": [1.0, 2.0, 6.0]})
    first, second = cells(shown(tmp_path / "x.h5"), 0)
    assert (first[8], second[2]) == ("3.0000", "±2.1602")  # sqrt((4 + 1 + 9) / 3)
    assert table([tmp_path / "x.h5"]).caption is None
    writer.close()


COINS = {"clusters": 2, "coins": {"global": 1, "cluster": 2}}  # clusters {0} and {1, 2, 3}


def test_merged_averagings(tmp_path, capsys):
    """Rounds 0 and 1 global, round 2 of cluster 1: one formation of every mean."""
    own, everyone = np.zeros((10, 2)), np.zeros((10, 1))
    everyone[:2], own[2, 1] = 1, 1
    up, down = np.zeros(10), np.zeros(10)
    up[:3], down[:3] = [6, 6, 3], [10, 10, 3]
    columns = {"coins_global": everyone, "coins_cluster": own, "vectors_up": up, "vectors_down": down}
    columns |= {"bytes_up": 1e6 * up, "bytes_down": 1e6 * down}
    finished(tmp_path, columns=columns, **COINS)
    finished(tmp_path, columns=columns | {"n_participants": np.full(10, 3)}, **COINS)
    finished(tmp_path)

    plain, text = shown(tmp_path), shown(tmp_path, merged=True)
    assert "up, down" in plain
    assert "merged" not in plain
    assert re.search(r"vectors\s+MB\s.*\n.*merged\s+merged", text)
    sent = [[line[place:][:2] for line, place in zip(cells(text, row), (8, -2), strict=True)] for row in range(3)]
    assert sent[0] == [["6", "6.00"], ["10", "10.00"]]
    assert sent[1] == [["15", "15.00"], ["23", "23.00"]]
    assert sent[2] == [["4,000", "10.00"], ["4,000", "20.00"]]
    (warning,) = table([tmp_path], merged=True).caption.splitlines()
    assert warning.startswith(f"warning: {tmp_path / 'job-002' / 'results.h5'}: rounds with partial participation")
    assert warning.endswith("; not merged")
    assert table([tmp_path]).caption is None

    for option in ([], ["--merged"]):
        assert main(["show", str(tmp_path / "job-001"), *option]) == 0
        assert ("merged" in capsys.readouterr().out) == bool(option)


def test_a_run_without_evaluations_is_shown(tmp_path):
    schema = Schema(4, 10, 5, 1, 1, None, ("personal",), ("train", "test"), ("loss", "squared_error"))
    n = np.arange(4)
    clients = {"id": n, "cluster": 0 * n, "n_train": n, "n_test": n}
    writer = ResultsWriter.create(tmp_path / "x.h5", schema, clients=clients, config="", attributes={})
    assert cells(shown(tmp_path / "x.h5"), 0)[0] == ["x", "running", "4", "-", "-", "-", "-", "-", "0", "0.00", "0.0"]
    assert "0/10 rounds" in shown(tmp_path / "x.h5")
    writer.status("failed:no [/bold] luck")  # no markup
    assert "failed:no [/bold] luck" in shown(tmp_path / "x.h5", width=200)
    writer.close()


@pytest.mark.parametrize(
    ("field", "place", "message"),
    [
        ("evaluations/personal_test_accuracy", 1, "[1] is 0.123, but the clients give 0.6"),
        ("evaluations/global_train_loss_by_sample", 0, "[0] is 0.123, but the clients give"),
        ("evaluations/personal_estimation_error", 1, "[1] is 0.123, but the clients give 6"),
        ("final/personal_test_accuracy_std", (), " is 0.123, but the clients give 0.223607"),
        ("final/personal_estimation_error_mean", (), " is 0.123, but the clients give 6"),
        ("final/global_estimation_error_std", (), " is 0.123, but the clients give 2.23607"),
        ("final/global_test_loss_worst_decile", (), " is 0.123, but the clients give 0.8"),
        ("final/participants_test_accuracy_mean", (), " is 0.123, but the rounds give 0.28125"),
        ("final/participants_test_loss_std", (), " is 0.123, but the rounds give 0.179518"),
    ],
)
def test_a_mean_that_does_not_follow_from_the_clients_is_complained_about(tmp_path, field, place, message):
    good, bad = (finished(tmp_path, truth=True, participants=True) for _ in range(2))
    with h5py.File(bad / "results.h5", "r+") as file:
        file[field][place] = 0.123
    assert table([good]).caption is None
    lines = table([good, bad]).caption.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: {bad / 'results.h5'}: /{field}")
    assert message in lines[0].replace("\\", "")
    assert "warning:" in shown(good, bad)


def test_a_mean_of_rounds_is_checked_at_the_end_of_the_run_only(tmp_path):
    folder = finished(tmp_path, participants=True)
    with h5py.File(folder / "results.h5", "r+") as file:
        file["final/participants_test_loss_mean"][()] = 0.123
        file["final/evaluation"][()] = -1  # what the evaluations say is another matter
    assert "but the rounds give" in table([folder]).caption
    with h5py.File(folder / "results.h5", "r+") as file:
        file["final/rounds"][()] = 9  # continued since
    assert table([folder]).caption is None


def test_bad_files_end_a_named_one_and_warn_in_a_folder(tmp_path):
    finished(tmp_path)
    (tmp_path / "job-002").mkdir()
    (tmp_path / "job-002" / "results.h5").write_text("hello")
    assert "not an HDF5 file" in table([tmp_path]).caption
    assert "job-001" in shown(tmp_path)
    with pytest.raises(InputError, match="not an HDF5 file"):
        table([tmp_path / "job-002"])
