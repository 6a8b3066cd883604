"""VGG-16's layers from its paper (Simonyan & Zisserman 2014, arXiv 1409.1556, table 1, D)."""

from itertools import pairwise

from pipelab.optimize.cut import Layer, Profile

# (channels, width) of each 3 x 3 convolution's output; pooling halves the width between groups.
CONVOLUTIONS = (
    [(64, 224)] * 2 + [(128, 112)] * 2 + [(256, 56)] * 3 + [(512, 28)] * 3 + [(512, 14)] * 3
)
CONNECTED = [512 * 7 * 7, 4096, 4096, 1000]


def vgg16(samples: int = 1, speed: float = 1e9) -> Profile:
    """Thirteen convolutions and three fully connected layers, for images of 224 x 224.

    samples  in a micro-batch
    speed    multiply-adds per second in a forward; a backward takes twice as long

    Outputs (after pooling, if any) and weights are in bytes of float32. Activations are only the
    outputs, as in PipeDream's profiles. A framework keeps more for the backward (each pooling's
    input and the indices of its maxima); `pipelab.optimize.cut.profile` measures that.

    >>> sum(layer.weights for layer in vgg16().layers) / 4
    138357544.0
    """
    channels = [3, *(c for c, _ in CONVOLUTIONS)]
    widths = [*(w for _, w in CONVOLUTIONS), 7]
    layers = []
    for i, (a, b) in enumerate(pairwise(channels)):
        # A kernel of 3 x 3 between each two channels, at every place of the picture.
        work, output = 9 * a * b * widths[i] ** 2, b * widths[i + 1] ** 2
        layers.append((f"convolution {i + 1}", work, 9 * a * b + b, output))
    for i, (a, b) in enumerate(pairwise(CONNECTED)):
        layers.append((f"connected {i + 1}", a * b, a * b + b, b))
    return Profile(
        tuple(
            Layer(
                name,
                forward=(seconds := samples * work / speed),
                input_grad=seconds,
                weight_grad=seconds,
                weights=4.0 * weights,
                activations=4.0 * samples * output,
                output=4.0 * samples * output,
                kind=name.split()[0],
            )
            for name, work, weights, output in layers
        ),
        samples=samples,
    )
