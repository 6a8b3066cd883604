"""A batch in micro-batches: whether they add up to the batch, and what they draw at random.

The proof uses the equations, before there is data. A trial on the first batches would be less code,
but would pass a loss that ignores padding, or clips large values, if these batches have none.

tags          how a value relates to the batch
primitives    what is known about jax's own operations, and what they run inside
indexing      gathers and scatters: whether a row of indices is one sample's
rules         how one equation treats samples
reduction     how a whole loss and its derivatives do
draws         each micro-batch's own random numbers
microbatches  how the results of micro-batches are combined
"""
