"""Handoff buffers: tensors that move from the worker of one stage to the worker of the next."""
