"""Eight JAX devices on the CPU: imported by the tests that use jax, before it is first used.

Most of their time would go into compiling the same programs again, since each test, and each
process that a test starts, makes functions of its own. So what is compiled is kept in build/jax for
all tests and the next run, and LLVM hardly optimizes it. The environment comes first: a folder of
its own (JAX_COMPILATION_CACHE_DIR) or other XLA_FLAGS. `make test-all` compiles as users do.

Nor does a program load what it has no operation of. Jax loads some thirty dialects for each, which
takes as long as to lower a small one.
"""

import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault(  # a compilation takes a twelfth of the time
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
    # Later ones end the process if they are given this flag.
    + " --xla_cpu_use_fusion_emitters=false"
    * version("jaxlib").startswith("0.10."),
)

import jax
from jax._src.interpreters import mlir

jax.config.update("jax_num_cpu_devices", 8)

_folder = Path(__file__).parents[1] / "build" / "jax"
for _name, _value in {
    "jax_compilation_cache_dir": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(_folder)),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_traceback_in_locations_limit": 0,  # programs need no line of whom they are of
}.items():
    os.environ[_name.upper()] = str(_value)  # for processes that tests start
    jax.config.update(_name, _value)


def _context():
    context, known = mlir.JaxIrContext(), mlir.dialects
    context.append_dialect_registry(mlir.upstream_dialects)
    assert context.dialects["func"]  # which is loaded by that, as all operations here need it
    context.set_thread_pool(mlir.global_thread_pool)
    known.sdy.register_dialect(context)
    known.mpmd.register_dialect(context)
    known.mhlo.register_mhlo_dialect(context)
    known.chlo.register_dialect(context)
    known.hlo.register_dialect(context)
    return context


if os.environ["XLA_FLAGS"] and version("jaxlib").startswith("0.10."):
    mlir.make_ir_context = _context
