"""Sign rules, reordering and their fast kernels: pure mathematics."""
