"""Video jobs: the interface for clients, the store that keeps them, the worker that runs them, and their files."""
