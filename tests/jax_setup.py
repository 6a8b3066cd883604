"""Eight JAX devices on the CPU: imported by the tests that use jax, before it is first used."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
