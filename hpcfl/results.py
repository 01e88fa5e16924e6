"""The results file: the only module that writes one. Format: results/README.md, list of contents: results_schema.py.

The whole file exists before the first round, so that a run only ever overwrites bytes in place: nothing that a kill can
leave half made, and no surprise from a full disk after hours. Rows are flushed before the count that announces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from hpcfl import results_file as making
from hpcfl import results_means as formulas
from hpcfl import results_resume as resuming
from hpcfl import results_schema as layout
from hpcfl.errors import RunError
from hpcfl.results_file import WRITING, cast, disk, now, process
from hpcfl.results_folder import lock, new_run_folder, newest_run_folder
from hpcfl.results_schema import FORMAT_VERSION, Schema

__all__ = ["FORMAT_VERSION", "ResultsWriter", "Schema", "lock", "new_run_folder", "newest_run_folder"]


class ResultsWriter:
    """Writes one results file; made by ``create`` or ``resume``. Raises RunError where the disk fails."""

    def __init__(self, file: h5py.File, path: Path, schema: Schema) -> None:
        self._file, self._path, self._schema = file, path, schema
        self._fields = {field.path: field for field in layout.fields(schema)}
        self._data = {path: file[path] for path in self._fields}
        chosen = slice(None) if schema.evaluated is None else schema.evaluated
        self._samples = {split: self._data[f"/clients/n_{split}"][()][chosen] for split in schema.splits}

    @classmethod
    def create(
        cls,
        path: Path,
        schema: Schema,
        *,
        clients: Mapping[str, np.ndarray],
        config: str,
        attributes: Mapping[str, str | int | float],
    ) -> ResultsWriter:
        """A new file at full size, in SWMR mode: readers may open it from the moment it has its name.

        clients: "id", "cluster", "n_train", "n_test" and, with that split, "n_validation" [N]; for classification
        "class_counts" [N, classes] of the training samples; with local labels "n_classes" [N]. config: the resolved
        TOML text. attributes: more for the root (versions, command, hosts, ...).
        Raises RunError where the file exists or cannot be written.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.part")
        with disk(path, WRITING):
            if path.exists():
                raise RunError(f"{path}: exists already, and results are never overwritten; start in a new folder")
            try:
                with making.create(temporary) as file:
                    making.fill(file, schema, clients, config, attributes)
                file = making.open_to_write(temporary)
                writer = cls(file, path, schema)
                temporary.rename(path)  # last: nobody can open, and so lock, the file before it is ready
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        return writer

    @classmethod
    def resume(
        cls,
        path: Path,
        schema: Schema,
        *,
        config: str,
        attributes: Mapping[str, str | int | float],
        clients: Mapping[str, np.ndarray] | None = None,
    ) -> ResultsWriter:
        """Go on with the file of a run that ended or was killed: the status is "running" again, /final is empty.

        What is counted stays; rounds and evaluations may be written again from any counted row on. schema, config: of
        the run as it goes on. The file keeps its length where the schema has fewer rounds, evaluations or ranks, and
        has more of them where that has more. attributes, clients: as for ``create``; the attributes stay those of the
        first start, and clients are compared where they are given.
        Raises InputError where the data have changed, RunError where the file is damaged or cannot be written.
        """
        path = Path(path)
        with disk(path, WRITING):
            file, full = resuming.reopen(path, schema, config, attributes, clients)
            writer = cls(file, path, full)
            writer._set(restarts=int(file.attrs["restarts"]) + 1)
            writer.status("running")
            writer._clear_final()
        return writer

    def rounds(self, first: int, columns: Mapping[str, np.ndarray]) -> None:
        """Write rows first, first + 1, ... of /rounds, then count them.

        columns: every one of "kind" (index into results_schema.KINDS), "n_participants", "seconds", "train_loss",
        "vectors_up", "vectors_down", "bytes_up", "bytes_down", "forward_passes", "backward_passes" [k], where
        participants are tested "participants_test_<metric>" [k], and "coins_<name>" [k, coins].
        """
        self._check_names("/rounds/", columns)
        stop = first + len(columns["kind"])
        self._check_rows("round", first, stop, "rounds_done")
        stored = {}
        for name, values in columns.items():
            shape = (stop - first, *self._data[f"/rounds/{name}"].shape[1:])
            stored[name] = cast(values, self._fields[f"/rounds/{name}"], shape)
        with disk(self._path, WRITING):
            for name, values in stored.items():
                self._data[f"/rounds/{name}"][first:stop] = values
            self._count("rounds_done", stop)

    def evaluation(
        self, row: int, round: int, seconds: float, per_client: Mapping[str, np.ndarray]
    ) -> Mapping[str, float]:
        """Write one row of /evaluations and /per_client, then count it. Returns the means, named as in /evaluations.

        round: rounds done. seconds: since the start of the run. per_client: every "<model>/<split>_<metric>", every
        exposed name and, with known true parameters, every "<model>/estimation_error", of the clients that are
        evaluated [E]. Those without samples in a split become NaN there and are left out of its means.
        """
        self._check_names("/per_client/", per_client)
        self._check_rows("evaluation", row, row + 1, "evaluations_done")
        stored = {}
        for name, values in per_client.items():
            shape = (self._schema.lengths[self._schema.measured],)
            stored[name] = cast(values, self._fields[f"/per_client/{name}"], shape)
        means: dict[str, float] = {}
        for model, split, metric in layout.measures(self._schema):
            values, samples = stored[f"{model}/{split}_{metric}"], self._samples[split]
            values[samples == 0] = np.nan
            means[f"{model}_{split}_{metric}"] = formulas.client_mean(values, samples)
            means[f"{model}_{split}_{metric}_by_sample"] = formulas.sample_mean(values, samples)
        for model in self._schema.estimated:
            means[f"{model}_estimation_error"] = formulas.client_mean(stored[f"{model}/estimation_error"])
        with disk(self._path, WRITING):
            for name, values in stored.items():
                self._data[f"/per_client/{name}"][row] = values
            for name, value in {"round": round, "seconds": seconds, **means}.items():
                self._data[f"/evaluations/{name}"][row] = value
            self._count("evaluations_done", row + 1)
        return means

    def timing(self, table: np.ndarray) -> None:
        """Write /timing. table [ranks, 5]: seconds in compute, communicate, wait, evaluate, write, over all starts.

        Ranks beyond these, which an earlier start had, keep their rows.
        """
        ranks, phases = np.shape(table)
        if ranks > self._schema.ranks or phases != len(layout.PHASES):
            raise ValueError(f"timing: shape {(ranks, phases)}, expected {(self._schema.ranks, len(layout.PHASES))}")
        with disk(self._path, WRITING):
            for phase, column in zip(layout.PHASES, np.asarray(table).T, strict=True):
                self._data[f"/timing/{phase}"][:ranks] = column

    def timing_so_far(self) -> np.ndarray:
        """[ranks in the file, 5] what /timing holds, 0 where nothing was written: what a run goes on from."""
        with disk(self._path, "read the results"):
            return np.nan_to_num(np.stack([self._data[f"/timing/{phase}"][()] for phase in layout.PHASES], 1))

    def models(self, kind: str, first_client: int, rows: np.ndarray) -> None:
        """Write models. kind "personal": rows [k, P] of the clients from first_client on; "global": rows [P]."""
        if self._schema.parameters is None or kind not in self._schema.models:
            raise ValueError(f'models("{kind}"): not announced in the schema, so there is no place for it')
        data = self._data[f"/final/models/{kind}"]
        first, stop = (first_client, first_client + len(rows)) if kind == "personal" else (0, len(data))
        if np.shape(rows) != (stop - first, *data.shape[1:]) or not 0 <= first <= stop <= len(data):
            raise ValueError(f'models("{kind}"): {np.shape(rows)} from row {first} on does not fit {data.shape}')
        with disk(self._path, WRITING):
            data[first:stop] = rows

    def final(self) -> None:
        """Fill /final from the last evaluation and the whole course. Models come by ``models``."""
        with disk(self._path, WRITING):
            rounds, evaluations = (int(self._file.attrs[name]) for name in ("rounds_done", "evaluations_done"))
            values: dict[str, float | np.ndarray] = {"rounds": rounds}
            values |= {name: self._data[f"/rounds/{name}"][:rounds].sum() for name in layout.TOTALS}
            values |= self._averagings(rounds)
            for metric in self._schema.metrics if self._schema.participants else ():
                course = self._data[f"/rounds/participants_test_{metric}"][:rounds]
                values |= {f"participants_test_{metric}_{name}": x for name, x in formulas.recent(course).items()}
            if evaluations:
                values |= {"evaluation": evaluations - 1, "round": self._data["/evaluations/round"][evaluations - 1]}
                values |= self._summary(evaluations)
            for name, value in values.items():
                self._data[f"/final/{name}"][()] = value
            self._file.flush()

    def status(self, text: str) -> None:
        """Set the status: "running", "done", "stopped:why" or "failed:why"; also host, process id and the times."""
        if text.partition(":")[0] not in ("running", "done", "stopped", "failed"):
            raise ValueError(f'status "{text}": expected running, done, stopped:why or failed:why')
        with disk(self._path, WRITING):
            self._file.flush()  # "done" must not get ahead of what it says is there
            self._set(status=text, end="" if text == "running" else now(), **process())
            self._file.flush()

    def close(self) -> None:
        """Close the file (again: nothing). The status stays as it is."""
        if self._file:
            with disk(self._path, WRITING):
                self._file.close()

    def _clear_final(self) -> None:
        """Empty /final, /final/models included, if it was filled."""
        done = self._data["/final/rounds"]  # the first to be filled, the last to be emptied
        if done[()] == self._fields["/final/rounds"].fill:
            return
        for path, data in self._data.items():
            if path.startswith("/final/") and path != "/final/rounds":
                for rows in resuming.pieces(data, len(data)) if data.shape else [()]:
                    data[rows] = self._fields[path].fill
        self._file.flush()
        done[()] = self._fields["/final/rounds"].fill
        self._file.flush()

    def _summary(self, evaluations: int) -> dict[str, float]:
        values: dict[str, float] = {}
        for model, split, metric in layout.measures(self._schema):
            if split != "test":
                continue
            key, samples = f"{model}_test_{metric}", self._samples["test"]
            last = self._data[f"/per_client/{model}/test_{metric}"][evaluations - 1]
            course = self._data[f"/evaluations/{model}_{self._schema.chooser}_{metric}"][:evaluations]
            best = formulas.best_evaluation(course, metric)
            values[f"{key}_mean"] = formulas.client_mean(last, samples)
            values[f"{key}_mean_by_sample"] = formulas.sample_mean(last, samples)
            values[f"{key}_std"] = formulas.deviation(last, samples)
            values[f"{key}_worst_decile"] = formulas.worst_decile(last, samples, metric)
            values[f"{key}_best"] = self._data[f"/evaluations/{key}"][best] if best >= 0 else np.nan
            values[f"{key}_best_evaluation"] = best
        for model in self._schema.estimated:
            last = self._data[f"/per_client/{model}/estimation_error"][evaluations - 1]
            values[f"{model}_estimation_error_mean"] = formulas.client_mean(last)
            values[f"{model}_estimation_error_std"] = formulas.deviation(last)
        return values

    def _averagings(self, rounds: int) -> dict[str, float | np.ndarray]:
        """How often the clusters averaged in the rounds done, from the coins that say so."""
        if not self._schema.averages_by_coins:
            return {}
        everyone, own = (self._data[f"/rounds/coins_{name}"][:rounds] == 1 for name in ("global", "cluster"))
        within = (own & ~everyone).sum(0)
        return {"global_rounds": everyone.sum(), "cluster_rounds": within, "mean_rounds": everyone.sum() + within}

    def _check_names(self, group: str, given: Mapping[str, np.ndarray]) -> None:
        expected = {path.removeprefix(group) for path in self._fields if path.startswith(group)}
        if given.keys() != expected:
            missing, unknown = sorted(expected - given.keys()), sorted(given.keys() - expected)
            raise ValueError(f"{group} missing {missing}, unknown {unknown}")

    def _check_rows(self, axis: str, first: int, stop: int, count: str) -> None:
        done, size = int(self._file.attrs[count]), self._schema.lengths[axis]
        if not 0 <= first <= done or stop > size:
            raise ValueError(f"{axis} rows {first} to {stop - 1}: {done} of {size} are done, and no gap may be left")

    def _count(self, name: str, rows: int) -> None:
        self._file.flush()  # the rows first: one flush for both can leave the count ahead of them after a kill
        self._set(updated=now(), **{name: max(rows, int(self._file.attrs[name]))})
        self._file.flush()

    def _set(self, **values: str | int) -> None:
        for name, value in values.items():
            attribute = h5py.h5a.open(self._file.id, name.encode())  # in place; attrs[name] = x makes a new one
            content = value if isinstance(value, int) else _cut(value, attribute.dtype.itemsize)
            attribute.write(np.array(content, attribute.dtype), attribute.get_type())


def _cut(text: str, size: int) -> bytes:
    """As much UTF-8 as fits, without half a character."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore").encode()
