"""Plans for pipelines of jax programs, found by a program: layers, stages, meshes, shardings.

After Alpa (Zheng et al., OSDI 2022, sections 4 and 5). It lives above the manual side, which does
not know it: what it finds is what a user could have written by hand.
"""

from pipelab.pipeshard.auto.layers import AutoLayers

__all__ = ["AutoLayers"]
