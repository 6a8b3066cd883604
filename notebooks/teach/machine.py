"""What the live cells of a lecture run on."""


def jax_devices(count: int) -> None:
    """Let JAX have this many devices: the machine's accelerators if there are as many, else CPUs.

    For a lecture's first cell, before any array is made. Where accelerators are too few, one line
    says so: the lecture then runs on CPU devices of the host, as on a machine without any.
    """
    import jax
    from jax.extend.backend import clear_backends

    if jax.config.jax_num_cpu_devices != count:  # type: ignore[attr-defined]
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX was used before
            if jax.device_count() >= count:
                return
            clear_backends()
            jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        (kind, number) = jax.devices()[0].device_kind, jax.device_count()
        jax.config.update("jax_platforms", "cpu")
        clear_backends()
        print(
            f"This lecture takes {count} devices, and JAX finds {number} here ({kind}): its cells "
            f"run on {count} CPU devices of the host."
        )
