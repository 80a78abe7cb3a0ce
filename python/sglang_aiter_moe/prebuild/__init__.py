"""Building the kernels that a plan dispatches before a server needs them."""
