"""Tensor parallelism: one worker as several processes, its ranks. Rank 0 decides, the others do their part."""
