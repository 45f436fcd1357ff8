"""Explains requests of a service by its decision log, and runs the log again to check what is said."""
