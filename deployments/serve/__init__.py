"""The Ray Serve deployments, and the start of the engine in one of them."""
