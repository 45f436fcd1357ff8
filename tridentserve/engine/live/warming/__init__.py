"""The warm-up of workers, before they take requests."""
