#!/usr/bin/env bash
# The mean of gradients over devices in JAX's shard_map.
#
# One would guess: lax.pmean(jax.grad(loss)(w, x), "dp") is the mean of the devices'
# gradients, as it is under pmap.
# What happens: w is the same on all devices, so that jax.grad inside of shard_map
# has added up the devices' gradients before pmean sees them. pmean of equal values
# changes nothing: the step is that of the sum, as many times too long as there are
# devices. psum counts the devices twice. With check_vma=False, and in 0.4.38's
# jax.experimental.shard_map, it is the mean.
# Version: jax 0.10.2, four CPU devices of one process.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir jax==0.10.2 jaxlib==0.10.2

cat >"$folder/mean.py" <<'PYTHON'
import sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,))
w = jnp.array([2.0, 3.0])
x = jnp.arange(8.0).reshape(4, 2)

def loss(w, x):
    return ((x @ w) ** 2).mean()

def averaged(w, x):
    return jax.lax.pmean(jax.grad(loss)(w, x), "dp")

def sharded(step, **options):
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("dp")),
                                 out_specs=P(), **options))(w, x)

one_device = jax.grad(loss)(w, x)
found = {
    "pmap, pmean": jax.pmap(averaged, "dp", in_axes=(None, 0))(w, x[:, None])[0],
    "shard_map, pmean": sharded(averaged),
    "shard_map, psum": sharded(
        lambda w, x: jax.lax.psum(jax.grad(loss)(w, x), "dp")),
    "shard_map, pmean, check_vma=False": sharded(averaged, check_vma=False),
    "shard_map, gradient of the mean": sharded(
        jax.grad(lambda w, x: jax.lax.pmean(loss(w, x), "dp"))),
}
print("jax", jax.__version__)
times = [float((gradient / one_device)[0]) for gradient in found.values()]
for name, factor in zip(found, times):
    print(f"{name}: {factor:g} times the gradient of one device")
sys.exit(times != [1.0, 4.0, 16.0, 1.0, 1.0])
PYTHON

XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu \
  "$folder/venv/bin/python" "$folder/mean.py" ||
  { echo "the behaviour changed"; exit 1; }
