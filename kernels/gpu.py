"""Which NVIDIA chips the Pallas kernels are for. Knows no operation."""

import jax


def require_ampere() -> None:
    """NotImplementedError on a GPU before compute capability 8.0, such as a T4.

    XLA refuses to compile Triton programs for such chips (jax-ml/jax#26799), and the compiler by itself gives
    them no tensor cores and spills (docs/gpu_code.md). A host without a GPU passes: there, code is lowered for
    other machines.
    """
    if jax.default_backend() != "gpu":
        return
    capability = str(getattr(jax.devices()[0], "compute_capability", "0"))
    if float(capability) < 8.0:
        raise NotImplementedError(f"This GPU has compute capability {capability}; the Pallas kernels need 8.0.")
