"""Error of estimators on a sentence encoder
=========================================

Error relative to exact attention, mean over the heads of the bundled queries and keys. More samples
reduce the error of plain random features little, and that of fitted ones (rfa-adapted) more. They
help randomized attention (ra) most, but its time grows with the square of the length.
"""

from refattn import compare, load_sample
from validation.plotting import panels
from validation.site.drawing import label, ticks

sizes = (8, 16, 32, 64, 128)
names = {"rfa-orthogonal": "o-", "lara-balance": "s--", "rfa-adapted": "^-.", "ra": "D:"}
rows = compare.measure(*load_sample(), estimators=names, sizes=sizes, draws=1).rows
figure, ((axes,),) = panels()
for name, mark in names.items():
    errors = [row.errors.mean() for row in rows if row.estimator == name]
    (line,) = axes.loglog(sizes, errors, mark)
    label(axes, name, line, (128, errors[-1]))
axes.set(xlabel="samples", ylabel="relative error", xlim=(7, 260), ylim=(0.1, 1.5))
ticks(axes, sizes, (0.1, 0.2, 0.5, 1))
