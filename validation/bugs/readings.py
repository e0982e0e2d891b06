"""What was read in source that does not install here, and was not executed."""

from __future__ import annotations

from .record import Reading

_EFFICIENT = "efficient-attention/efficient_attention/"

READINGS = (
    Reading(
        name="google-research-performer",
        repository="google-research/google-research",
        path="performer/fast_attention/jax/fast_attention.py",
        commit="0c1bbe5fc971a1de1a427debc814e66ab4f1e7fa",
        title="frequencies that are not Haar-distributed, and a constant in the features",
        cause="Q of a QR decomposition is used without the signs of R. A constant, 1e-6 by "
        "default, is added to features below a maximum over all keys.",
        mend="As for performer-pytorch, whose code was transcribed from this.",
    ),
    Reading(
        name="fast-transformers-favor",
        repository="idiap/fast-transformers",
        path="fast_transformers/feature_maps/fourier_features.py",
        commit="47187323149d517d5a7f52f0ce5b97fccaafea4d",
        title="frequencies that are not Haar-distributed, with lengths that depend on them",
        cause="Q of a QR decomposition is used without the signs of R, and the lengths are those "
        "of the rows of the same matrix that was decomposed. Its set-up asks for CUDA, and did "
        "not install here.",
        mend="Multiply columns of Q by the signs of the diagonal of R, and draw lengths apart.",
    ),
    Reading(
        name="xformers-favor",
        repository="facebookresearch/xformers",
        path="xformers/components/attention/feature_maps/softmax.py",
        commit="3d825c83ebfe4ac4c2338a3a9fdf6b27dc1d44b9",
        title="signs of R on the wrong side of Q, and lengths of another dimension",
        cause="Signs of the diagonal of R multiply the rows of Q, where its columns belong to "
        "them. Frequencies are then columns cut from blocks of the size of the number of features. "
        "Release 0.0.35 does not have these modules.",
        mend="Multiply Q by the signs from the right; make blocks of the size of the inputs.",
    ),
    Reading(
        name="efficient-attention-ra",
        repository="HKUNLP/efficient-attention",
        path=_EFFICIENT + "randomized_attention.py",
        commit="bfe2144df8bfe7173152f139b29e07e7335d105d",
        title="randomized attention with noise in other coordinates, and one sample for any number",
        cause="Queries and keys are not scaled when noise of variance 1 is added to their sum, "
        "while the scale is applied to keys after it. `num_samples` above 1 draws one sample; in "
        "evaluation the noise is left out.",
        mend="Scale queries and keys by d^(-1/4) first; average over `num_samples` draws.",
    ),
    Reading(
        name="efficient-attention-normaliser",
        repository="HKUNLP/efficient-attention",
        path=_EFFICIENT + "kernelized_attention.py",
        commit="c3b361d7b24055cfa89a64a0f3ca0323940ab01d",
        title="normalisers kept above 1e-2 after a maximum was divided out",
        cause="Features are divided by their largest, so that normalisers may be far below 1; the "
        "bound then makes outputs small, and it is above a negative sum of trigonometric features.",
        mend="Divide by the sum as it is.",
    ),
)
