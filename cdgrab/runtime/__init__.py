"""Logical workers on processes: the only place that imports torch.distributed."""
