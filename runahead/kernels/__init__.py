"""Kernels of our own for CPUs, in C++, as operators of torch; `runahead.model.loading.kernels` builds them."""
