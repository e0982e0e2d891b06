"""The table of the checks: what each claims, of whom, in the order in which they run.

A row is: name | traits of the estimators | what the candidate must have besides | claim.

Of the words in the third column all must hold: conditions of `trials.CONDITIONS`, capabilities,
tags with one of their values, properties of the adapter, and traits. ``a/b`` is one or the other,
and ``-a`` is not a. ``law`` and ``bound`` are tests of random numbers, and say how they come by
their probability; with ``draws`` the candidate must draw by itself for each seed, as in all laws.
"""

from __future__ import annotations

from collections.abc import Callable

from ...registry import TRAITS
from ..candidate.adapter import Adapter
from ..candidate.tags import CAPABILITIES, TAGS, parse_tag
from .trials import CHECKS, CONDITIONS, RUNS, Check

_TABLE = """
contract | | | takes and returns what it says, and the same twice at one seed
seeds | random seeds-differ | draws
  | the result depends on the seed, and two seeds never give the same
reference_values | | evaluated | agrees with the reference on ordinary numbers
value_length | | attends evaluated same_value_size=false | values may have another length than keys
large_logits | exponential | evaluated | right where unstabilised exponentials lose digits
extreme_logits | exponential normalised | evaluated stabilised
  | right where exponentials overflow or underflow, in whatever order they are taken
extreme_features | feature-map |
  | right where features are tiny or large: the ratio does not see their size
large_mean | rows | | mean and covariance do not lose digits to a large mean
batches_of_rows | rows | | each member of a batch has its own moments
weighted_mean | normalised |
  | a weighted mean of values: weights sum to 1, positive ones stay inside
order_of_keys | unordered-keys | evaluated | the order of keys does not matter
queries_apart | queries-apart | comparable weighs_alone -proposals/omega
  | the result of a query does not depend on other queries
heads_apart | | comparable heads | heads and members of a batch do not mix
frequencies_of_heads | | omega omega_per_head | each head uses the frequencies given for it
mask | | attends evaluated mask | a masked key is as if it were not there
mask_broadcasts | | attends evaluated mask | a mask broadcasts over heads and queries
masked_keys_unseen | | comparable mask | what is masked has no effect, however large
query_without_keys | | attends evaluated mask -empty_rows=undefined
  | a query that sees no key gets 0, or what is declared
causal | | attends evaluated masks_future | query i sees keys 0 to i
mask_with_causal | | attends evaluated masks_future mask | with a mask and causal both hide keys
causal_cross | | attends evaluated masks_future self_attention=false
  | with fewer queries than keys, or more, they are aligned as declared
future_unseen | | comparable causal | the future has no effect, however large
visible_part | random-features normalised | causal/mask black_box
  | causal and masked attention use the keys and frequencies that plain attention does
grouped_heads | | attends evaluated grouped | consecutive query heads share a key head
one_frequency | random-features normalised | features=positive fixed_frequencies=false
  | with one frequency queries cancel from the ratio
mean_over_frequencies | frequency-mean | omega | the estimate is the mean over frequencies
feature_products | pairs | omega feature_map
  | features of x times features of y are the estimate
same_bits | | attends deterministic | the same call has the same bits
same_bits_in_any_batch | queries-apart
  | comparable batch_invariant -per-query -proposals causal_only=false
  | a query has the same bits in any company
uses_together | | has_uses | what it takes one by one it takes together
factors_of_dropout | exact | attends dropout
  | weights that are kept are divided by 1 - p, all others 0
law_of_dropout | exact | law attends dropout
  | weights are kept with probability 1 - p, each independent of all others
gradients_of_dropout | exact | attends dropout vjp | gradients have the dropout of the result
all_keys | | attends given_keys | with all keys given it is exact attention
order_of_given_keys | | attends given_keys
  | the order in which keys are given does not matter
keys_of_heads | | attends given_keys heads | each head uses the keys given for it
keys_given_again | | attends given_keys sampled | a key that is given several times counts as often
any_probabilities | | attends given_keys sampled exponential | logs of probabilities may be large
large_queries | | attends given_keys linear-solve | scores may be large
negative_normalisers | | attends given_keys linear-solve
  | weights of either sign are kept, in the normaliser too
large_sizes | | evaluated attends rows_alone
  | right at real sizes: long sequences, large heads, many features, many heads
large_estimates | pairs | evaluated | estimates of many features, and of long vectors
many_rows | rows | dtype=float32/dtype=float64
  | moments of many rows are as right as those of few
heads_of_other_size | exponential | evaluated attends stabilised heads
  | heads of very different size do not share a maximum
memory_layouts | | comparable/-attends library=numpy/library=torch
  | the layout of arrays in memory does not matter
calls_apart | | comparable | a result stays as it is when other calls are made
hidden_nonsense | | comparable mask -hidden=finite
  | NaN, infinity and huge numbers in what is masked have no effect
long_half_sums | | evaluated attends rows_alone half -per-query/-proposals -given_keys
  | sums of thousands of terms are not added in half precision
gradients | | attends vjp evaluated | gradients are those of the formula
gradients_together | | attends vjp evaluated | gradients are right in every use
gradients_of_large_logits | exponential | attends vjp evaluated stabilised
  | gradients are right at large logits
gradients_of_extreme_features | feature-map | attends vjp evaluated feature_map=elu
  | gradients are right where features are tiny or large
gradients_of_many_tokens | | attends vjp evaluated | gradients are right at ragged ends of blocks
gradients_of_layouts | | attends vjp evaluated library=numpy/library=torch
  | gradients do not depend on the layout of arrays in memory
gradients_again | | attends vjp evaluated | gradients are the same at every call
gradients_of_hidden | | attends vjp hides | what a query does not see takes no gradient
gradients_of_hidden_nonsense | | attends vjp mask hidden=any
  | NaN and infinity in what is masked have no effect on gradients
gradients_of_means | normalised nonnegative | attends vjp evaluated/-waves
  | gradients are those of a mean
gradients_are_linear | | attends vjp | gradients are linear in the cotangent
gradients_are_slopes | | attends vjp dtype=float32/dtype=float64
  | gradients are the slopes of the outputs that the candidate returns
frequency_law | random-features | law lawful
  | frequencies are N(0, I), independent from seed to seed
one_function | random-features | precise black_box
  | the estimate is a function of x + y, or of x - y where trigonometric, but for norms
long_vectors | random-features | law told features=positive
  | at one frequency the logarithm of the estimate is Gaussian, of variance |x + y|^2
given_moments_law | random-features | law precise features=positive moments
  | frequencies given their mean and covariance have that law
frequency_pairs | random-features
  | law precise features=positive coupling=iid/coupling=orthogonal/coupling=antithetic
  | two frequencies of one set are coupled as declared
feature_sums | random-features | law precise
  | sums over many frequencies, and over their squares, have the laws of their coupling
recovered_values | random-features | draws precise features=positive
  | results at one seed follow from the frequencies recovered at it
feature_average | random-features | bound lawful
  | the average over many features has the law of its coupling, and the right mean
own_law | random | bound precise -random-features -target -proposals
  | results at many seeds have the law of the estimator's own
unseen_law | random | law -precise -lawful/-random-features
  | how frequencies are distributed shows in the results
log_normalisers | exact | attends lse | lse is the log of the sum of e^score
normaliser_without_keys | exact | attends lse mask/causal/window empty_rows=zero
  | lse of a query that sees no key is -inf
merged_parts | exact | attends lse causal_only=false self_attention=false
  | results over parts of the keys merge
gradients_of_normalisers | exact | attends lse vjp d_lse | gradients of lse are the weights
windows | exact | attends evaluated window | a window holds the keys that it says
outside_of_windows | exact | attends evaluated window | what is outside a window has no effect
soft_caps | exact | attends evaluated softcap | scores are capped before bias and mask
weights_of_sinks | exact | attends evaluated sinks | a sink is a key whose value is 0
biases | exact | attends evaluated bias | a bias is added to the scores
rounding_errors | | attends evaluated errors_have_law
  | is off by as much as roundings may add up to, and in no direction
target_law | target | law told
  | frequencies of a query are drawn from its target, one mixture of Gaussians
masked_target_law | target | law told mask
  | frequencies are drawn from the target over the keys that a mask leaves
causal_target_law | target | law told causal
  | frequencies are drawn from the target over the keys that are not in the future
choices | target | law precise | each sample chooses its key anew, light ones too
unbiased | target | bound precise | the mean over seeds is exact attention
mean_of_samples | target | draws precise
  | with two samples the result is the mean of two different results
sample_average | target | bound precise
  | the result has the law of a mean of independent samples
draws_apart | target | draws dtype=float32/dtype=float64 causal_only=false
  | queries and heads draw frequencies of their own
proposal_noise | proposals | law precise
  | with one proposal the frequency is Gaussian about a centre, with covariance I
two_proposals | proposals | draws precise weighting=balance/weighting=own causal_only=false
  | two proposals are weighed by their features of the query
proposal_average | proposals | bound precise centres=chunks multiple_of=1
  | weights of keys have the law they have with chunks of the sequence as proposals
"""


def _condition(word: str) -> Callable[[Adapter], bool]:
    """Return what a word of the third column asks."""
    if "/" in word:
        some = [_condition(each) for each in word.split("/")]
        return lambda adapter: any(holds(adapter) for holds in some)
    if word.startswith("-"):
        other = _condition(word[1:])
        return lambda adapter: not other(adapter)
    tag, _, value = word.partition("=")
    if word in CONDITIONS:
        return CONDITIONS[word]
    if value and tag in TAGS:
        wanted = parse_tag(tag, value)
        return lambda adapter: bool(adapter[tag] == wanted)
    if word in CAPABILITIES:
        return lambda adapter: adapter.can(word)
    if isinstance(getattr(Adapter, word, None), property):
        return lambda adapter: bool(getattr(adapter, word))
    if word in TRAITS:
        return lambda adapter: adapter.has(word)
    raise ValueError(f"{word!r} is nothing that a check may need")


def _check(row: str) -> Check:
    """Return the check of a row."""
    name, traits, needs, claim = (x.strip() for x in row.split("|", 3))
    words = needs.split()
    layer = next((word for word in words if word in ("law", "bound")), "identity")
    conditions = [_condition(word) for word in words if word not in ("law", "bound", "draws")]
    return Check(
        name,
        claim,
        layer,
        frozenset(traits.split()),
        lambda adapter: all(holds(adapter) for holds in conditions),
        RUNS[name],
        "draws" in words,
    )


CHECKS.update((x.name, x) for x in map(_check, _TABLE.strip().replace("\n ", " ").split("\n")))
