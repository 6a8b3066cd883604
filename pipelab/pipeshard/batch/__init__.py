"""A batch in micro-batches: when they add up to it, and what they draw at random.

tags          what a value is to the batch
primitives    what is known of jax's own operations, and what they run inside
rules         by which one equation treats samples
reduction     the same of a whole loss and of its derivatives
draws         random numbers of each micro-batch's own
microbatches  how the results of micro-batches are combined
"""
