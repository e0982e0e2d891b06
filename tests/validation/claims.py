"""Run one claim of the validation suite in this process."""

from validation import suite

LEVEL = 1e-8  # of each statement, about that of the suite, whatever number of claims it has


def run(name, level="tiny", seed=0):
    """Record of a claim."""
    claim = suite.claims()[name]
    results = [
        claim.run(suite.generator(seed, name, i), **task)
        for i, task in enumerate(claim.tasks(level))
    ]
    return suite.record(claim, claim.judge(results), LEVEL)
