"""Row kernels: one contract, a Triton and a torch implementation."""
