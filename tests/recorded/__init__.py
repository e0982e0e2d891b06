"""Numbers that small problems have, so that a change of any of them is noticed.

`python -m tests.recorded` records them again in `numbers.json.gz` and prints which changed. The
commit must say why: a number is recorded once it is known to be right. What is here are bounds,
standard deviations, statistics and words of verdicts, of which other tests assert what holds for
all problems. Problems are small and of numbers with few digits, of which sums of products are exact
in any order, and formats are so coarse that every term of a formula counts.
"""
