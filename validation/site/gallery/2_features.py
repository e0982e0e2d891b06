"""Which features suit which vectors
=================================

Standard deviation of the kernel estimate from one frequency, divided by the kernel, for two vectors
of norm 1 at an angle. Positive features are exact for opposite vectors, trigonometric features for
equal vectors; the curves are closed forms from `refattn.theory`. Attention divides by a sum of
kernels over all keys, so estimates should be positive; those of trigonometric features are not.
"""

import numpy as np

from refattn import theory
from refattn.typing import Features
from validation.plotting import panels
from validation.site.drawing import label

angle = np.linspace(0, np.pi, 41)
x, y = np.array([1.0, 0.0]), np.stack([np.cos(angle), np.sin(angle)], axis=-1)
figure, ((axes,),) = panels()
places: dict[Features, tuple[str, int, int]] = {
    "positive": ("o-", 12, 1),
    "hyperbolic": ("s--", 10, -1),
    "trigonometric": ("^-.", 32, -1),
}
for features, (mark, at, side) in places.items():
    variance = theory.kernel_variance(x, y, features=features, num_features=1)
    ratio = np.sqrt(variance) / np.exp(y @ x)
    (line,) = axes.plot(np.degrees(angle), ratio, mark, markevery=4)
    label(axes, features, line, (np.degrees(angle[at]), ratio[at]), side)
axes.set(xlabel="angle between x and y, degrees", ylabel="deviation / kernel")
