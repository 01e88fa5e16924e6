"""Which clients does the run serve well? Last test value of every client against its number of training samples.

Usage: python jobs/analysis/plot_clients.py RESULTS.h5 FIGURE.png

Needs h5py, numpy and matplotlib, not hpcfl: a template for your own analysis. The file's format: results/README.md.
"""

import sys

import h5py
import matplotlib.pyplot as plt
import numpy as np

if len(sys.argv) != 3:
    sys.exit("usage: python jobs/analysis/plot_clients.py RESULTS.h5 FIGURE.png")

# swmr=True also opens the file of a job that is still running, or that was killed.
with h5py.File(sys.argv[1], "r", swmr=True) as file:
    evaluations = file.attrs["evaluations_done"]  # only the counted rows are valid
    if evaluations == 0:
        sys.exit(f"{sys.argv[1]}: no evaluation in it yet")
    last = evaluations - 1
    rounds = file["evaluations/round"][last]
    model = "personal" if "personal" in file["per_client"] else "global"
    group = file["per_client"][model]
    metric = "test_accuracy" if "test_accuracy" in group else "test_squared_error"
    values = group[metric][last]  # [clients]; NaN for clients without test samples
    mean = file[f"evaluations/{model}_{metric}"][last]
    samples = file["clients/n_train"][()][group["client"][()]]  # of the clients that were evaluated
    # APFL exposes the weight of the local model in each client's mixture: 1 is purely local, 0 purely global.
    alpha = file["per_client/alpha"][last] if "alpha" in file["per_client"] else None

figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
if alpha is None:
    axes.scatter(samples, values, color="#0072B2", alpha=0.7)
else:
    points = axes.scatter(samples, values, c=alpha, cmap="cividis", vmin=0, vmax=1, edgecolor="0.4", linewidth=0.5)
    figure.colorbar(points, label="alpha, weight of the local model")
axes.axhline(mean, color="0.3", linestyle=":", label=f"mean over clients {mean:.3f}")

# Do clients with more data fare better? Spearman's coefficient: the correlation of the ranks (equal values share one).
known = np.isfinite(values)
if not known.any():
    sys.exit(f"{sys.argv[1]}: no client has test samples")
if np.ptp(samples[known]) > 0 and np.ptp(values[known]) > 0:

    def ranks(x):
        _, group, counts = np.unique(x, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[group]

    rho = np.corrcoef(ranks(samples[known]), ranks(values[known]))[0, 1]
    axes.plot([], [], " ", label=f"rank correlation {rho:+.2f}")

axes.set(xlabel="training samples of the client", ylabel=f"{model} {metric.replace('_', ' ')}, after {rounds} rounds")
axes.grid(color="0.92")
axes.set_axisbelow(True)
axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)  # above, hiding no client
figure.savefig(sys.argv[2], dpi=150)
