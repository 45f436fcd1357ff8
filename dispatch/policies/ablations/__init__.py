"""The default policy without one of its parts."""
