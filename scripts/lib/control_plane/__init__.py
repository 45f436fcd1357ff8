"""A control plane without GPUs: the real scheduler, engine and API, with workers that take time without computing."""
