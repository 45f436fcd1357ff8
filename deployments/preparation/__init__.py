"""Finds out, before the planners of a service are put together, the memory of its workers and the stage times of models
that nobody has profiled."""
