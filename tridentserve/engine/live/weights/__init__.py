"""The weights a worker holds: replicas, copies in host memory, and copies from a peer."""
