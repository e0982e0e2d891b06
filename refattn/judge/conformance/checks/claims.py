"""The table of the checks: what each claims, of whom, in the order in which they run.

A row is: name | traits of the estimators | what the candidate must have besides | claim.

Of the words in the third column all must hold: conditions of `trials.CONDITIONS`, capabilities,
tags with one of their values, properties of the adapter, and traits. ``a/b`` is one or the other,
and ``-a`` is not a. ``law`` and ``bound`` are tests of random numbers, of ``bound`` by inequalities
only; with ``draws`` the candidate must draw by itself for each seed, as in all laws.
"""

from __future__ import annotations

from collections.abc import Callable

from ....registry import TRAITS
from ..candidate.adapter import Adapter
from ..candidate.tags import CAPABILITIES, TAGS, parse_tag
from .trials import CHECKS, CONDITIONS, RUNS, Check

_CLAIMS = """
contract | | | shapes and dtypes are as declared, and one seed gives the same result twice
seeds | random seeds-differ | draws
  | the result depends on the seed, and no two seeds give the same result
reference_values | | evaluated | results agree with the reference on ordinary inputs
value_length | | attends evaluated same_value_size=false | d_v may differ from d
large_logits | exponential | evaluated
  | results are right where unstabilised exponentials lose digits
extreme_logits | exponential normalised | evaluated stabilised
  | results are right where exponentials overflow or underflow
extreme_features | feature-map |
  | results are right where features are tiny or large, as their size cancels from the ratio
large_mean | rows | | mean and covariance lose no digits if the mean is large
batches_of_rows | rows | | each member of a batch gets its own moments
weighted_mean | normalised |
  | the result is a weighted mean of the values, whose weights sum to 1
order_of_keys | unordered-keys | evaluated | the order of keys does not matter
queries_apart | queries-apart | comparable weighs_alone -proposals/omega
  | the result of a query does not depend on other queries
heads_apart | | comparable heads | heads, and members of a batch, do not affect each other
frequencies_of_heads | | omega omega_per_head | each head uses the frequencies given for it
mask | | attends evaluated mask | masking a key is the same as deleting it
mask_broadcasts | | attends evaluated mask | a mask broadcasts over heads and queries
masked_keys_unseen | | comparable mask | masked keys and values have no effect, however large
query_without_keys | | attends evaluated mask -empty_rows=undefined
  | a query that sees no key gets 0, or the declared output
causal | | attends evaluated masks_future | query i sees keys 0 to i
mask_with_causal | | attends evaluated masks_future mask | a mask and causal=True apply together
causal_cross | | attends evaluated masks_future self_attention=false
  | causal attention is aligned as declared if the numbers of queries and keys differ
future_unseen | | comparable causal | future keys and values have no effect, however large
visible_part | random-features normalised | causal/mask black_box
  | causal and masked attention use the same frequencies as plain attention
grouped_heads | | attends evaluated grouped | consecutive query heads share a key head
one_frequency | random-features normalised | features=positive fixed_frequencies=false
  | with one frequency the result does not depend on the query
mean_over_frequencies | frequency-mean | omega | the estimate is the mean over frequencies
feature_products | pairs | omega feature_map
  | the estimate is the dot product of the features of x and of y
same_bits | | attends deterministic | repeating a call gives the same bits
same_bits_in_any_batch | queries-apart
  | comparable batch_invariant -per-query -proposals causal_only=false
  | a query gives the same bits alone and in any batch
uses_together | | has_uses | the declared capabilities also work together
factors_of_dropout | exact | attends dropout
  | weights that are kept are divided by 1 - p, and all others are 0
law_of_dropout | exact | law attends dropout
  | weights are kept with probability 1 - p, independently of all others
gradients_of_dropout | exact | attends dropout vjp | gradients use the same dropout as the output
all_keys | | attends given_keys | with all keys passed, the result is exact attention
order_of_given_keys | | attends given_keys
  | the order in which keys are given does not matter
keys_of_heads | | attends given_keys heads | each head uses the keys given for it
keys_given_again | | attends given_keys sampled | a key that is passed twice counts twice
any_probabilities | | attends given_keys sampled exponential
  | results are right for all sampling probabilities
large_queries | | attends given_keys linear-solve | results are right for large scores
negative_normalisers | | attends given_keys linear-solve
  | neither negative weights nor a negative normaliser is clamped
large_sizes | | evaluated attends rows_alone
  | results are right for long sequences, large heads, many heads and many features
large_estimates | pairs | evaluated
  | results are right for many features, and for vectors of large norm
many_rows | rows | dtype=float32/dtype=float64
  | moments of many rows are as accurate as moments of few rows
heads_of_other_size | exponential | evaluated attends stabilised heads
  | results are right if the scores of one head are far larger than those of another
memory_layouts | | comparable/-attends library=numpy/library=torch
  | the layout of arrays in memory does not matter
calls_apart | | comparable | later calls do not change an earlier result
hidden_nonsense | | comparable mask -hidden=finite
  | NaN, infinity and huge numbers in masked keys and values have no effect
long_half_sums | | evaluated attends rows_alone half -per-query/-proposals -given_keys
  | sums of thousands of terms are not computed in half precision
gradients | | attends vjp evaluated | gradients match the formula
gradients_together | | attends vjp evaluated
  | gradients are right with all declared capabilities together
gradients_of_large_logits | exponential | attends vjp evaluated stabilised
  | gradients are right at large logits
gradients_of_extreme_features | feature-map | attends vjp evaluated feature_map=elu
  | gradients are right where features are tiny or large
gradients_of_many_tokens | | attends vjp evaluated | gradients are right past the ends of blocks
gradients_of_layouts | | attends vjp evaluated library=numpy/library=torch
  | gradients do not depend on the layout of arrays in memory
gradients_again | | attends vjp evaluated | repeating a call gives the same gradients
gradients_of_hidden | | attends vjp hides | keys and values that no query sees get gradient 0
gradients_of_hidden_nonsense | | attends vjp mask hidden=any
  | NaN and infinity in masked keys and values have no effect on gradients
gradients_of_means | normalised nonnegative | attends vjp evaluated/-waves
  | gradients have the sums that a weighted mean of the values implies
gradients_are_linear | | attends vjp | gradients are linear in the cotangent
gradients_are_slopes | | attends vjp dtype=float32/dtype=float64 -projection
  | gradients agree with difference quotients of the function's own outputs
tokens_one_by_one | recurrent | | a call with all tokens gives the same as calls token by token
later_tokens_unseen | recurrent | | later tokens have no effect on earlier results
packed_apart | recurrent | cuts
  | packed sequences give the same as each sequence alone
state_handed_over | recurrent | initial_state | the state can be passed on after any token
states | recurrent | initial_state | the initial state is used, and the last matches the formula
grouped_values | recurrent | gva heads
  | consecutive value heads share a head of queries and keys
extreme_decays | recurrent | decays | results are right if a state is kept, and if it is forgotten
frequency_law | random-features | law lawful
  | frequencies are N(0, I), independent from seed to seed
one_function | random-features | precise black_box
  | apart from factors that depend on |x| or |y| alone, the estimate depends on x + y only
 (trigonometric: x - y)
long_vectors | random-features | law told features=positive
  | at one frequency the logarithm of the estimate is Gaussian, of variance |x + y|^2
given_moments_law | random-features | law precise features=positive moments
  | frequencies are N(mean, cov) for the `mean` and `cov` that are passed
given_moments_weights | random-features normalised | draws precise features=positive moments
  | frequencies count by the ratio of N(0, I) to the distribution that is passed
frequency_pairs | random-features
  | law precise features=positive coupling=iid/coupling=orthogonal/coupling=antithetic
  | two frequencies of one set are coupled as declared
feature_sums | random-features | law precise
  | sums of many frequencies, and of their squares, have the distribution of their coupling
recovered_values | random-features | draws precise features=positive
  | results follow from the frequencies recovered at the same seed
feature_average | random-features | bound lawful
  | the average over many features has the distribution of its coupling, and the right mean
own_law | random | bound precise -random-features -target -proposals
  | over many seeds, results have the distribution of the estimator
unseen_law | random | law -precise -lawful/-random-features
  | rounding or a declared epsilon hides the distribution of the frequencies, so it is not tested
log_normalisers | exact | attends lse | lse is the log of the sum of e^score
normaliser_without_keys | exact | attends lse mask/causal/window empty_rows=zero
  | lse of a query that sees no key is -inf
merged_parts | exact | attends lse causal_only=false self_attention=false
  | results over two parts of the keys merge into the result over all keys
gradients_of_normalisers | exact | attends lse vjp d_lse | gradients of lse are the weights
windows | exact | attends evaluated window | each query sees the keys of its window
outside_of_windows | exact | attends evaluated window | keys outside a window have no effect
soft_caps | exact | attends evaluated softcap | scores are capped before bias and mask
weights_of_sinks | exact | attends evaluated sinks | a sink is a key whose value is 0
biases | exact | attends evaluated bias | a bias is added to the scores
rounding_errors | | attends evaluated errors_have_law
  | errors are no larger than rounding allows, and are not biased
target_law | target | law told
  | frequencies of a query are drawn from its target, a mixture of Gaussians
masked_target_law | target | law told mask
  | with a mask, frequencies are drawn from the target over the visible keys
causal_target_law | target | law told causal
  | in causal attention, frequencies are drawn from the target over past and present keys
choices | target | law precise | each sample chooses its key independently, by its weight
unbiased | target | bound precise | the mean over seeds is exact attention
mean_of_samples | target | draws precise
  | with two samples the result is the mean of two different results
sample_average | target | bound precise
  | the result has the distribution of a mean of independent samples
draws_apart | target | draws dtype=float32/dtype=float64 causal_only=false
  | each query and each head draws its own frequencies
proposal_noise | proposals | law precise
  | with one proposal the frequency is normal, with a centre as mean and covariance I
two_proposals | proposals | draws precise weighting=balance/weighting=own causal_only=false
  | two proposals are weighted by the formula, for each query
proposal_average | proposals | bound precise centres=chunks multiple_of=1
  | weights of keys have the distribution that follows from one proposal for each chunk
unseen_weights | proposals | law -omega -precise/-centres=chunks/-multiple_of=1
  | centres and importance weights are only known if declared or passed, so they are not tested
"""


def _condition(word: str) -> Callable[[Adapter], bool]:
    """Return what a word of the third column asks."""
    if "/" in word:
        some = [_condition(each) for each in word.split("/")]
        return lambda adapter: any(holds(adapter) for holds in some)
    if word.startswith("-"):
        other = _condition(word[1:])
        return lambda adapter: not other(adapter)
    # The first of these that knows the word has it.
    tag, _, value = word.partition("=")
    if word in CONDITIONS:
        return CONDITIONS[word]
    if value and tag in TAGS:
        wanted = parse_tag(tag, value)
        return lambda adapter: bool(adapter[tag] == wanted)
    if word in CAPABILITIES:
        return lambda adapter: adapter.can(word)
    # `half` or `grouped`, say.
    if isinstance(getattr(Adapter, word, None), property):
        return lambda adapter: bool(getattr(adapter, word))
    if word in TRAITS:
        return lambda adapter: adapter.has(word)
    raise ValueError(f"{word!r} is nothing that a check may need")


def _check(row: str) -> Check:
    name, traits, needs, claim = (x.strip() for x in row.split("|", 3))
    words = needs.split()
    # Words of the third column that are no condition: what kind of test it is.
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


# A line that begins with a space goes on with the row above it.
CHECKS.update((x.name, x) for x in map(_check, _CLAIMS.strip().replace("\n ", " ").split("\n")))
