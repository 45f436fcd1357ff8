"""Training on one machine: runs that may be stopped, the optimizer of matrices, and processes that train together."""
