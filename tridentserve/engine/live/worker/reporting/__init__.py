"""The outputs of plans as files, and what the Scheduler is told of plans."""
