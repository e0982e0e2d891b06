"""Error of estimators on a sentence encoder.

Errors relative to exact attention, mean over heads of the bundled queries and keys. Random features
with the standard proposal gain little from more samples; a fitted proposal and samples of the target
gain what theory says.
"""

from refattn import compare, load_sample
from validation.plotting import panels

sizes = (8, 16, 32, 64, 128)
names = {"rfa-orthogonal": "o-", "lara-balance": "s--", "rfa-adapted": "^-.", "ra": "D:"}
rows = compare.measure(*load_sample(), estimators=names, sizes=sizes, draws=2).rows
figure, ((axes,),) = panels()
for name, mark in names.items():
    errors = [row.errors.mean() for row in rows if row.estimator == name]
    (line,) = axes.loglog(sizes, errors, mark)
    axes.annotate(f" {name}", (sizes[-1], errors[-1]), color=line.get_color(), va="center")
axes.set(xlabel="samples", ylabel="relative error", xlim=(7, 300), xticks=sizes, xticklabels=sizes)
