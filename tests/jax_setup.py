"""Eight JAX devices on the CPU: imported by the tests that use jax, before it is first used.

What is compiled is kept on disk while the tests run: most of their time would go into compiling the
same programs again, since each test, and each process that a test starts, makes functions of its
own. A folder that the environment names (JAX_COMPILATION_CACHE_DIR) is used instead, and stays.
"""

import os
from tempfile import TemporaryDirectory

import jax

jax.config.update("jax_num_cpu_devices", 8)

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _folder = TemporaryDirectory(prefix="pipelab-tests-")  # removed when the tests end
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _folder.name
for _name, _value in {
    "jax_compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    os.environ[_name.upper()] = str(_value)  # for processes that tests start
    jax.config.update(_name, _value)
