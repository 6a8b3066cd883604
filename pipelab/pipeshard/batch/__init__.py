"""A batch in micro-batches: when they add up to it, and what they draw at random.

It is proved from the equations, before there is data. A trial on the first batches would be less
code, but pass a loss that ignores padding, or clips large values, if these batches have none.

tags          what a value is to the batch
primitives    what is known of jax's own operations, and what they run inside
indexing      gathers and scatters: whether a row of indices is one sample's
rules         by which one equation treats samples
reduction     the same of a whole loss and of its derivatives
draws         random numbers of each micro-batch's own
microbatches  how the results of micro-batches are combined
"""
