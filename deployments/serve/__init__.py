"""The Ray Serve deployments, and how they are started."""
