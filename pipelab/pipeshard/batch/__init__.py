"""A batch in micro-batches: when they add up to it, and what they draw at random.

primitives    what jax's own operations do to samples
samples       what one equation makes of samples
reduction     the same of a whole loss and of its derivatives
draws         random numbers of each micro-batch's own
microbatches  how the results of micro-batches are combined
"""
